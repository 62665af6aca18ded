"""An ensemble: models as steps, whose outputs are the inputs of others by the names of tensors. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ts_frontend.errors import InvalidArgument, InvalidGraph
from ts_frontend.graphs.graph import Graph, make_graph


@dataclass(frozen=True, slots=True)
class Step:
    """`name`: in messages; `version`: "" for the default one. `inputs` and `outputs`: the ensemble's tensor for each
    input and output of the model."""

    name: str
    model: str
    version: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ensemble:
    """`makers`: the step that makes each tensor; `outputs`: those that the client gets; `batch_max`: 0 without
    batches."""

    steps: Mapping[str, Step]
    graph: Graph
    makers: Mapping[str, str]
    outputs: tuple[str, ...]
    batch_max: int = 0

    what: ClassVar[str] = "ensemble"

    @property
    def models(self) -> Iterator[tuple[str, str, str]]:
        """For each step its name, and its model's name and version."""
        return ((step.name, step.model, step.version) for step in self.steps.values())


def make_ensemble(
    steps: Sequence[Step], inputs: Collection[str], outputs: Sequence[str], source: str, batch_max: int = 0
) -> Ensemble:
    """The ensemble of these steps. Raises InvalidArgument, naming `source`, the step and the tensor."""
    if not steps:
        raise InvalidArgument(f"{source}: ensemble_scheduling has no step")
    makers: dict[str, str] = {}
    for step in steps:
        if not step.model:
            raise InvalidArgument(f"{source}: {step.name} has no model_name")
        if not step.outputs:
            raise InvalidArgument(f"{source}: {step.name} has no output_map: nothing would be made of its answer")
        for tensor in step.outputs.values():
            if tensor in inputs:
                raise InvalidArgument(f"{source}: {step.name} makes tensor {tensor!r}, which is the ensemble's input")
            if tensor in makers:
                raise InvalidArgument(f"{source}: {makers[tensor]} and {step.name} both make tensor {tensor!r}")
            makers[tensor] = step.name
    for step in steps:
        for name, tensor in step.inputs.items():
            if tensor not in makers and tensor not in inputs:
                raise InvalidArgument(
                    f"{source}: {step.name} takes tensor {tensor!r} as its input {name!r}, but no step makes it, and "
                    "it is no input of the ensemble"
                )
    for tensor in outputs:
        if tensor not in makers:
            raise InvalidArgument(f"{source}: no step makes output {tensor!r}")
    edges: dict[str, list[str]] = {step.name: [] for step in steps}
    for step in steps:
        for tensor in step.inputs.values():
            if tensor in makers:
                edges[makers[tensor]].append(step.name)
    try:
        graph = make_graph(edges, "ensemble_scheduling")
    except InvalidGraph as error:
        raise InvalidArgument(f"{source}: {error.message}") from None
    return Ensemble({step.name: step for step in steps}, graph, makers, tuple(outputs), batch_max)
