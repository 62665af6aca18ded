"""KServe's command line, as programs and their models read it."""

from __future__ import annotations

import argparse
from functools import cache

from ts.compat.kserve_api.predictor import PredictorConfig


def _truth(text: str) -> bool:
    if text.lower() in ("y", "yes", "t", "true", "on", "1"):
        return True
    if text.lower() in ("n", "no", "f", "false", "off", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def _parser() -> argparse.ArgumentParser:
    """Makes the parser that programs use as a parent; the server parses its options again itself."""
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
