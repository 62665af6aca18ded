"""The known state of the cluster: its nodes, whether Ray answers, and the reasons of waiting workers. Pure: times
are arguments."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ts_frontend.workers.cluster.resources import ClusterRequest

NODE_ID_CHARS = 8
#: Seconds without an update after which Ray counts as unavailable; updates come every second.
SILENCE_S = 6.0


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node as Ray describes it. `port`: of Ray's own process there, 0 if unknown; `total`, `free`: amounts by
    resource."""

    id: str
    address: str
    alive: bool = True
    total: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    port: int = 0

    @property
    def name(self) -> str:
        return f"{self.address} ({self.id[:NODE_ID_CHARS]})"


def shown_amounts(amounts: Mapping[str, float]) -> str:
    """`CPU: 2, GPU: 0.5, memory: 2.0 GiB`."""
    texts = [
        f"{name}: {amount / 2**30:.1f} GiB" if name == "memory" else f"{name}: {amount:g}"
        for name, amount in amounts.items()
    ]
    return ", ".join(texts) or "nothing"


def why_waiting(request: ClusterRequest, nodes: Sequence[ClusterNode]) -> str:
    """The reason why a worker with this request has no place yet."""
    wanted = request.amounts
    needs = f"waits for resources: {shown_amounts(wanted)}"
    living = [node for node in nodes if node.alive]
    if not living:
        return f"{needs}. The cluster has no living node"
    labelled = [node for node in living if not unmet(request.labels, node.labels)]
    if not labelled:
        texts = ", ".join(f"{name}: {text}" for name, text in request.labels.items())
        return f"waits for a node with the labels {texts}: none of the {len(living)} nodes has them"
    where = " with its labels" if request.labels else ""
    if not any(_fits(wanted, node.total) for node in labelled):
        return f"{needs}. That is more than any node{where} has (at most {_most(wanted, labelled, free=False)})"
    if request.group:
        return _why_group_waits(request, labelled)
    missing = _missing(wanted, labelled)
    if missing:
        return f"{needs}. The cluster has no more{where} (free: {shown_amounts(missing)})"
    if not any(_fits(wanted, node.free) for node in labelled):
        return f"{needs}. No node{where} has so much left (at most {_most(wanted, labelled, free=True)})"
    return f"waits for Ray to start its process (there is room: {shown_amounts(wanted)})"


def _why_group_waits(request: ClusterRequest, nodes: Sequence[ClusterNode]) -> str:
    """The reason why a worker in a placement group, which is reserved as a whole, has no place yet."""
    count, each = request.bundles, request.amounts
    needs = f"waits for its placement group: {count} places ({request.group}) of {shown_amounts(each)}"
    where = " with its labels" if request.labels else ""
    room = sum(1 for node in nodes if _fits(each, node.total))
    if request.group == "STRICT_SPREAD" and room < count:
        return f"{needs}, each on a node of its own. The cluster has {room} such nodes{where}"
    whole = {name: amount * count for name, amount in each.items()}
    if request.group == "STRICT_PACK" and not any(_fits(whole, node.total) for node in nodes):
        return f"{needs}, all on one node. That is more than any node{where} has"
    missing = _missing(whole, nodes)
    if missing:
        return f"{needs}. The cluster has no more{where} (free: {shown_amounts(missing)})"
    return f"{needs}, which Ray hasn't reserved yet"


def _missing(wanted: Mapping[str, float], nodes: Sequence[ClusterNode]) -> dict[str, float]:
    """The free amount in the whole cluster of each resource that is insufficient."""
    left = {name: sum(node.free.get(name, 0.0) for node in nodes) for name in wanted}
    return {name: amount for name, amount in left.items() if amount < wanted[name]}


def _most(wanted: Mapping[str, float], nodes: Sequence[ClusterNode], *, free: bool) -> str:
    amounts = [node.free if free else node.total for node in nodes]
    return shown_amounts({name: max(one.get(name, 0.0) for one in amounts) for name in wanted})


def has_room(request: ClusterRequest, node: ClusterNode) -> bool:
    """Whether a living node has the labels and the free resources for a worker with this request."""
    return node.alive and not unmet(request.labels, node.labels) and _fits(request.amounts, node.free)


def room_for(request: ClusterRequest, node: ClusterNode) -> int:
    """The number of workers with this request for which a node has room; 1 if they request no resources."""
    if not has_room(request, node):
        return 0
    return min((int(node.free[name] / amount) for name, amount in request.amounts.items()), default=1)


def _fits(wanted: Mapping[str, float], there: Mapping[str, float]) -> bool:
    return all(there.get(name, 0.0) >= amount for name, amount in wanted.items())


def unmet(wanted: Mapping[str, str], labels: Mapping[str, str]) -> list[str]:
    """The selectors that a node doesn't match, by label. Ray's selectors: a value, `in(a,b)`, or either with `!` in
    front."""
    return [name for name, selector in wanted.items() if not _meets(selector, labels.get(name))]


def _meets(selector: str, value: str | None) -> bool:
    plain = selector.removeprefix("!")
    named = plain.removeprefix("in").removeprefix("(").removesuffix(")") if plain.endswith(")") else plain
    found = value in [one.strip() for one in named.split(",")]
    return found != selector.startswith("!")


@dataclass(slots=True)
class ClusterState:
    """The known state of the cluster. Pure: times are arguments, in `time.monotonic()` seconds."""

    address: str
    connected: bool = False
    reason: str = "not connected yet"
    told_s: float = 0.0
    away_at: float | None = None  # time.time() seconds
    nodes: tuple[ClusterNode, ...] = ()

    def told(self, nodes: tuple[ClusterNode, ...], now_s: float) -> list[ClusterNode]:
        """Takes an update of the cluster's state; returns the nodes that have died since the last one."""
        living = {node.id for node in nodes if node.alive}
        gone = [node for node in self.nodes if node.alive and node.id not in living]
        self.nodes = nodes
        self.told_s, self.connected, self.away_at = now_s, True, None
        return gone

    def lost(self, reason: str) -> None:
        """The connection has ended."""
        self.connected, self.reason = False, reason
        self.away_at = self.away_at or time.time()

    def away(self, now_s: float) -> str:
        """The reason why no worker can be placed; "" while Ray answers."""
        if not self.connected:
            return self.reason
        silent_s = now_s - self.told_s
        if silent_s <= SILENCE_S:
            return ""
        self.away_at = self.away_at or time.time() - silent_s
        return f"Ray's head at {self.address} hasn't answered for {silent_s:.0f} s"

    def why_waiting(self, request: ClusterRequest, now_s: float) -> str:
        """The reason why a worker with this request hasn't been placed yet."""
        away = self.away(now_s)
        return f"waits for Ray: {away}" if away else why_waiting(request, self.nodes)

    def described(self, now_s: float) -> dict[str, Any]:
        """For people and their programs."""
        away = self.away(now_s)
        out: dict[str, Any] = {"address": self.address, "state": "away" if away else "connected"}
        if away:
            out["reason"] = away
        out["nodes"] = sum(node.alive for node in self.nodes)
        return out
