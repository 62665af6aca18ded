"""A running batch: its requests as rows, its context, and its results as answers (as in TorchServe 0.12); and an
author's comparison of two versions' answers to a request, which runs in place of the handler (docs/rollouts.md)."""

from __future__ import annotations

import importlib
import io
import json
import math
import operator
import re
import sys
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeAlias

from ts.context import Context, RequestCancelled
from ts.protocol import forms
from ts.protocol.codes import DEVICE_LOST
from ts.protocol.decoder import decode_bytes
from ts.protocol.frames import COMPARISON, Buffer, Chunk, Failed, Input, Item, Pairs
from ts.protocol.text import name_of, printable, repr_of, said, text_of
from ts.runtime import tracebacks
from ts.runtime.handlers import HandlerNotUsable, import_file, is_at
from ts.runtime.jobs import Batch, Failure, Ledger, Outcome
from ts.runtime.tracebacks import last_lines, place_of, say, traceback_of, without_runtime
from ts.runtime.worker import Link
from ts.utils.util import PredictionException

NOT_A_LIST: Final = Failure(503, "Invalid model predict output", by_handler=True)
WRONG_LENGTH: Final = Failure(503, "number of batch response mismatched", by_handler=True)
UNSUPPORTED: Final = Failure(503, "Unsupported model output data type.", by_handler=True)
OUT_OF_RESOURCES: Final = Failure(507, "Out of resources", by_handler=True)
PREDICTION_FAILED: Final = Failure(503, "Prediction failed", by_handler=True)

#: Exceptions of a handler that takes bytes for a parsed value: an index, an attribute or a type that they haven't.
_MISREADS: Final = (TypeError, AttributeError, LookupError)

CAUSE_CHARS_MAX: Final = 400
#: The characters that are sent of the message that a handler gives for a failure.
MESSAGE_CHARS_MAX: Final = 65_536

HEAD_TEXT_BYTES_MAX: Final = 65535
#: The most headers of one answer, including those of a tensor form.
HEADERS_MAX: Final = 60_000

HELD_BYTES_MAX: Final = 64 * 1024 * 1024

#: The exceptions of torch that a GPU may have caused.
_OF_A_DEVICE: Final = re.compile("cuda|cudnn|cublas|nccl|accelerator", re.IGNORECASE)


# --- requests to rows


class Headers(dict[str, Any]):
    """A request's headers, under lower-case names as in HTTP/2 and gRPC; they are found in any case."""

    def __missing__(self, name: str) -> Any:
        lower = name.lower()
        if lower == name:
            raise KeyError(name)
        return self[lower]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and super().__contains__(name.lower()))

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


def is_tensor_request(item: Item | None) -> bool:
    """Whether its one input is marked as a tensor protocol's request (ts/tensors/forms.py)."""
    inputs = item.inputs if item is not None else ()
    return bool(inputs) and inputs[0][1][:1] == "\0"


def fields_of(item: Item) -> Sequence[Input]:
    """The inputs of a request. A form counts as one input for each of its fields."""
    found = item.inputs
    for part in found:
        if part.content_type and _kind(part.content_type) == FORM:
            break
    else:
        return found
    expanded: list[Input] = []
    for part in found:
        expanded.extend(_expanded(part) if _kind(part.content_type) == FORM else (part,))
    return expanded


FORM: Final = "form"
JSON: Final = "json"
TEXT: Final = "text"
BYTES: Final = "bytes"


@lru_cache(maxsize=forms.CONTENT_TYPES_MAX)
def _kind(content_type: str) -> str:
    """The way to decode an input of that content type. JSON and text compare case-sensitively, forms don't."""
    if forms.is_form(content_type):
        return FORM
    base = content_type.partition(";")[0].strip()
    return JSON if base == "application/json" else TEXT if base.startswith("text") else BYTES


def _expanded(part: Input) -> Sequence[Input]:
    try:
        return [Input(*one) for one in forms.parts(part.content_type, bytes(part.data))]
    except forms.MalformedForm as error:
        say(f"input declared as {printable(part.content_type)} isn't: {text_of(error)}; the handler gets its bytes")
        return [part]


