"""A workflow's specification: its models with their settings, and the graph they stand in. Pure.

The YAML's form is TorchServe's: `models` (defaults, and a mapping for each model) and `dag` (a list of children for
each node). What is in `dag` and not in `models` is a function of the workflow's handler file.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ts_frontend.errors import InvalidWorkflow
from ts_frontend.models.sources import INT_MAX
from ts_frontend.workflows.graph import Graph, make_graph

#: Settings of `models` and of each model: (default, least).
SETTINGS = {
    "min-workers": (1, 0),
    "max-workers": (1, 1),
    "batch-size": (1, 1),
    "max-batch-delay": (50, 0),
    "retry-attempts": (1, 0),
    "timeout-ms": (10_000, 1),
}


@dataclass(frozen=True, slots=True)
class Node:
    """A model of the store, or a function (`url` None). `max_batch_delay_set`: False when it is only the default.
    `timeout_ms` is for one attempt; `retry_attempts` are those after the first."""

    name: str
    url: str | None
    min_workers: int
    max_workers: int
    batch_size: int
    max_batch_delay_ms: int
    max_batch_delay_set: bool
    retry_attempts: int
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Spec:
    """`defaults`: the node settings that a model without its own has. `dag_text`: the graph as TorchServe shows it.
    `warnings`: what was left out, and why."""

    defaults: Node
    nodes: Mapping[str, Node]
    graph: Graph
    dag_text: str
    warnings: tuple[str, ...]


def parse_spec(tree: Mapping[str, Any], *, has_handler: bool) -> Spec:
    """From the YAML's mapping. Raises InvalidWorkflow, InvalidGraph: the node and what is wrong with it."""
    models, dag = tree.get("models"), tree.get("dag")
    if not isinstance(models, dict) and models is not None:
        raise InvalidWorkflow(f"models must be settings and models, not {models!r:.80}")
    if not isinstance(dag, dict):
        raise InvalidWorkflow("dag is missing: a list of children for each node")
    models = models or {}
    shared = {key: value for key, value in models.items() if key in SETTINGS}
    own = {_name(key): _model(key, value) for key, value in models.items() if key not in SETTINGS}
    defaults = _settled("", None, {}, shared)
    edges = {_name(key): _children(key, value) for key, value in dag.items()}
    graph = make_graph(edges)
    nodes = {name: _node(name, own.get(name), shared, has_handler) for name in graph.children}
    return Spec(defaults, nodes, graph, _java_text(edges), tuple(_warnings(own, nodes)))


def _name(key: object) -> str:
    if not isinstance(key, str) or not key.strip() or "/" in key or not key.isprintable():
        raise InvalidWorkflow(f"node {key!r}: a node's name must be a text without '/' (quote it, if it is one)")
    return key


def _model(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        near = difflib.get_close_matches(str(name), SETTINGS, 1)
        hint = f" (or did you mean {near[0]}?)" if near else ""
        raise InvalidWorkflow(f"model {name} must have a url and settings, not {value!r:.80}{hint}")
    return value


def _children(name: str, value: object) -> list[str]:
    """The children of a node; empty entries don't count."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidWorkflow(f"node {name}: its children must be a list, not {value!r:.80}")
    return [_name(child) for child in value if child is not None and child != ""]


def _node(name: str, own: Mapping[str, Any] | None, shared: Mapping[str, Any], has_handler: bool) -> Node:
    if own is not None:
        url = own.get("url")
        if not isinstance(url, str) or not url:
            raise InvalidWorkflow(f"model {name} has no url: the name of its archive in the model store")
        return _settled(name, url, own, shared)
    if not has_handler:
        raise InvalidWorkflow(
            f"node {name} is not in models, and can't be a function: the archive has no handler file (--handler)"
        )
    if not name.isidentifier():
        raise InvalidWorkflow(f"node {name} is not in models, and can't be a function: that is no name of one")
    waiting = {key: value for key, value in shared.items() if key in ("retry-attempts", "timeout-ms")}
    return _settled(name, None, {"max-batch-delay": 0}, waiting)


def _settled(name: str, url: str | None, own: Mapping[str, Any], shared: Mapping[str, Any]) -> Node:
    """A node's settings: its own, else those of `models`, else the defaults."""
    where = f"model {name}" if own else "models"
    given = {key: own[key] if own.get(key) is not None else shared.get(key) for key in SETTINGS}
    numbers = {key: _whole(where, key, value) for key, value in given.items()}
    if given["max-workers"] is None:
        numbers["max-workers"] = max(numbers["max-workers"], numbers["min-workers"])
    if numbers["min-workers"] > numbers["max-workers"]:
        raise InvalidWorkflow(
            f"{where}: min-workers {numbers['min-workers']} is more than max-workers {numbers['max-workers']}"
        )
    return Node(
        name=name,
        url=url,
        min_workers=numbers["min-workers"],
        max_workers=numbers["max-workers"],
        batch_size=numbers["batch-size"],
        max_batch_delay_ms=numbers["max-batch-delay"],
        max_batch_delay_set=given["max-batch-delay"] is not None,
        retry_attempts=numbers["retry-attempts"],
        timeout_ms=numbers["timeout-ms"],
    )


def _whole(where: str, key: str, value: object) -> int:
    default, least = SETTINGS[key]
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= INT_MAX:
        raise InvalidWorkflow(f"{where}: {key} must be a whole number from {least} on, not {value!r:.80}")
    return value


def _warnings(own: Mapping[str, Mapping[str, Any]], nodes: Mapping[str, Node]) -> list[str]:
    found = [f"model {name} is in no node of dag: it is left out" for name in own if name not in nodes]
    for name, settings in own.items():
        for key in settings:
            if key not in SETTINGS and key != "url":
                near = difflib.get_close_matches(str(key), SETTINGS, 1)
                found.append(f"model {name}: there is no setting {key}" + (f"; {near[0]} is one" if near else ""))
    return found


def _java_text(edges: Mapping[str, list[str]]) -> str:
    """A map of lists as Java prints it."""
    return "{" + ", ".join(f"{name}=[{', '.join(children)}]" for name, children in edges.items()) + "}"
