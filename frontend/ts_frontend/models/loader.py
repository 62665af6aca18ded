"""Makes models of fetched archives, with their queues, pools, worker start parameters and environments, and removes
them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ts_frontend.caching.cache import DECOUPLED, LANGUAGE, Asker, Caches, ModelCache
from ts_frontend.config.files import read_text
from ts_frontend.config.kinds import no_effect
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import InvalidArchive, ServeError
from ts_frontend.graphs.graph import Ensemble, Runs
from ts_frontend.graphs.inference_graph import InferenceGraph
from ts_frontend.job import FedJob, Job, Ledger
from ts_frontend.limits.limits import Limits, ModelLimits
from ts_frontend.models.archive import Archive, ExtractLimits
from ts_frontend.models.ensembles import EnsembleRequests, Find, GraphRequests, checked_signature, trouble_of
from ts_frontend.models.environments import Environment, Environments
from ts_frontend.models.formats.formats import Formats
from ts_frontend.models.inspection import SUFFIXES, how_to_serve, may_need_torch
from ts_frontend.models.model import NO_WORKER, CountedBatches, Model
from ts_frontend.models.settings import (
    LANGUAGE_MODEL,
    ModelSettings,
    Requested,
    Signature,
    model_name_for,
    resolve,
    signature_of,
)
from ts_frontend.models.store.store import Fetched, ModelStore
from ts_frontend.scheduling.batcher import Policy, Priorities, Repeats
from ts_frontend.scheduling.queues import (
    JobQueue,
    PriorityJobFactory,
    PriorityQueue,
    SequenceJobFactory,
    SequenceQueue,
    TicketQueue,
    WorkQueue,
    sequence_headers,
)
from ts_frontend.scheduling.sequences import SequenceLimits
from ts_frontend.tasks import Notifier, in_thread, undone_on_failure
from ts_frontend.telemetry.metrics.registry import MetricsRegistry
from ts_frontend.workers.calls import Answer
from ts_frontend.workers.cluster.resources import ClusterRequest
from ts_frontend.workers.pool import NO_LIMITS, Pool
from ts_frontend.workers.process import ProcessSpec, Sharing, TorchrunGroup, WorkerPlan
from ts_frontend.workers.resources import CPU_DEVICE, Place, RateLimiter, WorkerLimits, usable_ids
from ts_frontend.workers.supervisor import PoolScaler, Supervisor

if TYPE_CHECKING:
    from ts_frontend.telemetry.tracing.spans import Traces

log = logging.getLogger(__name__)


#: Room in a message to a worker for names, headers and ids, besides the payload.
MESSAGE_OVERHEAD_BYTES = 1 << 20
#: A debugger may halt a handler for any length of time.
DEBUG_TIMEOUT_S = 1e8


@dataclass(eq=False)
class ModelFactory:
    """Makes `Model`s. `worker_env`: the workers' environment; `answer`: answers calls of handlers; `find`: finds the
    models of an ensemble's steps."""

    config: ServerConfig
    supervisor: Supervisor
    worker_env: Mapping[str, str]
    changes: Notifier
    metrics: MetricsRegistry
    tracing: Traces | None = None
    answer: Answer | None = None
    caches: Caches | None = None
    limits: Limits | None = None
    find: Find = lambda name, version: None

    def __post_init__(self) -> None:
        self._rate_limiter = RateLimiter(self.config.rate_limit_resources) if self.config.rate_limit != "off" else None

    def model(
        self,
        name: str,
        version: str,
        url: str,
        archive: Archive,
        settings: ModelSettings,
        requested: Requested,
        *,
        python: str,
        loaded_at_startup: bool,
        with_torch: bool = True,
        content: bytes = b"",
        by_dialect: bool = False,
    ) -> Model:
        """A model without workers yet; InvalidArchive when it has no handler. `python`: its interpreter, "" for the
        server's; `with_torch`: its workers may need torch; `content`: the digest of its files, for the cache;
        `by_dialect`: as its format says."""
        config = self.config
        handler = self._handler(archive, settings)
        if not handler and archive.graph is None:
            if told := _pickle_in(archive.dir):
                raise InvalidArchive(f"Archive of model {name} names no handler. {told}")
            raise InvalidArchive(
                f"Archive of model {name} names no handler, and default_service_handler is not set. "
                "torch-model-archiver --handler packs one; `torchserve dev` serves a handler's file as it is"
            )
        divided = self._divided(settings, archive)
        at_lead = bool(config.frontend) and not divided
        if at_lead:
            settings = replace(settings, autoscale=None, demand=None, use_job_ticket=False, batch_size=1)
        self._check_devices(name, settings)
        settings = self._with_device_warnings(name, version, settings)
        if config.bypass_serve and (python or settings.torchrun is not None):
            raise InvalidArchive(
                f"Model {name} needs processes of its own (useVenv, requirements or torchrun), and with bypass_serve "
                "handlers run inside the server's"
            )
        signature = archive.signature or signature_of(archive.config)
        if archive.graph is not None:
            settings = replace(settings, min_workers=0, max_workers=0, batch_size=1, demand=None, autoscale=None)
            signature = checked_signature(archive.graph, signature, name, self.find, starting=loaded_at_startup)
        cache, settings = self._cache(
            Asker(name, version, frozenset(), dialects=not by_dialect, mark=content), settings, signature
        )
        limits = None if self.limits is None else self.limits.of(name)
        queue = self._queue(name, settings, archive.priorities, limits, stateful=settings.stateful and not at_lead)
        metrics = self.metrics.model(name, version)
        counted = CountedBatches(metrics.batches if limits is None else limits.measuring(metrics.batches))
        pool = self.supervisor.pool(
            f"{name}_{version}",
            self._plan(name, version, handler, archive, settings, signature, python, with_torch, counted),
            queue,
            device_type=settings.device_type,
            device_ids=tuple(settings.device_ids),
            level=settings.parallel_level,
            give_up_s=settings.max_retry_timeout_s,
            restart_delay_s_max=self.config.restart_delay_s_max,
            on_change=self.changes.notify,
        )
        make_job: Callable[..., Job] = Job
        make_fed: Callable[..., Job] = FedJob
        if isinstance(queue, SequenceQueue):
            make_job = SequenceJobFactory(queue, settings.sequence_start_required)
        if archive.priorities is not None and isinstance(queue, PriorityQueue):
            make_job = PriorityJobFactory(archive.priorities)
        graph, steps = self._graph(name, version, archive.graph, signature, counted)
        if graph is not None:
            pool.leave_to_others(lambda: not graph.trouble())
        guests: Ledger | None = None
        share: Callable[[int], int] | None = None
        if config.frontends > 1 and graph is None:
            guests, share = Ledger(), partial(share_of, config.frontend, config.frontends if divided else 1)
            pool.frontends = config.frontends if divided else 1
            if limits is not None:
                limits.follow(guests)
        tracing = self.tracing
        ledger = Ledger() if tracing is None else tracing.ledger(name, version)
        if limits is not None:
            limits.follow(ledger)
            make_job, make_fed = limits.jobs(make_job), limits.jobs(make_fed)
        model = Model(
            name,
            version,
            url,
            archive,
            settings,
            requested,
            queue,
            pool,
            metrics,
            signature=signature,
            counted=counted,
            response_bytes_max=config.max_response_size,
            loaded_at_startup=loaded_at_startup,
            new_job=make_job if tracing is None else tracing.jobs(make_job, name),
            new_fed=make_fed,
            ledger=ledger,
            scaler=self._scaler(pool, settings),
            cache=cache,
            graph=graph,
            steps=steps,
            share=share,
            guests=guests,
        )
        if limits is not None:
            limits.tells_tokens = lambda: model.openai is not None and model.openai.speaks
        return model

    def _divided(self, settings: ModelSettings, archive: Archive) -> bool:
        """Whether the model's workers are divided among the frontends. Otherwise the lead has all of them: what decides
        about workers, or about the requests of one, must see all."""
        single = settings.autoscale, settings.demand, settings.torchrun, settings.cluster, self._rate_limiter
        alone = settings.stateful or settings.use_job_ticket or settings.share_weights or settings.continuous_batching
        return not alone and all(one is None for one in single) and not archive.needs

    def _graph(
        self,
        name: str,
        version: str,
        graph: Ensemble | InferenceGraph | None,
        signature: Signature,
        counted: CountedBatches,
    ) -> tuple[Runs | None, Sequence[tuple[str, str]]]:
        """What runs the requests of a graph, and its models; None for a model with a handler."""

        def record(job: Job, waited_s: float, worked_s: float) -> None:
            counted.answered([job], waited_s, worked_s, time.monotonic())

        if graph is None:
            return None, ()
        if isinstance(graph, InferenceGraph):
            answer = GraphRequests(name, graph, self.find, record).answer
        else:
            answer = EnsembleRequests(name, version, graph, signature, self.find, record).answer
        steps = dict.fromkeys((model, named) for _, model, named in graph.models)
        return Runs(f"{graph.what} {name}", answer, partial(trouble_of, graph, self.find)), tuple(steps)

    def _cache(
        self, asker: Asker, settings: ModelSettings, signature: Signature
    ) -> tuple[ModelCache | None, ModelSettings]:
        """The cache, None if the model has none. The settings get a warning if it asks for one that it can't have."""
        rule = settings.cache
        if rule is None:
            return None, settings
        if self.caches is None or not self.caches.keep:
            why = "response_cache_size is 0, and there is no response_cache_redis"
        elif signature.platform == LANGUAGE_MODEL:
            why = LANGUAGE
        elif signature.decoupled:
            why = DECOUPLED
        else:
            asker = asker._replace(headers=rule.headers, decodes=self.config.decode_input_request)
            return self.caches.of(asker, rule), settings
        warning = f"cache has no effect: {why}"
        log.warning("Model %s %s: %s", asker.model, asker.version, warning)
        return None, replace(settings, warnings=(*settings.warnings, warning))

    @property
    def shares_answers(self) -> bool:
        """Whether other servers get the answers that caches keep."""
        return self.caches is not None and self.caches.remote is not None

    def _scaler(self, pool: Pool, settings: ModelSettings) -> PoolScaler | None:
        rule = settings.autoscale
        if rule is None or self.config.bypass_serve or self.config.debugging:
            return None
        return self.supervisor.scaler(pool, rule, settings.batch_size)

    def _handler(self, archive: Archive, settings: ModelSettings) -> str:
        return settings.handler or archive.handler or self.config.default_service_handler or ""

    def may_need_torch(self, archive: Archive, settings: ModelSettings) -> bool:
        """Whether the handler may import torch; an archive with an adapter says so itself. Blocking."""
        if archive.adapter:
            return archive.adapter_settings.get("torch") is not False
        if settings.envelope:
            return True
        return may_need_torch(archive.dir, self._handler(archive, settings))

    def _queue(
        self,
        name: str,
        settings: ModelSettings,
        priorities: Priorities | None,
        limits: ModelLimits | None,
        *,
        stateful: bool,
    ) -> WorkQueue:
        refusal = NO_WORKER.format(name=name)
        if stateful:
            sequences = self._limits(settings)
            fair = None if limits is None else limits.sequences(sequences)
            return SequenceQueue(sequences, sequence_headers(self.config), refusal, fair)
        policy = self._policy(settings)
        if limits is not None and (priorities is not None or not settings.use_job_ticket):
            return limits.queue(policy, priorities)
        if priorities is not None:
            return PriorityQueue(policy, priorities)
        return TicketQueue(policy, refusal) if settings.use_job_ticket else JobQueue(policy)

    def reschedule(self, model: Model, settings: ModelSettings) -> None:
        if isinstance(model.queue, SequenceQueue):
            model.queue.limits = self._limits(settings)
        elif isinstance(model.queue, JobQueue):
            model.queue.policy = self._policy(settings)

    def _limits(self, settings: ModelSettings) -> SequenceLimits:
        policy = self._policy(settings)
        return SequenceLimits(
            sequences_max=settings.max_num_sequence,
            worker_max=settings.max_sequences_per_worker,
            told_start=settings.sequence_start_required,
            jobs_max=settings.max_sequence_job_queue_size,
            idle_s=settings.sequence_max_idle_ms / 1000,
            life_s=settings.sequence_timeout_ms / 1000 or math.inf,
            batch_size=policy.batch_size,
            delay_s=policy.delay_s,
            lone_waits=policy.lone_waits,
            jobs_alone_max=policy.jobs_max,
            overlap=settings.continuous_batching,
        )

    def _policy(self, settings: ModelSettings) -> Policy:
        """A continuous batch is formed in the worker: its requests are sent one by one."""
        continuous = settings.continuous_batching
        delay_s = settings.max_batch_delay_ms / 1000 if settings.max_batch_delay_set and not continuous else 0.0
        return Policy(
            batch_size=1 if continuous else settings.batch_size,
            delay_s=delay_s,
            lone_waits=self.config.lone_requests_wait,
            jobs_max=settings.job_queue_size,
            bytes_max=self.config.job_queue_bytes_max,
        )

    def _plan(
        self,
        name: str,
        version: str,
        handler: str,
        archive: Archive,
        settings: ModelSettings,
        signature: Signature,
        python: str,
        with_torch: bool,
        recorder: CountedBatches,
    ) -> WorkerPlan:
        config = self.config
        return WorkerPlan(
            spec=self._spec(f"{name}_{version}", settings, archive, python, with_torch),
            load=self._load(name, version, handler, archive, settings, signature),
            startup_timeout_s=DEBUG_TIMEOUT_S if config.debugging else settings.startup_timeout_s,
            response_timeout_s=DEBUG_TIMEOUT_S if config.debugging else settings.response_timeout_s,
            workers_max=1 if config.debugging else None,
            in_process=config.bypass_serve,
            message_bytes_max=max(config.max_request_size, config.max_response_size) * settings.batch_size
            + MESSAGE_OVERHEAD_BYTES,
            max_concurrency=settings.batch_size if settings.continuous_batching else settings.max_concurrency,
            neighbour_grace_s=config.worker_kill_grace_s,
            recorder=recorder,
            answer=self.answer,
            on_response=recorder.responses.response,
            on_spent=recorder.spent,
            decoupled=signature.decoupled,
            limits=NO_LIMITS if config.bypass_serve else self._limits_of_workers(settings),
            repeats=Repeats() if settings.idempotent else None,
            sharing=self._sharing(f"{name}_{version}", archive, settings),
            files=None if archive.packed is None else archive.packed.needed,
            ends_alone=signature.platform == LANGUAGE_MODEL,
            place=self._place(name, version, archive, settings),
        )

    def _place(
        self, name: str, version: str, archive: Archive, settings: ModelSettings
    ) -> Callable[[int | None, Callable[[], None]], Place] | None:
        """What gives a worker its place in the rate limiter; None if it has none. Raises InvalidArchive."""
        if not archive.needs:
            return None
        if self._rate_limiter is None:
            log.warning("%s", no_effect("rate_limiter", f"model {name} {version}", "rate_limit is off"))
            return None
        if len(archive.needs) > 1:
            raise InvalidArchive(
                f"Model {name}: its instance groups differ in rate_limiter; with rate_limit=execution_count all "
                "workers of a model need the same resources"
            )
        (needs,) = archive.needs
        devices = self.supervisor.placement.usable(settings.device_type, settings.device_ids) or [CPU_DEVICE]
        if why := self._rate_limiter.missing(needs, devices):
            raise InvalidArchive(f"Model {name} could never run: {why} (rate_limit_resources)")
        return partial(self._rate_limiter.place, needs)

    def _sharing(self, name: str, archive: Archive, settings: ModelSettings) -> Sharing:
        if not settings.share_weights and self.config.dev_model is None:
            return Sharing()
        refusal = ""
        if sys.platform != "linux":
            refusal = "it needs Linux"
        elif self.config.bypass_serve:
            refusal = "bypass_serve runs the handler inside the server's process"
        elif settings.cluster is not None:
            refusal = "Ray places each of its workers by itself"
        elif settings.torchrun is not None:
            refusal = "torchrun starts the processes of its workers"
        elif archive.adapter:
            refusal = "only TorchServe handlers support it"
        elif self.supervisor.placement.usable(settings.device_type, settings.device_ids):
            refusal = "its workers are on GPUs, whose memory processes can't share by forking (deviceType: cpu)"
        if refusal and settings.share_weights:
            log.warning("%s: shareWeights has no effect, each worker loads the model: %s", name, refusal)
        return Sharing(True, refusal)

    def _limits_of_workers(self, settings: ModelSettings) -> WorkerLimits:
        return WorkerLimits(
            requests=settings.recycle_after_requests,
            memory_bytes=settings.recycle_above_bytes,
            memory_bytes_max=settings.worker_memory_bytes_max,
        )

    def _check_devices(self, name: str, settings: ModelSettings) -> None:
        if settings.cluster is not None:
            return
        usable = len(self.supervisor.placement.usable(settings.device_type, settings.device_ids))
        if 0 < usable < settings.parallel_level:
            raise InvalidArchive(
                f"Each worker of model {name} needs {settings.parallel_level} GPUs (parallelLevel, or torchrun's "
                f"nproc-per-node), and it may use {usable}: check deviceIds and number_of_gpu, or set deviceType: cpu"
            )

    def _with_device_warnings(self, name: str, version: str, settings: ModelSettings) -> ModelSettings:
        """The settings, with a warning if they ask for GPUs that aren't there."""
        count, ids = self.supervisor.placement.inventory.count, list(settings.device_ids)
        found = ""
        if settings.cluster is not None or settings.device_type == "cpu":
            return settings
        if not count and (settings.device_type == "gpu" or ids):
            asks = "deviceType is 'gpu'" if settings.device_type == "gpu" else f"deviceIds is {ids}"
            found = f"{asks}, and the server has no GPU: its workers run on the CPU. `torchserve doctor` says why"
        elif count and ids and not usable_ids(ids, count):
            found = f"deviceIds is {ids}: ignored, all GPUs are used: the server has {count}, numbered from 0"
        if not found:
            return settings
        log.warning("Model %s %s: %s", name, version, found)
        return replace(settings, warnings=(*settings.warnings, found))

    def _spec(self, name: str, settings: ModelSettings, archive: Archive, python: str, with_torch: bool) -> ProcessSpec:
        torchrun = settings.torchrun
        if settings.cluster is not None:
            return ProcessSpec(name, {}, cwd=str(archive.dir), cluster=self._request(settings, archive))
        if torchrun is None:
            return ProcessSpec(name, self.worker_env, python, str(archive.dir), with_torch=with_torch)
        words = torchrun.words(self.config.log_location.absolute() / "torchelastic_ts")
        group = TorchrunGroup(torchrun.processes, words, lockstep=settings.parallel_type != "pp")
        return ProcessSpec(name, {**self.worker_env, **torchrun.env}, python, str(archive.dir), group)

    def _request(self, settings: ModelSettings, archive: Archive) -> ClusterRequest:
        """The resources that a worker requests from Ray, with the installed packages of the archive's requirements file
        and a placement for each worker."""
        assert settings.cluster is not None
        wanted = archive.requirements_file
        install = wanted and (settings.use_venv or self.config.install_py_dep_per_model)
        packages = requirements_in(archive.dir / wanted) if wanted and install else ()
        return replace(settings.cluster, packages=packages, bundles=max(1, settings.max_workers))

    def _load(
        self, name: str, version: str, handler: str, archive: Archive, settings: ModelSettings, signature: Signature
    ) -> dict[str, Any]:
        config = self.config
        # A handler that completes its own configuration may enable batches only then.
        batch_size = 0 if archive.completed is not None else settings.batch_size
        return {
            "model_name": name,
            "model_version": version,
            "model_dir": str(archive.dir),
            "handler": handler,
            "envelope": settings.envelope,
            "batch_size": settings.batch_size,
            "continuous": settings.continuous_batching,
            "asynchronous": settings.async_communication,
            "header_keys": list(sequence_headers(config)),
            "limit_max_image_pixels": config.limit_max_image_pixels,
            "debug_errors": config.errors_explained,
            "decode_input_request": config.decode_input_request,
            "metrics_config": str(config.metrics_config) if config.metrics_config else None,
            "config_file": archive.config_file,
            "handler_settings": archive.handler_settings,
            "manifest": archive.manifest,
            "request_bytes_max": config.max_request_size,
            "response_bytes_max": config.max_response_size,
            "message_bytes_max": max(config.max_request_size * batch_size, config.max_response_size)
            + MESSAGE_OVERHEAD_BYTES
            if batch_size
            else None,
            "credit_bytes": config.stream_credit_bytes,
            "python_path": [],
            "tensors": signature.for_worker(),
            "adapter": archive.adapter,
            "adapter_settings": archive.adapter_settings,
            "threads": settings.cpu_threads or None,
            **({} if config.dev_model is None else _debugging(config)),
            "mark_lines": config.log_format == "json" and not config.bypass_serve,
        }