def _decoded(content_type: str, data: Buffer) -> Any:
    """JSON and text as values; other types, and invalid input, as a bytearray."""
    kind = _kind(content_type)
    try:
        if kind == JSON:
            return json.loads(str(data, "utf-8"))
        if kind == TEXT:
            return str(data, "utf-8")
    except (ValueError, RecursionError) as error:
        say(f"input declared as {printable(content_type)} isn't: {text_of(error)}; the handler gets its bytes")
    return _own(data)


def _not_json(fields: Sequence[Input], row: dict[str, Any]) -> str:
    """Why an input that is declared as JSON, and that its row has as bytes, isn't JSON; "" if all of them are."""
    for name, content_type, data in fields:
        if content_type and _kind(content_type) == JSON and type(row[name]) is bytearray:
            try:
                json.loads(str(data, "utf-8"))
            except (ValueError, RecursionError) as error:
                return f"The input {printable(name)} is declared as application/json and isn't JSON: {text_of(error)}"
    return ""


def _own(data: Buffer) -> bytearray:
    """A bytearray that the handler may change. Large data already has its own."""
    return data if type(data) is bytearray else bytearray(data)


def row_of(inputs: Sequence[Input], decode: bool) -> dict[str, Any]:
    if not decode:
        return {name: _own(data) for name, _, data in inputs}
    return {name: _decoded(content_type, data) if content_type else _own(data) for name, content_type, data in inputs}


def headers_of(pairs: Pairs, inputs: Sequence[tuple[str, ...]]) -> Headers:
    """A request's headers, and for each of its inputs, given by name and type, `{"content-type": TYPE}`."""
    found = Headers(pairs)
    for name, content_type in inputs:
        found[name] = {"content-type": content_type}
    return found


# --- results to answers


def outcome(value: Any) -> Outcome:
    """One element of a handler's result. An exception as an element fails that request alone."""
    if type(value) is bytes:
        return value
    if type(value) is str:
        return encoded(value)
    try:
        return _unusual(value)
    except BaseException as error:  # of the value's own methods, too
        return _misbehaved(UNSUPPORTED, f"a result of type {name_of(value)} can't be sent: {text_of(error)}", value)


def encoded(text: str) -> bytes:
    """An answer's text. Half of a surrogate pair, as JSON's `\\ud800` is read, is escaped in the same way: UTF-8 hasn't
    it, and the client would have bytes that are no text."""
    return text.encode("utf-8", "backslashreplace")


def _unusual(value: Any) -> Outcome:
    kind = type(value)  # what a value says of itself is its own code
    if kind is memoryview:
        flat: Buffer = value if value.contiguous and value.itemsize == 1 and value.ndim == 1 else value.tobytes()
        return flat
    if issubclass(kind, (bytes, bytearray)):
        given: Buffer = value if kind is bytearray else memoryview(value).tobytes()
        return given
    if issubclass(kind, BaseException):
        return failure_of(value)
    if issubclass(kind, str):
        return encoded(str.__str__(value))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()
    text: str = json.dumps(value, indent=2)  # a handler may have replaced it
    return text.encode()


def outcomes(result: Any, count: int) -> Sequence[Outcome] | Failure:
    """A handler's whole result, which should be a list of one element per request."""
    if count == 1 and type(result) is list and len(result) == 1:
        return (outcome(result[0]),)
    return wrong_shape(result, count) or [outcome(value) for value in result]


def wrong_shape(result: Any, count: int) -> Failure | None:
    """The failure of a whole batch whose result isn't a list of one element per request."""
    if not isinstance(result, list):
        given = f"it is of type {name_of(result)}: {repr_of(result)}"
        wanted = f"a list of {count} element{'s' * (count != 1)}, one for each request of the batch"
        return _misbehaved(NOT_A_LIST, f"the handler's result should be {wanted}; {given}", result)
    if len(result) != count:
        counts = f"{len(result)} element{'s' * (len(result) != 1)} for {count} request{'s' * (count != 1)}"
        return _misbehaved(WRONG_LENGTH, f"the handler's result has {counts} of the batch: {repr_of(result)}")
    return None


