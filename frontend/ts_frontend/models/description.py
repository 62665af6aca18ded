"""Models as TorchServe's management API describes them. Keys keep its order; absent facts are left out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from ts_frontend.caching.cache import ModelCache
from ts_frontend.models.model import Model
from ts_frontend.workers.demand import Resident
from ts_frontend.workers.pool import Slot
from ts_frontend.workers.scaling import PoolScaler

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


LIST_LIMIT_MAX = 100
T = TypeVar("T")


def page(found: Sequence[T], limit: int, token: int) -> tuple[Sequence[T], dict[str, str]]:
    """At most `limit` items from `token` on, and a mapping with the next page's `nextPageToken`, {} without one."""
    limit = LIST_LIMIT_MAX if limit < 0 or limit > LIST_LIMIT_MAX else limit
    first = max(0, token)
    more = {"nextPageToken": str(first + limit)} if first + limit <= len(found) else {}
    return found[first : first + limit], more


LIST_LIMIT = 100
