"""A model's statistics as Triton's ModelStatistics, for gRPC and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ts.protocol import open_inference_pb2 as pb
from ts_frontend.models.model import Model
from ts_frontend.models.registry import Registry
from ts_frontend.models.signature import as_json
from ts_frontend.models.statistics import Kinds, Statistics
from ts_frontend.open_inference.models import find


def statistics_of(models: Registry, name: str = "", version: str = "") -> pb.ModelStatisticsResponse:
    """Returns the statistics of one version, of all versions of a model, or of all models. Raises ModelNotFound,
    ModelVersionNotFound."""
    return pb.ModelStatisticsResponse(model_stats=map(_of_model, _meant(models, name, version)))


def statistics_json(models: Registry, name: str = "", version: str = "") -> dict[str, Any]:
    return as_json(statistics_of(models, name, version))


def _meant(models: Registry, name: str, version: str) -> Sequence[Model]:
    if not name:
        return list(models)
    return [find(models, name, version)] if version else models.versions(name)


def _of_model(model: Model) -> pb.ModelStatistics:
    found = model.statistics
    return pb.ModelStatistics(
        name=model.name,
        version=model.version,
        last_inference=int(found.last_at_s * 1e3),
        inference_count=found.answered,
        execution_count=found.calls,
        inference_stats=_inferences(found),
        batch_stats=[
            pb.InferBatchStatistics(
                batch_size=size,
                compute_input=_sum(of.calls, of.read_s),
                compute_infer=_sum(of.calls, of.seconds - of.read_s - of.written_s),
                compute_output=_sum(of.calls, of.written_s),
            )
            for size, of in found.batches.items()
        ],
        memory_usage=_memory(model),
        response_stats={str(index): _responses(kinds) for index, kinds in found.responses.items()},
    )


def _inferences(found: Statistics) -> pb.InferStatistics:
    """compute_infer is the worker's time except for reading and writing tensors."""
    count = found.answered
    return pb.InferStatistics(
        success=_sum(count, found.answered_s),
        fail=_sum(found.failed, found.failed_s),
        queue=_sum(count, found.queue_s),
        compute_input=_sum(count, found.read_s),
        compute_infer=_sum(count, found.handler_s),
        compute_output=_sum(count, found.written_s),
        cache_hit=_sum(0, 0.0),
        cache_miss=_sum(0, 0.0),
    )


def _memory(model: Model) -> list[pb.MemoryUsage]:
    """The resident memory of the model's workers; none without workers."""
    used = sum(slot.memory_bytes for slot in model.pool.slots)
    return [pb.MemoryUsage(type="CPU", id=0, byte_size=used)] if used and not model.pool.plan.in_process else []


def _responses(kinds: Kinds) -> pb.InferResponseStatistics:
    count, seconds = kinds.success[0] + kinds.fail[0], kinds.success[1] + kinds.fail[1]
    return pb.InferResponseStatistics(
        compute_infer=_sum(count, seconds),
        compute_output=_sum(count, 0.0),
        success=_sum(*kinds.success),
        fail=_sum(*kinds.fail),
        empty_response=_sum(*kinds.empty),
        cancel=_sum(*kinds.cancel),
    )


def _sum(count: int, seconds: float) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=count, ns=int(seconds * 1e9))
