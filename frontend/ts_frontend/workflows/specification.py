"""A workflow's specification: its models with their settings, and their graph. Pure.

The YAML's form is TorchServe's: `models` (defaults, and a mapping for each model) and `dag` (a list of children for
each node). A node of `dag` that isn't in `models` is a function of the workflow's handler file.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ts_frontend.errors import InvalidArchive, InvalidGraph, InvalidWorkflow
from ts_frontend.graphs.graph import Graph, make_graph
from ts_frontend.models.archive import (
    ExtractLimits,
    Pin,
    file_name,
    member,
    read_config,
    read_manifest,
    refusal,
    text,
    unpack,
)
from ts_frontend.models.settings import INT_MAX
from ts_frontend.tasks import Stop

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
class WorkflowSpec:
    """`defaults`: the settings of nodes without their own. `dag_text`: the graph in TorchServe's notation. `warnings`:
    sentences about ignored models and settings."""

    defaults: Node
    nodes: Mapping[str, Node]
    graph: Graph
    dag_text: str
    warnings: tuple[str, ...]


def parse_spec(tree: Mapping[str, Any], *, has_handler: bool) -> WorkflowSpec:
    """The specification in the YAML's mapping. Raises InvalidWorkflow, InvalidGraph, naming the node and its error."""
    models, dag = tree.get("models"), tree.get("dag")
    if not isinstance(models, dict) and models is not None:
        raise InvalidWorkflow(f"models must be a mapping of settings and of models by their names, not {models!r:.80}")
    if not isinstance(dag, dict):
        raise InvalidWorkflow("dag is missing: a list of children for each node")
    models = models or {}
    shared = {key: value for key, value in models.items() if key in SETTINGS}
    own = {_name(key): _model(key, value) for key, value in models.items() if key not in SETTINGS}
    defaults = _settled("", None, {}, shared)
    edges = {_name(key): _children(key, value) for key, value in dag.items()}
    graph = make_graph(edges)
    if len(graph.starts) != 1:
        raise InvalidGraph(f"dag must have one start node, but nothing leads to any of: {', '.join(graph.starts)}")
    nodes = {name: _node(name, own.get(name), shared, has_handler) for name in graph.children}
    return WorkflowSpec(defaults, nodes, graph, _java_text(edges), tuple(_warnings(own, nodes)))


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
        raise InvalidWorkflow(f"node {name} is not in models, and can't be a function: that is not a function's name")
    waiting = {key: value for key, value in shared.items() if key in ("retry-attempts", "timeout-ms")}
    return _settled(name, None, {"max-batch-delay": 0}, waiting)


def _settled(name: str, url: str | None, own: Mapping[str, Any], shared: Mapping[str, Any]) -> Node:
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
        raise InvalidWorkflow(f"{where}: {key} must be a whole number, at least {least}, not {value!r:.80}")
    return value


def _warnings(own: Mapping[str, Mapping[str, Any]], nodes: Mapping[str, Node]) -> list[str]:
    found = [f"model {name} is not in dag: it is left out" for name in own if name not in nodes]
    for name, settings in own.items():
        for key in settings:
            if key not in SETTINGS and key != "url":
                near = difflib.get_close_matches(str(key), SETTINGS, 1)
                found.append(f"model {name}: there is no setting {key}" + (f"; {near[0]} is one" if near else ""))
    return found


def _java_text(edges: Mapping[str, list[str]]) -> str:
    """A map of lists in Java's notation."""
    return "{" + ", ".join(f"{name}=[{', '.join(children)}]" for name, children in edges.items()) + "}"


MANIFEST = Path("WAR-INF", "MANIFEST.json")


@dataclass(frozen=True, slots=True)
class WorkflowArchive:
    """An unpacked archive. `handler`: the file with the functions, relative to `dir`."""

    dir: Path
    name: str | None
    handler: str | None
    spec: WorkflowSpec

    def remove(self) -> None:
        """Deletes the unpacked copy. Blocking, never fails."""
        shutil.rmtree(self.dir, ignore_errors=True)


def open_workflow(
    path: Path, work_dir: Path, limits: ExtractLimits, stop: Stop | None = None, pin: Pin | None = None
) -> WorkflowArchive:
    """Unpacks the archive at `path`, with the digest `pin`, to `work_dir/workflows/<32 hex>` and reads it. Blocking.

    Raises InvalidWorkflow, InvalidGraph, ServeError (disk), Stopped once `stop` is set; nothing stays behind then.
    """
    try:
        if path.is_dir():
            raise refusal(path, "a directory can't be registered: make an archive with torch-workflow-archiver")
        target = unpack(path, work_dir / "workflows", limits, stop, pin)
        try:
            return _read(path, target)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
    except InvalidArchive as error:
        raise InvalidWorkflow(error.message) from error


def _read(path: Path, directory: Path) -> WorkflowArchive:
    manifest = read_manifest(path, directory / MANIFEST)
    if not manifest:
        raise refusal(path, f"it has no {MANIFEST}: make it with torch-workflow-archiver")
    workflow = member(path, manifest, "workflow", MANIFEST)
    spec_file = file_name(path, workflow, "specFile", MANIFEST)
    if not spec_file or not (directory / spec_file).is_file():
        raise refusal(path, f"'specFile' must name a file of the archive, not {spec_file!a}", str(MANIFEST))
    handler = file_name(path, workflow, "handler", MANIFEST)
    if handler and not (directory / handler).is_file():
        raise refusal(path, f"'handler' must name a file of the archive, not {handler!a}", str(MANIFEST))
    try:
        spec = parse_spec(read_config(path, directory / spec_file), has_handler=handler is not None)
    except InvalidWorkflow as error:
        raise type(error)(f"{spec_file} of {path.name}: {error.message}") from None
    return WorkflowArchive(directory, text(path, workflow, "workflowName", MANIFEST), handler, spec)
