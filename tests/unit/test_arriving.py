"""All bodies that are arriving share a limit; the ones that began first make room."""

from __future__ import annotations

import asyncio
import functools
import gc
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

import pytest
from ts_frontend.http.arriving import PIECE_BYTES, REQUEST_BYTES, Arriving, BodiesFull, SlowSender, head_bytes
from ts_frontend.http.departures import Departures

from support import GUARD_S, until_async
from ts_frontend.errors import Code
from ts_frontend.grpc.call import Bidi, Call, ListenerLimits, Method, ServerStream, Shape, Unary
from ts_frontend.grpc.exchange import Exchange
from ts_frontend.grpc.protocol import Header
from ts_frontend.http.request import BodyLimits, Event, HttpRequest

BODY_BYTES = 4000
PATH = "/test.Service/Call"
HEAD: Sequence[Header] = ((b"te", b"trailers"),)
HEAD_BYTES = head_bytes(HEAD)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **more: Any) -> None:
        asyncio.run(test(*arguments, **more))

    return run


class Sender:
    """A client that sends its body piece by piece."""

    def __init__(self, headers: Sequence[Header] = HEAD) -> None:
        self._headers = headers
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self.sent: list[Event] = []

    def piece(self, data: bytes, *, more: bool = True) -> None:
        self._events.put_nowait({"type": "http.request", "body": data, "more_body": more})

    def receive(self) -> Awaitable[Event]:
        return asyncio.ensure_future(self._events.get())

    @property
    def empty(self) -> bool:
        """Whether the server has taken all pieces."""
        return self._events.empty()

    async def send(self, event: Event) -> None:
        self.sent.append(event)

    def over_http(self, arriving: Arriving, s_max: float = GUARD_S) -> asyncio.Task[bytes]:
        scope = {"method": "POST", "path": "/", "headers": self._headers, "query_string": b"", "http_version": "1.1"}
        limits = BodyLimits(1 << 20, s_max, arriving)
        return asyncio.create_task(HttpRequest(scope, self.receive, "id", limits, Departures()).body())

    def over_grpc(self, arriving: Arriving, method: Method) -> asyncio.Task[None]:
        limits = ListenerLimits(arriving=arriving)
        scope = {"path": PATH, "headers": self._headers}
        exchange = Exchange(scope, dict(self._headers), self.receive, self.send, limits)
        return asyncio.create_task(exchange.run(method))

    @property
    def grpc_status(self) -> int:
        """Of the last headers: the status alone, or the trailers."""
        return int(dict(next(one["headers"] for one in reversed(self.sent) if "headers" in one))[b"grpc-status"])


async def echo(call: Call, message: bytes) -> bytes:
    return message


async def echoes(call: Call, messages: AsyncIterator[bytes]) -> AsyncIterator[Sequence[bytes]]:
    async for message in messages:
        yield [message]


async def repeat(call: Call, message: bytes) -> AsyncIterator[Sequence[bytes]]:
    yield [message, message]


UNARY: Unary = echo
SERVER_STREAM: ServerStream = repeat
BIDI: Bidi = echoes
METHODS = {
    "unary": Method(PATH, Shape.UNARY, UNARY),
    "server stream": Method(PATH, Shape.SERVER_STREAM, SERVER_STREAM),
    "bidi": Method(PATH, Shape.BIDI, BIDI),
}


async def until_held(arriving: Arriving, count: int) -> None:
    await until_async(lambda: len(arriving) == count)


@in_loop
async def test_the_body_that_began_first_makes_room() -> None:
    arriving = Arriving(2 * (HEAD_BYTES + BODY_BYTES + PIECE_BYTES) + HEAD_BYTES + PIECE_BYTES)
    senders = [Sender() for _ in range(3)]
    bodies = []
    for number, sender in enumerate(senders[:2], 1):
        bodies.append(sender.over_http(arriving))
        sender.piece(b"x" * BODY_BYTES)
        await until_held(arriving, number)
    bodies.append(senders[2].over_http(arriving))
    senders[2].piece(b"y" * BODY_BYTES)
    with pytest.raises(BodiesFull, match="arriving_bytes_max") as refused:
        await bodies[0]
    assert (refused.value.http_status, refused.value.code) == (503, Code.RESOURCE_EXHAUSTED)
    for sender in senders[1:]:
        sender.piece(b"z", more=False)
    assert [len(await body) for body in bodies[1:]] == [BODY_BYTES + 1] * 2
    assert (arriving.bytes, len(arriving)) == (0, 0)


