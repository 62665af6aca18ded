"""A handler's view of its model and its requests, under TorchServe's names.

One `Context` belongs to a worker for its life; handlers may hang attributes on it. `idx` is always a request's
position in the batch that is being handled.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ts.version import __version__

if TYPE_CHECKING:
    from ts.runtime.running import Running

SEQUENCE_KEYS = (
    ("TS_REQUEST_SEQUENCE_ID", "ts_request_sequence_id"),
    ("TS_REQUEST_SEQUENCE_START", "ts_request_sequence_start"),
    ("TS_REQUEST_SEQUENCE_END", "ts_request_sequence_end"),
)


#: Held while processors are made, since several threads of one handler may request them at once.
_MAKING = threading.Lock()


class RequestCancelled(BaseException):
    """All callers of this batch have given up. Not an `Exception`: a handler's `except Exception` lets it pass."""


class RequestProcessor:
    """One request's headers, and the status and headers of its answer."""

    def __init__(self, request_header: Mapping[str, Any]) -> None:
        self._status_code = 200
        self._reason_phrase = ""
        self._response_header: dict[str, str] = {}
        self._request_header = request_header

    def get_request_property(self, key: str) -> Any:
        return self._request_header.get(key)

    def get_request_properties(self) -> Mapping[str, Any]:
        return self._request_header

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        self._status_code = code
        self._reason_phrase = reason_phrase or ""

    def get_response_status_code(self) -> int:
        return self._status_code

    def get_response_status_phrase(self) -> str:
        return self._reason_phrase

    def add_response_property(self, key: str, value: str) -> None:
        self._response_header[key] = value

    def get_response_headers(self) -> dict[str, str]:
        return self._response_header

    def is_plain(self) -> bool:
        return self._status_code == 200 and not self._reason_phrase and not self._response_header

    def get_response_header(self, key: str) -> str | None:
        return self._response_header.get(key)


