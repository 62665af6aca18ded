"""The server: its parts, built once and connected, and its life cycle. The only module that knows all parts."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import logging
import platform
import shlex
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ts.version import is_compiled
from ts_frontend.authorization.authorization import Authorization, open_authorization
from ts_frontend.caching.cache import Caches, RemoteAnswers
from ts_frontend.config import checks as config_checks
from ts_frontend.config.display import snapshot_settings
from ts_frontend.config.keys import KeyKind
from ts_frontend.config.kinds import ConfigError, bucket_of
from ts_frontend.config.snapshot import Snapshot, SnapshotFiles, SnapshotKind
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import ServeError
from ts_frontend.limits.limits import Fleet, Limits
from ts_frontend.listeners.listeners import Listeners
from ts_frontend.models.archive import ExtractLimits, remove_abandoned, work_dir
from ts_frontend.models.environments import Environments, EnvironmentStore
from ts_frontend.models.formats.formats import known_formats
from ts_frontend.models.health import Health
from ts_frontend.models.loader import ModelFactory, ModelLoader, settings_of
from ts_frontend.models.manager import ModelManager
from ts_frontend.models.metrics import (
    OnDemandMetrics,
    ServedModels,
    ServerState,
    client_families,
    compatible_families,
    examples_of,
    gpu_families,
    gpus_of,
    measure_of,
    refused_calls,
    shared_snapshot_family,
    system_metrics,
)
from ts_frontend.models.model import Registry
from ts_frontend.models.repository import Repository
from ts_frontend.models.sharing import SharedSnapshot, shared_place
from ts_frontend.models.startup import Reloading, SnapshotRecorder, load_at_startup, restored
from ts_frontend.models.store.http import limits_of
from ts_frontend.models.store.store import ModelStore
from ts_frontend.open_inference.calls import ModelCalls
from ts_frontend.redis_calls import is_installed
from ts_frontend.rollouts.manager import Rollouts
from ts_frontend.scheduling.queues import sequence_headers
from ts_frontend.tasks import kept, owned, watched
from ts_frontend.telemetry.logging.logs import ModelLog
from ts_frontend.telemetry.logging.writer import Logs
from ts_frontend.telemetry.metrics.registry import MetricsRegistry, open_metrics
from ts_frontend.telemetry.tracing.tracing import open_tracing
from ts_frontend.workers.cluster.launcher import ClusterLauncher
from ts_frontend.workers.launchers import Launcher
from ts_frontend.workers.memory import Admission, Demand, Memory, processes_memory
from ts_frontend.workers.pool import Clock
from ts_frontend.workers.spawning import StartedForkserver, worker_env
from ts_frontend.workers.supervisor import Supervisor, find_accelerators
from ts_frontend.workflows.manager import WorkflowManager, restore_workflows, states_of

if TYPE_CHECKING:
    from ts_frontend.frontends.keeper import Keeper
    from ts_frontend.frontends.lead import Lead
    from ts_frontend.frontends.sibling import Sibling
    from ts_frontend.telemetry.tracing.spans import Traces

log = logging.getLogger(__name__)

BYPASSED = (
    "bypass_serve is on: handlers run INSIDE the server's process, one request at a time, without workers or time "
    "limits. A handler that crashes or hangs stops the server. For development only."
)
SERVICES = frozenset(
    {
        "inference.GRPCInferenceService",
        "org.pytorch.serve.grpc.inference.InferenceAPIsService",
        "org.pytorch.serve.grpc.management.ManagementAPIsService",
    }
)


#: Gets the listening addresses by name, and warnings.
OnReady: TypeAlias = Callable[[dict[str, str], list[str]], None]
Made = TypeVar("Made")


def missing_torch(config: ServerConfig) -> list[str]:
    """A warning for a server whose models may need torch, and whose Python doesn't have it."""
    if not config.preload_torch or importlib.util.find_spec("torch") is not None:
        return []
    return [
        f"torch isn't installed in this Python: models that import it can't be loaded. Install it "
        f"({shlex.quote(sys.executable)} -m pip install torch), or set preload_torch=false if no model needs it"
    ]