@in_loop
async def test_the_only_body_is_never_given_up() -> None:
    arriving = Arriving(10)
    sender = Sender()
    body = sender.over_http(arriving)
    for number in range(5):
        sender.piece(b"x" * BODY_BYTES, more=number < 4)
    assert len(await body) == 5 * BODY_BYTES


@in_loop
async def test_pieces_of_one_byte_count_with_the_memory_that_they_need() -> None:
    arriving = Arriving()
    sender = Sender()
    body = sender.over_http(arriving)
    for _ in range(100):
        sender.piece(b"x")
    await until_async(lambda: arriving.bytes == HEAD_BYTES + 100 * (PIECE_BYTES + 1))
    sender.piece(b"", more=False)
    assert len(await body) == 100


@in_loop
async def test_a_slow_body_is_counted_no_longer_when_its_time_is_over() -> None:
    arriving = Arriving()
    sender = Sender()
    body = sender.over_http(arriving, s_max=0.01)
    sender.piece(b"x" * BODY_BYTES)
    with pytest.raises(SlowSender):
        await body
    assert (arriving.bytes, len(arriving)) == (0, 0)


#: Parts of a message of BODY_BYTES bytes: one that ends within it, and one that is whole in a stream that isn't ended.
PREFIX = b"\0" + BODY_BYTES.to_bytes(4, "big")
PARTS = {"a part": [PREFIX, b"x" * (BODY_BYTES - 1)], "the whole": [PREFIX + b"x" * BODY_BYTES]}
PIECES = [pytest.param("unary", "a part"), pytest.param("unary", "the whole"), pytest.param("bidi", "a part")]


@pytest.mark.parametrize(("shape", "part"), PIECES)
@in_loop
async def test_messages_of_grpc_are_bodies_too(shape: str, part: str) -> None:
    arriving = Arriving(2 * (HEAD_BYTES + BODY_BYTES))
    first, second = Sender(), Sender()
    call = first.over_grpc(arriving, METHODS[shape])
    for piece in PARTS[part]:
        first.piece(piece)
    await until_async(lambda: arriving.bytes >= REQUEST_BYTES + BODY_BYTES)
    body = second.over_http(arriving)
    second.piece(b"x" * BODY_BYTES)
    second.piece(b"x")
    await call
    assert first.grpc_status == Code.RESOURCE_EXHAUSTED
    second.piece(b"", more=False)
    assert len(await body) == BODY_BYTES + 1
    assert (arriving.bytes, len(arriving)) == (0, 0)


SLOW = [*PIECES, *(pytest.param(shape, "bytes") for shape in ("unary", "bidi")), pytest.param("unary", "empty frames")]
#: Of a message that nobody ends with single bytes in a test.
LARGE = b"\0" + (1 << 20).to_bytes(4, "big")


@pytest.mark.parametrize(("shape", "part"), SLOW)
@in_loop
async def test_the_rest_of_a_message_of_grpc_must_come_in_time(shape: str, part: str) -> None:
    """Also if the client sends on, a byte or an empty frame now and then."""
    arriving = Arriving(message_timeout_s=0.05)
    sender = Sender()
    call = sender.over_grpc(arriving, METHODS[shape])
    for piece in PARTS.get(part, [LARGE if part == "bytes" else b""]):
        sender.piece(piece)
    while not call.done():
        sender.piece(b"x" if part == "bytes" else b"")
        await asyncio.sleep(0)
    await call
    assert sender.grpc_status == Code.DEADLINE_EXCEEDED
    assert (arriving.bytes, len(arriving)) == (0, 0)


LONG_HEAD = [(b"te", b"trailers"), *[(b"x-a", b"v" * 1000)] * 20]
#: A message of a byte in a stream that isn't ended, which needs little memory.
SMALL = b"\0" + (1).to_bytes(4, "big") + b"x"


