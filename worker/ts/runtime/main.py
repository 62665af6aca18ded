"""A worker process: `python -m ts.runtime.main --fd N --progress-fd M`, or `run` in a child of the forkserver.

`--fd` is the connected socket to the frontend, `--progress-fd` a file of `ts.protocol.shared.PROGRESS_BYTES`, or
`SHARED_BYTES`.

A `Stopwatch` has the times of measured requests (`Measure`). None of it is in the path of a request until the first
measurement: only then it is put before the handler's entry and before the function that takes answers.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import faulthandler
import gc
import inspect
import mmap
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ts.protocol.codes import SHOWS_STACKS
from ts.protocol.frames import LoadFailed, Ready, Times
from ts.protocol.memory import give_back_freed, keep_freed
from ts.protocol.shared import Progress
from ts.protocol.text import repr_of, text_of
from ts.runtime.asynchronous import AsyncRunner
from ts.runtime.blocking import BlockingRunner
from ts.runtime.calls import Calls
from ts.runtime.continuous import ContinuousRunner
from ts.runtime.handlers import Loaded, describe_failure, load
from ts.runtime.jobs import Failure, Job, Ledger, Outcome, SilentLedger
from ts.runtime.process import log_to_stdout, mark_lines, modules_in, outlive_stops, set_threads, turn_to
from ts.runtime.running import Opened, Opening
from ts.runtime.tracebacks import place_of, say
from ts.runtime.worker import Link, leave

#: The most measured requests that have not ended; of more, the oldest are forgotten.
MEASURED_MAX = 1024


class _Lap:
    """One request's times, `time.monotonic()` seconds, 0 for none yet."""

    __slots__ = ("begun_s", "ended_s")

    def __init__(self) -> None:
        self.begun_s = self.ended_s = 0.0


class Stopwatch:
    """Measures requests of one worker. `runner`: what calls the handler by its `entry`, with the rows and the context
    of a batch; `awaits`: the result is awaited."""

    def __init__(self, ledger: Ledger, runner: Any, *, awaits: bool) -> None:
        self._ledger, self._runner, self._awaits = ledger, runner, awaits
        self._laps: dict[int, _Lap] = {}
        self._entry: Any = None

    def measure(self, job_id: int) -> None:
        """Measures this request, which hasn't arrived yet or waits here."""
        if self._entry is None:
            self._entry = self._runner.entry
            self._runner.entry = self._called
            self._ledger.on_given = self._given
        self._laps[job_id] = _Lap()
        if len(self._laps) > MEASURED_MAX:
            del self._laps[next(iter(self._laps))]

    def _called(self, rows: Sequence[Any], context: Any) -> Any:
        laps = self._laps
        mine = [laps[job.job_id] for job in context._batch.jobs if job.job_id in laps] if laps else []
        if not mine:
            return self._entry(rows, context)
        begun_s = time.monotonic()
        for lap in mine:
            lap.begun_s = lap.begun_s or begun_s
        result = self._entry(rows, context)
        if self._awaits and inspect.isawaitable(result):
            return _awaited(result, mine)
        _end(mine, result)
        return result

    def _given(self, job: Job, value: Outcome, last: bool) -> None:
        """Sends the times before the last piece, or the failure."""
        if self._laps and (last or type(value) is Failure):
            lap = self._laps.pop(job.job_id, None)
            if lap is not None:
                now_s = time.monotonic()
                times = Times(job.job_id, lap.begun_s or now_s, lap.ended_s or now_s, now_s)
                with self._ledger.lock:
                    if not job.done:
                        self._ledger.outbox.push(times)


async def _awaited(result: Awaitable[Any], laps: Sequence[_Lap]) -> Any:
    value = await result
    _end(laps, value)
    return value


def _end(laps: Sequence[_Lap], result: Any) -> None:
    """Notes the handler's end. A stream ends with its last piece."""
    if not (inspect.isgenerator(result) or inspect.isasyncgen(result)):
        now_s = time.monotonic()
        for lap in laps:
            lap.ended_s = now_s


CREDIT_BYTES = 256 * 1024
REQUEST_BYTES_MAX = RESPONSE_BYTES_MAX = 6_553_500
LOAD_FAILED_STATUS = 1
_RUNNERS: dict[str, type[BlockingRunner | AsyncRunner | ContinuousRunner]] = {
    "async": AsyncRunner,
    "continuous": ContinuousRunner,
}


#: Returns the handler for the settings of a Load; exceptions are the handler's.
Loading = Callable[[dict[str, Any]], Loaded]


def run(socket_fd: int, progress_fd: int, silent: bool = False, loading: Loading = load) -> int:
    """Runs a worker: loads the handler and answers until Stop or the socket's end; returns the exit status. `silent`:
    one of several processes that compute together, whose answers aren't used."""
    prepare_process()
    link = Link(socket_fd)
    link.part_from_forks()
    return answer(link, _progress(progress_fd), SilentLedger if silent else Ledger, prepare_logging, loading=loading)


def _progress(fd: int) -> Progress:
    memory = mmap.mmap(fd, 0)
    os.close(fd)  # the map has a descriptor of its own
    return Progress(memory)


