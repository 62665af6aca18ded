"""Pools and their slots with a launcher and a clock of the test's: how workers fail to start, and who is told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stage import Actor, Skipping, Stage, pool_of, waiting
from support import GUARD_S, until_async
from ts.protocol.decoder import Decoder
from ts.protocol.frames import Cancel, Input, Load, Ready, encode_bytes
from ts.runtime.handlers import NETWORK_HINT
from ts_frontend.errors import PROCESS_DIED, DeadlineExceeded, WorkerDied
from ts_frontend.job import Job, JobState, Ledger
from ts_frontend.workers import process as orphans
from ts_frontend.workers.in_flight import Connection
from ts_frontend.workers.launchers import LaunchFailed
from ts_frontend.workers.pool import Pool, Slot
from ts_frontend.workers.process import ExitStatus, Failure, StartFailed
from ts_frontend.workers.resources import Device

DIED = "Backend worker monitoring thread interrupted or backend worker process died."


async def test_code_to_write_is_whole_in_the_answer() -> None:
    pool = pool_of(Stage(), Skipping(0))
    hint = NETWORK_HINT.format(file="a_network_with_a_long_name.py", name="NetworkWithALongName")
    pool.load_failure = StartFailed("", cause=hint)
    assert pool.not_loaded().message.endswith(f"{hint}\n\nIt is tried again.")
    await pool.close(0)


async def test_callers_who_may_not_see_exceptions_are_sent_to_the_log() -> None:
    pool = pool_of(Stage(), Skipping(0))
    pool.plan = replace(pool.plan, load={**pool.plan.load, "debug_errors": False})
    pool.load_failure = StartFailed("", cause="ValueError: secret")
    pool.last_failure = Failure(0, 9000, "ValueError: secret", 1, [])
    told = f"Model {pool.name} could not be loaded: the model's log says why. It is tried again."
    assert pool.not_loaded().message == told
    assert pool.refusal() == " The model's log says why."
    await pool.close(0)


@pytest.mark.parametrize(
    ("scenes", "words"),
    [
        (("dies", "dies"), "killed by SIGKILL"),
        (("dies", "fails"), "SyntaxError"),
        (("fails", "dies"), "SyntaxError"),
        (("exits", "fails"), "exit code 3"),
        ((LaunchFailed("no memory"), "fails"), "no memory"),
    ],
)
async def test_what_fails_a_start(scenes: tuple[Any, ...], words: str) -> None:
    """The second death in a row, but the first exception of a handler."""
    stage = Stage(*scenes)
    pool = pool_of(stage, Skipping(0))
    with pytest.raises(StartFailed, match=words):
        await pool.scale(1)
    assert stage.launched <= 2
    await pool.close(0)


async def test_scaling_a_crash_loop_tries_at_once_and_says_why_it_failed() -> None:
    stage, clock = Stage(*["fails"] * 5), Skipping(1)
    pool = pool_of(stage, clock)
    with pytest.raises(StartFailed, match="SyntaxError"):
        await pool.scale(1)
    await clock.holding.wait()
    before = stage.launched
    with pytest.raises(StartFailed, match="SyntaxError"):
        await pool.scale(1)
    assert stage.launched == before + 1
    stage.scenes.clear()
    await pool.scale(1)
    assert pool.ready_count == 1
    await pool.close(0)


async def test_a_worker_that_dies_whenever_it_is_ready_is_not_scaled() -> None:
    stage, clock = Stage(), Skipping(1)
    pool = pool_of(stage, clock)
    await pool.scale(1)
    while not clock.holding.is_set():
        if pool.ready_count:
            stage.actors[-1].end(-signal.SIGSEGV)
        await asyncio.sleep(0)
    scaling = asyncio.create_task(pool.scale(1))
    await until_async(lambda: pool.ready_count)
    stage.actors[-1].end(-signal.SIGSEGV)
    with pytest.raises(StartFailed, match="soon after it was ready: .*SIGSEGV"):
        await scaling
    await pool.close(0)


async def test_the_same_traceback_is_logged_once_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    stage, clock = Stage(*["fails"] * 6), Skipping(2)
    pool = pool_of(stage, clock)
    with pytest.raises(StartFailed):
        await pool.scale(2)
    await until_async(lambda: stage.lines.count(PROCESS_DIED) >= 6)
    assert [line for line in stage.lines if line != PROCESS_DIED] == ["  m.py", "SyntaxError"]
    assert stage.lines[0] == PROCESS_DIED, "TorchServe's line comes each time"
    await pool.close(0)
    assert "same traceback as before, 4 times now" in caplog.text


# --- TorchServe's lines


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log lines about worker 9000, without their times."""
    found = [
        (one.levelname, one.getMessage()) for one in caplog.records if getattr(one, "source", "") == "W-9000-m_1.0"
    ]
    return [f"{level} {re.sub(r'[0-9.]+ seconds|timestamp: [0-9]{13}$', '…', text)}" for level, text in found]


