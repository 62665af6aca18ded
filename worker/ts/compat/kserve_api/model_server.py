"""KServe's command line, and the server that programs start."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import cache
from typing import Any, NoReturn

from ts.compat.kserve_api.model import Model
from ts.compat.kserve_api.predictor import PredictorConfig
from ts.compat.start import serve


def _truth(text: str) -> bool:
    if text.lower() in ("y", "yes", "t", "true", "on", "1"):
        return True
    if text.lower() in ("n", "no", "f", "false", "off", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def _parser() -> argparse.ArgumentParser:
    """Makes the parser that programs take as a parent of their own; the server reads its options again itself."""
    made = argparse.ArgumentParser(add_help=False)
    for name, kind, default in (
        ("http_port", int, 8080),
        ("grpc_port", int, 8081),
        ("workers", int, 1),
        ("max_threads", int, 4),
        ("max_asyncio_workers", int, None),
        ("enable_grpc", _truth, True),
        ("enable_docs_url", _truth, False),
        ("enable_latency_logging", _truth, True),
        ("access_log_format", str, None),
        ("model_name", str, "model"),
        ("predictor_host", str, None),
        ("predictor_protocol", str, "v1"),
        ("predictor_use_ssl", _truth, False),
        ("predictor_request_timeout_seconds", int, 600),
        ("predictor_request_retries", int, 0),
        ("enable_predictor_health_check", str, None),
        ("protocol", str, "v1"),
        ("configure_logging", _truth, True),
        ("log_config_file", str, None),
    ):
        made.add_argument(f"--{name}", type=kind, default=default)
    return made


parser = _parser()


def __getattr__(name: str) -> Any:
    """`args`: the command line's, read on first access; KServe reads it when it is imported."""
    if name == "args":
        return parser.parse_known_args()[0]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def predictor_config() -> PredictorConfig | None:
    """The predictor that the command line names."""
    given = parser.parse_known_args()[0]
    if not given.predictor_host:
        return None
    return PredictorConfig(
        given.predictor_host,
        given.predictor_protocol,
        given.predictor_use_ssl,
        given.predictor_request_timeout_seconds,
        given.predictor_request_retries,
    )


class ModelServer:
    """Options given here apply where the command line sets none."""

    def __init__(self, **options: Any) -> None:
        self._options = {name: value for name, value in options.items() if value is not None}

    def start(self, models: Iterable[Model]) -> NoReturn:
        """This process becomes the server; its workers run the program again, up to here."""
        by_name = {}
        for model in models:
            model.start()
            by_name[model.name] = model
        plain = {name: value for name, value in self._options.items() if isinstance(value, (str, int, float, bool))}
        serve("kserve", by_name, plain)
