"""A forkserver that lives and doesn't answer, or dies at the wrong moment: workers start all the same."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from support import GUARD_S, until
from ts_frontend.workers.forkserver import ForkLauncher
from ts_frontend.workers.launchers import ExecLauncher
from ts_frontend.workers.process import ProcessSpec, WorkerProcess
from ts_frontend.workers.spawning import start_forkserver

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


# --- with torch: a stand-in for it, which is imported in no time

TORCH = "def manual_seed(seed): pass\ndef set_num_threads(count): pass\n"


def run_with_torch(folder: Path, scenario: Callable[[Started], Coroutine[None, None, None]]) -> None:
    """Runs a scenario with both forkservers, which were started before the event loop, as a server's are."""
    (folder / "torch.py").write_text(TORCH)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), *sys.path))}
    first = start_forkserver(env, preload_torch=True)

    async def whole(started: Started) -> None:
        started.launcher = ForkLauncher(env, started.fallback, started=first, fork_s_max=5.0)
        await started.launcher.start()
        await scenario(started)

    run(whole)


def parent(process: WorkerProcess) -> psutil.Process:
    found = psutil.Process(process.pid).parent()
    assert found is not None
    return found


PLAIN = replace(SPEC, with_torch=False)


def test_workers_without_torch_have_another_parent(tmp_path):
    async def scenario(started: Started) -> None:
        (plain,) = until(forkservers)
        assert parent(await started.worker(PLAIN)) == plain
        second = parent(await started.worker())
        assert second.parent() == plain and parent(await started.worker()) == second

    run_with_torch(tmp_path, scenario)


def test_a_forkserver_with_torch_that_dies_is_forked_again(tmp_path):
    """Its workers end with it, those of the plain one live."""

    async def scenario(started: Started) -> None:
        other, first = await started.worker(PLAIN), await started.worker()
        second = parent(first)
        second.send_signal(signal.SIGKILL)
        await first.exited
        again = parent(await started.worker())
        assert again != second and again.parent() == parent(other)
        assert not other.exited.done()

    run_with_torch(tmp_path, scenario)


def test_both_forkservers_are_replaced_when_the_plain_one_dies(tmp_path):
    async def scenario(started: Started) -> None:
        other, first = await started.worker(PLAIN), await started.worker()
        (plain,) = until(forkservers)
        plain.send_signal(signal.SIGKILL)
        await asyncio.gather(first.exited, other.exited)
        await asyncio.to_thread(until, lambda: not forkservers())
        again = parent(await started.worker())
        assert again.parent() == parent(await started.worker(PLAIN)) != plain

    run_with_torch(tmp_path, scenario)


def test_a_wedged_forkserver_with_torch_is_set_aside_alone(tmp_path):
    async def scenario(started: Started) -> None:
        first = await started.worker()
        wedged = parent(first)
        wedged.suspend()
        exec_d = await started.worker()
        await asyncio.to_thread(wait_until_execed, exec_d.pid)
        next_one = await started.worker()
        assert parent(next_one) != wedged and parent(next_one).parent() == wedged.parent()
        assert not first.exited.done()
        await started.end(first)
        await asyncio.to_thread(until, lambda: not wedged.is_running() or wedged.status() == psutil.STATUS_ZOMBIE)

    run_with_torch(tmp_path, scenario)