def share_of(frontend: int, frontends: int, workers: int) -> int:
    """The workers of a frontend, by its number."""
    return 0 if frontend >= frontends else workers // frontends + (frontend < workers % frontends)


def requirements_in(path: Path) -> tuple[str, ...]:
    """The lines of a requirements file that aren't blank or comments. Raises InvalidArchive."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArchive(f"{path.name} can't be read: {error}") from error
    stripped = (line.split(" #")[0].strip() for line in lines)
    return tuple(line for line in stripped if line and not line.startswith("#"))


def _debugging(config: ServerConfig) -> dict[str, Any]:
    terminal = os.ttyname(0) if os.isatty(0) else ""
    return {"renewable": True, "terminal": terminal, "debugpy_port": config.debugpy_port}


def _pickle_in(directory: Path) -> str:
    """What to do with the only file of Python objects in a folder, "" if there isn't one."""
    found = [one for one in directory.iterdir() if one.suffix in SUFFIXES]
    return f"{found[0].name} is {how_to_serve(found[0])}" if len(found) == 1 else ""


_DIGEST_BYTES = 32

Resolve = Callable[[Requested, Archive, str, str], ModelSettings]


def settings_of(config: ServerConfig, requested: Requested, archive: Archive, name: str, version: str) -> ModelSettings:
    entry = config.models.get(name, {}).get(version, {})
    settings = resolve(requested, archive.config or {}, entry, config, handler=archive.handler, runtime=archive.runtime)
    for warning in settings.warnings:
        log.warning("Model %s %s: %s", name, version, warning)
    if config.bypass_serve:
        settings = replace(settings, batch_size=1, max_batch_delay_set=False, demand=None)
    if config.dev_model is not None:
        settings = replace(settings, demand=None)
    if config.debugging:
        settings = replace(settings, min_workers=min(1, settings.min_workers), max_workers=min(1, settings.max_workers))
    return settings


