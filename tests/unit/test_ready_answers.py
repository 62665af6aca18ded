"""How much of a stream waits to be written."""

from __future__ import annotations

import asyncio

from ts_frontend.scheduling.stream import WAITING_BYTES_MAX, ReadyAnswers

PIECE = bytes(1000)


async def bring(answers: ReadyAnswers, groups: int, group: list[bytes]) -> int:
    """How many of the groups are let in while nobody takes any."""
    let_in = 0

    async def put() -> None:
        nonlocal let_in
        await answers.put(group)
        let_in += 1

    tasks = [asyncio.ensure_future(put()) for _ in range(groups)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return let_in


def test_so_many_bytes_wait_and_no_more() -> None:
    assert 200 < asyncio.run(bring(ReadyAnswers(), 1000, [PIECE])) <= WAITING_BYTES_MAX // 1000 + 1
    assert 20 < asyncio.run(bring(ReadyAnswers(), 1000, [PIECE] * 10)) <= WAITING_BYTES_MAX // 10_000 + 1
    empty_max = WAITING_BYTES_MAX // 128
    assert asyncio.run(bring(ReadyAnswers(), 2 * empty_max, [b""])) <= empty_max


def test_a_large_answer_goes_alone() -> None:
    assert asyncio.run(bring(ReadyAnswers(), 3, [bytes(10 * WAITING_BYTES_MAX)])) == 1


def test_whoever_waits_goes_on_in_turn() -> None:
    async def scenario() -> list[int]:
        answers, taken = ReadyAnswers(), []

        async def produce(name: int) -> None:
            for number in range(5):
                await answers.put([bytes([name, number]) + bytes(WAITING_BYTES_MAX)])

        async def produce_all() -> None:
            await asyncio.gather(*map(produce, range(3)))
            answers.end()

        producing = asyncio.create_task(produce_all())
        while (group := await answers.get()) is not None:
            taken += [tuple(one[:2]) for one in group]
        await producing
        return taken

    taken = asyncio.run(scenario())
    assert sorted(taken) == [(name, number) for name in range(3) for number in range(5)]
    assert all([n for m, n in taken if m == name] == list(range(5)) for name in range(3))


def test_what_waits_is_taken_at_once_up_to_the_end() -> None:
    async def scenario() -> None:
        answers = ReadyAnswers()
        for number in range(3):
            await answers.put([bytes([number])])
        answers.end()
        assert await answers.get() == [b"\0"]
        assert answers.get_waiting() == [b"\1", b"\2"]
        assert answers.get_waiting() == []
        assert await answers.get() is None

    asyncio.run(scenario())