def _misbehaved(failure: Failure, cause: str, value: Any = None) -> Failure:
    """The failure with its cause, and with advice for the `value` that can't be an answer."""
    given = tracebacks.of_whole_result if failure is NOT_A_LIST else tracebacks.of_result
    what_to_do = tracebacks.safely(given, value) if failure is not WRONG_LENGTH else ""
    cause = text_of(f"{cause}. {what_to_do}" if what_to_do else cause)
    say(cause)
    return failure._replace(cause=cause)


def failure_of(error: BaseException) -> Failure:
    """The code and message that callers see for a handler's exception. Any exception but a PredictionException is
    the handler's fault, and has its cause in the message."""
    if issubclass(type(error), PredictionException):
        given: Any = error  # whose fields may be of any type
        try:
            return failure_with(given.error_code, given.message)
        except BaseException as second:  # of a class with fields of its own by these names
            say(f"{name_of(error)} has no code and message: {said(second)}")
    failure = OUT_OF_RESOURCES if tracebacks.is_out_of_memory(error) else PREDICTION_FAILED
    return failure._replace(cause=_cause(error), traceback=traceback_of(error))


def _cause(error: BaseException) -> str:
    """The last line of a traceback, the file and line in the handler's code, and a common mistake's remedy."""
    text = text_of(" ".join(last_lines(error).split()), CAUSE_CHARS_MAX)
    what_to_do = tracebacks.safely(lambda: tracebacks.of_exception(error, _inputs_of(without_runtime(error))))
    return f"{text}{place_of(error)}. {what_to_do}" if what_to_do else f"{text}{place_of(error)}"


def _inputs_of(here: TracebackType | None) -> list[str] | None:
    """The names of the first request's inputs, from the arguments of the failed call."""
    if here is None:
        return None
    frame: Any = here.tb_frame  # the locals are a dict, or from Python 3.13 on a view
    code = frame.f_code
    for name in code.co_varnames[: code.co_argcount]:
        rows = frame.f_locals.get(name)
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            return [str(key) for key in rows[0]]
    return None


def failure_with(code: Any, message: Any) -> Failure:
    """The failure with the code and message of a handler. An invalid HTTP status becomes 500."""
    number = int.__int__(code) if issubclass(type(code), int) else 0
    return Failure(number if 100 <= number <= 999 else 500, text_of(message, MESSAGE_CHARS_MAX))


def raised(error: BaseException, request_ids: Sequence[str]) -> Failure:
    """`failure_of`, with the traceback in the model's log."""
    failure = failure_of(error)
    lines = failure.traceback or traceback_of(error)
    say(f"{_said_of(error, failure)} (request ids: {', '.join(request_ids)})\n{lines}")
    return failure


def _said_of(error: BaseException, failure: Failure) -> str:
    """The line that TorchServe's worker prints before the traceback."""
    if failure.code == OUT_OF_RESOURCES.code and failure.by_handler:
        if issubclass(type(error), MemoryError):
            return "System out of memory"
        return "CUDA out of memory" if "out of memory" in text_of(error).lower() else "CUDA error"
    return "Prediction error" if issubclass(type(error), PredictionException) else "Invoking custom service failed."


