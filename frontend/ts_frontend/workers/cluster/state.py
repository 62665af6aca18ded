"""What is known of the cluster: its nodes, whether Ray answers, and why a worker waits for a place. Pure: times are
arguments."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ts_frontend.workers.cluster.resources import ClusterRequest

NODE_ID_CHARS = 8
#: Without news for so long, Ray counts as away: it tells every second.
SILENCE_S = 6.0


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node as Ray describes it. `total`: amounts by resource."""

    id: str
    address: str
    alive: bool = True
    total: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

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


def why_waiting(request: ClusterRequest, nodes: Sequence[ClusterNode], free: Mapping[str, float]) -> str:
    """Why a worker with this request has no place yet; `free`: what the whole cluster has left."""
    wanted = request.amounts
    needs = f"waits for resources: {shown_amounts(wanted)}"
    living = [node for node in nodes if node.alive]
    if not living:
        return f"{needs}. The cluster has no living node"
    labelled = [node for node in living if not unmet(request.labels, node.labels)]
    if not labelled:
        texts = ", ".join(f"{name}: {text}" for name, text in request.labels.items())
        return f"waits for a node with the labels {texts}: none of the {len(living)} nodes has them"
    if not any(_fits(wanted, node.total) for node in labelled):
        most = {name: max(node.total.get(name, 0.0) for node in labelled) for name in wanted}
        return f"{needs}. That is more than any node has (at most {shown_amounts(most)})"
    missing = {name: free.get(name, 0.0) for name, amount in wanted.items() if free.get(name, 0.0) < amount}
    if missing:
        return f"{needs}. The cluster has no more (free: {shown_amounts(missing)})"
    have = shown_amounts({name: free[name] for name in wanted})
    return f"waits for Ray to start its process (wanted: {shown_amounts(wanted)}; free on all nodes: {have})"


def _fits(wanted: Mapping[str, float], total: Mapping[str, float]) -> bool:
    return all(total.get(name, 0.0) >= amount for name, amount in wanted.items())


def unmet(wanted: Mapping[str, str], labels: Mapping[str, str]) -> list[str]:
    """The names of the labels that don't match, for selectors that are plain values; others count as matched."""
    plain = {name: text for name, text in wanted.items() if not text.startswith(("!", "in("))}
    return [name for name, text in plain.items() if labels.get(name) != text]


@dataclass(slots=True)
class ClusterState:
    """What is known of the cluster. Pure: times are arguments, in `time.monotonic()` seconds."""

    address: str
    connected: bool = False
    reason: str = "not connected yet"
    told_s: float = 0.0
    away_at: float | None = None  # time.time() seconds
    nodes: tuple[ClusterNode, ...] = ()
    free: Mapping[str, float] = field(default_factory=dict)

    def told(self, nodes: tuple[ClusterNode, ...], free: Mapping[str, float], now_s: float) -> list[ClusterNode]:
        """Takes news of the cluster; returns the nodes that were alive before and aren't any more."""
        living = {node.id for node in nodes if node.alive}
        gone = [node for node in self.nodes if node.alive and node.id not in living]
        self.nodes, self.free = nodes, free
        self.told_s, self.connected, self.away_at = now_s, True, None
        return gone

    def lost(self, reason: str) -> None:
        """The connection has ended."""
        self.connected, self.reason = False, reason
        self.away_at = self.away_at or time.time()

    def away(self, now_s: float) -> str:
        """Why nothing can be placed; "" while Ray answers."""
        if not self.connected:
            return self.reason
        silent_s = now_s - self.told_s
        if silent_s <= SILENCE_S:
            return ""
        self.away_at = self.away_at or time.time() - silent_s
        return f"Ray's head at {self.address} hasn't answered for {silent_s:.0f} s"

    def why_waiting(self, request: ClusterRequest, now_s: float) -> str:
        """Why a worker with this request hasn't been placed yet."""
        away = self.away(now_s)
        return f"waits for Ray: {away}" if away else why_waiting(request, self.nodes, self.free)

    def described(self, now_s: float) -> dict[str, Any]:
        """For people and their programs."""
        away = self.away(now_s)
        out: dict[str, Any] = {"address": self.address, "state": "away" if away else "connected"}
        if away:
            out["reason"] = away
        out["nodes"] = sum(node.alive for node in self.nodes)
        return out
