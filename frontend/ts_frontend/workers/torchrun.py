"""Starts workers of several processes through torchrun (`parallelType` pp, tp and pptp)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ts_frontend.workers.process import ExecLauncher
from ts_frontend.workers.ranks import Meeting
from ts_frontend.workers.started import Ends, LineSink, Process, Spec


class TorchrunLauncher:
    """`work_dir`: where the processes' sockets are."""

    def __init__(self, work_dir: Path, launcher: ExecLauncher) -> None:
        self._work_dir = work_dir
        self._exec = launcher

    async def launch(self, spec: Spec, sink: LineSink) -> Process:
        """Starts torchrun; its processes connect when they are there. Raises OSError."""
        assert spec.team is not None
        meeting = Meeting.open(self._work_dir, spec.team.count, spec.team.lockstep)
        named = ["--rdzv-id", f"{spec.name}_{spec.worker_id}"]
        words = ["ts.runtime.torchrun", str(os.getpid()), *spec.team.words, *named, "-m", "ts.runtime.rank"]
        try:
            process = await self._exec.start(words, replace(spec, env={**spec.env, **meeting.env}), Ends(), sink)
        except BaseException:
            meeting.close()
            raise
        process.meeting = meeting
        return process

    async def close(self) -> None:
        """Its processes are the other launcher's."""
