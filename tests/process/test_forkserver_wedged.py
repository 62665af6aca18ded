"""A forkserver that lives and doesn't answer, or dies at the wrong moment: workers start all the same."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator

import psutil
import pytest

from support import GUARD_S, until
from ts_frontend.workers.forkserver import ForkLauncher
from ts_frontend.workers.launchers import ExecLauncher
from ts_frontend.workers.process import ProcessSpec, WorkerProcess

SPEC = ProcessSpec("m", dict(os.environ))


def forkservers() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "ts.runtime.forkserver" in command(one)]


def command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def wait_until_execed(pid: int) -> None:
    """Returns when the process is one that was exec'd in place of a fork; a moment before, it has no command line."""
    until(lambda: "ts.runtime.main" in command(psutil.Process(pid)))


class Started:
    """A launcher with short limits, and the workers it started."""

    def __init__(self) -> None:
        self.fallback = ExecLauncher()
        self.launcher = ForkLauncher(dict(os.environ), self.fallback, preload_torch=False, fork_s_max=1.0)
        self.workers: list[WorkerProcess] = []

    async def worker(self, spec: ProcessSpec = SPEC) -> WorkerProcess:
        process = await self.launcher.launch(spec, lambda stream, line: None)
        self.workers.append(process)
        return process

    async def end(self, process: WorkerProcess) -> None:
        process.kill()
        await process.exited
        process.release()
        process.sock.close()
        self.workers.remove(process)

    async def close(self) -> None:
        for process in list(self.workers):
            await self.end(process)
        await self.launcher.close()
        await self.fallback.close()


def forked(process: WorkerProcess) -> bool:
    return psutil.Process(process.pid).parent() in forkservers()


def run(scenario: Callable[[Started], Coroutine[None, None, None]]) -> None:
    async def whole() -> None:
        started = Started()
        try:
            await scenario(started)
        finally:
            await started.close()

    asyncio.run(asyncio.wait_for(whole(), GUARD_S))
    assert not forkservers()


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = psutil.Process().num_fds()
    yield
    assert psutil.Process().num_fds() <= before + 2, "descriptors are left open"


def test_a_wedged_forkserver_is_set_aside_and_ends_with_its_last_worker():
    async def scenario(started: Started) -> None:
        first = await started.worker()
        (wedged,) = forkservers()
        assert forked(first)
        wedged.suspend()
        second = await started.worker()
        await asyncio.to_thread(wait_until_execed, second.pid)
        assert not first.exited.done(), "a worker that serves isn't ended for a start that can't be"
        third = await started.worker()
        assert forked(third) and psutil.Process(third.pid).ppid() != wedged.pid
        await started.end(first)
        await asyncio.to_thread(wedged.wait, GUARD_S)

    run(scenario)


def test_closing_does_not_wait_for_a_wedged_forkserver():
    async def scenario(started: Started) -> None:
        await started.worker()
        forkservers()[0].suspend()

    run(scenario)


def test_half_a_request_is_never_followed_by_another():
    """The rest of the first would be read as the beginning of the second."""
    large = ProcessSpec("m", {**os.environ, **{f"LARGE_{number}": "x" * 100_000 for number in range(10)}})

    async def scenario(started: Started) -> None:
        first = await started.worker()
        (slow,) = forkservers()
        slow.suspend()
        exec_d = await started.worker(large)
        slow.resume()
        for _ in range(3):
            assert forked(await started.worker())
        assert not first.exited.done() and not exec_d.exited.done()

    run(scenario)


def test_a_forkserver_that_dies_takes_no_start_of_the_next_one_with_it():
    async def scenario(started: Started) -> None:
        await started.worker()
        (server,) = forkservers()
        starts = [asyncio.create_task(started.worker()) for _ in range(2)]
        await asyncio.sleep(0)
        server.send_signal(signal.SIGKILL)
        starts += [asyncio.create_task(started.worker()) for _ in range(2)]
        await asyncio.gather(*starts)
        await started.worker()

    run(scenario)
