"""The base class of users' predictors, the server that their programs start, and its command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from enum import Enum
from functools import cache
from typing import Any, NoReturn

from ts.compat.kserve_api.predictor import V1, Predictor, PredictorConfig
from ts.compat.start import serve

# --- the command line, as programs and their models read it


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


# --- models


class PredictorProtocol(Enum):
    REST_V1 = "v1"
    REST_V2 = "v2"
    GRPC_V2 = "grpc-v2"


class Model:
    """A predictor. Every step may be a coroutine, and may take fewer arguments than here. The payload is the body of a
    V1 request as a dict, of a V2 request an InferRequest; headers are by name."""

    def __init__(self, name: str, *arguments: Any, return_response_headers: bool = False, **more: Any) -> None:
        self.name, self.ready = name, False
        self.return_response_headers = return_response_headers
        self._predictor: Predictor | None = None
        self._explainer: Predictor | None = None

    def load(self) -> bool:
        self.ready = True
        return self.ready

    def start(self) -> None:
        """Called by `ModelServer.start`: loads the model unless it is ready."""
        if not self.ready:
            self.ready = bool(self.load())

    def stop(self) -> None: ...

    async def healthy(self) -> bool:
        return self.ready

    async def get_input_types(self) -> list[dict[str, Any]]:
        return []

    async def get_output_types(self) -> list[dict[str, Any]]:
        return []

    async def preprocess(self, payload: Any, headers: dict[str, str] | None = None) -> Any:
        return payload

    async def predict(
        self, payload: Any, headers: dict[str, str] | None = None, response_headers: dict[str, str] | None = None
    ) -> Any:
        """Calls the predictor at `--predictor_host`: a model that doesn't override this method is a transformer."""
        return await self._asked("predict").predict(self.name, payload, headers)

    @property
    def predictor_config(self) -> PredictorConfig | None:
        """The predictor of the command line, or of older programs' attributes; None without one."""
        host, given = getattr(self, "predictor_host", None), predictor_config()
        if host and (given is None or host != given.predictor_host):
            return PredictorConfig(host, getattr(self, "protocol", None) or V1)
        return given

    def _asked(self, step: str) -> Predictor:
        config = self.predictor_config
        if config is None:
            raise NotImplementedError(f"{type(self).__name__} has no {step}, and there is no --predictor_host")
        if self._predictor is None:
            self._predictor = Predictor(config)
        return self._predictor

    async def postprocess(
        self, result: Any, headers: dict[str, str] | None = None, response_headers: dict[str, str] | None = None
    ) -> Any:
        return result

    async def explain(self, payload: Any, headers: dict[str, str] | None = None) -> Any:
        """Calls `explainer_host`, or the predictor, unless it is overridden."""
        host = getattr(self, "explainer_host", None)
        if host is not None and self._explainer is None:
            self._explainer = Predictor(PredictorConfig(host))
        return await (self._explainer or self._asked("explain")).explain(self.name, payload, headers)


class ModelServer:
    """KServe's server. Options given here apply unless the command line sets them."""

    def __init__(self, **options: Any) -> None:
        self._options = {name: value for name, value in options.items() if value is not None}

    def start(self, models: Iterable[Model]) -> NoReturn:
        """Turns this process into the server, whose workers run the program again up to this call."""
        by_name = {}
        for model in models:
            model.start()
            by_name[model.name] = model
        plain = {name: value for name, value in self._options.items() if isinstance(value, (str, int, float, bool))}
        serve("kserve", by_name, plain)


class InvalidInput(ValueError):
    """400"""

    status = 400

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class InferenceError(RuntimeError):
    """500"""

    status = 500

    def __init__(self, reason: str, status: str | None = None, debug_details: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.debug_details = reason, debug_details


class ModelNotFound(Exception):
    """404"""

    status = 404

    def __init__(self, model_name: str | None = None) -> None:
        self.reason = f"Model with name {model_name} does not exist."
        super().__init__(self.reason)


class ModelNotReady(RuntimeError):
    """503"""

    status = 503

    def __init__(self, model_name: str, detail: str | None = None) -> None:
        self.model_name = model_name
        self.error_msg = f"Model with name {model_name} is not ready."
        if detail:
            self.error_msg += f" {detail}"
        super().__init__(self.error_msg)


class UnsupportedProtocol(Exception):
    """400"""

    status = 400

    def __init__(self, protocol_version: str | None = None) -> None:
        self.reason = f"Unsupported protocol {protocol_version}"
        super().__init__(self.reason)