async def test_alerts_find_torchserves_lines_for_a_worker_that_fails_to_load_and_recovers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    stage = Stage("fails", "fails", LaunchFailed("no memory"), "ready")
    pool = pool_of(stage, Skipping())
    with pytest.raises(StartFailed):
        await pool.scale(1)
    await until_async(lambda: "Auto recovery succeeded" in caplog.text)
    assert said(caplog) == [
        "INFO 9000 Worker disconnected. WORKER_STARTED",
        f"INFO {DIED}, startupTimeout:{GUARD_S:g}sec",
        "INFO Auto recovery start …",
        "INFO Retry worker: 9000 in ….",
        "WARNING Auto recovery failed again: Model couldn't be loaded: SyntaxError: invalid syntax (m.py, line 1)"
        " (with the same traceback as before, 2 times now). Retry worker: 9000 in ….",
        "ERROR Backend worker error\norg.pytorch.serve.wlm.WorkerInitializationException: Failed start worker process",
        "WARNING Auto recovery failed again",
        "INFO Retry worker: 9000 in ….",
        "INFO Auto recovery succeeded, reset recoveryStartTS",
    ]
    caplog.clear()
    stage.actors[-1].end(-signal.SIGSEGV)
    await until_async(lambda: "Auto recovery succeeded" in caplog.text)
    assert said(caplog) == [
        "INFO 9000 Worker disconnected. WORKER_MODEL_LOADED",
        f"INFO {DIED}, responseTimeout:{GUARD_S:g}sec",
        "INFO Auto recovery start …",
        "INFO Retry worker: 9000 in ….",
        "INFO Auto recovery succeeded, reset recoveryStartTS",
    ]
    caplog.clear()
    await pool.close(0)
    assert not said(caplog), "a worker that is asked to end is no failure"


