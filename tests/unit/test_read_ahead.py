"""How far requests of a stream are read ahead."""

from __future__ import annotations

import asyncio

from ts_frontend.scheduling.stream import ReadAhead


async def entered(room: ReadAhead, size_bytes: int) -> asyncio.Task[None]:
    """One who wants to enter, as far as it gets by itself."""
    task = asyncio.create_task(room.enter(size_bytes))
    for _ in range(3):
        await asyncio.sleep(0)
    return task


def test_so_many_and_no_more() -> None:
    async def talk() -> None:
        room = ReadAhead(requests_max=2, bytes_max=100)
        assert (await entered(room, 1)).done() and (await entered(room, 1)).done()
        third = await entered(room, 1)
        assert not third.done()
        room.leave(1)
        await asyncio.wait_for(third, 10)

    asyncio.run(talk())


def test_so_many_bytes_and_a_larger_one_alone() -> None:
    async def talk() -> None:
        room = ReadAhead(requests_max=9, bytes_max=100)
        assert (await entered(room, 1000)).done(), "nothing is before it"
        second = await entered(room, 1)
        assert not second.done()
        room.leave(1000)
        await asyncio.wait_for(second, 10)
        assert (await entered(room, 99)).done()
        full = await entered(room, 1)
        assert not full.done()
        full.cancel()

    asyncio.run(talk())


def test_one_who_gives_up_takes_nothing() -> None:
    async def talk() -> None:
        room = ReadAhead(requests_max=1, bytes_max=100)
        await room.enter(60)
        waiting = await entered(room, 60)
        waiting.cancel()
        room.leave(60)
        assert (await entered(room, 60)).done()

    asyncio.run(talk())
