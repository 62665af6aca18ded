"""All bodies that are arriving share a limit; the ones that began first make room."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Sequence

import pytest

from streams import Http1Client, Http2Client
from support import GUARD_S, until_async
from ts_frontend.errors import Code
from ts_frontend.grpc.call import Bidi, Call, Exchange, Method, ServerStream, Shape, Unary
from ts_frontend.grpc.protocol import Header
from ts_frontend.http.request import BodyLimits, HttpRequest
from ts_frontend.transport.http1 import UNREAD_BYTES_MAX
from ts_frontend.transport.limits import (
    PIECE_BYTES,
    REQUEST_BYTES,
    Arriving,
    BodiesFull,
    ListenerLimits,
    SlowSender,
    head_bytes,
)

BODY_BYTES = 4000
PATH = "/test.Service/Call"
HEAD: Sequence[Header] = ((b"te", b"trailers"),)
HEAD_BYTES = head_bytes(HEAD)


class Sender(Http2Client):
    """A client that sends the body of its request piece by piece."""

    def __init__(self, headers: Sequence[Header] = HEAD) -> None:
        super().__init__()
        self.stream = self.request(target=PATH, headers=headers, ended=False)

    def send(self, data: bytes, *, more: bool = True) -> None:
        self.piece(self.stream, data, more=more)

    @property
    def empty(self) -> bool:
        """Whether the server has taken all pieces."""
        return not self.stream.pieces

    def over_http(self, arriving: Arriving, s_max: float = GUARD_S) -> asyncio.Task[bytes]:
        limits = BodyLimits(1 << 20, s_max, arriving)
        return asyncio.create_task(HttpRequest(self.stream, "id", limits).body())

    def over_grpc(self, arriving: Arriving, method: Method) -> asyncio.Task[None]:
        exchange = Exchange(self.stream, ListenerLimits(arriving=arriving))
        return asyncio.create_task(exchange.run(method))

    @property
    def grpc_status(self) -> int:
        return self.answer(self.stream).grpc_status


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


async def test_a_slow_body_is_counted_no_longer_when_its_time_is_over() -> None:
    arriving = Arriving()
    sender = Sender()
    body = sender.over_http(arriving, s_max=0.01)
    sender.send(b"x" * BODY_BYTES)
    with pytest.raises(SlowSender):
        await body
    assert (arriving.bytes, len(arriving)) == (0, 0)


#: Parts of a message of BODY_BYTES bytes: one that ends within it, and one that is whole in a stream that isn't ended.
PREFIX = b"\0" + BODY_BYTES.to_bytes(4, "big")
PARTS = {"a part": [PREFIX, b"x" * (BODY_BYTES - 1)], "the whole": [PREFIX + b"x" * BODY_BYTES]}
PIECES = [pytest.param("unary", "a part"), pytest.param("unary", "the whole"), pytest.param("bidi", "a part")]


@pytest.mark.parametrize(("shape", "part"), PIECES)
async def test_messages_of_grpc_are_bodies_too(shape: str, part: str) -> None:
    arriving = Arriving(2 * (HEAD_BYTES + BODY_BYTES))
    first, second = Sender(), Sender()
    call = first.over_grpc(arriving, METHODS[shape])
    for piece in PARTS[part]:
        first.send(piece)
    await until_async(lambda: arriving.bytes >= REQUEST_BYTES + BODY_BYTES)
    body = second.over_http(arriving)
    second.send(b"x" * BODY_BYTES)
    second.send(b"x")
    await call
    assert first.grpc_status == Code.RESOURCE_EXHAUSTED
    second.send(b"", more=False)
    assert len(await body) == BODY_BYTES + 1
    assert (arriving.bytes, len(arriving)) == (0, 0)


LARGE_BYTES = 300_000


class LargeSender(Http1Client):
    """A client that sends a large body over HTTP/1.1 piece by piece."""

    def __init__(self, size: int = LARGE_BYTES) -> None:
        super().__init__(body_bytes_max=size)
        self._size = size
        self.http.receive(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size)
        self.stream = self._opened.pop()
        self.head_bytes = head_bytes(self.stream.head.fields) + PIECE_BYTES

    def send(self, data: bytes) -> None:
        self.http.receive(data)

    def body(self, arriving: Arriving) -> asyncio.Task[bytes]:
        return asyncio.create_task(HttpRequest(self.stream, "id", BodyLimits(self._size, GUARD_S, arriving)).body())


async def test_a_large_body_counts_with_what_has_arrived() -> None:
    arriving = Arriving()
    sender = LargeSender()
    sender.send(b"x" * 100_000)
    body = sender.body(arriving)
    await until_held(arriving, 1)
    sender.send(b"y" * 7)
    assert arriving.bytes == sender.head_bytes + 100_007
    sender.send(b"z" * (LARGE_BYTES - 100_007))
    assert await body == b"x" * 100_000 + b"y" * 7 + b"z" * (LARGE_BYTES - 100_007)
    assert (arriving.bytes, len(arriving)) == (0, 0)


async def test_a_large_body_that_nobody_takes_is_read_no_further() -> None:
    sender = LargeSender(4 * UNREAD_BYTES_MAX)
    sender.send(bytes(UNREAD_BYTES_MAX))
    assert not sender.http.full
    sender.send(b"x")
    assert sender.http.full
    body = sender.body(Arriving())
    await until_async(lambda: not sender.http.full)
    sender.send(bytes(3 * UNREAD_BYTES_MAX - 1))
    assert len(await body) == 4 * UNREAD_BYTES_MAX


@pytest.mark.parametrize("cut", [3, 70_000, 100_004, 100_005, 100_009, 100_015, 180_000])
async def test_large_messages_whose_ends_and_begins_share_pieces(cut: int) -> None:
    message = b"\0" + (100_000).to_bytes(4, "big") + b"x" * 100_000
    sender = Sender()
    call = sender.over_grpc(Arriving(), METHODS["bidi"])
    sender.send((message * 2)[:cut])
    await until_async(lambda: sender.empty)
    sender.send((message * 2)[cut:], more=False)
    await call
    assert b"".join(sender.answer(sender.stream).pieces) == message * 2


#: A message of a byte in a stream that isn't ended, which needs little memory.
SMALL = b"\0" + (1).to_bytes(4, "big") + b"x"


@pytest.mark.parametrize("data", [b"", SMALL])
@pytest.mark.parametrize("shape", ["unary", "server stream"])
async def test_a_head_without_its_message_is_given_up_in_time(shape: str, data: bytes) -> None:
    arriving = Arriving(message_timeout_s=0.05)
    sender = Sender()
    call = sender.over_grpc(arriving, METHODS[shape])
    if data:
        sender.send(data)
    await asyncio.wait_for(call, GUARD_S)
    assert sender.grpc_status == Code.DEADLINE_EXCEEDED
    assert (arriving.bytes, len(arriving)) == (0, 0)


async def test_between_the_messages_of_a_stream_nothing_is_counted() -> None:
    arriving = Arriving(BODY_BYTES)
    sender = Sender()
    call = sender.over_grpc(arriving, METHODS["bidi"])
    for piece in PARTS["the whole"]:
        sender.send(piece)
    await until_async(lambda: sender.answer(sender.stream).pieces)
    assert (arriving.bytes, len(arriving)) == (0, 0)
    sender.send(b"", more=False)
    await call


async def test_a_refused_body_is_freed_without_garbage_collection() -> None:
    arriving = Arriving(HEAD_BYTES + BODY_BYTES)
    alone = bytes(bytearray(BODY_BYTES))
    gc.disable()
    try:
        first, second = Sender(), Sender()
        body = first.over_http(arriving)
        first.send(alone)
        piece = first.stream.pieces[0]
        await until_async(lambda: arriving.bytes > BODY_BYTES)
        other = second.over_http(arriving)
        second.send(b"x" * BODY_BYTES)
        with pytest.raises(BodiesFull):
            await body
        del body
        second.send(b"", more=False)
        await other
        assert piece is not alone and sys.getrefcount(piece) == sys.getrefcount(alone)
    finally:
        gc.enable()
