"""Managing models while the server runs: register, scale, describe, set default, unregister.

Every protocol's management calls come here; answers carry TorchServe's HTTP status and its sentence. Descriptions are
TorchServe's: keys keep its order; absent facts are left out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ts_frontend.caching.cache import ModelCache
from ts_frontend.config.parameters import WORKERS_MAX
from ts_frontend.errors import (
    Code,
    InvalidArgument,
    MemoryFull,
    ModelApiDisabled,
    NoWorker,
    ServeError,
    UnregisterTimeout,
    WorkerStartFailed,
)
from ts_frontend.models.archive import Archive
from ts_frontend.models.loader import ModelLoader
from ts_frontend.models.model import Model, Registry
from ts_frontend.models.settings import Requested, check_range
from ts_frontend.models.store.store import Fetched
from ts_frontend.tasks import ENDING, Tasks, owned, undone_on_failure
from ts_frontend.workers.memory import Admission, Check, Demand, Resident, ResidentState, UnloadCause
from ts_frontend.workers.pool import Slot
from ts_frontend.workers.process import StartFailed
from ts_frontend.workers.supervisor import PoolScaler

log = logging.getLogger(__name__)


GPU_USAGE_UNKNOWN = "N/A"


def describe(model: Model) -> dict[str, Any]:
    """One version, without `customizedMetadata`."""
    settings = model.settings
    queued = model.queued
    out: dict[str, Any] = {
        "modelName": model.name,
        "modelVersion": model.version,
        "modelUrl": model.url,
        "runtime": settings.runtime,
        "minWorkers": 0 if model.pool.plan.in_process else model.minimum,
        "maxWorkers": 0 if model.pool.plan.in_process else model.maximum,
        "batchSize": settings.batch_size,
        "maxBatchDelay": settings.max_batch_delay_ms,
        "responseTimeout": settings.response_timeout_s,
        "startupTimeout": settings.startup_timeout_s,
        "maxRetryTimeoutInSec": settings.max_retry_timeout_s,
        "clientTimeoutInMills": settings.client_timeout_ms,
        "parallelType": settings.parallel_type,
        "parallelLevel": settings.parallel_level,
        "deviceType": settings.device_type or ("gpu" if model.pool.on_gpus else "cpu"),
    }
    if settings.device_ids:
        out["deviceIds"] = list(settings.device_ids)
    out |= {
        "continuousBatching": settings.continuous_batching,
        "useJobTicket": settings.use_job_ticket,
        "useVenv": settings.use_venv,
        "stateful": settings.stateful,
        **({"idempotent": True} if settings.idempotent else {}),
        **({"autoscale": _scaling(model.scaler)} if model.scaler is not None else {}),
        **({"loadOnDemand": _residence(model.resident)} if model.resident is not None else {}),
        **({"cache": _cache(model.cache)} if model.cache is not None else {}),
        **({"shareWeights": _sharing(model)} if model.pool.plan.sharing.wanted else {}),
        **(
            {"steps": [{"modelName": name, "modelVersion": version} for name, version in model.steps]}
            if model.steps
            else {}
        ),
        **({"ray": _cluster(model)} if model.pool.resources.cluster is not None else {}),
        "sequenceMaxIdleMSec": settings.sequence_max_idle_ms,
        "sequenceTimeoutMSec": settings.sequence_timeout_ms,
        "maxNumSequence": settings.max_num_sequence,
        "maxSequenceJobQueueSize": settings.max_sequence_job_queue_size,
        "loadedAtStartup": model.loaded_at_startup,
        "workers": _workers(model),
        "jobQueueStatus": {
            "remainingCapacity": max(0, settings.job_queue_size - queued),
            "pendingRequests": queued,
        },
    }
    if settings.warnings:
        out["warnings"] = list(settings.warnings)
    if model.pool.load_failure is not None:
        out["loadFailure"] = model.pool.load_failure.cause
    for name, last in (
        ("lastWorkerFailure", model.pool.last_failure),
        ("lastWorkerReplacement", model.pool.last_replacement),
    ):
        if last is not None:
            out[name] = last.shown(time=_local_time(last.at))
    return out


def whole(own: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The description of a model by one frontend, with the workers and waiting requests of others."""
    for one in others:
        own["workers"] += one["workers"]
        for key, value in one["jobQueueStatus"].items():
            own["jobQueueStatus"][key] += value
        for key in ("loadFailure", "lastWorkerFailure"):
            if key in one:
                own.setdefault(key, one[key])
    return own


