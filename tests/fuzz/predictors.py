"""The targets of the fuzzer that are answers of predictors, which transformers call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ts.compat.kserve_api.grpc_channel import Unanswered, _Connection
from ts.compat.kserve_api.http_channel import BadAnswer, PostAnswer

if TYPE_CHECKING:
    from fuzz.targets import target
else:
    from targets import target

#: The bodies of the calls that are under way; the second is larger than a server's usual windows.
BODIES = (b"", b"x" * 100_000, b"y")
#: A call that has no answer when its connection has ended would wait so long.
CALL_S, END_S_MAX = 3600.0, 5.0


def _cuts(data: bytes) -> Sequence[Sequence[bytes]]:
    """The bytes in one piece, in three, and with the first 64 alone."""
    third = len(data) // 3
    singles = [data[at : at + 1] for at in range(min(len(data), 64))]
    return [data], [data[:third], data[third : 2 * third], data[2 * third :]], [*singles, data[64:]]


class _Memory(asyncio.Transport):
    """A transport without a network, which forgets what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def write(self, data: Any) -> None:
        assert data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 0


def _frame(kind: int, flags: int, number: int, content: bytes = b"") -> bytes:
    return len(content).to_bytes(3, "big") + bytes((kind, flags)) + number.to_bytes(4, "big") + content


def _setting(key: int, value: int) -> bytes:
    return _frame(4, 0, 0, key.to_bytes(2, "big") + value.to_bytes(4, "big"))


_STATUS = b"\0\x0bgrpc-status\x010"
_WORDS = (
    *(_frame(1, 4, number, b"\x88") for number in (1, 3, 5)),
    *(_frame(0, 0, number, b"\0\0\0\0\1y") for number in (1, 3, 5)),
    *(_frame(1, 5, number, _STATUS) for number in (1, 3, 5)),
    *(_frame(3, 0, number, reason.to_bytes(4, "big")) for number, reason in ((1, 7), (3, 8), (5, 11))),
    *(_setting(key, value) for key, value in ((3, 0), (3, 1), (3, 100), (4, 0), (4, 1), (5, 0), (5, 16384))),
    *(_frame(8, 0, number, more.to_bytes(4, "big")) for number, more in ((0, 1), (0, 1 << 20), (3, 1), (3, 1 << 30))),
    *(_frame(7, 0, 0, last.to_bytes(4, "big") + bytes(4)) for last in (0, 1, 3)),
    *(_frame(6, 0, 0, bytes(8)), _frame(9, 4, 1, _STATUS), _frame(1, 1, 1, b"\x88"), _frame(1, 45, 1, b"\0" * 7)),
    *(b"\x0cgrpc-message", b"\x40\x83\xff\xff\xff", b"\x3f\xe1\x1f", b"\x7f\xff\xff\xff\xff\x0f", b"\xc2\xb2"),
)


@target(words=_WORDS)
def grpc_answers(data: bytes) -> None:
    """Frames of a server with three calls, of which it accepts as many at a time as the first byte says (0: all). Each
    call has its answer, or an Unanswered, by the end of the connection. It is the same however the bytes are cut,
    unless calls wait for each other."""
    at_a_time, sent = data[0] & 3 if data else 0, data[1:]
    first, *others = (_loop().run_until_complete(_outcomes(at_a_time, pieces)) for pieces in _cuts(sent))
    for other in others:
        assert at_a_time or other == first, (other, first)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


async def _outcomes(at_a_time: int, pieces: Sequence[bytes]) -> list[object]:
    connection, transport = _Connection(), _Memory()
    connection.connection_made(transport)
    if at_a_time:
        connection.data_received(_setting(3, at_a_time))
    calls = [asyncio.ensure_future(connection.ask(b"\x83", body, CALL_S)) for body in BODIES]
    await _settled()
    for piece in pieces:
        if not transport.closed:
            connection.data_received(piece)
            await _settled()
    connection.connection_lost(None)
    found = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), END_S_MAX)
    if connection.greeted.done():
        connection.greeted.exception()
    for one in found:
        if isinstance(one, BaseException) and not isinstance(one, Unanswered):
            raise one
    return [(one.code, one.message) if isinstance(one, Unanswered) else one for one in found]


async def _settled() -> None:
    """Gives the tasks their turns, of which each takes up to three."""
    for _ in range(3):
        await asyncio.sleep(0)


_HEAD = b"HTTP/1.1 200 OK\r\n"


@target(
    BadAnswer,
    words=(
        *(_HEAD, b"HTTP/1.0 500 .\r\n", b"HTTP/1.1 100 \r\n\r\n", b"\r\n\r\n", b"\r\n", b"HTTP/1.1 204 \r\n\r\n"),
        *(b"content-length: ", b"content-length: 3\r\n", b"transfer-encoding: chunked\r\n", b"connection: close\r\n"),
        *(b"1\r\n.\r\n", b"0\r\n\r\n", b"7fffffff\r\n", b"80000000\r\n", b"9" * 16, b";a=b", b"\xb2", b"a" * 4097),
    ),
)
def http_answers(data: bytes) -> None:
    """The same status, body and error however the bytes are cut."""
    first, *others = map(_answer, _cuts(data))
    for other in others:
        assert other == first, (other, first)
    if isinstance(first, str):
        raise BadAnswer(first)


def _answer(pieces: Sequence[bytes]) -> object:
    """The status, the body, and whether it is complete, or a text that is the error's."""
    answer, complete = PostAnswer(), False
    try:
        for piece in pieces:
            if not complete and piece:
                complete = answer.feed(piece)
    except BadAnswer as error:
        return str(error)
    return answer.status, answer.body, complete or answer.ends()
