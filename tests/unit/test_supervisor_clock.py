"""The supervisor's clock and the recorder of snapshots, with parts that misbehave."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from ts_frontend.config.snapshot import SnapshotFiles, SnapshotKind
from ts_frontend.models import startup as persistence
from ts_frontend.models.startup import SnapshotRecorder
from ts_frontend.workers.devices import Inventory
from ts_frontend.workers.supervisor import Supervisor


class Pool:
    def __init__(self, name: str, wrong: bool) -> None:
        self.name, self._wrong = name, wrong
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


def test_one_pools_mistake_does_not_stop_the_clock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        supervisor = Supervisor(
            {},
            work_dir=tmp_path,
            first_worker_id=1,
            first_distribution_id=1,
            fork=False,
            inventory=Inventory(),
            on_line=lambda *_: None,
        )
        pools = [Pool("wrong", True), Pool("right", False)]
        supervisor._pools.update(pools)  # type: ignore[arg-type]
        await supervisor.start()
        await asyncio.wait_for(asyncio.gather(*(pool.twice.wait() for pool in pools)), 30)
        await supervisor.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert "Workers of wrong could not be looked after" in caplog.text
    assert "a mistake" in caplog.text


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
