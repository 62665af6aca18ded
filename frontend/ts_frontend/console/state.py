"""The state of the served models and their workers for the console's readers, without the numbers that change with each
request (`samples`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ts_frontend.models.model import Model
from ts_frontend.models.registry import Registry
from ts_frontend.models.signature import TensorSpec
from ts_frontend.workers.failures import Failure, Replacement
from ts_frontend.workers.memory import WorkerMemory
from ts_frontend.workers.pool import Slot
from ts_frontend.workers.worker import Worker

#: The most last lines of a worker that ended.
DEATH_LINES = 20


def key_of(model: Model) -> str:
    """Returns the key of a model version in samples and states."""
    return f"{model.name}/{model.version}"


def models_state(registry: Registry, memory: WorkerMemory) -> list[dict[str, Any]]:
    """Returns all model versions, by name and in the order of their registration."""
    models = sorted(registry, key=lambda model: model.name)
    return [model_state(model, registry.is_default(model), memory.of) for model in models]


def model_state(model: Model, is_default: bool, memory: Callable[[Worker], int]) -> dict[str, Any]:
    """Returns one model version. Times are seconds since 1970, memory in bytes."""
    settings, pool = model.settings, model.pool
    return {
        "key": key_of(model),
        "name": model.name,
        "version": model.version,
        "default": is_default,
        "status": status_of(model),
        "url": model.url,
        "registeredAt": round(model.created_s, 3),
        "workflow": model.workflow,
        "runs": model.adapter or "torchserve",
        "minWorkers": model.minimum,
        "maxWorkers": model.maximum,
        "batchSize": settings.batch_size,
        "maxBatchDelayMs": settings.max_batch_delay_ms,
        "queueSize": settings.job_queue_size,
        "responseTimeoutS": settings.response_timeout_s,
        "continuousBatching": settings.continuous_batching,
        "stateful": settings.stateful,
        "tensors": model.takes_tensors,
        "streams": model.streams,
        "inputs": [_tensor(spec) for spec in model.signature.inputs],
        "outputs": [_tensor(spec) for spec in model.signature.outputs],
        "loadFailure": pool.load_failure.cause if pool.load_failure is not None else None,
        "lastFailure": _failure(pool.last_failure),
        "lastReplacement": _replacement(pool.last_replacement),
        "workers": [_worker(slot, memory) for slot in pool.slots],
    }


def status_of(model: Model) -> str:
    """Returns one word: ready, loading, failing, or stopped for a model without workers."""
    if model.ready:
        return "ready"
    if model.failing:
        return "failing"
    return "loading" if model.loading else "stopped"


def _worker(slot: Slot, memory: Callable[[Worker], int]) -> dict[str, Any]:
    worker, device = slot.worker, slot.device
    found: dict[str, Any] = {
        "id": str(slot.id),
        "state": "given up" if slot.gave_up else "waiting" if worker is None else worker.state.value,
        "device": str(device),
        "failuresInARow": slot.failures,
    }
    if slot.waits_for:
        found["waitsFor"] = slot.waits_for
    if worker is not None and worker.node:
        found["node"] = worker.node["address"]
    if worker is not None:
        found |= {
            "pid": worker.pid,
            "memoryBytes": memory(worker),
            "startedAt": round(worker.started_at, 3),
        }
    return found


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape), "optional": spec.optional}


def _failure(failure: Failure | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {
        "workerId": str(failure.worker_id),
        "at": round(failure.at, 3),
        "reason": failure.reason,
        "failuresInARow": failure.failures,
        "lastLines": failure.tail[-DEATH_LINES:],
    }


def _replacement(replacement: Replacement | None) -> dict[str, Any] | None:
    if replacement is None:
        return None
    return {
        "workerId": str(replacement.worker_id),
        "at": round(replacement.at, 3),
        "reason": replacement.reason,
    }


def worker_log(model: Model, worker_id: str) -> dict[str, Any] | None:
    """Returns the last lines that a worker printed, up to a hundred; None when the model has no such worker."""
    for slot in model.pool.slots:
        if str(slot.id) == worker_id:
            worker = slot.worker
            lines = worker.tail() if worker is not None else []
            return {"workerId": worker_id, "pid": worker.pid if worker is not None else 0, "lines": lines}
    return None


def server_state(about: Mapping[str, Any], *, ready: bool, draining: bool) -> dict[str, Any]:
    """Returns the state of the whole server: `about`, which doesn't change, and its health now."""
    return {**about, "ready": ready, "draining": draining}
