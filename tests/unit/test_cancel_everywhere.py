"""Callers that leave at every await of an operation: of submit -> result, of a registration, of the start of a worker
or of a holder of weights, of the loads and ends of models on demand. Nothing is left of the operation, and the next
request is served."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import zipfile
from collections.abc import Callable, Coroutine, Generator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from stage import Actor, Skipping, Stage, pool_of, waiting
from support import GUARD_S, run, turns, until_async
from ts.protocol.frames import Cancel, Chunk, Credit, Input, Predict
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import ServeError
from ts_frontend.job import CREDIT_GRANT_BYTES, FINAL, FedJob, JobState, Ledger
from ts_frontend.models.archive import Archive, ExtractLimits
from ts_frontend.models.environments import Environments, EnvironmentStore
from ts_frontend.models.formats.formats import Formats
from ts_frontend.models.loader import ModelFactory, ModelLoader
from ts_frontend.models.manager import ModelManager
from ts_frontend.models.model import Registry
from ts_frontend.models.settings import ModelSettings, Requested, resolve
from ts_frontend.models.store.store import ModelStore
from ts_frontend.scheduling.batcher import Repeats
from ts_frontend.scheduling.stream import chunks
from ts_frontend.telemetry.metrics.families import read_definitions
from ts_frontend.telemetry.metrics.registry import DEFAULT_FILE, MetricsRegistry
from ts_frontend.workers.forkserver import HolderLauncher
from ts_frontend.workers.launchers import ExecLauncher
from ts_frontend.workers.pool import Pool
from ts_frontend.workers.process import ProcessSpec, StartFailed, WorkerPlan
from ts_frontend.workers.resources import Inventory
from ts_frontend.workers.supervisor import Supervisor

#: More than any coroutine here has.
AWAITS_MAX = 200


class Driven:
    """Awaits a coroutine and cancels the task that does so at its `at`th suspension. `count`: those that there were."""

    def __init__(self, work: Coroutine[Any, Any, Any], at: int) -> None:
        self._work, self._at = work, at
        self.count = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        sent: Any = None
        thrown: BaseException | None = None
        while True:
            try:
                waits_for = steps.throw(thrown) if thrown is not None else steps.send(sent)
            except StopIteration as end:
                return end.value
            thrown = None
            self.count += 1
            if self.count == self._at:
                task = asyncio.current_task()
                assert task is not None
                asyncio.get_running_loop().call_soon(task.cancel)
            try:
                sent = yield waits_for
            except BaseException as error:
                thrown = error


async def driven(work: Coroutine[Any, Any, Any], at: int) -> tuple[bool, bool]:
    """Runs it in a task of its own: whether there was an `at`th await, and whether the cancellation ended it."""
    steps = Driven(work, at)

    async def whole() -> None:
        await steps

    task = asyncio.create_task(whole())
    await asyncio.wait({task})
    if not task.cancelled() and (error := task.exception()) is not None:
        assert isinstance(error, (ServeError, StartFailed)), error
    return steps.count >= at, task.cancelled()


def at_every_await(scenario: Callable[[int], Coroutine[Any, Any, tuple[bool, bool]]], least: int) -> None:
    """Runs the scenario with a cancellation at the first, second ... await, until there are no more."""
    for at in range(1, AWAITS_MAX):
        found: list[tuple[bool, bool]] = []

        async def one(at: int = at, found: list[tuple[bool, bool]] = found) -> None:
            found.append(await scenario(at))

        run(one())
        reached, cancelled = found[0]
        assert cancelled or not reached, f"await {at}: the cancellation was swallowed"
        if not reached:
            assert at > least, f"only {at - 1} awaits"
            return
    raise AssertionError(f"more than {AWAITS_MAX} awaits")


@pytest.fixture(autouse=True, scope="module")
def without_garbage() -> None:
    """Collects the sockets that other modules' tests left as garbage: a collection in a test would change its count."""
    gc.collect()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- submit -> result