def check_device(error: BaseException) -> None:
    """Raises SystemExit with DEVICE_LOST when a handler's exception comes from its GPU and has left it unusable, as
    an illegal access or a failed assertion of a kernel does: every further call to it from this process would fail
    too, so a new process replaces this one. A failed allocation leaves the GPU usable."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not _OF_A_DEVICE.search(said(error)):
        return
    try:
        if not torch.cuda.is_initialized():
            return
        here = torch.cuda.current_device()
        for device in range(torch.cuda.device_count()):
            if device == here or torch.cuda.memory_reserved(device):
                torch.cuda.synchronize(device)
    except Exception as lost:
        first = text_of(lost).partition("\n")[0]
        say(f"The GPU can't be used by this process any more ({first}): the worker ends and is replaced.")
        raise SystemExit(DEVICE_LOST) from None


class Head(NamedTuple):
    """Status and headers, which go before the first piece of an answer."""

    status: int = 200
    phrase: str = ""
    headers: tuple[tuple[str, str], ...] = ()


PLAIN_HEAD: Final = Head()


def head_of(processor: Any) -> Head:
    """The status and headers that a handler set in its `RequestProcessor`, with values of any type. Raises
    ValueError for values that can't be sent."""
    if processor.is_plain():
        return PLAIN_HEAD
    status, phrase = processor.get_response_status_code(), str(processor.get_response_status_phrase())
    if not isinstance(status, int) or not 100 <= status <= 999:
        raise ValueError(f"a response status is a number from 100 to 999, not {repr_of(status)}")
    headers = tuple((str(name), str(value)) for name, value in processor.get_response_headers().items())
    for text in (phrase, *(part for pair in headers for part in pair)):
        if len(text.encode()) > HEAD_TEXT_BYTES_MAX:
            raise ValueError(f"a phrase or header is over {HEAD_TEXT_BYTES_MAX} bytes: {text[:40]!r}…")
    if len(headers) > HEADERS_MAX:
        raise ValueError(f"{len(headers)} response headers are more than {HEADERS_MAX}")
    return Head(int(status), phrase, headers)


# --- a batch


class Refused(NamedTuple):
    """An element that a generator may yield: a failure among the answers, after which the request continues."""

    error: Any  # an Exception


class Ended(NamedTuple):
    """An element that a generator may yield: the request ends, with `value` as its last piece (None: without one)."""

    value: Any


class Together(NamedTuple):
    """An element that an async generator may yield: pieces of answers that are ready together, each with its
    request's position in the batch (None: no piece)."""

    pieces: Sequence[tuple[int, Any]]