@pytest.mark.parametrize(("shape", "data"), [("unary", b""), ("unary", SMALL), ("server stream", SMALL), ("bidi", b"")])
@in_loop
async def test_a_head_counts_until_its_message_is_there(shape: str, data: bytes) -> None:
    """HTTP/2 can repeat long headers with a few bytes: a client that only sends heads must not fill the memory."""
    arriving = Arriving(2 * head_bytes(LONG_HEAD) - 1)
    first, second = Sender(LONG_HEAD), Sender(LONG_HEAD)
    call = first.over_grpc(arriving, METHODS[shape])
    if data:
        first.piece(data)
    await until_async(lambda: first.empty and arriving.bytes > REQUEST_BYTES + 20 * 1000)
    other = second.over_http(arriving)
    await call
    assert first.grpc_status == Code.RESOURCE_EXHAUSTED
    second.piece(b"", more=False)
    assert await other == b""
    assert (arriving.bytes, len(arriving)) == (0, 0)


@pytest.mark.parametrize("data", [b"", SMALL])
@pytest.mark.parametrize("shape", ["unary", "server stream"])
@in_loop
async def test_a_head_without_its_message_is_given_up_in_time(shape: str, data: bytes) -> None:
    arriving = Arriving(message_timeout_s=0.05)
    sender = Sender()
    call = sender.over_grpc(arriving, METHODS[shape])
    if data:
        sender.piece(data)
    await asyncio.wait_for(call, GUARD_S)
    assert sender.grpc_status == Code.DEADLINE_EXCEEDED
    assert (arriving.bytes, len(arriving)) == (0, 0)


@in_loop
async def test_a_stream_may_rest_before_its_first_message() -> None:
    limit_s = 0.05
    arriving = Arriving(message_timeout_s=limit_s)
    sender, late = Sender(), Sender()
    call = sender.over_grpc(arriving, METHODS["bidi"])
    await until_held(arriving, 1)
    await late.over_grpc(arriving, METHODS["unary"])
    assert late.grpc_status == Code.DEADLINE_EXCEEDED
    sender.piece(SMALL, more=False)
    await call
    assert sender.grpc_status == Code.OK


@in_loop
async def test_each_message_of_a_stream_has_its_own_time() -> None:
    """The pieces of a fast client's stream end within messages for as long as it lives."""
    limit_s = 0.3
    arriving = Arriving(message_timeout_s=limit_s)
    sender = Sender()
    call = sender.over_grpc(arriving, METHODS["bidi"])
    begun_s = time.monotonic()
    sender.piece(PREFIX)
    while time.monotonic() - begun_s < 3 * limit_s:
        sender.piece(b"x" * BODY_BYTES + PREFIX)
        await until_async(lambda: sender.empty)
    sender.piece(b"x" * BODY_BYTES, more=False)
    await call
    assert sender.grpc_status == Code.OK


@in_loop
async def test_between_the_messages_of_a_stream_nothing_is_counted() -> None:
    arriving = Arriving(BODY_BYTES)
    sender = Sender()
    call = sender.over_grpc(arriving, METHODS["bidi"])
    for piece in PARTS["the whole"]:
        sender.piece(piece)
    await until_async(lambda: len(sender.sent) > 1)
    assert (arriving.bytes, len(arriving)) == (0, 0)
    sender.piece(b"", more=False)
    await call


@in_loop
async def test_a_cancelled_call_is_counted_no_longer() -> None:
    arriving = Arriving()
    sender = Sender()
    call = sender.over_grpc(arriving, METHODS["unary"])
    for piece in PARTS["a part"]:
        sender.piece(piece)
    await until_async(lambda: arriving.bytes >= REQUEST_BYTES + BODY_BYTES)
    call.cancel()
    await asyncio.wait({call})
    assert (arriving.bytes, len(arriving)) == (0, 0)


@in_loop
async def test_a_refused_body_is_freed_without_garbage_collection() -> None:
    arriving = Arriving(HEAD_BYTES + BODY_BYTES)
    piece = bytes(bytearray(BODY_BYTES))
    before = sys.getrefcount(piece)
    gc.disable()
    try:
        first, second = Sender(), Sender()
        body = first.over_http(arriving)
        first.piece(piece)
        await until_held(arriving, 1)
        other = second.over_http(arriving)
        second.piece(b"x" * BODY_BYTES)
        with pytest.raises(BodiesFull):
            await body
        del body
        second.piece(b"", more=False)
        await other
        assert sys.getrefcount(piece) == before
    finally:
        gc.enable()
