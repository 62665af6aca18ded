"""Texts of requests that wait at the same time are computed together, up to a number of tokens with padding."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install torch")

from support import GUARD_S, turns
from ts.language import embedding
from ts.language.embedding import Batches, Encoded
from ts.language.surface import Refusal

#: Turns of the loop that a computation would need at most to begin.
SHORT = 20


def text(length: int) -> Encoded:
    return Encoded([1] * length)


class Computed:
    """Computes the length of each text, and keeps those of each batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, texts: list[Encoded]) -> list[int]:
        self.batches.append([len(one.ids) for one in texts])
        if 13 in self.batches[-1]:
            raise ArithmeticError("thirteen")
        return self.batches[-1]


async def test_a_batch_has_no_more_tokens_with_padding() -> None:
    computed = Computed()
    assert await Batches(computed, 4).results([text(1), text(9), text(2)]) == [1, 9, 2]
    assert computed.batches == [[9], [2, 1]]


async def test_callers_that_come_again_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the first of them comes alone. Nobody waits for callers that have gone."""
    monkeypatch.setattr(embedding, "AGAIN_PART", GUARD_S * 1e6)
    computed = Computed()
    batches = Batches(computed)
    both = await asyncio.gather(batches.results([text(2)]), batches.results([text(1)]))
    first = asyncio.ensure_future(batches.results([text(2)]))
    await turns(SHORT)
    assert not first.done() and await batches.results([text(1)]) == [1] and await first == [2] == both[0]
    assert computed.batches == [[2, 1], [2, 1]]
    monkeypatch.setattr(embedding, "AGAIN_PART", 0)
    assert await batches.results([text(3)]) == [3] and await batches.results([text(4)]) == [4]


async def test_a_failure_is_that_of_its_batch_and_the_next_is_computed() -> None:
    computed = Computed()
    batches = Batches(computed, 13)
    found: list[Any] = await asyncio.gather(
        batches.results([text(13)]), batches.results([text(1)]), return_exceptions=True
    )
    assert isinstance(found[0], Refusal) and found[0].status == 500 and "ArithmeticError: thirteen" in str(found[0])
    assert found[1] == [1] == await batches.results([text(1)])


async def test_a_request_that_nobody_waits_for_is_not_computed() -> None:
    computed = Computed()
    batches = Batches(computed)
    left = asyncio.ensure_future(batches.results([text(5)]))
    kept = asyncio.ensure_future(batches.results([text(2)]))
    await asyncio.sleep(0)  # both wait
    left.cancel()
    assert await kept == [2] and computed.batches == [[2]]
    assert left.cancelled()
