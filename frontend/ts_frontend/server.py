"""The server: builds every part once, joins them, runs, drains, stops. The only module that knows all of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ts.version
from ts_frontend.authorization.authorization import Authorization, open_authorization
from ts_frontend.config import checks as config_checks
from ts_frontend.config.kinds import s3_of
from ts_frontend.config.load import snapshot_settings, worker_environment
from ts_frontend.config.snapshot import Snapshot, SnapshotFiles, SnapshotKind
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import ServeError
from ts_frontend.listeners.listeners import Engine, Listeners
from ts_frontend.models.archive import Archive
from ts_frontend.models.environments import Environments, EnvironmentStore
from ts_frontend.models.extraction import ExtractLimits
from ts_frontend.models.factory import ModelFactory
from ts_frontend.models.formats.formats import Formats, known_formats
from ts_frontend.models.health import Health
from ts_frontend.models.loader import ModelLoader
from ts_frontend.models.manager import ModelManager
from ts_frontend.models.metrics import (
    compatible_families,
    refused_calls,
    served_families,
    system_metrics,
)
from ts_frontend.models.registry import Registry
from ts_frontend.models.repository import Repository
from ts_frontend.models.settings import ModelSettings, Requested, resolve
from ts_frontend.models.startup import SnapshotRecorder, load_at_startup, restored
from ts_frontend.models.store.store import ModelStore
from ts_frontend.models.work_dir import work_dir
from ts_frontend.open_inference.calls import ModelCalls
from ts_frontend.scheduling.sequence_queue import keys_of
from ts_frontend.tasks import kept, owned
from ts_frontend.telemetry.logging.logs import Logs
from ts_frontend.telemetry.logging.model_log import ModelLog
from ts_frontend.telemetry.metrics.registry import open_metrics
from ts_frontend.telemetry.tracing.tracing import open_tracing
from ts_frontend.workers.supervisor import Supervisor, find_accelerators
from ts_frontend.workflows.manager import WorkflowManager, restore_workflows, states_of

if TYPE_CHECKING:
    from ts_frontend.telemetry.tracing.traces import Traces

log = logging.getLogger(__name__)

BYPASSED = (
    "bypass_serve is on: handlers run INSIDE the server's process, one request at a time, without workers or time "
    "limits. One that crashes or hangs takes the server with it. For development only."
)
SERVICES = frozenset(
    {
        "inference.GRPCInferenceService",
        "org.pytorch.serve.grpc.inference.InferenceAPIsService",
        "org.pytorch.serve.grpc.management.ManagementAPIsService",
    }
)


class StartRefused(ServeError):
    """A model can't be loaded, and the server is not to run without it."""


