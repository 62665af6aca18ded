"""KServe's InferenceGraph: nodes that pass whole bodies to models and to each other, by conditions: paths into JSON in
GJSON's notation, which hold when there is something. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

from ts_frontend.errors import InvalidArgument, InvalidGraph
from ts_frontend.graphs.graph import make_graph

#: Paths inside queries inside paths, at most.
DEPTH_MAX = 16
_OPERATORS = re.compile(r"(==|!=|<=|>=|!%|<|>|=|%)")
_MISSING = object()


class Condition:
    """Raises InvalidArgument for a text that isn't supported."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._path = _path(text)

    def holds(self, value: Any) -> bool:
        return _found(value, self._path) is not _MISSING


class _Query(NamedTuple):
    """`every`: all matching elements instead of the first one."""

    path: list[Any]
    operator: str
    value: str
    every: bool


def _path(text: str, depth: int = 0) -> list[Any]:
    """The steps of a path: keys, `#`, queries, and lists of paths."""
    steps: list[Any] = []
    if depth > DEPTH_MAX:
        raise InvalidArgument(f"condition {text!r} is nested too deeply")
    for part in _split(text, ".|"):
        if part == "@this":
            continue
        if part.startswith(("@", "{", "!")) or not part:
            raise InvalidArgument(f"condition {text!r}: {part!r} is not supported: there are keys, #, #(…) and [@this]")
        if part.startswith("#("):
            inner, end = part[2:].rpartition(")")[::2]
            if end not in ("", "#"):
                raise InvalidArgument(f"condition {text!r}: {part!r} has no ) at its end")
            steps.append(_query(inner, end == "#", depth))
        elif part.startswith("[") and part.endswith("]"):
            steps.append([_path(one, depth + 1) for one in _split(part[1:-1], ",")])
        else:
            steps.append(part)
    return steps


def _query(text: str, every: bool, depth: int) -> _Query:
    at, operator = next(_at_top(text, _OPERATORS), (len(text), ""))
    value = text[at + len(operator) :].strip()
    if value.startswith("~"):
        raise InvalidArgument(f"condition {text!r}: {value!r} is not supported")
    if len(value) > 1 and value[0] == value[-1] == '"':
        value = value[1:-1].replace('\\"', '"')
    path = text[:at].strip()
    return _Query(_path(path, depth + 1) if path else [], "==" if operator == "=" else operator, value, every)


def _at_top(text: str, wanted: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """What is outside of quotes and brackets."""
    depth, at = 0, 0
    while at < len(text):
        quoted = re.compile(r'"(?:[^"\\]|\\.)*"').match(text, at)
        if quoted or text[at] == "\\":
            at = quoted.end() if quoted else at + 2
            continue
        depth += (text[at] in "([{") - (text[at] in ")]}")
        found = wanted.match(text, at) if depth == 0 else None
        if found:
            yield at, found[0]
        at += len(found[0]) if found else 1


def _split(text: str, separators: str) -> list[str]:
    places = [at for at, _ in _at_top(text, re.compile(f"[{re.escape(separators)}]"))]
    return [text[at + 1 : end] for at, end in zip([-1, *places], [*places, len(text)], strict=True)]


def _found(value: Any, path: list[Any]) -> Any:
    """What the path leads to, or _MISSING."""
    for at, step in enumerate(path):
        if isinstance(step, list):
            value = [one for one in (_found(value, inner) for inner in step) if one is not _MISSING]
        elif isinstance(step, _Query):
            if not isinstance(value, list):
                return _MISSING
            matching = [one for one in value if _matches(one, step)]
            if step.every:
                return _each(matching, path[at + 1 :])
            value = matching[0] if matching else _MISSING
        elif step == "#":
            if not isinstance(value, list):
                return _MISSING
            return _each(value, path[at + 1 :]) if path[at + 1 :] else len(value)
        else:
            value = _member(value, step)
        if value is _MISSING:
            break
    return value


def _each(values: list[Any], path: list[Any]) -> list[Any]:
    return [found for one in values if (found := _found(one, path)) is not _MISSING]


def _member(value: Any, key: str) -> Any:
    if isinstance(value, list):
        return value[int(key)] if key.isdecimal() and int(key) < len(value) else _MISSING
    if not isinstance(value, dict):
        return _MISSING
    if re.search(r"(?<!\\)[*?]", key):
        return next((one for name, one in value.items() if fnmatchcase(name, key)), _MISSING)
    return value.get(re.sub(r"\\(.)", r"\1", key), _MISSING)


_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "==": lambda one, other: bool(one == other),
    "!=": lambda one, other: bool(one != other),
    "<": lambda one, other: bool(one < other),
    "<=": lambda one, other: bool(one <= other),
    ">": lambda one, other: bool(one > other),
    ">=": lambda one, other: bool(one >= other),
}


def _matches(value: Any, query: _Query) -> bool:
    found = _found(value, query.path)
    if found is _MISSING or not query.operator:
        return found is not _MISSING
    if query.operator in ("%", "!%"):
        return isinstance(found, str) and fnmatchcase(found, query.value) == (query.operator == "%")
    compared = partial(_COMPARED[query.operator], found)
    if isinstance(found, bool):
        return query.value in ("true", "false") and compared(query.value == "true")
    if isinstance(found, (int, float)):
        try:
            return compared(float(query.value))
        except ValueError:
            return False
    return isinstance(found, str) and compared(query.value)


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