class _AnswerSocket:
    """`context.cl_socket`, for handlers that write `create_predict_response(...)` to it."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def sendall(self, data: bytes) -> None:
        self._context._running().send_frames(data)

    send = sendall


class Context:
    """The context of a handler. `metrics` may be given, or made by `metrics_source` at the first access."""

    def __init__(
        self,
        model_name: str,
        model_dir: str,
        manifest: dict[str, Any] | None,
        batch_size: int,
        gpu: int | None,
        mms_version: str = __version__,
        limit_max_image_pixels: bool = True,
        metrics: Any = None,
        model_yaml_config: dict[str, Any] | None = None,
    ) -> None:
        self.model_name = model_name
        self.manifest = manifest
        self.model_yaml_config = {} if model_yaml_config is None else model_yaml_config
        self._system_properties: dict[str, Any] = {
            "model_dir": model_dir,
            "gpu_id": gpu,
            "batch_size": batch_size,
            "server_name": "MMS",
            "server_version": mms_version,
            "limit_max_image_pixels": limit_max_image_pixels,
        }
        self.request_ids: dict[int, str] | None = None
        self._processors: list[RequestProcessor] | None = []  # None: not asked for yet
        #: No request processor was accessed, so that nothing can have been set for any answer. The runtime asks for
        #: each batch, and an attribute costs it less than a property.
        self.is_plain = False
        self._metrics = metrics
        self._metrics_source: Callable[[], Any] | None = None
        self.stopping_criteria: Any = None
        self.cl_socket: Any = _AnswerSocket(self)
        self.header_key_sequence_id, self.header_key_sequence_start, self.header_key_sequence_end = (
            os.environ.get(name, default) for name, default in SEQUENCE_KEYS
        )
        self._batch: Running | None = None
        #: Tells the server how many of its requests wait in the handler's engine.
        self._tell_waiting: Callable[[int], object] = lambda count: None

    def begin(self, batch: Running, request_ids: dict[int, str]) -> None:
        """Sets the context to another batch: called by the runtime before each handler call. The batch's headers are
        read at the handler's first access."""
        self._batch = batch
        self.request_ids = request_ids
        self._processors = None
        self.is_plain = True

    def fork(self) -> Context:
        """A separate context for a batch that runs concurrently with others; attributes set so far are shared."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.cl_socket = _AnswerSocket(other)
        if self._metrics_source is not None:
            other._metrics, other._metrics_source = None, self._bound_metrics
        return other

    def _bound_metrics(self) -> Any:
        """The metrics bound to a single batch, so that request ids of concurrent batches don't mix."""
        metrics = self.metrics
        return metrics.bind(self.request_ids or {}) if hasattr(metrics, "bind") else metrics

    def _running(self) -> Running:
        if self._batch is None:
            raise RuntimeError("no request is being handled: this can be called only while the handler runs a batch")
        return self._batch

    @property
    def system_properties(self) -> dict[str, Any]:
        return self._system_properties

    @property
    def metrics(self) -> Any:
        """The metrics object (`add_counter`, `add_time`, …), with this batch's request ids."""
        if self._metrics is None and self._metrics_source is not None:
            self._metrics = self._metrics_source()
        if self._metrics is not None and self.request_ids is not None:
            self._metrics.request_ids = self.request_ids
        return self._metrics

    @metrics.setter
    def metrics(self, metrics: Any) -> None:
        self._metrics = metrics

    @property
    def request_processor(self) -> list[RequestProcessor]:
        if self._processors is None:
            with _MAKING:
                if self._processors is None:
                    self.is_plain = False
                    self._processors = [RequestProcessor(header) for header in self._running().headers()]
        return self._processors

    @request_processor.setter
    def request_processor(self, processors: Sequence[RequestProcessor | Mapping[str, Any]]) -> None:
        """Accepts processors, or (as TorchServe does) a list of header dicts, from which it makes them."""
        self.is_plain = False
        self._processors = [one if isinstance(one, RequestProcessor) else RequestProcessor(one) for one in processors]

    #: TorchServe's own name for them, which handlers use.
    _request_processor = request_processor

    # --- requests

    def get_request_id(self, idx: int = 0) -> str | None:
        return (self.request_ids or {}).get(idx)

    def get_request_header(self, idx: int, key: str) -> Any:
        return self.request_processor[idx].get_request_property(key)

    def get_all_request_header(self, idx: int) -> Mapping[str, Any]:
        return self.request_processor[idx].get_request_properties()

    def get_sequence_id(self, idx: int) -> str:
        return str(self.get_request_header(idx, self.header_key_sequence_id) or "")

    # --- answers

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        return self.get_response_headers(idx).get("content-type")

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        self.request_processor[idx].add_response_property(key, value)

    def get_response_headers(self, idx: int) -> dict[str, str]:
        return self.request_processor[idx].get_response_headers()

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        self.request_processor[idx].report_status(code, phrase)

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        for processor in self.request_processor:
            processor.report_status(code, phrase)

    def get_response_status(self, idx: int) -> tuple[int, str]:
        processor = self.request_processor[idx]
        return processor.get_response_status_code(), processor.get_response_status_phrase()

    # --- who still waits, and for how long (not in TorchServe)

    @property
    def cancelled(self) -> bool:
        """True if every request of the batch has been cancelled, so that no caller waits for a result."""
        return self._batch is not None and self._batch.is_cancelled(None)

    def is_cancelled(self, idx: int) -> bool:
        """True if this request has been cancelled."""
        return self._running().is_cancelled(idx)

    @property
    def deadline_s(self) -> float:
        """The latest deadline of the batch's requests, in seconds of `time.monotonic()`; `math.inf`: none."""
        return math.inf if self._batch is None else self._batch.deadline_s(None)

    def remaining_s(self, idx: int | None = None) -> float:
        """Seconds until the deadline of request `idx` (None: until the latest of all requests)."""
        return self._running().deadline_s(idx) - time.monotonic()

    async def drain(self) -> None:
        """In an async handler: waits until the readers of this batch's streams have taken enough to send more."""
        await self._running().drain()