class Running:
    """A batch with its data and operations for a handler, behind its context."""

    __slots__ = ("_asked", "_not_json", "batch", "context", "jobs", "ledger", "link", "waiter")

    #: Whether bytes and texts of a result are answers as they are.
    verbatim = True

    def __init__(self, batch: Batch, context: Context, link: Link) -> None:
        self.batch, self.context, self.link = batch, context, link
        self.ledger: Ledger = link.ledger
        self.jobs = batch.jobs
        self.waiter: Any = None
        self._asked: list[tuple[Pairs, Sequence[tuple[str, ...]]]] = []
        #: Why requests are no JSON although they say so, by their position.
        self._not_json: dict[int, str] = {}

    def rows(self, decode: bool) -> list[Any]:
        """The rows for the handler, whose context is set to this batch. Empty if no request could be read."""
        return self._only_row() or self._rows(decode)

    def _only_row(self) -> list[Any] | None:
        """The row of the usual batch, one request with one input of bytes; None for any other batch."""
        job = self.jobs[0]
        if len(self.jobs) != 1 or job.item is None:
            return None
        _, request_id, _, headers, inputs = job.item
        if len(inputs) != 1:
            return None
        name, content_type, data = inputs[0]
        if content_type and _kind(content_type) is not BYTES:
            return None
        job.item = None
        self._asked.append((headers, ((name, content_type),)))
        self.context.begin(self, {0: request_id})
        return [{name: data if type(data) is bytearray else bytearray(data)}]

    def _rows(self, decode: bool) -> list[Any]:
        rows: list[Any] = []
        for index, job in enumerate(self.jobs):
            item, job.item = job.item, None
            if item is not None:
                fields = fields_of(item)
                self._asked.append((item.headers, [part[:2] for part in fields]))
                rows.append(self.row(index, fields, decode))
        self.context.begin(self, self.batch.request_ids())
        return rows

    def row(self, index: int, fields: Sequence[Input], decode: bool) -> dict[str, Any]:
        """The row of the request at that position, noted if its inputs aren't the JSON that they should be."""
        row = row_of(fields, decode)
        if decode and (why := _not_json(fields, row)):
            self._not_json[index] = why
        return row

    # --- the handler's view

    def headers(self) -> list[Headers]:
        return [headers_of(pairs, inputs) for pairs, inputs in self._asked]

    def is_cancelled(self, idx: Any) -> bool:
        return self.batch.cancelled if idx is None else self.jobs[operator.index(idx)].cancelled

    def deadline_s(self, idx: Any) -> float:
        if idx is not None:
            return self.jobs[operator.index(idx)].deadline_s
        return max((job.deadline_s for job in self.jobs), default=math.inf)

    def send(self, ret: Any, indices: Sequence[Any], message: Any, code: Any) -> None:
        """One piece per request, now. Raises RequestCancelled; waits for credit (async handlers: `drain`)."""
        if code != 200:
            self._give([(operator.index(index), failure_with(code, message)) for index in indices])
            return
        if len(indices) == 1:
            place = operator.index(indices[0])
            pieces = [(place, self._outcome(place, ret[place], False))]
        else:
            pieces = [(place, self._outcome(place, ret[place], False)) for place in map(operator.index, indices)]
        if len(pieces) != 1 or not self._add_piece(*pieces[0]):
            self._give(pieces)
        elif not self.link.may_hold_back():
            self.link.flush()

    def _add_piece(self, index: int, value: Outcome) -> bool:
        """Gives a piece in the ordinary case; returns False for any other case, which `_give` handles."""
        job = self.jobs[index]
        usual = type(value) is bytes and job.answered and self.context.is_plain
        return usual and self.ledger.add_piece(job, value)  # type: ignore[arg-type]  # it is bytes

    def send_frames(self, data: bytes) -> None:
        """Sends the frames that `create_predict_response` made."""
        pieces: list[tuple[int, Outcome]] = []
        for message in decode_bytes(data):
            if isinstance(message, Chunk):
                pieces.append((message.job_id, message.data))
            elif isinstance(message, Failed):
                pieces.append((message.job_id, Failure(message.code, message.message)))
        self._give(pieces)

    def _give(self, pieces: Sequence[tuple[int, Outcome]]) -> None:
        if self.batch.stalled:
            self.link.wait_for_credit(self.batch)
        if self.batch.cancelled:
            raise RequestCancelled
        for index, _ in pieces:
            if self.jobs[index].held and self.ledger.held_bytes(self.jobs[index]) > HELD_BYTES_MAX:
                raise BufferError(f"over {HELD_BYTES_MAX} bytes wait for a slow reader: await context.drain()")
        sent = [self._piece(index, frozen(value), last=False) for index, value in pieces]
        if not self.link.may_hold_back():
            self.link.flush()
        if not all(sent) and all(job.over for job in self.jobs):
            raise ValueError("no request of the batch is left: what was to be sent can't be, the log says why")

    async def drain(self) -> None:
        while self.batch.stalled and not self.batch.cancelled:
            await self.waiter()

    # --- how its result becomes answers

    def _outcome(self, index: int, value: Any, last: bool) -> Outcome:
        """The outcome for one element of a result. `last`: the answer to that request ends with it."""
        return outcome(value)

    def _outcomes(self, result: Any, last: bool) -> Sequence[Outcome] | Failure:
        """The outcomes for a whole result, one per request, or one failure for all."""
        return outcomes(result, len(self.jobs))

    def _head(self, index: int) -> Head:
        return PLAIN_HEAD if self.context.is_plain else head_of(self.context.request_processor[index])

    def _piece(self, index: int, value: Outcome, last: bool) -> bool:
        """Gives a piece of one answer. False, with only that request failed, if it can't be sent."""
        try:
            self._put(index, value, last)
            return True
        except BaseException as error:  # of a header's text, too
            job = self.jobs[index]
            self.ledger.give(job, raised(error, [job.request_id]), last=True)
            return False

    def _put(self, index: int, value: Outcome, last: bool) -> None:
        job = self.jobs[index]
        if job.answered and not last and type(value) is bytes and self.ledger.add_piece(job, value):
            return
        head = PLAIN_HEAD if job.answered else self._head(index)
        if head is PLAIN_HEAD:
            self.ledger.give(job, value, last)
        else:
            self.ledger.give(job, value, last, *head)

    def step(self, value: Any) -> bool:
        """Takes a generator's value: an element per request (None: nothing for it). False ends the batch."""
        if not isinstance(value, list) and len(self.jobs) == 1:
            value = [value]
        pieces = self._outcomes(value, False)
        if isinstance(pieces, Failure):
            self.fail(pieces)
            return False
        for index, piece in enumerate(pieces):
            if value[index] is not None:
                self._piece(index, frozen(piece), last=type(value[index]) is Ended)
        return not self._is_over()

    def step_of(self, index: int, value: Any) -> bool:
        """`step` with a value for one request of the batch."""
        if value is not None:
            self._piece(index, frozen(self._outcome(index, value, False)), last=type(value) is Ended)
        return not self._is_over()

    def _is_over(self) -> bool:
        jobs = self.jobs
        return jobs[0].over if len(jobs) == 1 else all(job.over for job in jobs)

    def finish(self, result: Any) -> None:
        if len(self.jobs) == 1 and type(result) is list and len(result) == 1 and self.verbatim:
            value = result[0]
            if type(value) is str:
                value = encoded(value)
            if type(value) is bytes and self.context.is_plain:
                self.ledger.give(self.jobs[0], value, True)
                return
        self._finish(result)

    def _finish(self, result: Any) -> None:
        """`finish` of any batch and result."""
        pieces = self._outcomes(result, True)
        if isinstance(pieces, Failure):
            self.fail(pieces)
            return
        places = self.ledger.give_whole(self.jobs, pieces) if self._is_plain() else range(len(pieces))
        for index in places:
            self._piece(index, pieces[index], True)

    def _is_plain(self) -> bool:
        return self.context.is_plain

    def finish_stream(self, result: Any) -> None:
        """Ends the answers of a generator; `result` is its return value, None for no last piece."""
        if result is None:
            result = [b""] * len(self.jobs)
        elif not isinstance(result, list) and len(self.jobs) == 1:
            result = [result]
        self.finish(result)

    def fail(self, failure: Failure) -> None:
        """Ends every open request with `failure`; cancelled ones are answered as cancelled."""
        self.batch.failed = len(self.jobs) > 1
        for job in self.jobs:
            self.ledger.give(job, failure, last=True)

    def failed(self, error: BaseException) -> None:
        """Fails the requests with the handler's `error`, or raises SystemExit, its own or if the GPU is lost."""
        if self.batch.cancelled and issubclass(type(error), (RequestCancelled, CancelledError)):
            self.fail(PREDICTION_FAILED)
            return
        if self._not_json and issubclass(type(error), _MISREADS):
            # The handler took the bytes for a value: the clients that sent no JSON are at fault, not the handler.
            for index, why in self._not_json.items():
                self.ledger.give(self.jobs[index], Failure(400, why), last=True)
        self.fail(raised(error, [job.request_id for job in self.jobs]))
        check_device(error)


