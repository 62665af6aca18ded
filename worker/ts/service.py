"""A loaded handler in TorchServe's form, for tests of handlers and for code based on its loader."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ts.context import Context, RequestProcessor
from ts.protocol.otf_message_handler import create_predict_response
from ts.runtime.jobs import Failure
from ts.runtime.running import failure_of, outcomes
from ts.utils.util import PredictionException, get_yaml_config
from ts.version import __version__

__all__ = ["PREDICTION_METRIC", "PredictionException", "Service", "emit_metrics"]

PREDICTION_METRIC = "PredictionTime"

logger = logging.getLogger(__name__)


class Service:
    """A handler's entry point with its context. `predict` runs it for requests in the form of TorchServe's frontend."""

    def __init__(
        self,
        model_name: str,
        model_dir: str,
        manifest: dict[str, Any] | None,
        entry_point: Callable[[Any, Context], Any],
        gpu: int | None,
        batch_size: int | None,
        limit_max_image_pixels: bool | None = True,
        metrics_cache: Any = None,
    ) -> None:
        self._context = Context(
            model_name,
            model_dir,
            manifest,
            batch_size or 1,
            gpu,
            __version__,
            bool(limit_max_image_pixels),
            metrics_cache,
            _model_config(model_dir, manifest),
        )
        self._entry_point = entry_point
        self.cl_socket: Any = None

    @property
    def context(self) -> Context:
        return self._context

    def set_cl_socket(self, cl_socket: Any) -> None:
        """Sets the target of a handler's `context.cl_socket.sendall`."""
        self.cl_socket = cl_socket

    @staticmethod
    def retrieve_data_for_inference(
        batch: Sequence[Mapping[str, Any]] | None,
    ) -> tuple[list[RequestProcessor], list[dict[str, Any]], dict[int, str]]:
        """Per request its headers and its row, and the request ids by position.

        A request is `{"requestId": bytes, "parameters": [{"name", "value", "contentType"}], "headers": [{"name": bytes,
        "value": bytes}]}`. Raises ValueError without any.
        """
        if batch is None:
            raise ValueError("Received invalid inputs")
        processors = [RequestProcessor(_headers(request)) for request in batch]
        rows = [{one["name"]: one["value"] for one in request["parameters"]} for request in batch]
        return processors, rows, {idx: request["requestId"].decode() for idx, request in enumerate(batch)}

    def predict(self, batch: Sequence[Mapping[str, Any]]) -> bytes:
        """The answers, as `create_predict_response` encodes them."""
        processors, rows, request_ids = self.retrieve_data_for_inference(batch)
        context = self.context
        context.request_ids, context.request_processor = request_ids, processors
        context.cl_socket = self.cl_socket
        begun_s = time.perf_counter()
        result = self._result(rows)
        if isinstance(result, Failure):
            return create_predict_response([], request_ids, result.message, result.code)
        if context.metrics is not None:
            context.metrics.add_time(PREDICTION_METRIC, round((time.perf_counter() - begun_s) * 1000, 2))
        return create_predict_response(result, request_ids, "Prediction success", 200, context=context)

    def _result(self, rows: list[dict[str, Any]]) -> list[Any] | Failure:
        try:
            result = self._entry_point(rows, self.context)
        except Exception as error:
            logger.warning("Invoking custom service failed.", exc_info=True)
            return failure_of(error)
        checked = outcomes(result, len(rows))
        return checked if isinstance(checked, Failure) else list(result)


def _model_config(model_dir: str, manifest: dict[str, Any] | None) -> dict[str, Any]:
    model = manifest.get("model", {}) if isinstance(manifest, dict) else {}
    name = model.get("configFile")
    return get_yaml_config(os.path.join(model_dir, name)) if name else {}


def _headers(request: Mapping[str, Any]) -> dict[str, Any]:
    """A request's headers, and for each input its name with its content type."""
    found: dict[str, Any] = {one["name"]: {"content-type": one["contentType"]} for one in request["parameters"]}
    found.update((one["name"].decode(), one["value"].decode()) for one in request.get("headers") or ())
    return found


def emit_metrics(metrics: Any) -> None:
    """Logs metrics, one line each, as the server reads them from a worker."""
    for metric in metrics or ():
        logger.info("[METRICS]%s", metric)
