"""The admission of models within a limit of measured memory, with pools whose memory the test says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ts_frontend.errors import MemoryFull
from ts_frontend.workers.admission import Admission
from ts_frontend.workers.memory import Memory


class Loaded:
    """A model's pool."""

    size = ready_count = 0


class Machine:
    """Models with a size each; `measure` tells the size of those that are loaded."""

    def __init__(self, limit: int) -> None:
        self.pools: list[Any] = []
        self.most = 0
        self.admission = Admission(limit, lambda: self.pools, self.measure)

    def measure(self, pools: Any) -> list[Memory]:
        found = [Memory(one.size) for one in pools]
        self.most = max(self.most, sum(one.size for one in self.pools))
        return found

    async def load(self, size: int, files: Path, *, fails: bool = False) -> bool:
        """Whether the model was admitted."""
        pool = Loaded()

        async def withdraw() -> None:
            self.pools.remove(pool)

        try:
            async with self.admission.room(files) as check:
                self.pools.append(pool)
                for _ in range(3):
                    await asyncio.sleep(0)
                if fails:
                    await withdraw()
                    raise ValueError
                pool.size, pool.ready_count = size, 1
                await check("m", withdraw)
        except MemoryFull as error:
            assert error.http_status == 507 and "registered_memory_max" in error.message
            return False
        except ValueError:
            return False
        return True


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_bytes(b"1" * 6)
    (tmp_path / "sub" / "b").write_bytes(b"1" * 4)
    (tmp_path / "sub" / "c").symlink_to("/nowhere")
    return tmp_path


async def test_as_many_as_fit_are_admitted_side_by_side(files: Path) -> None:
    machine = Machine(1000)
    found = await asyncio.gather(*(machine.load(100, files) for _ in range(15)))
    assert found.count(True) == 10 == len(machine.pools)
    assert machine.most <= 1100  # never more than one that turned out to be too much


async def test_the_size_of_the_files_alone_may_say_no(files: Path) -> None:
    machine = Machine(95)
    assert await machine.load(90, files)
    assert not await machine.load(1, files)  # 90 and at least 10 bytes of files
    assert machine.most == 90


async def test_one_that_turns_out_to_be_too_large_is_withdrawn(files: Path) -> None:
    machine = Machine(1000)
    assert await machine.load(300, files)
    assert not await machine.load(800, files)
    assert [one.size for one in machine.pools] == [300]
    assert await machine.load(600, files)


async def test_a_load_that_fails_lets_the_next_one_go_on(files: Path) -> None:
    machine = Machine(250)
    assert await machine.load(100, files)
    found = await asyncio.gather(machine.load(100, files, fails=True), machine.load(100, files))
    assert list(found) == [False, True]


async def test_without_a_limit_nothing_is_measured(files: Path) -> None:
    machine = Machine(0)
    assert await machine.load(10**12, files / "nowhere") and machine.most == 0


def test_the_automatic_limit_is_most_of_the_memory() -> None:
    assert 1 << 30 < Admission(-1).limit < 1 << 50