def _sharing(model: Model) -> dict[str, Any]:
    """Whether workers are forked from a holder of the weights, and its number of loads; or why they aren't."""
    holder = model.pool.resources.holder
    refusal = holder.refusal if holder is not None else model.pool.plan.sharing.refusal
    if refusal or holder is None:
        return {"shared": False, "reason": refusal}
    return {"shared": True, "pid": holder.pid, "loads": holder.loads, "loadSeconds": round(holder.load_s, 3)}


def _cache(cache: ModelCache) -> dict[str, Any]:
    shelf = cache.shelf
    return {
        "entries": len(shelf),
        "bytes": shelf.used_bytes,
        "hits": cache.hits,
        "misses": cache.misses,
        "evictions": shelf.evicted,
    }


def _cluster(model: Model) -> dict[str, Any]:
    state, request = model.pool.resources.cluster, model.pool.plan.spec.cluster
    assert state is not None
    return {**state.described(time.monotonic()), **(request.described() if request is not None else {})}


def _scaling(scaler: PoolScaler) -> dict[str, Any]:
    """The scaling rule, and the latest decision with its reason; nothing is scaled when minWorkers is maxWorkers."""
    rule, last = scaler.rule, scaler.last
    found: dict[str, Any] = {
        "active": scaler.active,
        "targetQueue": rule.target_queue,
        **({"targetWait": round(rule.target_wait_s * 1000)} if rule.target_wait_s else {}),
        "upAfter": rule.up_after_s,
        "downAfter": rule.down_after_s,
    }
    if last is not None:
        found["lastDecision"] = {
            "time": _local_time(last.at),
            "from": last.before,
            "to": last.workers,
            "reason": last.reason,
        }
    return found


def _residence(resident: Resident) -> dict[str, Any]:
    rule = resident.rule
    return {
        "state": resident.status,
        "pinned": rule.pinned,
        "keepAlive": rule.keep_alive_s,
        "memory": resident.held.host,
        "knownMemory": resident.known.host,
        **({"gpuMemory": resident.held.gpus, "knownGpuMemory": resident.known.gpus} if resident.pool.on_gpus else {}),
        "loads": resident.loads,
        "loadSeconds": round(resident.load_s, 3),
        "unloads": resident.unloads,
        **({"lastUnload": resident.unloaded_because} if resident.unloaded_because else {}),
    }


def _workers(model: Model) -> list[dict[str, Any]]:
    return [_worker(slot) for slot in model.pool.slots if slot.worker is not None and not model.pool.plan.in_process]


def _worker(slot: Slot) -> dict[str, Any]:
    worker = slot.worker
    assert worker is not None
    return {
        "id": str(slot.id),
        "startTime": _local_time(worker.started_at),
        "status": worker.status,
        "memoryUsage": worker.memory_bytes,
        "pid": worker.pid,
        "gpu": slot.device.is_gpu,
        "gpuUsage": GPU_USAGE_UNKNOWN if slot.device.gpu_id is None else f"gpuId::{slot.device.gpu_id}",
        **({"node": worker.node} if worker.node else {}),
        **({"waitsFor": slot.waits_for} if slot.waits_for else {}),
    }