class StartRefused(ServeError):
    """A model can't be loaded, and the server must not run without it."""

    remedy = "Fix the models that the message names, or start without `exit_on_error`."


class Parts:
    """The parts of a server, built from its configuration and connected. None of them runs yet.

    `supervisor` makes their workers, `directory` is for their temporary files, `left` are the sockets that another
    server has left. `keeper`: makes the siblings of this frontend, if it has any; `sibling`: this one is one of them.
    Raises ConfigError.
    """

    def __init__(
        self,
        config: ServerConfig,
        logs: Logs,
        metrics: MetricsRegistry,
        tracing: Traces | None,
        authorization: Authorization | None,
        supervisor: Supervisor,
        directory: Path,
        caches: Caches,
        limits: Limits | None = None,
        fleet: Fleet | None = None,
        left: Mapping[str, Sequence[int]] = MappingProxyType({}),
        keeper: Keeper | None = None,
        sibling: Sibling | None = None,
    ) -> None:
        self._config, self._metrics = config, metrics
        self._limits, self._fleet = limits, fleet
        self.gpus = supervisor.placement.inventory.count
        self._gpus = gpus_of(supervisor.placement.inventory)
        self.registry = Registry()
        self.recorder = _recorder(config)
        self.sharing: SharedSnapshot | None = None
        self._build_models(supervisor, tracing, directory, caches)
        self._build_services(directory, supervisor)
        self._gather(tracing)
        self.listeners = Listeners(
            config,
            self.manager,
            self.workflows,
            self.repository,
            self.health,
            logs,
            metrics,
            authorization,
            tracing,
            self._gpus,
            self.rollouts,
            limits,
            left,
            {} if sibling is None else sibling.ports,
        )
        self.lead: Lead | None = None
        if keeper is not None:
            from ts_frontend.frontends.lead import Lead  # one frontend needs none of it

            self.lead = lead = Lead(config, keeper, self.manager, self.repository, authorization, directory)
            self.listeners.metrics_pages.gather = lead.gather
            metrics.join = lead.join
            metrics.gather(lead.families, always=True)
        if authorization is not None:
            metrics.gather(lambda: [refused_calls(authorization.refusals.counts, metrics.host)], always=True)
        #: Loops that run while the server serves, with the subjects of their messages.
        self.loops = list(self._watches(authorization))

    def _build_models(self, supervisor: Supervisor, tracing: Traces | None, directory: Path, caches: Caches) -> None:
        config, env = self._config, worker_env(self._config)
        limit = Memory(config.model_memory_max, config.model_gpu_memory_max)
        self.calls = ModelCalls(self.registry, sequence_headers(config))
        formats = known_formats(config, env=env, work_dir=directory, gpus=self.gpus)
        self.store = _store(
            config,
            config.model_store,
            formats=formats,
            trusted=[f"{url}/" for url in repositories_in_s3(config)],
            copies=directory / "downloads",
            environ=config.environment,
        )
        loader = ModelLoader(
            self.store,
            formats,
            ModelFactory(
                config,
                supervisor,
                env,
                self.registry.changes,
                self._metrics,
                tracing,
                self.calls.answer,
                caches,
                find=self.registry.get,
                limits=self._limits,
            ),
            supervisor,
            partial(settings_of, config),
            _environments(config),
            work_dir=directory,
            extract_limits=extract_limits(config),
        )
        self.manager = ModelManager(
            self.registry,
            loader,
            model_api=config.model_api_enabled,
            unregister_timeout_s=config.unregister_model_timeout,
            on_change=self._changed,
            demand=Demand(limit, measure_of(self._gpus) if limit.gpus else processes_memory),
            admission=Admission(config.registered_memory_max, lambda: [model.pool for model in self.registry]),
            frontends=config.frontends,
        )
        if config.shared_snapshot is not None and config.dev_model is None:
            self._share(config.shared_snapshot)
        self.rollouts = Rollouts(self.manager, self._metrics.host)

    def _build_services(self, directory: Path, supervisor: Supervisor) -> None:
        config = self._config
        self.workflows = WorkflowManager(
            self.manager,
            self.store,
            _store(
                config, config.workflow_store, missing="Workflow not found in workflow store", place="workflow store"
            ),
            work_dir=directory,
            extract_limits=extract_limits(config),
            unregister_timeout_s=config.unregister_model_timeout,
            on_change=self.recorder.changed,
        )
        self.repository = Repository(
            self.manager,
            [path for path in config.model_repository if bucket_of(path) is None],
            config.model_control_mode,
            config.repository_poll_secs,
            config.default_workers_per_model or max(self.gpus, 1),
            repositories_in_s3(config),
            loads_at_once_max=config.loads_at_once_max,
        )
        self.health = Health(
            self.registry,
            SERVICES,
            strict=config.strict_readiness,
            troubles=lambda: () if self.sharing is None else self.sharing.failures,
            cluster=supervisor.cluster.bridge.state if supervisor.cluster is not None else None,
        )

    def _gather(self, tracing: Traces | None) -> None:
        metrics, gpus = self._metrics, self._gpus
        metrics.examples = partial(examples_of, self.registry)
        metrics.gather(ServedModels(self.registry, metrics.host).families, always=True)
        metrics.gather(ServerState(self.health, metrics.host).families, always=True)
        metrics.gather(self.rollouts.families, always=True)
        metrics.gather(lambda: gpu_families(gpus.loads, metrics.host), always=True)
        on_demand = OnDemandMetrics(self.manager.demand, metrics.host)
        metrics.gather(lambda: on_demand.families(self.registry), always=True)
        metrics.gather(lambda: compatible_families(self.registry, metrics))
        limits = self._limits
        if limits is not None:
            metrics.gather(lambda: client_families(limits, metrics.host), always=True)
        if tracing is not None:
            metrics.gather(tracing.families, always=True)

    def _watches(self, authorization: Authorization | None) -> Iterator[tuple[Callable[[], Awaitable[None]], str]]:
        config = self._config
        yield self.repository.watch, "The watch over the model repositories"
        yield self.manager.demand.watch, "The watch over models on demand"
        yield self.rollouts.watch, "The watch over rollouts"
        if self.sharing is not None:
            yield self.sharing.watch, "The watch over the shared snapshot"
        if config.dev_model is not None:
            addresses, console = self.listeners.addresses, config.enable_console
            reloading = Reloading(self.manager, config.dev_model, addresses, console=console)
            yield reloading.watch, "The watch over the model of torchserve dev"
        sampling = (
            None
            if config.frontend
            else system_metrics(config, self._metrics, self._gpus, worker_env(config), self._worker_pids)
        )
        if sampling is not None:
            yield sampling.run, "The sampling of system metrics"
        if authorization is not None:
            yield partial(authorization.watch, config.token_reload_interval_s), "The watch over the keys"
        if self._limits is not None:
            yield self._limits.watch, "The watch over the limits of clients"
        if self._fleet is not None:
            yield self._fleet.watch, "The watch over the servers that divide limits"

    def _changed(self) -> None:
        self.recorder.changed()
        if self.sharing is not None:
            self.sharing.changed()
        if self.lead is not None:
            self.lead.changed()

    def _share(self, place: Path) -> None:
        config, metrics = self._config, self._metrics
        poll_s, at_once_max = config.shared_snapshot_poll_secs, config.loads_at_once_max
        self.sharing = sharing = SharedSnapshot(shared_place(place), self.manager, poll_s, at_once_max)
        self.manager.standing = sharing.standing
        metrics.gather(lambda: [shared_snapshot_family(len(sharing.failures), metrics.host)], always=True)

    def _worker_pids(self) -> list[int]:
        return [
            pid
            for model in self.registry
            for slot in model.pool.slots
            if slot.worker is not None
            for pid in slot.worker.pids
        ]


