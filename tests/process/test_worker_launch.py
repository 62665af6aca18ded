"""Starting a worker process and thinking better of it."""

from __future__ import annotations

import asyncio
import os

import psutil
import pytest

from ts_frontend.workers.launchers import ExecLauncher
from ts_frontend.workers.process import ProcessSpec


@pytest.mark.parametrize("turns", [1, 2])
async def test_a_start_that_is_cancelled_leaves_neither_a_process_nor_descriptors(turns):
    launcher = ExecLauncher()
    await asyncio.to_thread(int)  # the loop's own thread and descriptors
    before, others = psutil.Process().num_fds(), psutil.Process().children()
    for _ in range(3):
        start = asyncio.create_task(launcher.launch(ProcessSpec("m", dict(os.environ)), lambda stream, line: None))
        for _ in range(turns):
            await asyncio.sleep(0)
        start.cancel()
        await asyncio.wait({start})
        if not start.cancelled():  # it was quicker
            process = start.result()
            process.kill()
            await process.exited
            process.release()
            process.sock.close()
    await launcher.close()
    assert psutil.Process().num_fds() == before
    assert psutil.Process().children() == others