async def playing(actor: Actor, pieces: int) -> None:
    """Answers whatever comes, in so many pieces, as far as there is credit and nobody cancels."""
    open_ids: dict[int, int] = {}
    while not actor.exited.done():
        if (batch := actor.heard(Predict)) is not None:
            open_ids |= {item.job_id: pieces for item in batch.items}
        if (cancel := actor.heard(Cancel)) is not None and open_ids.pop(cancel.job_id, None) is not None:
            actor.say(Chunk(cancel.job_id, b"", last=True))
        actor.heard(Credit)
        for job_id in list(open_ids):
            open_ids[job_id] -= 1
            last = open_ids[job_id] <= 0
            actor.say(Chunk(job_id, b"x" * CREDIT_GRANT_BYTES, last=last))
            if last:
                del open_ids[job_id]
        await asyncio.sleep(0)


async def whole_answer(pool: Pool, ledger: Ledger) -> None:
    assert len(await waiting(pool, ledger).result()) == 3 * CREDIT_GRANT_BYTES


async def in_pieces(pool: Pool, ledger: Ledger) -> None:
    assert len(await waiting(pool, ledger).pieces()) == 3


async def as_stream(pool: Pool, ledger: Ledger) -> None:
    coming = chunks(waiting(pool, ledger, stream=True))
    try:
        async for _ in coming:
            await asyncio.sleep(0)
    finally:
        await coming.aclose()


async def fed(pool: Pool, ledger: Ledger) -> None:
    """It sends while it reads; its feeds wait for room that the handler never makes."""
    job = FedJob(ledger, [Input("data", "", b"x")], request_id="r", stream=True, alone=True)
    pool.queue.put(job)
    coming = chunks(job)
    try:
        for _ in range(3):
            await job.feed([Input("data", "", b"y" * 200_000)])
        async for _ in coming:
            pass
    finally:
        await coming.aclose()
        job.cancel()


@pytest.mark.parametrize("ask", [whole_answer, in_pieces, as_stream, fed])
@pytest.mark.parametrize("repeats", [False, True], ids=["once", "idempotent"])
def test_a_request(ask: Callable[[Pool, Ledger], Coroutine[Any, Any, None]], repeats: bool) -> None:
    async def scenario(at: int) -> tuple[bool, bool]:
        stage, ledger = Stage(), Ledger()
        stage.handler_kind = "async"
        pool = pool_of(stage, Skipping(), repeats=Repeats() if repeats else None)
        await pool.scale(1)
        player = asyncio.create_task(playing(stage.actors[0], 3))
        found = await driven(ask(pool, ledger), at)
        assert not ledger.live and (ledger.queued, ledger.sent) == (0, 0) and len(pool.queue) == 0
        assert sum(ledger.counts[state] for state in FINAL) == 1 and (found[1] or ledger.counts[JobState.ANSWERED])
        worker = pool.slots[0].worker
        assert worker is not None
        await until_async(lambda: not worker.busy)
        assert not worker._running.jobs and worker.room() == 2
        assert len(await waiting(pool, ledger).result()) == 3 * CREDIT_GRANT_BYTES, "the next one is served"
        assert stage.launched == 1
        await pool.close(0)
        await player
        return found

    at_every_await(scenario, 1)


# --- a worker's start


def released(stage: Stage) -> bool:
    return all(actor.exited.done() and actor.sock.fileno() < 0 and actor.progress.closed for actor in stage.actors)


async def late() -> None:
    await turns()


@pytest.mark.parametrize("scene", ["ready", "late", "fails", "dies"])
@pytest.mark.parametrize("what", ["scale up", "scale down", "close"])
def test_who_scales_leaves(scene: str, what: str) -> None:
    """The workers are the pool's, whoever asked for them: they are as many as were asked for, and end with it."""

    async def scenario(at: int) -> tuple[bool, bool]:
        before = descriptors()
        scenes: Sequence[Any] = [late if scene == "late" else scene] * 2
        stage, ledger = Stage(*(scenes if what == "scale up" else ())), Ledger()
        pool = pool_of(stage, Skipping())
        if what != "scale up":
            await pool.scale(2)
            stage.scenes = list(scenes)
        wanted = {"scale up": 2, "scale down": 1, "close": 0}[what]
        found = await driven(pool.close(0) if what == "close" else pool.scale(wanted, 0), at)
        assert len(pool.slots) == wanted or not found[0]
        if wanted:
            await until_async(lambda: pool.ready_count == wanted)
        await pool.close(0)
        assert released(stage) and not pool._leaving and not pool._retiring and not pool.slots and not ledger.live
        await until_async(lambda: descriptors() == before)
        return found

    at_every_await(scenario, 1)