@dataclass(eq=False)
class ModelLoader:
    """Makes models of archives, and removes them with their files and environments. `store`: their source."""

    store: ModelStore
    formats: Formats
    factory: ModelFactory
    supervisor: Supervisor
    resolve: Resolve
    environments: Environments
    _: KW_ONLY
    work_dir: Path
    extract_limits: ExtractLimits
    _fetched: dict[Model, Fetched] = field(default_factory=dict, init=False)
    _environment_of: dict[Model, Environment] = field(default_factory=dict, init=False)

    # --- archives

    async def open(self, fetched: Fetched, requested: Requested) -> Archive:
        """Opens a fetched archive, of which only the outline is unpacked until `build`. One without a name that serves
        a single model gets the model's name. Raises ServeError."""
        place = fetched.path, self.work_dir, self.extract_limits
        name, hub = requested.model_name or "", fetched.hub
        opening = partial(self.formats.open, *place, outline=True, pin=fetched.pin, name=name, hub=hub)
        async with undone_on_failure() as undo:
            archive = await in_thread(opening, Archive.remove)
            undo.push_async_callback(asyncio.to_thread, archive.remove)
            if requested.model_name:
                return archive
            found = await self.each_model(archive)
            if len(found) > 1:
                raise InvalidArchive(
                    f"{archive.dir / (archive.handler or '')} serves {', '.join(str(one.name) for one in found)}: "
                    "choose one (model_name, or NAME=URL)"
                )
            return found[0]

    async def each_model(self, archive: Archive) -> list[Archive]:
        """The archive under each of its models' names if it has several and no name; else itself. Raises ServeError."""
        return await self.formats.running(archive.adapter).named(archive)

    async def each_model_at(self, url: str) -> list[Archive]:
        """The same for an entry of the store whose files may serve several models and are used where they lie, given by
        its path in the store. [] for any other, and for a URL."""
        if "://" in url:
            return []
        fetched = await self.store.fetch(url, named=True)
        found = await asyncio.to_thread(self.formats.of, fetched.path)
        if not found.several:
            return []
        return await self.each_model(await asyncio.to_thread(self.formats.open, fetched.path, self.work_dir))

    async def unpack(self, archive: Archive) -> None:
        """Has all files of an archive there. Raises ServeError."""
        if archive.packed is not None:
            await in_thread(archive.packed.unpack, lambda nothing: None)

    async def discard(self, fetched: Fetched) -> None:
        await asyncio.to_thread(self.store.discard, fetched)

    # --- models

    async def build(
        self,
        fetched: Fetched,
        requested: Requested,
        archive: Archive | None = None,
        *,
        loaded_at_startup: bool,
        check_free: Callable[[str, str], None] | None = None,
    ) -> Model:
        """Makes a model, with its environment, of a fetched archive, which `archive` has if it is open already. No
        worker is started yet. A failure removes everything but what was fetched. `check_free` raises ServeError for a
        name and version that are taken.

        The files of a model on demand are not there before its first worker starts; those of others stay, without the
        copy of their archive that lies outside the store. Raises ServeError.
        """
        async with undone_on_failure() as undo:
            if archive is None:
                archive = await self.open(fetched, requested)
            undo.push_async_callback(asyncio.to_thread, archive.remove)
            name, packed = model_name_for(requested, archive.name, archive.version, fetched.path), archive.packed
            if check_free is not None:
                check_free(name, archive.version)
            archive = self.formats.running(archive.adapter).prepared(archive)
            settings = self.resolve(requested, archive, name, archive.version)
            if settings.demand is None or self.environments.wanted(archive, settings.use_venv):
                await self.unpack(archive)
            with_torch = await asyncio.to_thread(self.factory.may_need_torch, archive, settings)
            environment = Environment()  # in a cluster Ray makes one on each node
            if settings.cluster is None:
                environment = await self.environments.of(name, archive, settings.use_venv)
            undo.push_async_callback(self.environments.release, environment)
            model = self.factory.model(
                name,
                archive.version,
                fetched.url,
                archive,
                settings,
                requested,
                python=environment.python,
                with_torch=with_torch,
                loaded_at_startup=loaded_at_startup,
                content=await self._content(fetched, archive, settings),
                by_dialect=self.formats.running(archive.adapter).by_dialect,
            )
            self._environment_of[model], self._fetched[model] = environment, fetched
            undo.pop_all()
            undo.push_async_callback(self.remove, model)
            if archive.completed is not None or model.cache is not None:
                model.pool.on_ready = partial(self._ready, model)
            if packed is not None and settings.demand is not None:
                await asyncio.to_thread(packed.put_away)
            elif packed is not None and fetched.folder is not None:
                await self.discard(fetched)
            return model

    async def _content(self, fetched: Fetched, archive: Archive, settings: ModelSettings) -> bytes:
        """The digest of all that the model's answers depend on, b"" if they aren't kept for other servers."""
        if settings.cache is None or not self.factory.shares_answers:
            return b""
        said = (archive.config, archive.adapter, archive.adapter_settings, archive.handler_settings)
        return await asyncio.to_thread(_digest, fetched.path, repr((*said, settings.handler, settings.envelope)))

    def _ready(self, model: Model, info: Mapping[str, Any]) -> None:
        self._complete(model, info)
        model.settle_cache(info)

    def _complete(self, model: Model, info: Mapping[str, Any]) -> None:
        """Applies the configuration that a ready worker's handler has completed, from now on."""
        archive, found = model.archive, info.get("completed")
        if archive.completed is None or found is None:
            return
        try:
            archive = archive.completed(archive, found)
            settings = self.resolve(model.requested, archive, model.name, model.version)
        except ServeError as error:
            log.error("Model %s: %s", model, error.message)
            return
        self.factory.reschedule(model, settings)
        model.adopt(archive, settings)

    def fetched(self, model: Model) -> Fetched:
        return self._fetched[model]

    def set_fetched(self, model: Model, fetched: Fetched) -> None:
        """Sets the model's files from now on; a copy in the store is deleted with the model."""
        self._fetched[model] = fetched

    async def remove(self, model: Model) -> None:
        """Ends a model's workers and removes its files. A second call at the same time does nothing: the replacement
        of a model that is still starting and the start itself may both call this."""
        environment = self._environment_of.pop(model, None)
        if environment is None:
            return
        await self.supervisor.dismiss(model.pool, 0.0)
        model.forget_metrics()
        await asyncio.to_thread(model.archive.remove)
        await self.environments.release(environment)
        fetched = self._fetched.pop(model, None)
        if fetched is None:
            return
        heir = next((other for other, one in self._fetched.items() if one.path == fetched.path), None)
        if heir is None:
            await asyncio.to_thread(self.store.discard, fetched)
        elif fetched.downloaded:  # the last model that uses it removes it
            self._fetched[heir] = replace(self._fetched[heir], downloaded=True)

    async def close(self, model: Model, drain_s: float) -> None:
        """Ends a model's workers with the server, and removes the unpacked files; downloads stay."""
        await self.supervisor.dismiss(model.pool, drain_s)
        await asyncio.to_thread(model.archive.remove)


def _digest(path: Path, said: str) -> bytes:
    """The SHA-256 of a file, or of a folder's files with their names, and of a text."""
    found = hashlib.sha256(said.encode("utf-8", "surrogatepass"))
    try:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                with file.open("rb") as data:
                    own = hashlib.file_digest(data, "sha256").digest()
                name = str(file.relative_to(path)).encode("utf-8", "surrogateescape")
                found.update(hashlib.sha256(name).digest() + own)
    except OSError as error:
        log.warning("%s can't be read, so that other servers don't share the answers of this load: %s", path, error)
        return os.urandom(_DIGEST_BYTES)
    return found.digest()