def answer(
    link: Link,
    progress: Progress,
    ledger_type: type[Ledger],
    before_load: Callable[[dict[str, Any]], None] | None = None,
    at_end: Callable[[Loaded], None] | None = None,
    loading: Loading = load,
    is_alone: bool = True,
) -> int:
    """Waits for Load, loads the model and answers requests. Returns the exit status. `at_end` is called with the
    handler when its last answer is sent, also if the frontend has gone. `is_alone`: the process is the model's, whose
    memory then stays as it is."""
    settings = link.wait_for_load().settings
    if before_load is not None:
        before_load(settings)
    set_threads(settings.get("threads"), settings.get("workers") or 1)
    if settings.get("terminal") or settings.get("debugpy_port"):
        from ts.runtime.debugging import prepare

        prepare(settings)
    most_bytes = int(settings.get("response_bytes_max") or RESPONSE_BYTES_MAX)
    ledger = ledger_type(settings.get("credit_bytes") or CREDIT_BYTES, most_bytes, bool(settings.get("debug_errors")))
    link.open(ledger, settings.get("message_bytes_max"), progress.memory if settings.get("arenas") else None)
    Calls(link, settings.get("request_bytes_max") or REQUEST_BYTES_MAX)
    if settings.get("mark_lines"):
        mark_lines()
        link.on_turn = turn_to
    loaded = _load(link, settings, loading, is_alone)
    if loaded is None:
        return LOAD_FAILED_STATUS
    loaded.context._tell_waiting = progress.wait
    runner_type = _RUNNERS.get(loaded.kind, BlockingRunner)
    status = 0
    try:
        try:
            opening = Opening(link, loaded.takes == "rows", lambda: _with_tensors(link, loaded, progress))
            decodes = bool(settings.get("decode_input_request", True))
            runner = runner_type(link, loaded, opening.opened, progress, decodes)
            ledger.on_measure = Stopwatch(ledger, runner, awaits=runner_type is AsyncRunner).measure
            runner.run()
        except SystemExit as error:
            place = place_of(error)
            if place:  # else it isn't the handler's
                say(f"The handler called sys.exit({repr_of(error.code)}){place}, which ends its worker")
            status = _exit_status(error)
        link.drain()
    finally:
        if at_end is not None:
            at_end(loaded)
    return status


def _with_tensors(link: Link, loaded: Loaded, progress: Progress) -> Opened:
    from ts.runtime.tensor_running import with_tensors

    return with_tensors(link, loaded.tensors or {}, loaded.takes == "rows", progress)


def prepare_process() -> None:
    faulthandler.enable(file=2)
    faulthandler.register(SHOWS_STACKS, file=2, all_threads=True)  # sent before a worker that hangs is killed
    sys.stdout.flush()
    # As stderr does, it escapes what its encoding hasn't: a request with half of a surrogate pair is no reason to fail.
    # The former one can't be changed where the descriptor has become another kind of file since.
    sys.stdout = open(  # noqa: SIM115  # until the process ends
        1, "w", buffering=1, encoding=sys.stdout.encoding, errors="backslashreplace", closefd=False
    )


def prepare_logging(settings: dict[str, Any]) -> None:
    """Sets up logging for TorchServe's handlers; other servers' models and programs set it up themselves."""
    if not settings.get("adapter"):
        log_to_stdout()


def _load(link: Link, settings: dict[str, Any], loading: Loading, is_alone: bool) -> Loaded | None:
    begun_s = time.monotonic()
    link.enter()
    try:
        loaded = loading(settings)
    except BaseException as error:  # its receiver logs the traceback, once for all workers and tries
        link.announce(LoadFailed(describe_failure(error)))
        link.drain()
        return None
    finally:
        link.leave()
    if is_alone:
        gc.collect()
        gc.freeze()  # the model stays as long as the process
        give_back_freed()
        keep_freed()
    load_s = time.monotonic() - begun_s
    info: dict[str, Any] = {"pid": os.getpid(), "handler_kind": loaded.kind, "load_s": round(load_s, 6)}
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "get_num_threads"):
        info["threads"] = torch.get_num_threads()
    if loaded.signature is not None:
        info["signature"] = loaded.signature
    if loaded.routes:
        info["routes"] = list(loaded.routes)
    if loaded.takes_streams:
        info["takes_streams"] = True
    if loaded.openai is not None:
        info["openai"] = loaded.openai
    if loaded.completed is not None:
        info["completed"] = loaded.completed
    link.announce(Ready(info))
    return loaded


def _exit_status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    say(text_of(error.code))
    return 1


def live(socket_fd: int, progress_fd: int, silent: bool = False, loading: Loading = load) -> None:
    """`run`, and the end of the process, without waiting for the handler's threads."""
    outlive_stops()
    status = run(socket_fd, progress_fd, silent, loading)
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    leave(status)


def main() -> None:
    parser = argparse.ArgumentParser(prog="ts.runtime.main", description="A worker process of torchserve.")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--progress-fd", type=int, required=True)
    arguments = parser.parse_args()
    live(arguments.fd, arguments.progress_fd)


if __name__ == "__main__":
    main()


def live_in_process(socket_fd: int, progress_fd: int) -> int:
    """Loads and answers until Stop or the socket's end, and closes both; returns a process's status."""
    progress = _progress(progress_fd)
    link = Link(socket_fd, leave=sys.exit)
    try:
        return answer(link, progress, Ledger, before_load=_forget_modules, at_end=_close_loop, is_alone=False)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    finally:
        link.close()


def _close_loop(loaded: Loaded) -> None:
    loop = loaded.loop
    if loop is None:
        return
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    asyncio.set_event_loop(None)
    loop.close()


def _forget_modules(settings: dict[str, Any]) -> None:
    """Makes the next import reload the modules of the model's folder, which may have been edited."""
    for name in modules_in(settings["model_dir"]):
        del sys.modules[name]
