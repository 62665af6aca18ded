"""From what a handler returns or raises to what is sent: bytes, or a code and a message (as in TorchServe 0.12)."""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

from ts.context import RequestProcessor
from ts.protocol.frames import Buffer
from ts.utils.util import PredictionException


class Failure(NamedTuple):
    """Why a request has no answer. `code` is an HTTP status."""

    code: int
    message: str


Outcome: TypeAlias = "Buffer | Failure"

CANCELLED = Failure(499, "Request cancelled")
EXPIRED = Failure(504, "Deadline exceeded before the request was started")
NOT_A_LIST = Failure(503, "Invalid model predict output")
WRONG_LENGTH = Failure(503, "number of batch response mismatched")
UNSUPPORTED = Failure(503, "Unsupported model output data type.")
OUT_OF_RESOURCES = Failure(507, "Out of resources")
PREDICTION_FAILED = Failure(503, "Prediction failed")

HEAD_TEXT_BYTES_MAX = 65535
#: Of one answer, those of a tensor form among them.
HEADERS_MAX = 60_000

_RUNTIME_DIR = os.path.dirname(__file__)


def outcome(value: Any) -> Outcome:
    """One element of a handler's result. An exception as an element fails that request alone."""
    if type(value) is str:
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, (bytes, bytearray)):
        return value
    if isinstance(value, memoryview):
        return value if value.contiguous and value.itemsize == 1 and value.ndim == 1 else value.tobytes()
    if isinstance(value, BaseException):
        return failure_of(value)
    return _serialised(value)


def _serialised(value: Any) -> Outcome:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()
    try:
        return (value if isinstance(value, str) else json.dumps(value, indent=2)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        _log(f"a result of type {type(value).__name__} can't be sent: {error}")
        return UNSUPPORTED


def outcomes(result: Any, count: int) -> Sequence[Outcome] | Failure:
    """A handler's whole result, which should be a list of one element per request."""
    if not isinstance(result, list):
        _log(f"the handler's result should be a list, it is of type {type(result).__name__}")
        return NOT_A_LIST
    if len(result) != count:
        _log(f"the handler's result has {len(result)} elements for {count} requests")
        return WRONG_LENGTH
    return [outcome(value) for value in result]


def failure_of(error: BaseException) -> Failure:
    """The code and message that callers see for what a handler raised."""
    try:
        if isinstance(error, PredictionException):
            return failure(error.error_code, error.message)
        if isinstance(error, MemoryError) or "CUDA" in str(error):
            return OUT_OF_RESOURCES
    except Exception as second:  # an exception that can't tell its own text
        _log(f"{type(error).__name__} has no text: {type(second).__name__}")
    return PREDICTION_FAILED


def failure(code: Any, message: Any) -> Failure:
    """What a handler gave as code and message, made fit to be sent; 500 for what is no HTTP status."""
    text = str(message).encode("utf-8", "replace").decode()
    return Failure(code if isinstance(code, int) and 100 <= code <= 999 else 500, text)


def raised(error: BaseException, request_ids: Sequence[str]) -> Failure:
    """`failure_of`, with the traceback in the model's log."""
    failure = failure_of(error)
    lines = "".join(traceback.format_exception(type(error), error, _without_runtime(error)))
    _log(f"{failure.message} (request ids: {', '.join(request_ids)})\n{lines.rstrip()}")
    return failure


def _without_runtime(error: BaseException) -> TracebackType | None:
    """The traceback from the handler's own frame on, when it got that far."""
    here = error.__traceback__
    while here is not None and os.path.dirname(here.tb_frame.f_code.co_filename) == _RUNTIME_DIR:
        here = here.tb_next
    return here or error.__traceback__


def _log(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class Head(NamedTuple):
    """What goes before an answer's first piece."""

    status: int = 200
    phrase: str = ""
    headers: tuple[tuple[str, str], ...] = ()


PLAIN_HEAD = Head()


def head(processor: RequestProcessor) -> Head:
    """The status and headers that a handler set. Raises ValueError for what can't be sent."""
    if processor.is_plain():
        return PLAIN_HEAD
    status, phrase = processor.get_response_status_code(), str(processor.get_response_status_phrase())
    if not isinstance(status, int) or not 100 <= status <= 999:
        raise ValueError(f"a response status is a number from 100 to 999, not {status!r}")
    headers = tuple((str(name), str(value)) for name, value in processor.get_response_headers().items())
    for text in (phrase, *(part for pair in headers for part in pair)):
        if len(text.encode()) > HEAD_TEXT_BYTES_MAX:
            raise ValueError(f"a phrase or header is over {HEAD_TEXT_BYTES_MAX} bytes: {text[:40]!r}…")
    if len(headers) > HEADERS_MAX:
        raise ValueError(f"{len(headers)} response headers are more than {HEADERS_MAX}")
    return Head(int(status), phrase, headers)


def too_large(size: int, limit: int) -> Failure:
    return Failure(500, f"Response of {size} bytes is over max_response_size of {limit} bytes")