# --- the process that holds a model's weights


class Holding:
    """A real holder of a model without weights, and the launcher of its workers."""

    def __init__(self, directory: Path) -> None:
        (directory / "handler.py").write_text("def handle(data, context):\n    return data\n")
        load = {
            "model_name": "m",
            "model_version": "1.0",
            "model_dir": str(directory),
            "handler": "handler.py",
            "batch_size": 1,
            "decode_input_request": True,
        }
        self.spec = ProcessSpec("m_1.0", dict(os.environ))
        plan = WorkerPlan(self.spec, load, GUARD_S, GUARD_S, 1 << 20)
        self.below = ExecLauncher()
        self.launcher = HolderLauncher(self.below, plan)
        self.lines: list[str] = []
        self._children = set(psutil.Process().children())

    def sink(self, stream: str, line: str) -> None:
        self.lines.append(line)

    async def works(self) -> None:
        """A worker is forked, and ends."""
        process = await self.launcher.launch(self.spec, self.sink)
        assert psutil.Process(process.pid).ppid() == self.launcher.pid and not self.launcher.refusal, self.lines
        process.kill()
        await process.exited
        process.release()
        process.sock.close()

    async def close(self) -> None:
        await self.launcher.close()
        await self.below.close()
        assert not self.launcher._holders
        assert set(psutil.Process().children()) == self._children


@pytest.mark.skipif(sys.platform != "linux", reason="shareWeights needs Linux")
def test_who_starts_a_worker_of_a_holder_leaves(tmp_path: Path) -> None:
    """The holder loads the model once, even if the first caller leaves, and forks the next requested worker."""

    async def scenario(at: int) -> tuple[bool, bool]:
        await asyncio.to_thread(int)  # the loop's own thread and descriptors
        before = descriptors()
        holding = Holding(tmp_path)

        async def start() -> None:
            process = await holding.launcher.launch(holding.spec, holding.sink)
            process.kill()
            process.release()
            process.sock.close()

        found = await driven(start(), at)
        await holding.works()
        assert holding.launcher.loads == 1
        await holding.close()
        await until_async(lambda: descriptors() == before)
        return found

    at_every_await(scenario, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="shareWeights needs Linux")
def test_the_start_of_a_holder_itself(tmp_path: Path) -> None:
    """The coroutine that starts the process and has it load the model, as `rest` cancels it: the next worker starts
    another one."""

    async def scenario(at: int) -> tuple[bool, bool]:
        await asyncio.to_thread(int)
        before = descriptors()
        holding = Holding(tmp_path)
        launcher = holding.launcher
        found = await driven(launcher._loaded(holding.spec, holding.sink), at)
        for left in launcher._holders:
            left.set_aside()
        await until_async(lambda: not launcher._holders)
        await holding.works()
        await holding.close()
        await until_async(lambda: descriptors() == before)
        return found

    at_every_await(scenario, 2)


# --- a registration