class Server:
    """All parts of one server, made from its configuration; `run` is its whole life."""

    def __init__(self, config: ServerConfig, logs: Logs) -> None:
        self.config = config
        self._logs = logs
        self._metrics = open_metrics(config, logs)
        self._tracing: Traces | None = None
        self._stop = asyncio.Event()
        #: From now on a stop drains; before, there is nobody whose requests could be lost.
        self._serving = False

    def stop(self) -> None:
        """Asks `run` to drain and return; a second time changes nothing."""
        self._stop.set()

    async def run(self, on_ready: Callable[[dict[str, str], list[str]], None], progress: Callable[[str], None]) -> None:
        """Starts, serves until `stop()`, drains. `on_ready` gets the listening addresses by name and
        what couldn't be loaded, `progress` what is
        being done until then.

        A stop that comes while it starts is obeyed at once, whatever is being done: `on_ready` isn't called then.
        Raises OSError (an address is taken), StartRefused, ValueError with what was wrong when it can't start.
        """
        life = owned(self._live(on_ready, progress))
        stop = owned(self._stop.wait())
        try:
            await asyncio.wait({life, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not self._serving and not life.done():
                log.info("Asked to stop while it starts: what is being loaded is given up.")
                life.cancel()
            await asyncio.wait({life})
        finally:
            stop.cancel()
            life.cancel()
        if not life.cancelled():
            life.result()

    async def _live(
        self, on_ready: Callable[[dict[str, str], list[str]], None], progress: Callable[[str], None]
    ) -> None:
        config = self.config
        if config.bypass_serve:
            log.warning("%s", BYPASSED)
        with work_dir(config.temp_dir) as directory, self._authorized() as authorization:
            supervisor = await self._supervisor(directory)
            try:
                await supervisor.start()
                self._tracing = open_tracing(config)  # its threads are later than the forkserver
                await self._serve(supervisor, directory, authorization, on_ready, progress)
            finally:
                await supervisor.close()
                if self._tracing is not None:
                    await self._tracing.close()

    async def _supervisor(self, work_dir: Path) -> Supervisor:
        config = self.config
        inventory = await find_accelerators(config.number_of_gpu, sys.platform, platform.machine())
        log.info("Number of GPUs: %s", inventory.count)
        return Supervisor(
            worker_env(config),
            work_dir=work_dir,
            first_worker_id=config.initial_worker_port,
            first_distribution_id=config.initial_distribution_port,
            fork=config.worker_start == "fork",
            inside=config.bypass_serve,
            inventory=inventory,
            on_line=ModelLog(self._logs, self._metrics).line,
        )

    async def _serve(
        self,
        supervisor: Supervisor,
        work_dir: Path,
        authorization: Authorization | None,
        on_ready: Callable[[dict[str, str], list[str]], None],
        progress: Callable[[str], None],
    ) -> None:
        config = self.config
        gpus = supervisor.placement.inventory.count
        formats = known_formats(config, env=worker_env(config), work_dir=work_dir, gpus=gpus)
        store = self._store(work_dir, formats)
        recorder = self._recorder()
        registry = Registry()
        calls = ModelCalls(registry, keys_of(config))
        manager = self._manager(registry, calls, supervisor, store, formats, work_dir, recorder)
        workflows = self._workflows(manager, store, work_dir, recorder)
        self._measure(registry)
        repository = self._repository(manager, gpus)
        health = Health(registry, SERVICES, strict=config.strict_readiness)
        doors = Listeners(
            config,
            manager,
            workflows,
            repository,
            health,
            self._logs,
            self._metrics,
            authorization,
            self._tracing,
        )
        doors.check_addresses()

        async def restore(snapshot: Snapshot) -> list[str]:
            return await restore_workflows(snapshot.workflows, workflows, config.loads_at_once_max)

        try:
            failures = await load_at_startup(config, manager, store, restore, gpus, progress)
            calls.attach(repository)
            failures += await repository.start(config.load_model)
            if failures and config.exit_on_error:
                raise StartRefused("\n".join((*failures, "exit_on_error is on")))
        except BaseException:
            await manager.tasks.close(0.0)
            raise
        self._serving = True
        await doors.engine.start()
        recorder.attach(manager, lambda: states_of(workflows), config.snapshot)
        await recorder.write(SnapshotKind.STARTUP)
        tasks = [
            *self._sample_system(supervisor, registry),
            kept(repository.watch, "The watch over the model repositories"),
        ]
        if authorization is not None:
            tasks.append(kept(partial(authorization.watch, config.token_reload_interval_s), "The watch over the keys"))
            self._metrics.gather(lambda: [refused_calls(authorization.refusals.counts, self._metrics.host)])
        _settle()
        on_ready(doors.addresses(), [*restored(config.snapshot, manager), *failures, *doors.warnings])
        await self._until_stopped(doors.engine)
        for task in tasks:
            task.cancel()
        health.drain()
        if config.drain_grace_s:
            log.info("Not ready any more; serving for %g s, until nobody routes here.", config.drain_grace_s)
            await asyncio.sleep(config.drain_grace_s)
        log.info("Draining: what was accepted is answered within %g s.", config.drain_timeout_s)
        latest_s = time.monotonic() + config.drain_timeout_s
        for model in manager.registry:
            model.give_up_waiting("was to end with the server")
        manager.tasks.end_loads()
        await doors.engine.drain(config.drain_timeout_s)
        await recorder.close()
        await manager.close(max(0.0, latest_s - time.monotonic()))

    async def _until_stopped(self, engine: Engine) -> None:
        """Returns when `stop` was called; raises when the engine ended by itself."""
        stop = owned(self._stop.wait())
        ended = owned(engine.wait())
        done, _ = await asyncio.wait({stop, ended}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if ended in done:
            ended.result()
            raise RuntimeError("The listeners ended without being asked to")
        ended.cancel()

    @contextlib.contextmanager
    def _authorized(self) -> Iterator[Authorization | None]:
        """The keys that calls need, as long as the block runs; None when they need none. The log says which and why."""
        config = self.config
        authorization = open_authorization(config, config.key_dir)
        tokens, model_api = config_checks.who_may(config)
        log.log(logging.INFO if authorization or config.loopback_only else logging.WARNING, "%s", tokens)
        if authorization is not None and authorization.made_in is not None:
            log.info("Keys are in %s", authorization.made_in)
        log.info("%s", model_api)
        try:
            yield authorization
        finally:
            if authorization is not None:
                authorization.close()

    # --- parts

    def _store(self, work_dir: Path, formats: Formats) -> ModelStore:
        config = self.config
        return ModelStore(
            config.model_store,
            config.allowed_urls,
            download_bytes_max=config.download_bytes_max,
            download_timeout_s=config.download_timeout_s,
            formats=formats,
            download_total_timeout_s=config.download_total_timeout_s,
            files_max=config.extract_files_max,
            trusted=[f"{url}/" for url in repositories_in_s3(config)],
            copies=work_dir / "downloads",
        )

    def _repository(self, manager: ModelManager, gpus: int) -> Repository:
        config = self.config
        return Repository(
            manager,
            [path for path in config.model_repository if s3_of(path) is None],
            config.model_control_mode,
            config.repository_poll_secs,
            gpus,
            repositories_in_s3(config),
            loads_at_once_max=config.loads_at_once_max,
        )

    def _measure(self, models: Registry) -> None:
        """What the metrics say of the served models, and of the traces."""
        metrics = self._metrics
        metrics.gather(lambda: served_families(models, metrics.host))
        metrics.gather(lambda: compatible_families(models, metrics))
        if self._tracing is not None:
            metrics.gather(self._tracing.families)

    def _sample_system(self, supervisor: Supervisor, models: Registry) -> list[asyncio.Task[None]]:
        """System metrics from now on, until the task is cancelled; none where they are off."""
        inventory = supervisor.placement.inventory
        gpus = inventory.count if inventory.kind == "cuda" else 0

        def pids() -> list[int]:
            return [slot.worker.pid for model in models for slot in model.pool.slots if slot.worker is not None]

        system = system_metrics(self.config, self._metrics, gpus, worker_env(self.config), pids)
        return [] if system is None else [kept(system.run, "The sampling of system metrics")]

    def _recorder(self) -> SnapshotRecorder:
        config = self.config
        files = None if config.ncs else SnapshotFiles(config.snapshot_dir, config.snapshots_kept_max)
        return SnapshotRecorder(files, snapshot_settings(config))

    def _manager(
        self,
        registry: Registry,
        calls: ModelCalls,
        supervisor: Supervisor,
        store: ModelStore,
        formats: Formats,
        work_dir: Path,
        recorder: SnapshotRecorder,
    ) -> ModelManager:
        config = self.config
        factory = ModelFactory(
            config, supervisor, worker_env(config), registry.changes, self._metrics, self._tracing, calls
        )
        loader = ModelLoader(
            store,
            formats,
            factory,
            supervisor,
            self._settings,
            self._environments(),
            work_dir=work_dir,
            extract_limits=self._extract_limits(),
        )
        return ModelManager(
            registry,
            loader,
            model_api=config.model_api_enabled,
            unregister_timeout_s=config.unregister_model_timeout,
            on_change=recorder.changed,
        )

    def _environments(self) -> Environments:
        config = self.config
        store = EnvironmentStore(config.environments_path, config.environments_kept_max)
        return Environments(store, install=config.install_py_dep_per_model, timeout_s=config.install_timeout_s)

    def _workflows(
        self, manager: ModelManager, store: ModelStore, work_dir: Path, recorder: SnapshotRecorder
    ) -> WorkflowManager:
        config = self.config
        wars = ModelStore(
            config.workflow_store,
            config.allowed_urls,
            download_bytes_max=config.download_bytes_max,
            download_timeout_s=config.download_timeout_s,
            download_total_timeout_s=config.download_total_timeout_s,
            files_max=config.extract_files_max,
            missing="Workflow not found in workflow store",
            place="workflow store",
        )
        return WorkflowManager(
            manager,
            store,
            wars,
            work_dir=work_dir,
            extract_limits=self._extract_limits(),
            unregister_timeout_s=config.unregister_model_timeout,
            on_change=recorder.changed,
        )

    def _extract_limits(self) -> ExtractLimits:
        config = self.config
        return ExtractLimits(
            bytes_max=config.extract_bytes_max, files_max=config.extract_files_max, ratio_max=config.extract_ratio_max
        )

    def _settings(self, requested: Requested, archive: Archive, name: str, version: str) -> ModelSettings:
        entry = self.config.models.get(name, {}).get(version, {})
        settings = resolve(
            requested, archive.config or {}, entry, self.config, handler=archive.handler, runtime=archive.runtime
        )
        for warning in settings.warnings:
            log.warning("Model %s %s: %s", name, version, warning)
        if self.config.bypass_serve:
            settings = replace(settings, batch_size=1, max_batch_delay_set=False)
        if self.config.inside:
            settings = replace(
                settings, min_workers=min(1, settings.min_workers), max_workers=min(1, settings.max_workers)
            )
        return settings


def repositories_in_s3(config: ServerConfig) -> list[str]:
    return [url for path in config.model_repository if (url := s3_of(path))]


def worker_env(config: ServerConfig) -> dict[str, str]:
    """The environment of workers: `ts` is found where the server found it, whatever else has that name."""
    env = worker_environment(config)
    package_root = str(Path(ts.version.__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join(part for part in (package_root, env.get("PYTHONPATH", "")) if part)
    return env


def _settle() -> None:
    """What exists now stays: the garbage collector needn't look at it again, nor as often at the rest. Requests make no
    cycles; a collection of everything takes some 10 ms, which a request would wait for."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
