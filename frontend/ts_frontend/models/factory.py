"""Makes models with their queue, pool and worker start parameters from archives and settings."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ts_frontend.caching.cache import DECOUPLED, LANGUAGE, Caches, ModelCache
from ts_frontend.caching.questions import Asker
from ts_frontend.config.files import read_text
from ts_frontend.config.kinds import no_effect
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import InvalidArchive
from ts_frontend.graphs.ensemble import Ensemble
from ts_frontend.graphs.graph import Runs
from ts_frontend.graphs.inference_graph import InferenceGraph
from ts_frontend.job import FedJob, Job, Ledger
from ts_frontend.limits.limits import Limits, ModelLimits
from ts_frontend.models.archive import Archive
from ts_frontend.models.ensembles import EnsembleRequests, Find, checked_signature, trouble_of
from ts_frontend.models.handler_imports import may_need_torch
from ts_frontend.models.inference_graphs import GraphRequests
from ts_frontend.models.model import NO_WORKER, Model
from ts_frontend.models.pickles import SUFFIXES, how_to_serve
from ts_frontend.models.settings import ModelSettings, Requested
from ts_frontend.models.signature import LANGUAGE_MODEL, Signature, signature_of
from ts_frontend.models.statistics import CountedBatches
from ts_frontend.scheduling.batcher import Policy, Priorities, Repeats
from ts_frontend.scheduling.queues import JobQueue, PriorityJobFactory, PriorityQueue, TicketQueue, WorkQueue
from ts_frontend.scheduling.sequence_queue import SequenceJobFactory, SequenceQueue, sequence_headers
from ts_frontend.scheduling.sequences import SequenceLimits
from ts_frontend.tasks import Notifier
from ts_frontend.telemetry.metrics.registry import MetricsRegistry
from ts_frontend.workers.calls import Answer
from ts_frontend.workers.cluster.resources import ClusterRequest
from ts_frontend.workers.devices import usable_ids
from ts_frontend.workers.limits import WorkerLimits
from ts_frontend.workers.pool import NO_LIMITS, Pool
from ts_frontend.workers.process import ProcessSpec, Sharing, TorchrunGroup, WorkerPlan
from ts_frontend.workers.rate_limiter import CPU_DEVICE, Place, RateLimiter
from ts_frontend.workers.scaling import PoolScaler
from ts_frontend.workers.supervisor import Supervisor

if TYPE_CHECKING:
    from ts_frontend.telemetry.tracing.spans import Traces

log = logging.getLogger(__name__)

#: Room in a message to a worker for names, headers and ids, besides the payload.
MESSAGE_OVERHEAD_BYTES = 1 << 20
#: A debugger may halt a handler for any length of time.
DEBUG_TIMEOUT_S = 1e8


class ModelFactory:
    """Makes `Model`s. `worker_env`: the workers' environment; `answer`: answers calls of handlers; `find`: finds the
    models of an ensemble's steps."""

    def __init__(
        self,
        config: ServerConfig,
        supervisor: Supervisor,
        worker_env: Mapping[str, str],
        changes: Notifier,
        metrics: MetricsRegistry,
        tracing: Traces | None = None,
        answer: Answer | None = None,
        caches: Caches | None = None,
        limits: Limits | None = None,
        find: Find = lambda name, version: None,
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._worker_env = worker_env
        self._changes = changes
        self._metrics = metrics
        self._tracing = tracing
        self._answer = answer
        self._caches = caches
        self._client_limits = limits
        self._find = find
        self._rate_limiter = RateLimiter(config.rate_limit_resources) if config.rate_limit != "off" else None

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
        config = self._config
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
            signature = checked_signature(archive.graph, signature, name, self._find, starting=loaded_at_startup)
        cache, settings = self._cache(
            Asker(name, version, frozenset(), dialects=not by_dialect, mark=content), settings, signature
        )
        limits = None if self._client_limits is None else self._client_limits.of(name)
        queue = self._queue(name, settings, archive.priorities, limits, stateful=settings.stateful and not at_lead)
        metrics = self._metrics.model(name, version)
        counted = CountedBatches(metrics.batches if limits is None else limits.measuring(metrics.batches))
        pool = self._supervisor.pool(
            f"{name}_{version}",
            self._plan(name, version, handler, archive, settings, signature, python, with_torch, counted),
            queue,
            device_type=settings.device_type,
            device_ids=tuple(settings.device_ids),
            level=settings.parallel_level,
            give_up_s=settings.max_retry_timeout_s,
            restart_delay_s_max=self._config.restart_delay_s_max,
            on_change=self._changes.notify,
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
        tracing = self._tracing
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
            answer = GraphRequests(name, graph, self._find, record).answer
        else:
            answer = EnsembleRequests(name, version, graph, signature, self._find, record).answer
        steps = dict.fromkeys((model, named) for _, model, named in graph.models)
        return Runs(f"{graph.what} {name}", answer, partial(trouble_of, graph, self._find)), tuple(steps)

    def _cache(
        self, asker: Asker, settings: ModelSettings, signature: Signature
    ) -> tuple[ModelCache | None, ModelSettings]:
        """The cache, None if the model has none. The settings get a warning if it asks for one that it can't have."""
        rule = settings.cache
        if rule is None:
            return None, settings
        if self._caches is None or not self._caches.keep:
            why = "response_cache_size is 0, and there is no response_cache_redis"
        elif signature.platform == LANGUAGE_MODEL:
            why = LANGUAGE
        elif signature.decoupled:
            why = DECOUPLED
        else:
            asker = asker._replace(headers=rule.headers, decodes=self._config.decode_input_request)
            return self._caches.of(asker, rule), settings
        warning = f"cache has no effect: {why}"
        log.warning("Model %s %s: %s", asker.model, asker.version, warning)
        return None, replace(settings, warnings=(*settings.warnings, warning))

    @property
    def shares_answers(self) -> bool:
        """Whether other servers get the answers that caches keep."""
        return self._caches is not None and self._caches.remote is not None

    def _scaler(self, pool: Pool, settings: ModelSettings) -> PoolScaler | None:
        rule = settings.autoscale
        if rule is None or self._config.bypass_serve or self._config.debugging:
            return None
        return self._supervisor.scaler(pool, rule, settings.batch_size)

    def _handler(self, archive: Archive, settings: ModelSettings) -> str:
        return settings.handler or archive.handler or self._config.default_service_handler or ""

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
            return SequenceQueue(sequences, sequence_headers(self._config), refusal, fair)
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
            lone_waits=self._config.lone_requests_wait,
            jobs_max=settings.job_queue_size,
            bytes_max=self._config.job_queue_bytes_max,
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
        config = self._config
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
            answer=self._answer,
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
        devices = self._supervisor.placement.usable(settings.device_type, settings.device_ids) or [CPU_DEVICE]
        if why := self._rate_limiter.missing(needs, devices):
            raise InvalidArchive(f"Model {name} could never run: {why} (rate_limit_resources)")
        return partial(self._rate_limiter.place, needs)

    def _sharing(self, name: str, archive: Archive, settings: ModelSettings) -> Sharing:
        if not settings.share_weights and self._config.dev_model is None:
            return Sharing()
        refusal = ""
        if sys.platform != "linux":
            refusal = "it needs Linux"
        elif self._config.bypass_serve:
            refusal = "bypass_serve runs the handler inside the server's process"
        elif settings.cluster is not None:
            refusal = "Ray places each of its workers by itself"
        elif settings.torchrun is not None:
            refusal = "torchrun starts the processes of its workers"
        elif archive.adapter:
            refusal = "only TorchServe handlers support it"
        elif self._supervisor.placement.usable(settings.device_type, settings.device_ids):
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
        usable = len(self._supervisor.placement.usable(settings.device_type, settings.device_ids))
        if 0 < usable < settings.parallel_level:
            raise InvalidArchive(
                f"Each worker of model {name} needs {settings.parallel_level} GPUs (parallelLevel, or torchrun's "
                f"nproc-per-node), and it may use {usable}: check deviceIds and number_of_gpu, or set deviceType: cpu"
            )

    def _with_device_warnings(self, name: str, version: str, settings: ModelSettings) -> ModelSettings:
        """The settings, with a warning if they ask for GPUs that aren't there."""
        count, ids = self._supervisor.placement.inventory.count, list(settings.device_ids)
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
            return ProcessSpec(name, self._worker_env, python, str(archive.dir), with_torch=with_torch)
        words = torchrun.words(self._config.log_location.absolute() / "torchelastic_ts")
        group = TorchrunGroup(torchrun.processes, words, lockstep=settings.parallel_type != "pp")
        return ProcessSpec(name, {**self._worker_env, **torchrun.env}, python, str(archive.dir), group)

    def _request(self, settings: ModelSettings, archive: Archive) -> ClusterRequest:
        """The resources that a worker requests from Ray, with the installed packages of the archive's requirements file
        and a placement for each worker."""
        assert settings.cluster is not None
        wanted = archive.requirements_file
        install = wanted and (settings.use_venv or self._config.install_py_dep_per_model)
        packages = requirements_in(archive.dir / wanted) if wanted and install else ()
        return replace(settings.cluster, packages=packages, bundles=max(1, settings.max_workers))

    def _load(
        self,
        name: str,
        version: str,
        handler: str,
        archive: Archive,
        settings: ModelSettings,
        signature: Signature,
    ) -> dict[str, Any]:
        config = self._config
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
