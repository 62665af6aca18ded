"""All answers that wait for clients share a limit: the connection that holds most makes room. A connection that takes
nothing loses its answers."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import pytest
import ts_frontend.http.arriving
from ts_frontend.http.arriving import REQUEST_BYTES, Arriving
from ts_frontend.http.unread import FIRST_BYTES, HELD, PIECE_BYTES, WHOLE_BYTES_MAX, AnswersUnread, SlowReader, Unread

from support import until_async
from ts_frontend.errors import ClientGone, Code, ServeError

SIZE = 100_000
COUNTED = SIZE + REQUEST_BYTES


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **more: Any) -> None:
        asyncio.run(test(*arguments, **more))

    return run


class Ready:
    """What h2corn returns for an event that it takes at once."""

    def __await__(self) -> Generator[None]:
        return
        yield


class Client:
    """A connection of h2corn: it takes nothing until `read`."""

    def __init__(self, unread: Unread, name: str, *, reads: bool = False) -> None:
        self.name, self.unread, self.reads = name, unread, reads
        self.events: list[dict[str, Any]] = []
        self._futures: list[asyncio.Future[None]] = []

    def _send(self, event: dict[str, Any]) -> Awaitable[None]:
        self.events.append(event)
        if self.reads:
            return Ready()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        return future

    def answer(self, body: bytes = bytes(SIZE), version: str = "2", held: int = 0) -> asyncio.Task[None]:
        send = self.unread.sending(self.name, self._send, version)
        event = {"type": "http.response.body", "body": body, "more_body": False, HELD: held}

        async def run() -> None:
            await send(event)

        return asyncio.create_task(run())

    def read(self) -> None:
        """Takes all that waits, and what comes from now on."""
        self.reads = True
        for future in self._futures:
            if not future.done():
                future.set_result(None)


async def until_waiting(unread: Unread, count: int) -> None:
    await until_async(lambda: len(unread) == count)


async def gone(answer: asyncio.Task[None]) -> ServeError:
    """Why an answer was given up."""
    with pytest.raises(ClientGone) as ended:
        await answer
    assert isinstance(ended.value.__cause__, ServeError)
    return ended.value.__cause__


@in_loop
async def test_the_connection_that_holds_most_loses_its_oldest_answer() -> None:
    unread = Unread(4 * COUNTED)
    greedy, modest = Client(unread, "greedy"), Client(unread, "modest")
    first = greedy.answer()
    await until_waiting(unread, 1)
    small = modest.answer()
    later = [greedy.answer() for _ in range(2)]
    await until_waiting(unread, 4)
    assert unread.bytes == 4 * COUNTED
    last = modest.answer()
    error = await gone(first)
    assert isinstance(error, AnswersUnread) and error.code is Code.RESOURCE_EXHAUSTED
    assert "unread_bytes_max" in error.message
    assert unread.given_up == {"bytes": 1, "time": 0}
    for client in (greedy, modest):
        client.read()
    await asyncio.gather(small, last, *later)
    assert (unread.bytes, len(unread)) == (0, 0)


@in_loop
async def test_an_answer_that_is_alone_is_never_given_up_for_its_size() -> None:
    unread = Unread(10)
    client = Client(unread, "one")
    answer = client.answer()
    await until_waiting(unread, 1)
    client.read()
    await answer
    assert unread.given_up == {"bytes": 0, "time": 0}


@in_loop
async def test_a_client_that_takes_nothing_loses_its_answers_and_the_others_keep_theirs() -> None:
    unread = Unread(stall_s=0.4)
    dead, slow = Client(unread, "dead"), Client(unread, "slow")
    waiting = dead.answer(), dead.answer()
    moving = asyncio.create_task(keep_taking(unread, slow))
    for answer in waiting:
        assert isinstance(await gone(answer), SlowReader)
    assert unread.given_up == {"bytes": 0, "time": 2}
    patient = slow.answer()
    await until_waiting(unread, 2)
    slow.read()
    await patient
    moving.cancel()


async def keep_taking(unread: Unread, client: Client) -> None:
    """A client of which something is taken all the time, while other answers wait."""
    while True:
        following: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.02, following.set_result, None)
        await unread.wait(client.name, following, 1)


@in_loop
async def test_a_stream_of_grpcio_is_apart_from_the_rest_of_its_connection() -> None:
    unread = Unread(stall_s=0.4)
    moving = asyncio.create_task(keep_taking(unread, Client(unread, "same")))
    with pytest.raises(SlowReader, match="write_timeout_s") as ended:
        await unread.wait("same", asyncio.get_running_loop().create_future(), 1, apart=True)
    assert ended.value.code is Code.DEADLINE_EXCEEDED
    moving.cancel()


@in_loop
async def test_without_a_time_limit_answers_wait() -> None:
    unread = Unread(math.inf, 0)
    client = Client(unread, "one")
    answer = client.answer()
    await until_waiting(unread, 1)
    answer.cancel()  # its client left
    with pytest.raises(asyncio.CancelledError):
        await answer
    assert (unread.bytes, len(unread)) == (0, 0) and unread.given_up == {"bytes": 0, "time": 0}


@pytest.mark.parametrize("version", ["1.1", "2"])
@in_loop
async def test_large_answers_go_to_the_engine_in_pieces(version: str) -> None:
    """What the engine hasn't taken waits here, where it counts; nothing is lost or added."""
    unread = Unread()
    body = bytes(range(256)) * (WHOLE_BYTES_MAX // 128)
    client = Client(unread, "one")
    answer = client.answer(body, version)
    await until_waiting(unread, 1)
    assert unread.bytes == len(body) + REQUEST_BYTES and len(client.events[0]["body"]) == FIRST_BYTES
    client.read()
    await answer
    assert b"".join(event["body"] for event in client.events) == body
    assert max(len(event["body"]) for event in client.events) == PIECE_BYTES[version[0]]
    assert [event["more_body"] for event in client.events] == [True] * (len(client.events) - 1) + [False]


@in_loop
async def test_usual_answers_are_passed_whole_and_not_counted() -> None:
    unread = Unread()
    client = Client(unread, "one", reads=True)
    await client.answer(bytes(WHOLE_BYTES_MAX))
    assert len(client.events) == 1 and not len(unread)
    stream = Client(unread, "one").answer(b"prefix", held=SIZE)
    await until_waiting(unread, 1)
    assert unread.bytes == SIZE + len(b"prefix") + REQUEST_BYTES, "with what its sender holds"
    stream.cancel()


@pytest.mark.parametrize("kind", ["unread", "arriving", "given up"])
@in_loop
async def test_freed_memory_is_returned(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The C library's function itself is part of the operating system: e2e/test_unread_answers.py sees its effect."""
    returned: list[int] = []
    monkeypatch.setattr(ts_frontend.http.arriving, "_trim", lambda: returned.append)
    monkeypatch.setattr(ts_frontend.http.arriving, "RETURN_S", 0.01)
    size = 80 * 1024 * 1024
    if kind == "arriving":
        arriving = Arriving()
        body = arriving.body()
        body.hold(size)
        body.end()
    else:
        unread = Unread(size + SIZE if kind == "given up" else math.inf)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = [asyncio.create_task(unread.wait(number, future, size)) for number in range(2)]
        await asyncio.sleep(0)
        if kind == "unread":
            future.set_result(None)
            await asyncio.gather(*waiting)
        await until_async(lambda: bool(returned))
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    await until_async(lambda: returned[:1] == [0])
