"""The graph of a workflow: which node runs after which. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ts_frontend.errors import InvalidGraph

NODES_MAX = 256


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph with one start and without cycles. `parents` and `children` have every node, in `dag`'s order."""

    start: str
    leaves: tuple[str, ...]
    parents: Mapping[str, tuple[str, ...]]
    children: Mapping[str, tuple[str, ...]]


def make_graph(edges: Mapping[str, Sequence[str]]) -> Graph:
    """From each node's children; nodes that are named only as children have none. Raises InvalidGraph."""
    children = {name: tuple(dict.fromkeys(named)) for name, named in edges.items()}
    for named in edges.values():
        for child in named:
            children.setdefault(child, ())
    if not children:
        raise InvalidGraph("dag has no nodes")
    if len(children) > NODES_MAX:
        raise InvalidGraph(f"dag has {len(children)} nodes; at most {NODES_MAX} are allowed")
    parents: dict[str, tuple[str, ...]] = dict.fromkeys(children, ())
    for name, named in children.items():
        for child in named:
            parents[child] += (name,)
    _check_cycles(children, parents)
    starts = [name for name, before in parents.items() if not before]
    if len(starts) != 1:
        raise InvalidGraph(f"dag must have one start node, but nothing leads to any of: {', '.join(starts)}")
    return Graph(starts[0], tuple(name for name in children if not children[name]), parents, children)


def _check_cycles(children: Mapping[str, Sequence[str]], parents: Mapping[str, Sequence[str]]) -> None:
    """Takes away nodes without parents as long as there are any: what stays leads into a cycle, or out of one."""
    missing = {name: len(before) for name, before in parents.items()}
    free = [name for name, count in missing.items() if not count]
    while free:
        name = free.pop()
        del missing[name]
        for child in children[name]:
            missing[child] -= 1
            if not missing[child]:
                free.append(child)
    if missing:
        raise InvalidGraph(f"dag has a cycle: {' -> '.join(_cycle(missing, parents))}")


def _cycle(left: Mapping[str, int], parents: Mapping[str, Sequence[str]]) -> list[str]:
    """Every node in `left` has a parent there: going back from any leads round a cycle."""
    name = next(iter(left))
    path: list[str] = []
    while name not in path:
        path.append(name)
        name = next(parent for parent in parents[name] if parent in left)
    return [name, *reversed(path[path.index(name) :])]
