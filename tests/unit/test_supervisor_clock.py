"""The supervisor's clock and the recorder of snapshots, with parts that misbehave."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from support import until_async
from ts_frontend.config.snapshot import SnapshotFiles, SnapshotKind
from ts_frontend.job import Ledger
from ts_frontend.models import startup as persistence
from ts_frontend.models.startup import SnapshotRecorder
from ts_frontend.scheduling.batcher import Policy
from ts_frontend.scheduling.queues import JobQueue
from ts_frontend.workers.demand import Demand, DemandRule
from ts_frontend.workers.devices import Inventory
from ts_frontend.workers.failures import StartFailed
from ts_frontend.workers.pool import Pool as RealPool
from ts_frontend.workers.process import LineSink, ProcessSpec, WorkerPlan, WorkerProcess
from ts_frontend.workers.supervisor import Supervisor


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


def new_pool(supervisor: Supervisor) -> RealPool:
    return supervisor.pool(
        "m",
        WorkerPlan(ProcessSpec("m", {}), {}, 1, 1, 1 << 20),
        JobQueue(Policy()),
        device_type="cpu",
        device_ids=(),
        level=0,
        give_up_s=60.0,
        restart_delay_s_max=60.0,
        on_change=lambda: None,
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


async def test_pools_become_busy_with_workers_and_with_requests_that_load_a_model(tmp_path: Path) -> None:
    supervisor = new_supervisor(tmp_path, NoLauncher())
    ledger = Ledger()
    pools = [new_pool(supervisor) for _ in range(3)]
    assert not supervisor._busy
    with pytest.raises(StartFailed):
        await pools[0].scale(1)
    assert supervisor._busy == {pools[0]}
    resident = Demand().enter(pools[1], ledger, DemandRule(), lambda: 1)
    resident.asked()
    assert supervisor._busy == set(pools[:2])
    for pool in pools:
        await supervisor.dismiss(pool, 0.0)
    assert not supervisor._busy
    await supervisor.close()


class Files(SnapshotFiles):
    """Notices two writers at a time."""

    busy = threading.Lock()

    def write(self, *arguments: Any, **more: Any) -> Path:
        assert self.busy.acquire(blocking=False), "two writers at a time"
        try:
            return super().write(*arguments, **more)
        finally:
            self.busy.release()


def test_snapshots_are_written_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start's, while a change is told at the same time, and the shutdown's."""
    monkeypatch.setattr(persistence, "states_of", lambda manager: {})

    async def scenario() -> None:
        recorder = SnapshotRecorder(Files(tmp_path, kept_max=100), {})
        recorder.attach(object())  # type: ignore[arg-type]
        for _ in range(20):
            recorder.changed()
            await asyncio.gather(recorder.write(SnapshotKind.STARTUP), recorder.write(SnapshotKind.SNAPSHOT))
        await recorder.close()

    asyncio.run(scenario())
    names = SnapshotFiles(tmp_path).names()
    assert len(names) == len(set(names)) >= 41
    assert names[-1].endswith("shutdown.cfg")