Opened: TypeAlias = Callable[[Batch, Context], Running]


def frozen(value: Outcome) -> Outcome:
    """A copy of a value that the handler may change before it is written."""
    return bytes(value) if isinstance(value, (bytearray, memoryview)) else value


class Opening:
    """Opens each batch, for reading and writing its requests. `with_tensors` makes the function that opens batches
    with requests of a tensor protocol among them: it is called for the first one, because it imports numpy, which
    not every worker needs."""

    def __init__(self, link: Link, takes_rows: bool, with_tensors: Callable[[], Opened]) -> None:
        self._link, self._takes_rows, self._make = link, takes_rows, with_tensors
        self._with_tensors: Opened | None = None

    def opened(self, batch: Batch, context: Context) -> Running:
        if self._takes_rows:
            for job in batch.jobs:
                if is_tensor_request(job.item):
                    break
            else:
                return Running(batch, context, self._link)
        if self._with_tensors is None:
            self._with_tensors = self._make()
        return self._with_tensors(batch, context)


#: The characters that are sent of what a comparison says.
SAID_CHARS_MAX: Final = 300


def is_comparison(batch: Batch) -> bool:
    """Such a request is never batched with others."""
    item = batch.jobs[0].item
    return item is not None and bool(item.inputs) and item.inputs[0].content_type == COMPARISON


