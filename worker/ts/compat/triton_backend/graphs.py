"""Models of one file without code: TorchScript, torch.export, ONNX. Requests of matching shapes share a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ts.compat.triton_backend import onnx_model, torch_graphs
from ts.compat.triton_backend.edges import Edges, Fields, tensors_of
from ts.compat.triton_backend.messages import TritonModelException, as_failure
from ts.compat.triton_backend.model_config import check_warmup, signature_of, warmup_samples
from ts.context import Context
from ts.runtime.handlers import Loaded, Settings, context_of, declared
from ts.tensors.types import InferenceRequest, InferenceResponse, Tensor
from ts.utils.util import PredictionException


class TensorGraph(Protocol):
    """An opened model. `config` is complete."""

    config: Fields

    def run(self, inputs: Sequence[Tensor], wanted: Sequence[str]) -> list[Tensor]:
        """The outputs for whole inputs; `wanted`: the names of the requested ones, all if empty."""


def load(settings: Settings) -> Loaded:
    """As `ts.compat.triton.load`."""
    adapted = settings["adapter_settings"]
    file = Path(adapted["model_file"])
    opened = {"pytorch": torch_graphs.opened, "onnxruntime": onnx_model.opened}[adapted["backend"]]
    return served(opened(file, adapted["config"], settings.get("gpu_id")), settings)


def served(graph: TensorGraph, settings: Settings) -> Loaded:
    """The graph as a handler, warmed up."""
    adapter = GraphAdapter(graph)
    for sample in warmup_samples(graph.config, Path(settings["model_dir"]).parent):
        check_warmup(sample, adapter.answers([sample.request], None))
    signature = signature_of(graph.config)
    labels = settings["adapter_settings"].get("labels") or {}
    tensors = declared(settings | {"tensors": tensors_of(graph.config, signature, labels)}) | {"values": True}
    return Loaded(
        adapter.answers, context_of(settings), "blocking", None, "requests", tensors, signature, completed=graph.config
    )


class GraphAdapter:
    """The adapter of a graph."""

    def __init__(self, graph: TensorGraph) -> None:
        self._graph = graph
        self._edges = Edges(graph.config, strict=True)
        self._batch_max = int(graph.config.get("max_batch_size") or 0)

    def answers(self, data: Sequence[InferenceRequest], context: Context | None) -> list[Any]:
        found: list[Any] = [None] * len(data)
        inputs = [self._edges.taken(request) for request in data]
        for together in self._groups(inputs):
            for index, answer in zip(together, self._run([(inputs[i], data[i]) for i in together]), strict=True):
                found[index] = answer
        return found

    def _groups(self, inputs: Sequence[list[Tensor]]) -> list[list[int]]:
        """The requests grouped by run: up to the model's number of rows, with equal shapes otherwise."""
        if not self._batch_max:
            return [[index] for index in range(len(inputs))]
        groups: list[list[int]] = []
        filling: dict[Any, tuple[list[int], int]] = {}
        for index, tensors in enumerate(inputs):
            key = frozenset((one.name, one.datatype, one.shape[1:]) for one in tensors)
            rows = _rows(tensors)
            group, taken = filling.get(key, ([], 0))
            if not group or taken + rows > self._batch_max:
                group, taken = [], 0
                groups.append(group)
            group.append(index)
            filling[key] = group, taken + rows
        return groups

    def _run(self, requests: Sequence[tuple[list[Tensor], InferenceRequest]]) -> list[Any]:
        try:
            if len(requests) == 1:
                inputs, request = requests[0]
                return [self._answer(self._graph.run(inputs, [output.name for output in request.outputs]))]
            counts = [_rows(inputs) for inputs, _ in requests]
            outputs = self._graph.run(_joined([inputs for inputs, _ in requests]), [])
            return [self._answer(part) for part in _parts(outputs, counts)]
        except PredictionException as error:
            return [error for _ in requests]
        except TritonModelException as error:
            return [as_failure(error) for _ in requests]
        except (RuntimeError, ValueError, TypeError) as error:
            text = f"the model failed: {type(error).__name__}: {error}"
            return [as_failure(text) for _ in requests]

    def _answer(self, outputs: list[Tensor]) -> InferenceResponse:
        return self._edges.given(InferenceResponse(outputs))


def _rows(tensors: Sequence[Tensor]) -> int:
    return tensors[0].shape[0] if tensors and tensors[0].shape else 1


def _joined(requests: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    first = requests[0]
    by_name = [{one.name: one.array for one in tensors} for tensors in requests]
    return [Tensor(one.name, one.datatype, np.concatenate([found[one.name] for found in by_name])) for one in first]


def _parts(outputs: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    """Splits outputs into each request's rows. Raises TritonModelException for another number of rows."""
    for one in outputs:
        if not one.shape or one.shape[0] != sum(counts):
            raise TritonModelException(
                f"output {one.name!r} has shape {list(one.shape)} for a batch of {sum(counts)}: "
                "set max_batch_size to 0 for a model whose first dimension isn't a batch"
            )
    ends = np.cumsum(counts).tolist()
    return [
        [Tensor(one.name, one.datatype, one.array[end - count : end]) for one in outputs]
        for end, count in zip(ends, counts, strict=True)
    ]