@pytest.mark.parametrize("loading", [True, False])
async def test_alerts_find_torchserves_lines_for_a_worker_that_does_not_answer(
    loading: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stage = Stage("hangs", "ready") if loading else Stage("ready", "ready")
    pool = pool_of(stage, Skipping())
    if loading:
        pool.plan = replace(pool.plan, startup_timeout_s=0.01)
        with pytest.raises(StartFailed, match="startupTimeout"):
            await pool.scale(1)
        pool.plan = replace(pool.plan, startup_timeout_s=GUARD_S)
    else:
        await pool.scale(1)
        waiting(pool)
        await until_async(lambda: pool.slots[0].worker is not None and pool.slots[0].worker.busy)
        pool.tick(time.monotonic() + 2 * GUARD_S)
    await until_async(lambda: "Auto recovery succeeded" in caplog.text)
    assert said(caplog)[:3] == [
        f"INFO 9000 Worker disconnected. {'WORKER_STARTED' if loading else 'WORKER_MODEL_LOADED'}",
        "ERROR Number or consecutive unsuccessful inference 1",
        "ERROR Backend worker error\n"
        "org.pytorch.serve.wlm.WorkerInitializationException: Backend worker did not respond in given time",
    ]
    await pool.close(0)


# --- mistakes of the server's own, and cancellation


async def started(pool: Pool) -> Slot:
    """The slot of a pool that has been asked for one worker, which needn't be ready."""
    asyncio.create_task(pool.scale(1)).add_done_callback(lambda task: task.exception())
    await until_async(lambda: pool.slots)
    return pool.slots[0]


@pytest.mark.parametrize(
    "where",
    [
        *("new_worker", "launch", "started", "put_back", "release", "on_change"),
        pytest.param("connect", marks=pytest.mark.pure_form),  # it replaces a method of Connection
    ],
)
async def test_a_mistake_anywhere_is_logged_and_the_worker_started_again(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each step of a worker's life raises once."""
    raised: list[str] = []

    def once(original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*arguments: Any, **more: Any) -> Any:
            if not raised:
                raised.append(where)
                raise RuntimeError("a mistake")
            return original(*arguments, **more)

        return replacement

    caplog.set_level(logging.WARNING)
    stage = Stage(RuntimeError("a mistake")) if where == "launch" else Stage()
    pool = pool_of(stage, Skipping(), on_change=once(lambda: None) if where == "on_change" else lambda: None)
    if where == "new_worker":
        monkeypatch.setattr(pool, "new_worker", once(pool.new_worker))
    elif where == "started":
        monkeypatch.setattr(pool, "on_ready", once(pool.on_ready))
    elif where == "connect":
        monkeypatch.setattr("ts_frontend.workers.worker.Connection.push", once(Connection.push))
    elif where == "put_back":
        monkeypatch.setattr(Actor, "unbegun", once(Actor.unbegun))
    elif where == "release":
        release = once(lambda: None)
        monkeypatch.setattr(Actor, "release", lambda actor: (actor.progress.close(), release()))
    slot = await started(pool)
    if where in ("put_back", "release"):
        await until_async(lambda: slot.ready)
        stage.actors[-1].end(-signal.SIGSEGV)
        await until_async(lambda: not slot.ready)
    lives = 1 if where in ("new_worker", "on_change") else 2
    await until_async(lambda: slot.ready and stage.launched >= lives)
    await pool.scale(1)
    assert pool.load_failure is None and not pool.unavailable
    await pool.close(0)
    assert "a mistake" in caplog.text
    if where != "launch":  # that is a failure like others: its message says it
        assert raised and "Traceback" in caplog.text


async def test_notes_are_read_after_the_end_of_a_process_that_lived_on_without_its_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has read batches ahead, and may begin one before the kill works: that batch must not run twice."""
    monkeypatch.setattr("ts_frontend.workers.worker.EXIT_STATUS_S_MAX", 0.02)
    stage = Stage()
    pool = pool_of(stage, Skipping())
    await pool.scale(1)
    job, actor = waiting(pool), stage.actors[0]
    batch = await actor.batch(begins=False)

    def kill(killed: Actor) -> None:
        def end() -> None:
            killed.note(batch)
            killed.ended(ExitStatus(-signal.SIGKILL))

        asyncio.get_running_loop().call_soon(end)

    with monkeypatch.context() as slow:
        slow.setattr(Actor, "kill", kill)
        actor.theirs.close()
        with pytest.raises(WorkerDied, match="killed by SIGKILL"):
            await job.result()
    await until_async(lambda: stage.launched == 2 and pool.ready_count == 1)
    await pool.close(0)


@pytest.mark.parametrize("turns", range(14))
@pytest.mark.parametrize("scene", ["ready", "fails", "dies", "hangs", "late"])
async def test_retiring_at_any_step_of_a_start_leaves_nothing(scene: str, turns: int) -> None:
    """The pool is closed after so many turns of the loop."""

    async def late() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    stage = Stage(*[late if scene == "late" else scene] * 20)
    pool = pool_of(stage, Skipping())
    scaling = asyncio.create_task(pool.scale(1))
    for _ in range(turns + 1):
        await asyncio.sleep(0)
    await pool.close(0)
    await asyncio.wait({scaling})
    assert not scaling.cancelled()
    assert scaling.exception() is None or isinstance(scaling.exception(), StartFailed)
    assert all(actor.exited.done() and actor.sock.fileno() < 0 for actor in stage.actors)
    assert all(actor.progress.closed for actor in stage.actors)


async def test_a_slot_whose_task_is_lost_is_given_up_and_everybody_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    stage = Stage("hangs")
    pool = pool_of(stage, Skipping())
    scaling = asyncio.create_task(pool.scale(1))
    await until_async(lambda: stage.actors)
    job = waiting(pool)
    pool.slots[0]._task.cancel()
    with pytest.raises(StartFailed, match="not started again"):
        await scaling
    with pytest.raises(Exception, match="could be kept running"):
        await job.result()
    assert pool.unavailable
    await pool.scale(1)
    assert pool.ready_count == 1, "a scale call makes a new one"
    await pool.close(0)
    assert "is not started again" in caplog.text


async def test_orphans_are_looked_for_again_after_a_look_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[int] = []
    again = asyncio.Event()
    caplog.set_level(logging.ERROR)
    loop = asyncio.get_running_loop()

    def reap(before: orphans.Zombies) -> orphans.Zombies:
        looks.append(1)
        if len(looks) == 1:
            raise OSError("no /proc")
        loop.call_soon_threadsafe(again.set)
        return frozenset()

    monkeypatch.setattr(orphans, "reap", reap)
    task = asyncio.create_task(orphans.reap_orphans(0.001))
    await again.wait()
    task.cancel()
    await asyncio.wait({task})
    assert "no /proc" in caplog.text


# --- deadlines, without the supervisor's ticks


def limited(pool: Pool, seconds: float) -> Job:
    deadline_s = time.monotonic() + seconds
    job = Job(Ledger(), [Input("data", "", b"x")], request_id="r", deadline_s=deadline_s, ends_s=deadline_s)
    pool.queue.put(job)
    pool.end_by(deadline_s)
    return job


async def ended(job: Job) -> JobState:
    with pytest.raises(DeadlineExceeded):
        await job.result()
    return job.state


async def test_what_runs_ends_at_its_deadline_and_the_handler_is_told() -> None:
    stage = Stage()
    pool = pool_of(stage, Skipping())
    await pool.scale(1)
    first, second, later = limited(pool, 0.05), limited(pool, 0.05), limited(pool, 3600)
    (actor,) = stage.actors
    assert [await ended(first), await ended(second)] == [JobState.EXPIRED] * 2
    decoder = Decoder(1 << 20)
    told: list[Cancel] = []
    while not told:
        await asyncio.sleep(0)
        with contextlib.suppress(BlockingIOError):
            told += [one for one in decoder.feed(actor.theirs.recv(65536)) if isinstance(one, Cancel)]
    assert told[0].job_id == first.id and not later.done
    later.cancel()
    await pool.close(0)
    assert pool._due is None


# --- loading


async def test_a_load_may_take_longer_than_an_answer() -> None:
    """TorchServe's timeout of answers ended loads, too, for ever anew."""
    stage = Stage("hangs")
    pool = pool_of(stage, Skipping())
    scaling = asyncio.ensure_future(pool.scale(1))
    await until_async(lambda: stage.actors)
    await until_async(lambda: pool.slots[0].worker is not None and pool.slots[0].worker.state.value == "loading")
    for seconds in range(0, 10 * GUARD_S, GUARD_S):
        pool.tick(time.monotonic() + seconds)
    stage.actors[0].theirs.sendall(encode_bytes(Ready({"handler_kind": "blocking"})))
    await scaling
    assert pool.ready_count == stage.launched == 1
    await pool.close(0)


@pytest.mark.parametrize(("device", "in_process"), [(Device("cuda", 0), False), (Device(), True)])
async def test_workers_on_gpus_and_in_the_servers_process_have_all_cores(device: Device, in_process: bool) -> None:
    stage = Stage()
    stage.device = device
    pool = pool_of(stage, Skipping(), in_process=in_process)
    await pool.scale(2)
    assert [actor.heard(Load).settings["workers"] for actor in stage.actors] == [1, 1]
    await pool.close(0)