class Managed:
    """A manager of models with its parts: the server's own but for the launcher."""

    def __init__(self, directory: Path, stage: Stage) -> None:
        self.stage, self.work_dir = stage, directory / "work"
        self.work_dir.mkdir(exist_ok=True)
        store = directory / "store"
        if not store.exists():
            store.mkdir()
            manifest = {
                "runtime": "python",
                "model": {"modelName": "m", "handler": "handler.py", "modelVersion": "1.0"},
            }
            with zipfile.ZipFile(store / "m.mar", "w") as archive:
                archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
                archive.writestr("handler.py", "def handle(data, context):\n    return data\n")
        config = ServerConfig(model_store=store, default_workers_per_model=1)
        self.supervisor = Supervisor(
            {},
            work_dir=self.work_dir,
            first_worker_id=9000,
            first_distribution_id=29500,
            fork=False,
            inventory=Inventory(),
            on_line=lambda *line: None,
            launcher=stage,
        )
        self.registry = Registry()
        metrics = MetricsRegistry(read_definitions(DEFAULT_FILE), "log", "host")

        def settings(requested: Requested, archive: Archive, name: str, version: str) -> ModelSettings:
            return resolve(requested, archive.config or {}, {}, config, handler=archive.handler)

        loader = ModelLoader(
            ModelStore(store),
            Formats(),
            ModelFactory(config, self.supervisor, {}, self.registry.changes, metrics),
            self.supervisor,
            settings,
            Environments(EnvironmentStore(directory / "environments", 1), install=False, timeout_s=GUARD_S),
            work_dir=self.work_dir,
            extract_limits=ExtractLimits(),
        )
        self.manager = ModelManager(
            self.registry, loader, model_api=True, unregister_timeout_s=GUARD_S, on_change=lambda: None
        )

    def unpacked(self) -> list[Path]:
        return [path for path in self.work_dir.rglob("*") if not path.is_dir()]

    async def nothing_left(self) -> None:
        """Asserts that nothing of a cancelled registration is left. Threads that unpack finish, then remove files."""
        await until_async(lambda: not self.unpacked(), self.unpacked)
        assert not list(self.registry) and not self.supervisor._pools and released(self.stage)
        loader = self.manager.loader
        assert not loader._fetched and not loader._environment_of

    async def serves(self) -> None:
        model = self.registry.find("m")
        job = model.submit([Input("data", "", b"x")])
        actor = next(actor for actor in self.stage.actors if not actor.exited.done())
        actor.answer(await actor.batch())
        assert await job.result() == b"ok" and not model.ledger.live

    async def close(self) -> None:
        await self.manager.close(0.0)
        await self.supervisor.close()
        await self.nothing_left_but_models()

    async def nothing_left_but_models(self) -> None:
        await until_async(lambda: not self.unpacked(), self.unpacked)
        assert not self.supervisor._pools and released(self.stage)


@pytest.mark.parametrize("scene", ["ready", "late", "fails", "dies"])
def test_a_registration_itself(scene: str, tmp_path: Path) -> None:
    """The coroutine that fetches, opens, starts and adds, as the server's end cancels it: all of it or nothing."""

    async def scenario(at: int) -> tuple[bool, bool]:
        before = descriptors()
        managed = Managed(tmp_path, Stage(late if scene == "late" else scene))
        manager = managed.manager
        found = await driven(manager._register("m.mar", Requested(initial_workers=1), True, False), at)
        if list(managed.registry):
            await managed.serves()
        else:
            await managed.nothing_left()
            managed.stage.scenes = []
            await manager.register("m.mar", initial_workers=1)
            await managed.serves()
        await managed.close()
        await until_async(lambda: descriptors() == before)
        return found

    at_every_await(scenario, 3)


@pytest.mark.parametrize("scene", ["ready", "late", "fails"])
def test_who_registers_leaves(scene: str, tmp_path: Path) -> None:
    """The model is added whole, or not at all if it can't be loaded, whoever waits for it."""

    async def scenario(at: int) -> tuple[bool, bool]:
        managed = Managed(tmp_path, Stage(late if scene == "late" else scene))
        manager = managed.manager
        found = await driven(manager.register("m.mar", initial_workers=1), at)
        await until_async(lambda: not manager.tasks._tasks)
        if scene == "fails":
            await managed.nothing_left()
        else:
            await managed.serves()
            found_again = await driven(manager.unregister("m"), at)
            await until_async(lambda: not manager.tasks._tasks)
            await managed.nothing_left()
            assert found_again[0] or not found_again[1]
        await managed.close()
        return found

    at_every_await(scenario, 1)
