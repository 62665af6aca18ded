"""How many workers there are and when they start again: load, delays, the supervisor's clock, memory."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from stage import Skipping, Stage, pool_of, waiting
from support import turns, until_async
from ts_frontend.errors import MemoryFull
from ts_frontend.models.settings import Source, _autoscale
from ts_frontend.workers.memory import Admission, Memory
from ts_frontend.workers.process import Backoff, ExitStatus, LineSink, ProcessSpec, StartFailed, WorkerProcess
from ts_frontend.workers.resources import Inventory, Placement
from ts_frontend.workers.supervisor import LoadSample, PoolScaler, Scaling, ScalingRule, Supervisor

SAMPLE_S = 0.1


def samples(scaling: Scaling, sample: LoadSample, begin_s: float, seconds: float) -> tuple[float, int] | None:
    """The first decision of the same sample again and again: (after so many seconds, workers)."""
    for step in range(int(seconds / SAMPLE_S) + 1):
        found = scaling.decide(begin_s + step * SAMPLE_S, sample, 1, 8)
        if found is not None:
            return round(step * SAMPLE_S, 3), found[0]
    return None


def test_one_busy_moment_keeps_the_workers_for_the_whole_time() -> None:
    scaling = Scaling(ScalingRule(down_after_s=5))
    assert samples(scaling, LoadSample(0, 1, 0.0, 4, 4), 0, 4) is None
    assert scaling.decide(4.1, LoadSample(0, 4, 0.0, 4, 4), 1, 8) is None
    found = samples(scaling, LoadSample(0, 1, 0.0, 4, 4), 4.2, 20)
    assert found is not None and found[0] == pytest.approx(5, abs=0.3) and found[1] == 1


def test_numbers_of_workers_outside_the_limits_are_corrected_at_once() -> None:
    scaling = Scaling(ScalingRule())
    found = scaling.decide(0.0, LoadSample(0, 0, 0.0, 9, 9), 1, 8)
    assert found is not None and found[0] == 8


async def test_a_pool_gets_workers_while_requests_wait_and_loses_them_later() -> None:
    stage = Stage()
    pool = pool_of(stage, Skipping())
    scaler = PoolScaler(pool, ScalingRule(up_after_s=1, down_after_s=10), batch_size=1)
    await pool.scale(scaler.between(1, 4))
    jobs = [waiting(pool) for _ in range(8)]
    await stage.actors[0].batch()
    begun_s = jobs[0].queued_at_s
    scaler.tick(begun_s + 1)
    assert scaler.last is None, "not before upAfter"
    scaler.tick(begun_s + 2.5)
    await until_async(lambda: pool.ready_count == 2)
    assert scaler.last is not None and (scaler.last.before, scaler.last.workers) == (1, 2)
    assert "requests wait" in scaler.last.reason
    for job in jobs:
        job.cancel()
    await until_async(lambda: not scaler.sample(begun_s).running)
    for seconds in (20, 31):
        await until_async(lambda: scaler._changing is not None and scaler._changing.done())
        scaler.tick(begun_s + seconds)
    await until_async(lambda: len(pool.slots) == 1)
    assert (scaler.ups, scaler.downs) == (1, 1)
    await scaler.close()
    await pool.close(0)


async def test_requests_that_wait_in_an_engine_count_as_waiting() -> None:
    """Its memory is full before its places are. What it computes then is its capacity until it has nothing to do."""
    stage = Stage()
    stage.handler_kind = "async"
    pool = pool_of(stage, Skipping())
    scaler = PoolScaler(pool, ScalingRule(up_after_s=1, down_after_s=10), batch_size=1)
    await pool.scale(scaler.between(1, 2))
    jobs = [waiting(pool) for _ in range(8)]
    begun_s = jobs[0].queued_at_s
    await until_async(lambda: scaler.sample(begun_s).running == 8)
    (engine,) = stage.actors
    assert (scaler.sample(begun_s).queued, scaler.sample(begun_s).at_once) == (0, 64)
    engine.hold(6)
    assert scaler.sample(begun_s)[:2] == (6, 2)
    scaler.tick(begun_s)
    scaler.tick(begun_s + 1.5)
    await until_async(lambda: pool.ready_count == 2)
    engine.hold(0)
    assert scaler.sample(begun_s).needed == 4, "two on each worker"
    engine.hold(100)
    assert scaler.sample(begun_s)[:2] == (8, 0), "no more than it has"
    engine.hold(0)
    for job in jobs:
        job.cancel()
    await until_async(lambda: not scaler.sample(begun_s).running)
    assert scaler.sample(begun_s).at_once == 64
    await scaler.close()
    await pool.close(0)


@pytest.mark.parametrize(
    ("given", "rule", "warnings"),
    [
        (None, None, 0),
        (False, None, 0),
        (True, ScalingRule(), 0),
        ({}, ScalingRule(), 0),
        ({"targetQueue": 0.5, "targetWait": 200, "upAfter": 2, "downAfter": 30}, ScalingRule(0.5, 0.2, 2, 30), 0),
        ({"targetQueue": -1, "down_after": 3}, ScalingRule(), 2),
        ("yes", None, 1),
    ],
)
def test_the_rule_in_a_configuration(given: object, rule: ScalingRule | None, warnings: int) -> None:
    source = Source({"autoscale": given}, "model-config.yaml", [])
    assert _autoscale(source) == rule
    assert len(source.warnings) == warnings, source.warnings


def delays(backoff: Backoff, count: int, chance: float = 0.0) -> list[float]:
    out = []
    for number in range(count):
        backoff.failed(float(number))
        out.append(backoff.delay_s(chance))
    return out


def test_the_first_restart_is_at_once_then_the_delay_doubles_up_to_its_cap():
    assert delays(Backoff(300), 10) == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_model_with_device_ids_has_its_own_turn_from_the_first():
    placement = Placement(Inventory("cuda", 4))
    model = object()
    assert [placement.next(model, "gpu", (3, 1)).gpu_id for _ in range(3)] == [3, 1, 3]
    assert placement.next(object(), "gpu", ()).gpu_id == 1


def test_an_id_that_does_not_exist_makes_the_list_count_for_nothing():
    placement = Placement(Inventory("cuda", 2))
    assert [placement.next(object(), "", (0, 2)).gpu_id for _ in range(2)] == [1, 0]


@pytest.mark.parametrize(
    ("code", "words"),
    [(3, "exit code 3"), (-9, "killed by SIGKILL (out of memory?)"), (-11, "killed by SIGSEGV"), (None, "unknown")],
)
def test_how_a_process_ended_reads_like_a_sentence(code, words):
    assert words in ExitStatus(code).sentence()
    assert ExitStatus(code).by_sigkill is (code == -9)


class Pool:
    def __init__(self, name: str, wrong: bool, busy: bool = True) -> None:
        self.name, self._wrong, self.busy = name, wrong, busy
        self.ticks = 0
        self.twice = asyncio.Event()

    def tick(self, now_s: float) -> None:
        self.ticks += 1
        if self.ticks == 2:
            self.twice.set()
        if self._wrong:
            raise RuntimeError("a mistake")

    async def close(self, drain_s: float | None) -> None:
        pass


class NoLauncher:
    """Starts nothing."""

    async def launch(self, spec: ProcessSpec, sink: LineSink) -> WorkerProcess:
        raise StartFailed("nothing is started here")

    async def close(self) -> None:
        pass


def new_supervisor(work_dir: Path, launcher: NoLauncher | None = None) -> Supervisor:
    return Supervisor(
        {},
        work_dir=work_dir,
        first_worker_id=1,
        first_distribution_id=1,
        fork=False,
        inventory=Inventory(),
        on_line=lambda *_: None,
        launcher=launcher,
    )


async def test_one_pools_mistake_does_not_stop_the_clock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    supervisor = new_supervisor(tmp_path)
    pools = [Pool("wrong", True), Pool("right", False)]
    supervisor._busy.update(pools)  # type: ignore[arg-type]
    await supervisor.start()
    await asyncio.wait_for(asyncio.gather(*(pool.twice.wait() for pool in pools)), 30)
    await supervisor.close()
    assert "Workers of wrong could not be supervised" in caplog.text
    assert "a mistake" in caplog.text


async def test_a_pool_is_ticked_while_it_is_busy(tmp_path: Path) -> None:
    supervisor = new_supervisor(tmp_path)
    idle, busy = Pool("idle", False, busy=False), Pool("busy", False)
    supervisor._busy.update([idle, busy])  # type: ignore[list-item]
    await supervisor.start()
    await asyncio.wait_for(busy.twice.wait(), 30)
    assert idle.ticks == 0 and supervisor._busy == {busy}  # type: ignore[comparison-overlap]
    busy.busy = False
    await until_async(lambda: not supervisor._busy)
    await supervisor.close()


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
                await turns()
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


async def test_one_that_turns_out_to_be_too_large_is_withdrawn(files: Path) -> None:
    machine = Machine(1000)
    assert await machine.load(300, files)
    assert not await machine.load(800, files)
    assert [one.size for one in machine.pools] == [300]
    assert await machine.load(600, files)


def test_the_automatic_limit_is_most_of_the_memory() -> None:
    assert 1 << 30 < Admission(-1).limit < 1 << 50