def _local_time(at: float) -> str:
    """Local time with a literal Z, as TorchServe prints it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at)) + f".{int(at * 1000) % 1000:03d}Z"


#: The models of a page, at most and if a call doesn't say.
LIST_LIMIT = 100
T = TypeVar("T")


def page(found: Sequence[T], limit: int, token: int) -> tuple[Sequence[T], dict[str, str]]:
    """At most `limit` items from `token` on, and a mapping with the next page's `nextPageToken`, {} without one."""
    limit = limit if 0 <= limit <= LIST_LIMIT else LIST_LIMIT
    first = max(0, token)
    more = {"nextPageToken": str(first + limit)} if first + limit <= len(found) else {}
    return found[first : first + limit], more


PROCESSING = "Processing worker updates..."
#: Models still being loaded at shutdown are ended and removed in this time.
LOADS_END_S = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a management call: the HTTP status and the sentence of TorchServe's answer, and a warning for each
    ignored setting of a registered model."""

    http_status: int
    status: str
    warnings: tuple[str, ...] = ()


class ModelManager:
    """`on_change` is called after each change that a restart should remember."""

    def __init__(
        self,
        registry: Registry,
        loader: ModelLoader,
        *,
        model_api: bool,
        unregister_timeout_s: float,
        on_change: Callable[[], None],
        demand: Demand | None = None,
        admission: Admission | None = None,
        frontends: int = 1,
    ) -> None:
        self.registry = registry
        self._admission = admission or Admission()
        self.demand = demand or Demand()
        self.loader = loader
        self.tasks = Tasks()
        self._model_api = model_api
        self._unregister_timeout_s = unregister_timeout_s
        self._on_change = on_change
        self._frontends = frontends
        #: Models of register calls whose workers start for the first time: they are withdrawn if that fails.
        self.entering: set[Model] = set()
        #: Returns why a model differs from the shared snapshot, "" if it doesn't; None without one.
        self.standing: Callable[[Model], str] | None = None
        #: Returns the rollout that a model version takes part in, if any.
        self.rollout_of: Callable[[Model], Mapping[str, Any] | None] = lambda model: None
        #: Tells the other frontends of the models of now; returns once they have them, and with True their workers.
        #: Raises ServeError that names a frontend whose workers can't be started.
        self.tell: Callable[[bool], Coroutine[Any, Any, None]] = _nobody
        #: The descriptions of a model by the other frontends.
        self.elsewhere: Callable[[Model], Awaitable[list[dict[str, Any]]]] = _nowhere

    def changed(self) -> None:
        """To be called after a change that a restart should remember, and that no method of this class has made."""
        self._on_change()

    def check_alone(self, what: str) -> None:
        """Raises InvalidArgument with several frontends, of which each would do something else."""
        if self._frontends > 1:
            raise InvalidArgument(f"{what} need one frontend, and this server has {self._frontends}: set frontends=1")

    async def _changed_everywhere(self) -> None:
        self._on_change()
        await self.tell(False)

    async def _tell_of_removal(self) -> None:
        """Has the other frontends remove a model, too. It is removed here whatever else they can't do."""
        try:
            await self.tell(False)
        except ServeError as error:
            log.error("%s", error.message)

    # --- register

    async def register(
        self, url: str, *, synchronous: bool = True, s3_sse_kms: bool = False, **settings: str | int | None
    ) -> Outcome:
        """Registers a model version, entirely or not at all; it goes on if the caller is cancelled. `s3_sse_kms`: an
        http(s) `url` is an S3 object's, requested with the server's AWS credentials. `settings`: the call's parameters
        that are model settings (`config/parameters.py`), None if not given."""
        self.check_model_api()
        return await self.tasks.load(self._register(url, Requested.of(settings), synchronous, s3_sse_kms))

    async def _register(self, url: str, requested: Requested, synchronous: bool, signed: bool) -> Outcome:
        fetched = await self.loader.store.fetch(url, signed=signed)
        async with self._admission.room(fetched.path) as check:
            return await self._registered(fetched, requested, synchronous, check)

    async def _registered(self, fetched: Fetched, requested: Requested, synchronous: bool, check: Check) -> Outcome:
        model = await self.add(await self.build(fetched, requested, loaded_at_startup=False))
        async with undone_on_failure() as undo:
            undo.push_async_callback(self._withdraw, model)
            return await self._begun(model, synchronous, check)

    async def _begun(self, model: Model, synchronous: bool, check: Check) -> Outcome:
        """Starts the workers of a registered model, here and at the other frontends."""
        count, own, warnings = model.minimum, model.own(model.minimum), model.settings.warnings
        title = f'Model "{model.name}" Version: {model.version} registered with'
        if model.resident is not None:
            await self._changed_everywhere()
            return Outcome(200, f"{title} 0 initial workers. Its first request loads it (loadOnDemand).", warnings)
        if not count:
            await self._changed_everywhere()
            return Outcome(
                200, f"{title} 0 initial workers. Use scale workers API to add workers for the model.", warnings
            )
        if not synchronous:
            await self.tell(False)
            self.tasks.background(self._scale_admitted(model, own, check))
            return Outcome(202, PROCESSING, warnings)
        self.entering.add(model)
        try:
            await _start_workers(model, own)
            await check(model.name, partial(self._withdraw, model))
            self.entering.discard(model)
            await self.tell(True)
        finally:
            self.entering.discard(model)
        self._on_change()
        return Outcome(200, f"{title} {count} initial workers", model.settings.warnings)

    async def _scale_admitted(self, model: Model, count: int, check: Check) -> None:
        """Starts the workers of a model whose caller has gone; it is withdrawn if it doesn't fit."""
        await self._scale(model, count, None)
        try:
            await check(model.name, partial(self._withdraw, model))
        except MemoryFull as error:
            log.error("Model %s was withdrawn: %s", model, error.message)
            self._on_change()

    async def build(
        self, fetched: Fetched, requested: Requested, archive: Archive | None = None, *, loaded_at_startup: bool
    ) -> Model:
        """Makes a model of a fetched archive, with its environment. It gets no requests before `add`. A failure removes
        its files, and those that were fetched unless the caller has opened the `archive`. Raises ServeError."""
        async with undone_on_failure() as undo:
            if archive is None:
                undo.push_async_callback(self.loader.discard, fetched)
            return await self.loader.build(
                fetched, requested, archive, loaded_at_startup=loaded_at_startup, check_free=self.registry.check_free
            )

    async def add(self, model: Model) -> Model:
        """Serves a built model; a failure removes it. No worker is started yet."""
        async with undone_on_failure() as undo:
            undo.push_async_callback(self.loader.remove, model)
            self.registry.add(model)
        self._enter(model)
        self.choose_default(model)
        log.info("Model %s added.", model)
        log.info("Model %s loaded.", model.name)  # TorchServe's line, for alerts and scripts that look for it
        log.debug("Model %s: %s", model, model.settings)
        return model

    def _enter(self, model: Model) -> None:
        """Leaves the workers of a model on demand to its first request."""
        rule = model.settings.demand
        if rule is not None:
            model.resident = self.demand.enter(model.pool, model.ledger, rule, lambda: max(1, model.minimum))
            model.resident.guests = model.guests

    async def _removed(self, model: Model, removal: Awaitable[None]) -> None:
        """Awaits the removal of a model; one on demand is not loaded any more."""
        await (removal if model.resident is None else self.demand.leave(model.resident, removal))

    async def start_and_replace(self, fetched: Fetched, archive: Archive, requested: Requested) -> Model:
        """Serves an open archive in place of the model with its name and version, once the new workers are ready. The
        old model stays if the new one can't be started. Raises ServeError."""
        model = await self.start(fetched, archive, requested)
        self.replace(model)
        return model

    async def start(self, fetched: Fetched, archive: Archive, requested: Requested) -> Model:
        """Makes a model of an open archive and waits for its workers; `replace` then serves it. A failure removes it,
        and what was fetched. Raises ServeError."""
        async with self._admission.room(fetched.path) as check, undone_on_failure() as undo:
            undo.push_async_callback(self.loader.discard, fetched)
            model = await self.loader.build(fetched, requested, archive, loaded_at_startup=False)
            undo.pop_all()
            undo.push_async_callback(self.loader.remove, model)
            if model.settings.demand is None:
                await _start_workers(model, model.own(model.minimum))
                await check(model.name, partial(self.loader.remove, model))
            return model

    def replace(self, model: Model) -> None:
        """Serves a started model in place of the one with its name and version, which answers its accepted requests."""
        old = self.registry.put(model)
        self._enter(model)
        self.choose_default(model)
        self._on_change()
        log.info("Model %s %s.", model, "added" if old is None else "replaced")
        if old is not None:
            self.tasks.background(self.retire(old))

    def choose_default(self, model: Model, versions: Sequence[Model] | None = None) -> None:
        """Sets the default to the version that the model's format chooses among `versions` (None: all), if any."""
        archives = [one.archive for one in versions or self.registry.versions(model.name)]
        default = self.loader.formats.running(model.archive.adapter).default_version(archives)
        if default is not None:
            self.registry.set_default(model.name, default)

    def check_model_api(self) -> None:
        """Raises ModelApiDisabled if models can't be registered and unregistered while the server runs."""
        if not self._model_api:
            raise ModelApiDisabled

    async def _withdraw(self, model: Model) -> None:
        self.registry.discard(model)
        await self._tell_of_removal()
        model.fail_rest(f'Model "{model.name}" could not be started')
        await self.loader.remove(model)

    # --- unregister

    async def unregister(self, name: str, version: str | None = None) -> Outcome:
        """Removes a version; its accepted requests are answered first (up to unregister_model_timeout)."""
        self.check_model_api()
        model = self.registry.remove(name, version)
        self._on_change()
        return await self.tasks.detached(self._unregister(model))

    async def _unregister(self, model: Model) -> Outcome:
        if not await self.retire(model):
            raise UnregisterTimeout(model.name)
        return Outcome(200, f'Model "{model.name}" unregistered')

    async def retire(self, model: Model, drain_s: float | None = None) -> bool:
        """Removes a version, default or not, and ends it; False when not all its accepted requests were answered within
        `drain_s`, None for the time limit of unregister calls."""
        self.registry.discard(model)
        self._on_change()
        await self._tell_of_removal()
        in_time = await model.drain(self._unregister_timeout_s if drain_s is None else drain_s)
        model.fail_rest(f'Model "{model.name}" version {model.version} was unregistered')
        await self._removed(model, self.loader.remove(model))
        log.info("Model %s unregistered.", model)
        return in_time

    # --- scale, default

    async def scale(
        self,
        name: str,
        version: str | None = None,
        *,
        min_worker: int = 1,
        max_worker: int | None = None,
        synchronous: bool = False,
        timeout: int = -1,
    ) -> Outcome:
        """Sets the number of workers. `timeout`: seconds a surplus worker may take to finish its requests (-1: as long
        as it needs; 0: it is ended at once and its requests run elsewhere)."""
        maximum = min_worker if max_worker is None else max_worker
        if min_worker < 0:
            raise InvalidArgument(f"min_worker cannot be negative: {min_worker}")
        if maximum < min_worker:
            raise InvalidArgument("max_worker cannot be less than min_worker.")
        check_range("max_worker" if max_worker is not None else "min_worker", maximum, 0, WORKERS_MAX)
        model = self.registry.find(name, version)
        if model.graph is not None:
            raise InvalidArgument(f"{name} has no workers of its own: scale the models of its steps")
        work = self._scale(model, model.scale_between(min_worker, maximum), None if timeout < 0 else float(timeout))
        if not synchronous:
            self.tasks.background(work)
            return Outcome(202, PROCESSING)
        await self.tasks.detached(work)
        suffix = f", version: {version}" if version else ""
        return Outcome(200, f"Workers scaled to {min_worker} for model: {name}{suffix}")

    async def _scale(self, model: Model, count: int, drain_s: float | None) -> None:
        resident = model.resident
        if resident is not None and (count == 0 or resident.state is not ResidentState.WARM):
            await self.demand.unload(resident, UnloadCause.SCALED, "it was scaled to no workers")
            self._on_change()
            return
        try:
            told = owned(self.tell(True))
            try:
                await _start_workers(model, count, drain_s)
            finally:
                await told
        finally:
            self._on_change()

    async def start_workers(self, model: Model) -> None:
        await self._scale(model, model.own(model.minimum), None)

    async def set_default(self, name: str, version: str) -> Outcome:
        self.registry.set_default(name, version)
        await self._changed_everywhere()
        return Outcome(200, f'Default version successfully updated for model "{name}" to "{version}"')

    # --- list, describe

    def list_models(self, limit: int = LIST_LIMIT, next_page_token: int = 0) -> dict[str, Any]:
        """One page of default versions, as TorchServe lists them: not the functions of workflows, which have no URL."""
        models = [model for model in self.registry.defaults() if model.url]
        found, more = page(models, limit, next_page_token)
        return {**more, "models": [_listed(model) for model in found]}

    async def describe(self, name: str, version: str | None = None, customized: bool = False) -> list[dict[str, Any]]:
        if version == "all":
            return [await self._described_everywhere(model) for model in self.registry.versions(name)]
        model = self.registry.find(name, version)
        description = await self._described_everywhere(model)
        if customized:
            description["customizedMetadata"] = await self._customized(model)
        return [description]

    async def _described_everywhere(self, model: Model) -> dict[str, Any]:
        return whole(self.described(model), await self.elsewhere(model))

    def described(self, model: Model) -> dict[str, Any]:
        description = describe(model)
        if self.standing is not None:
            failure = self.standing(model)
            description["sharedSnapshot"] = {"inStep": not failure, **({"failure": failure} if failure else {})}
        rollout = self.rollout_of(model)
        if rollout is not None:
            description["rollout"] = rollout
        return description

    async def _customized(self, model: Model) -> dict[str, Any]:
        """The handler's description of itself: it is called with one empty row and header `describe`."""
        if not model.ready:
            raise NoWorker(
                f'Model "{model.name}" has no worker to serve describe request. '
                "Please use scale workers API to add workers."
            )
        job = model.submit([], headers=[("describe", "True")], alone=True, counted=False, version_named=True)
        try:
            value = json.loads(bytes(await job.result()))
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    # --- shutdown

    async def close(self, drain_s: float) -> None:
        """Ends all models; their accepted requests are answered first, up to `drain_s`."""
        models = list(self.registry)
        await asyncio.gather(*(model.drain(drain_s) for model in models))
        await self.tasks.close(LOADS_END_S)
        for model in models:
            model.fail_rest(ENDING)
            await self._removed(model, self.loader.close(model, 1.0))


async def _nobody(_: bool) -> None:
    """There is one frontend."""


async def _nowhere(_: Model) -> list[dict[str, Any]]:
    return []


def _listed(model: Model) -> dict[str, str]:
    state = {} if model.resident is None else {"state": model.resident.status}
    return {"modelName": model.name, "modelUrl": model.url, **state}


async def _start_workers(model: Model, count: int, drain_s: float | None = None) -> None:
    try:
        await model.pool.scale(count, drain_s)
    except StartFailed as error:
        raise _start_error(model, error) from error


def _start_error(model: Model, error: StartFailed) -> ServeError:
    failed = WorkerStartFailed(
        f"Failed to start workers for model {model.name} version: {model.version}. {error.message}"
    )
    failed.http_status, failed.asked_for = error.code, error.asked_for
    if error.code == 503:  # no free place for a worker yet
        failed.code = Code.UNAVAILABLE
    return failed
