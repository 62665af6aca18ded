"""KServe's InferenceGraph: nodes that pass whole bodies to models and to each other. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

from ts_frontend.errors import InvalidArgument, InvalidGraph
from ts_frontend.graphs.conditions import Condition
from ts_frontend.graphs.graph import make_graph

KIND, ROOT = "InferenceGraph", "root"
SEQUENCE, SWITCH, ENSEMBLE, SPLITTER = "Sequence", "Switch", "Ensemble", "Splitter"
_STEP_KEYS = frozenset({"name", "nodeName", "serviceName", "serviceUrl", "data", "weight", "condition", "dependency"})
_PATH = re.compile(r"/(?:v[12]/models|predictions)/([^/:]+)")


@dataclass(frozen=True, slots=True)
class RoutedStep:
    """A step that asks a model, or the node `node`. `protocol`: "v1", "v2" or "", as its URL says; `of_response`: it
    gets the answer before it instead of the request; `hard`: its failure ends the node."""

    name: str
    model: str
    node: str
    protocol: str
    of_response: bool
    hard: bool
    weight: int
    condition: Condition | None


@dataclass(frozen=True, slots=True)
class Router:
    kind: str
    steps: tuple[RoutedStep, ...]


@dataclass(frozen=True, slots=True)
class InferenceGraph:
    name: str
    nodes: Mapping[str, Router]

    what: ClassVar[str] = "inference graph"

    @property
    def models(self) -> Iterator[tuple[str, str, str]]:
        """For each step with a model its place, and the model's name and version."""
        for name, node in self.nodes.items():
            for step in node.steps:
                if step.model:
                    yield f"node {name}, step {step.name}", step.model, ""


def inference_graph(tree: Mapping[str, Any], source: str) -> InferenceGraph:
    """The graph in a manifest. Raises InvalidArgument, naming `source`, the node and the step."""
    spec = _mapping(tree.get("spec"), f"{source}: spec")
    found = _mapping(spec.get("nodes"), f"{source}: spec.nodes")
    nodes = {
        str(name): _router(_mapping(one, f"{source}: node {name}"), f"{source}: node {name}")
        for name, one in found.items()
    }
    if ROOT not in nodes:
        raise InvalidArgument(f"{source}: spec.nodes has no node {ROOT!r}")
    for name, node in nodes.items():
        for step in node.steps:
            if step.node and step.node not in nodes:
                raise InvalidArgument(f"{source}: node {name}: step {step.name}: there is no node {step.node!r}")
    try:
        make_graph(
            {name: [step.node for step in node.steps if step.node] for name, node in nodes.items()}, "spec.nodes"
        )
    except InvalidGraph as error:
        raise InvalidArgument(f"{source}: {error.message}") from None
    metadata = _mapping(tree.get("metadata"), f"{source}: metadata")
    return InferenceGraph(str(metadata.get("name") or ""), nodes)


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument(f"{what} is a mapping, not {value!r:.80}")
    return value


def _router(node: Mapping[str, Any], where: str) -> Router:
    kind, listed = node.get("routerType"), node.get("steps")
    if kind not in (SEQUENCE, SWITCH, ENSEMBLE, SPLITTER):
        raise InvalidArgument(f"{where}: routerType is Sequence, Switch, Ensemble or Splitter, not {kind!r}")
    if not isinstance(listed, list) or not listed:
        raise InvalidArgument(f"{where} has no steps")
    steps = tuple(_step(_mapping(one, f"{where}: a step"), number, where) for number, one in enumerate(listed))
    if kind == SPLITTER and sum(step.weight for step in steps) != 100:
        raise InvalidArgument(f"{where}: the weights are {[step.weight for step in steps]}, and don't add up to 100")
    if kind == SWITCH and any(step.condition is None for step in steps):
        raise InvalidArgument(f"{where}: each step of a Switch needs a condition")
    return Router(kind, steps)


def _step(step: Mapping[str, Any], number: int, where: str) -> RoutedStep:
    name = str(step.get("name") or number)
    label = f"{where}: step {name}"
    if unknown := set(step) - _STEP_KEYS:
        raise InvalidArgument(f"{label} has unknown keys: {', '.join(sorted(map(str, unknown)))}")
    if sum(bool(step.get(key)) for key in ("nodeName", "serviceName", "serviceUrl")) != 1:
        raise InvalidArgument(f"{label} has one of nodeName, serviceName and serviceUrl")
    data, dependency, weight = step.get("data", "$request"), step.get("dependency", "Soft"), step.get("weight", 0)
    if data not in ("$request", "$response") or dependency not in ("Soft", "Hard"):
        raise InvalidArgument(f"{label}: data is $request or $response, and dependency Soft or Hard")
    if type(weight) is not int or not 0 <= weight <= 100:
        raise InvalidArgument(f"{label}: weight is a number from 0 to 100, not {weight!r}")
    url = urlsplit(str(step.get("serviceUrl") or ""))
    path = _PATH.match(url.path)
    model = str(step.get("serviceName") or (path[1] if path else (url.hostname or "").partition(".")[0]))
    if not model and not step.get("nodeName"):
        raise InvalidArgument(f"{label}: serviceUrl names no model: {step.get('serviceUrl')!r}")
    return RoutedStep(
        name,
        "" if step.get("nodeName") else model,
        str(step.get("nodeName") or ""),
        url.path[1:3] if url.path.startswith(("/v1/", "/v2/")) else "",
        data == "$response",
        dependency == "Hard",
        weight,
        Condition(str(step["condition"])) if step.get("condition") else None,
    )