class Server:
    """One server, made from its configuration. `run` starts, serves and drains. `launcher`: starts its workers (None:
    chosen by the configuration); `clock`: for its pauses; `forkserver`: the first one, if it was started already;
    `left_sockets`: those that the server which it replaces has left, or that the lead has made; `keeper`, `sibling`: as
    of `Parts`."""

    def __init__(
        self,
        config: ServerConfig,
        logs: Logs,
        launcher: Launcher | None = None,
        clock: Clock | None = None,
        forkserver: StartedForkserver | None = None,
        left_sockets: Mapping[str, Sequence[int]] = MappingProxyType({}),
        keeper: Keeper | None = None,
        sibling: Sibling | None = None,
    ) -> None:
        self.config = config
        self._logs = logs
        self._launcher = launcher
        self._clock = clock or Clock()
        self._forkserver = forkserver
        self._left_sockets = left_sockets
        self._keeper, self._sibling = keeper, sibling
        #: What it leaves to the server that replaces it in this process; None unless one is to.
        self.left: dict[str, Any] | None = None
        self._metrics = open_metrics(config, logs)
        self._stop = asyncio.Event()
        #: From now on a stop drains; before that there are no requests to lose.
        self.serving = False

    def stop(self, *, leave: bool = False) -> None:
        """Asks `run` to drain and return; a second call does nothing. `leave`: to a server that replaces it in this
        process, which gets its sockets, where new clients wait, and its forkserver."""
        if leave and not self._stop.is_set():
            self.left = {}
        self._stop.set()

    async def run(self, on_ready: OnReady, progress: Callable[[str], None]) -> None:
        """Starts, serves until `stop()`, drains. `on_ready` gets the listening addresses by name and the warnings of
        the start, `progress` gets the steps of the start.

        A stop during the start is obeyed at once, and `on_ready` isn't called then.
        Raises OSError (an address is taken), StartRefused or ValueError with the reason when it can't start.
        """
        life = owned(self._live(on_ready, progress))
        stop = owned(self._stop.wait())
        try:
            await asyncio.wait({life, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not self.serving and not life.done():
                log.info("Stopped during the start: the models that are loading are dropped.")
                life.cancel()
            await asyncio.wait({life})
        finally:
            stop.cancel()
            life.cancel()
            await asyncio.wait({life})  # also if this is cancelled: its files on disk are removed
        if not life.cancelled():
            life.result()

    async def _live(self, on_ready: OnReady, progress: Callable[[str], None]) -> None:
        async with self.parts() as parts:
            warnings = await self._startup(parts, progress)
            try:
                await self._serve(parts, lambda: on_ready(parts.listeners.addresses(), warnings))
                await self._drain(parts)
            except asyncio.CancelledError:
                # Running requests are answered UNAVAILABLE, nothing listens any more.
                await parts.listeners.serving.drain(0.0)
                raise

    @contextlib.asynccontextmanager
    async def parts(self, *, serving: bool = True) -> AsyncIterator[Parts]:
        """All parts, with the forkserver started, as long as the block runs. Without `serving` they only try
        models: no keys are made, and nothing is traced."""
        config = self.config
        if config.bypass_serve:
            log.warning("%s", BYPASSED)
        keys = self._authorized() if serving else contextlib.nullcontext()
        caches = open_caches(config)
        lead: Lead | None = None
        with work_dir(config.temp_dir) as directory, keys as authorization:
            limits = open_limits(config, authorization) if serving else None
            fleet = open_fleet(config, limits)
            supervisor, tracing = await self._supervisor(directory), None
            try:
                await supervisor.start()
                watched(
                    asyncio.to_thread(remove_abandoned, config.temp_dir), "The removal of killed servers' directories"
                )
                tracing = open_tracing(config) if serving else None  # its threads must start after the forkserver
                parts = Parts(
                    config,
                    self._logs,
                    self._metrics,
                    tracing,
                    authorization,
                    supervisor,
                    directory,
                    caches,
                    limits,
                    fleet,
                    self._left_sockets,
                    self._keeper,
                    self._sibling,
                )
                lead = parts.lead
                yield parts
            finally:
                if lead is not None:
                    await lead.close()
                if self._sibling is not None:
                    await self._sibling.close()
                if fleet is not None:
                    await fleet.close()
                forkserver = await supervisor.close(leave_forkserver=self.left is not None)
                if self.left is not None:
                    self.left["forkserver"] = forkserver
                await caches.close()
                if tracing is not None:
                    await tracing.close()
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)  # signals are obeyed meanwhile

    @contextlib.contextmanager
    def _authorized(self) -> Iterator[Authorization | None]:
        """The keys that calls need, while the block runs; None if they need none. The log gives the reason."""
        config = self.config
        sibling = self._sibling
        authorization = open_authorization(config, config.key_dir) if sibling is None else sibling.authorization()
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

    async def _supervisor(self, directory: Path) -> Supervisor:
        config = self.config
        inventory = await find_accelerators(config.number_of_gpu, sys.platform, platform.machine())
        env = worker_env(config)
        cluster: ClusterLauncher | None = None
        if config.ray_address and not config.debugging:
            metrics_config = str(config.metrics_config or "")
            listen = config.ray_worker_host or "", config.ray_worker_port
            cluster = ClusterLauncher(config.ray_address, env, listen, metrics_config, spares=config.ray_spares)
        log.info("Number of GPUs: %s", inventory.count)
        return Supervisor(
            env,
            work_dir=directory,
            first_worker_id=config.initial_worker_port,
            first_distribution_id=config.initial_distribution_port,
            fork=config.worker_start == "fork",
            preload_torch=config.preload_torch,
            forkserver=self._forkserver,
            in_process=config.bypass_serve,
            inventory=inventory,
            on_line=ModelLog(self._logs, self._metrics).line,
            launcher=self._launcher,
            clock=self._clock,
            cluster=cluster,
            frontend=config.frontend,
            frontends=config.frontends,
        )

    # --- lifecycle

    async def _startup(self, parts: Parts, progress: Callable[[str], None]) -> list[str]:
        """Loads the models and workflows of the start, then listens. Returns warnings, also of models that failed."""
        config, manager = self.config, parts.manager
        parts.listeners.check_addresses()
        if not is_compiled():
            log.info("Pure Python: the compiled form takes less CPU time for each request (docs/performance.md).")
        missing = missing_torch(config)
        for warning in missing:
            log.warning("%s", warning)

        async def restore(snapshot: Snapshot) -> list[str]:
            return await restore_workflows(snapshot.workflows, parts.workflows, config.loads_at_once_max)

        try:
            failures = await load_at_startup(config, manager, parts.store, restore, parts.gpus, progress)
            if parts.sharing is not None:
                progress("taking the models of the shared snapshot")
                failures += await parts.sharing.join()
            parts.calls.attach(parts.repository)
            failures += await parts.repository.start(config.load_model)
            if failures and config.exit_on_error:
                raise StartRefused("\n".join((*failures, "exit_on_error is on")))
            if self._sibling is not None:
                await self._sibling.join(manager, parts.repository, self._metrics)
        except BaseException:
            await manager.tasks.close(0.0)
            raise
        parts.rollouts.restore({} if config.snapshot is None else config.snapshot.rollouts)
        self.serving = True
        await parts.listeners.serving.start()
        if parts.lead is not None:
            progress("starting the other frontends")
            await parts.lead.start(parts.listeners.serving.another, parts.listeners.serving.own_ports())
        parts.recorder.attach(manager, lambda: states_of(parts.workflows), config.snapshot, parts.rollouts.states)
        await parts.recorder.write(SnapshotKind.STARTUP)
        return [*restored(config.snapshot, manager), *failures, *missing]

    async def _serve(self, parts: Parts, on_ready: Callable[[], None]) -> None:
        loops = [kept(loop, subject) for loop, subject in parts.loops]
        _tune_garbage_collection()
        on_ready()
        stop = owned(self._stop.wait())
        ended = owned(parts.listeners.serving.wait())
        done, _ = await asyncio.wait({stop, ended}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stop, *loops):
            task.cancel()
        if ended in done:
            ended.result()
            raise RuntimeError("The listeners ended unexpectedly")
        ended.cancel()

    async def _drain(self, parts: Parts) -> None:
        """Reports that the server is no longer ready, answers the accepted requests, and ends the models."""
        config = self.config
        if self.left is not None:
            self.left["sockets"] = parts.listeners.serving.leave()
        parts.health.drain()
        if parts.lead is not None:
            parts.lead.drain()
        if config.drain_grace_s and self.left is None:
            log.info("No longer ready; serving for %g s, until clients are routed elsewhere.", config.drain_grace_s)
            await self._clock.pause(config.drain_grace_s, asyncio.Event())
        log.info("Draining: accepted requests are answered within %g s.", config.drain_timeout_s)
        latest_s = time.monotonic() + config.drain_timeout_s
        for model in parts.registry:
            model.give_up_waiting("was to end with the server")
        parts.manager.tasks.end_loads()
        await parts.listeners.serving.drain(config.drain_timeout_s)
        front = parts.lead or self._sibling
        if front is not None:
            await front.drained()
        if parts.sharing is not None:
            await parts.sharing.close()
        await parts.recorder.close()
        await parts.manager.close(max(0.0, latest_s - time.monotonic()))


# --- parts and their settings


def _with_redis(setting: str, make: Callable[[], Made]) -> Made:
    """What `make` makes with the Redis that `setting` names. Raises ConfigError if it can't."""
    if not is_installed():
        raise ConfigError(f"{setting} is set, and needs the package redis: pip install torchrelay[redis]")
    try:
        return make()
    except ValueError as error:
        raise ConfigError(f"{setting} is no URL of Redis (redis://HOST:PORT): {error}") from None


def open_caches(config: ServerConfig) -> Caches:
    """The places for kept answers. Raises ConfigError if one of them needs a package that isn't there."""
    url = config.response_cache_redis
    remote = _with_redis("response_cache_redis", lambda: RemoteAnswers(url)) if url else None
    return Caches(config.response_cache_size, remote)


def open_limits(config: ServerConfig, authorization: Authorization | None) -> Limits | None:
    """The limits of clients; None without any. Raises ConfigError if the file can't be used."""
    if config.limits_file is None:
        return None

    def is_key(value: bytes) -> bool:
        kinds = (KeyKind.INFERENCE, KeyKind.MANAGEMENT)
        return authorization is not None and any(authorization.opens(kind, [value]) for kind in kinds)

    limits = Limits(config.limits_file, is_key)
    if config.frontends > 1 and not config.limits_redis:
        limits.servers = config.frontends
        limits.change()
    return limits


def open_fleet(config: ServerConfig, limits: Limits | None) -> Fleet | None:
    """The servers that divide the limits; None for one alone. Raises ConfigError."""
    url = config.limits_redis
    return _with_redis("limits_redis", lambda: Fleet(limits, url)) if limits is not None and url else None


def _recorder(config: ServerConfig) -> SnapshotRecorder:
    files = None if config.ncs else SnapshotFiles(config.snapshot_dir, config.snapshots_kept_max)
    return SnapshotRecorder(files, snapshot_settings(config))


def _store(config: ServerConfig, directory: Path | None, **more: Any) -> ModelStore:
    """`more`: as of `ModelStore`."""
    return ModelStore(directory, config.allowed_urls, limits=limits_of(config), **more)


def _environments(config: ServerConfig) -> Environments:
    store = EnvironmentStore(config.environments_path, config.environments_kept_max)
    return Environments(store, install=config.install_py_dep_per_model, timeout_s=config.install_timeout_s)


def extract_limits(config: ServerConfig) -> ExtractLimits:
    return ExtractLimits(
        bytes_max=config.extract_bytes_max, files_max=config.extract_files_max, ratio_max=config.extract_ratio_max
    )


def repositories_in_s3(config: ServerConfig) -> list[str]:
    return [url for path in config.model_repository if (url := bucket_of(path))]


def _tune_garbage_collection() -> None:
    """Exempts all objects of the start from garbage collection, and makes it rarer for others. Requests make no
    reference cycles, and a full collection would delay a request by about 10 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
