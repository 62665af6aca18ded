"""ModelStreamInfer: requests as the client sends them, answers as they are ready, in one of two dialects.

`triton` wraps every answer in a ModelStreamInferResponse and reports failures in band; `mlserver` sends plain
ModelInferResponses and ends the stream with the status of the first failure. A stream's first request decides
(docs/open-inference.md has the rules). In the dialect `mlserver` all requests of a stream go into one call of a handler
that takes streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple, TypeAlias

from ts.protocol import open_inference_pb2 as pb
from ts.protocol.frames import Input
from ts_frontend.errors import Ending, HandlerFailed, InvalidArgument, ServeError
from ts_frontend.grpc.call import Call, response_metadata
from ts_frontend.job import FedJob, Job
from ts_frontend.open_inference.heads import head_of_message
from ts_frontend.open_inference.models import coded
from ts_frontend.scheduling.stream import ReadAhead, ReadyAnswers
from ts_frontend.tasks import owned, watched

#: So many elements with their lengths are no accident.
ELEMENTS_SEEN_MAX = 256
DIALECT_KEY, STATUS_KEY, EMPTY_FINAL = "oip-stream-dialect", "triton_grpc_error", "triton_enable_empty_final_response"
FINAL = "triton_final_response"


class StreamDialect(Enum):
    AUTO = "auto"
    TRITON = "triton"
    MLSERVER = "mlserver"


Start: TypeAlias = "Callable[[bytes, pb.ModelInferRequest, str], Job]"
Interleaves: TypeAlias = "Callable[[pb.ModelInferRequest], bool]"
#: Begins a request that the rest of its stream follows; None for handlers that take one at a time.
Open: TypeAlias = "Callable[[bytes, pb.ModelInferRequest], FedJob | None]"
_FORMS = {StreamDialect.TRITON: "grpc;stream;triton", StreamDialect.MLSERVER: "grpc;stream"}
#: The forms of a stream's first request and of those that follow it into the same call.
FIRST, FOLLOWING = "grpc;stream;more", "grpc;stream"


def dialect_of(call: Call, request: pb.ModelInferRequest, configured: StreamDialect) -> StreamDialect:
    """What a stream speaks, by its metadata, the setting, or its first request. InvalidArgument for unknown words."""
    asked = call.value(DIALECT_KEY)
    if asked is not None:
        if asked not in (StreamDialect.TRITON.value, StreamDialect.MLSERVER.value):
            raise InvalidArgument(f"{DIALECT_KEY} is triton or mlserver, not {asked!r}")
        return StreamDialect(asked)
    if configured is not StreamDialect.AUTO:
        return configured
    if call.value(STATUS_KEY) is not None or EMPTY_FINAL in request.parameters:
        return StreamDialect.TRITON
    typed = any(tensor.HasField("contents") for tensor in request.inputs)
    return StreamDialect.MLSERVER if typed or _has_bare_bytes(request) else StreamDialect.TRITON


def _has_bare_bytes(request: pb.ModelInferRequest) -> bool:
    """Whether a BYTES input's raw content is no sequence of elements with their lengths (Dynamo's sample clients)."""
    for tensor, data in zip(request.inputs, request.raw_input_contents, strict=False):
        if tensor.datatype == "BYTES" and not _is_prefixed(data):
            return True
    return False


def _is_prefixed(data: bytes) -> bool:
    at = 0
    for _ in range(ELEMENTS_SEEN_MAX):
        if at + 4 > len(data):
            return at == len(data)
        at += 4 + int.from_bytes(data[at : at + 4], "little")
    return True


class _Asked(NamedTuple):
    """What an answer says of its request."""

    model: str
    id: str


def _failed(error: ServeError, asked: _Asked, started: bool) -> bytes:
    """`started`: the model had the request, whose last answer this is."""
    message = pb.ModelStreamInferResponse(error_message=error.message)
    message.infer_response.id = asked.id
    if started:
        message.infer_response.model_name = asked.model
        message.infer_response.parameters[FINAL].bool_param = True
    return message.SerializeToString()


class _Conversation:
    """The state of one stream."""

    def __init__(
        self, call: Call, configured: StreamDialect, start: Start, interleaves: Interleaves, begin: Open
    ) -> None:
        self._call, self._configured = call, configured
        self._start, self._interleaves, self._begin = start, interleaves, begin
        self._stream: FedJob | None = None
        self._dialect = StreamDialect.AUTO
        self._room = ReadAhead()
        self._last: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._answers = ReadyAnswers()
        self._ending: Ending | None = None
        self.finished = False  # the one call that takes the whole stream has ended, whatever the client still sends

    async def read(self, requests: AsyncIterator[bytes]) -> None:
        """Starts every request and waits for their ends."""
        try:
            async for data in requests:
                await self._take(data)
                if self._ending is not None:
                    return
            if self._stream is not None:
                await self._stream.feed((), last=True)
            if self._running:
                await asyncio.wait(self._running)
        except ServeError as error:
            self._ending = self._ending or error.ending()
        finally:
            for task in self._running:
                task.cancel()
            self._answers.end()

    async def ready(self) -> list[bytes] | None:
        """The answers that are ready; None after the last. Raises the ServeError that ends the stream."""
        answers = await self._answers.get()
        if answers is None:
            if self._ending is not None:
                raise self._ending.error()
            return None
        return answers

    async def _take(self, data: bytes) -> None:
        if self._stream is not None:
            await self._stream.feed([Input("", f"\0{FOLLOWING}", data)])
            return
        await self._room.enter(len(data))
        request = head_of_message(data, forms=self._dialect is StreamDialect.AUTO)
        if self._dialect is StreamDialect.AUTO:
            self._dialect = dialect_of(self._call, request, self._configured)
            if self._dialect is StreamDialect.MLSERVER:
                self._stream = self._begin(data, request)
        answer: Job | Ending
        interleaves = False
        try:
            interleaves = self._dialect is StreamDialect.TRITON and self._interleaves(request)
            answer = self._stream or self._start(data, request, self._form())
        except ServeError as error:
            answer = error.ending()
        asked = _Asked(request.model_name, request.id)
        task = watched(self._run(answer, asked, None if interleaves else self._last), "A request of ModelStreamInfer")
        self._last = task
        self._running.add(task)
        task.add_done_callback(partial(self._ended, answer, len(data)))

    def _form(self) -> str:
        form = _FORMS[self._dialect]
        return f"{form};status" if self._ends_failed() else form

    def _ends_failed(self) -> bool:
        """Whether a failure ends the stream with its status."""
        return self._dialect is not StreamDialect.TRITON or self._call.value(STATUS_KEY) == "true"

    def _ended(self, answer: Job | Ending, size_bytes: int, task: asyncio.Task[None]) -> None:
        """Also of a task that was cancelled before it began."""
        if not isinstance(answer, Ending):
            answer.cancel()
        self._room.leave(size_bytes)
        self._running.discard(task)
        if self._last is task:
            self._last = None  # a cancelled task keeps its exception, and with that the frames that hold this

    async def _run(self, answer: Job | Ending, asked: _Asked, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await asyncio.wait({before})
            await self._drain(answer)
        except ServeError as error:
            await self._fail(error, asked, not isinstance(answer, Ending))
        except Exception as error:
            internal = ServeError(f"ModelStreamInfer: {type(error).__name__} in the server, see its log")
            await self._fail(internal, asked, True)
            raise
        finally:
            if answer is self._stream:
                self.finished = True
                self._answers.end()

    async def _drain(self, answer: Job | Ending) -> None:
        if isinstance(answer, Ending):
            raise answer.error()
        async for pieces in answer.chunks():
            found = [bytes(piece) for piece in pieces if len(piece)]
            if found:
                await self._answers.put(found)
        if self._dialect is StreamDialect.MLSERVER and answer.headers:  # those of the last answer
            self._call.trailing[:] = response_metadata(200, answer.headers)

    async def _fail(self, error: ServeError, asked: _Asked, started: bool) -> None:
        """In band, or as the end of the stream."""
        if not self._ends_failed():
            await self._answers.put([_failed(error, asked, started)])
        elif self._ending is None:
            self._ending = (coded(error) if isinstance(error, HandlerFailed) else error).ending()
            self._answers.end()


async def converse(
    call: Call,
    requests: AsyncIterator[bytes],
    configured: StreamDialect,
    start: Start,
    interleaves: Interleaves,
    begin: Open,
) -> AsyncGenerator[Sequence[bytes], None]:
    """The answers to `requests`. Leaving early cancels what is running."""
    conversation = _Conversation(call, configured, start, interleaves, begin)
    reader = owned(conversation.read(requests))
    try:
        while (answers := await conversation.ready()) is not None:
            yield answers
        if not conversation.finished:
            await reader
    finally:
        reader.cancel()
        del reader  # the exception that it ended with may be on its way through this frame