class Comparing(Running):
    """One request, whose inputs are the `old` version's answer and the `new` one's. Its headers have the `function`,
    the `form` in which the answers are, and the length of each answer's JSON (`answer_of`). It is answered with JSON:
    `differs`, why the answers differ, "" if they don't, or `failed`, why the comparison has failed."""

    __slots__ = ()

    def rows(self, decode: bool) -> list[Any]:
        """Compares, and returns no row for the handler."""
        (job,) = self.jobs
        item, job.item = job.item, None
        assert item is not None
        self.context.begin(self, self.batch.request_ids())
        given = dict(item.headers)
        try:
            function = function_of(given["function"], str(self.context.system_properties["model_dir"]))
            answers = (answer_of(given["form"], bytes(one.data), given[one.name]) for one in item.inputs)
            told = {"differs": _why(function(*answers))}
        except BaseException as error:  # also sys.exit: the worker goes on
            say(f"The comparison {given['function']} failed (request id: {job.request_id})\n{traceback_of(error)}")
            told = {"failed": text_of(said(error), SAID_CHARS_MAX)}
        self.finish([json.dumps(told).encode()])
        return []


def _why(result: Any) -> str:
    """The reason in a comparison's result. Raises TypeError for a result that says nothing."""
    if isinstance(result, str):
        return text_of(result, SAID_CHARS_MAX)
    if name_of(result) not in ("bool", "bool_"):  # numpy's, too
        raise TypeError(f"a comparison returns True, False or a text that says how the answers differ, not {result!r}")
    return "" if result else "the comparison says so"


@lru_cache(maxsize=8)
def function_of(name: str, model_dir: str) -> Callable[[Any, Any], Any]:
    """The function `[folder/]file[.py]:function` of the model's own files. Raises HandlerNotUsable; exceptions of the
    file's import pass through."""
    path, _, attribute = name.partition(":")
    file = Path(model_dir, path.removesuffix(".py") + ".py")
    if not file.is_file() or ".." in file.parts:
        raise HandlerNotUsable(f"the archive has no file {path.removesuffix('.py')}.py")
    module = sys.modules.get(file.stem)
    if module is None or not is_at(module, file):
        importlib.invalidate_caches()
        module = import_file(f"ts_comparison_{file.stem}", file)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise HandlerNotUsable(f"{file.name} has no function {attribute}")
    return function  # type: ignore[no-any-return]  # it is callable


def answer_of(form: str, data: bytes, length: str) -> Any:
    """An answer for a comparison: tensors as arrays by the names of the outputs, JSON as its value, else bytes.
    `length`: that of the JSON before binary tensors, "" without any."""
    if form.startswith("\0grpc"):
        from ts.tensors.grpc_form import response_from

        return {tensor.name: tensor.numbers() for tensor in response_from(data).outputs}
    at = int(length or len(data))
    try:
        tree = json.loads(data[:at])
    except (ValueError, RecursionError):
        return data
    if not form.startswith("\0json") or not isinstance(tree, dict) or not isinstance(tree.get("outputs"), list):
        return tree
    from ts.protocol.datatypes import DATATYPES
    from ts.tensors.json_form import BINARY_SIZE, from_json
    from ts.tensors.types import Tensor, decode_raw

    found = {}
    for one in tree["outputs"]:
        name, kind, shape = one["name"], DATATYPES[one["datatype"]], one["shape"]
        size = (one.get("parameters") or {}).get(BINARY_SIZE)
        if size is None:
            array = from_json(kind, shape, one["data"], {}, name)
        else:
            array = decode_raw(kind, shape, data[at : at + size], name)
            at += size
        found[name] = Tensor(name, kind.name, array).numbers()
    return found
