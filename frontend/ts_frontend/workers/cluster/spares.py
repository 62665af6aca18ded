"""The nodes on which Ray keeps a started process for the next actor, since the start of one takes most of the time in
which a lost worker is replaced. Pure: times are arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ts_frontend.workers.cluster.resources import ClusterRequest
from ts_frontend.workers.cluster.state import ClusterNode, has_room

#: Seconds for which a node is new: Ray's own processes on it are still starting, and take its processors.
NEW_S = 8.0


class Spares:
    """The known nodes, and those with a spare process."""

    def __init__(self) -> None:
        self._seen_s: dict[str, float] = {}
        self._have: set[str] = set()

    def told(self, nodes: Iterable[ClusterNode], now_s: float) -> None:
        """Takes an update of the cluster's state."""
        living = [node.id for node in nodes if node.alive]
        self._seen_s = {node: self._seen_s.get(node, now_s) for node in living}
        self._have.intersection_update(living)

    def due(self, nodes: Iterable[ClusterNode], requests: Sequence[ClusterRequest], now_s: float) -> list[ClusterNode]:
        """The nodes that get a spare now: they have none, aren't new, and have room for a worker with one of these
        requests. Environments with packages need processes of their own."""
        wanted = [request for request in requests if not request.packages]
        found = [
            node
            for node in nodes
            if node.alive
            and node.port
            and node.id not in self._have
            and not self._new(node.id, now_s)
            and any(has_room(request, node) for request in wanted)
        ]
        self._have.update(node.id for node in found)
        return found

    def passed_over(self, nodes: Sequence[ClusterNode], request: ClusterRequest, now_s: float) -> list[str]:
        """The new nodes, if another one of these nodes has room for the request and a spare."""
        if not any(node.id in self._have and has_room(request, node) for node in nodes):
            return []
        return [node.id for node in nodes if self._new(node.id, now_s)]

    def taken(self, node: str) -> None:
        """Notes that an actor was placed on a node."""
        self._have.discard(node)

    def _new(self, node: str, now_s: float) -> bool:
        return now_s - self._seen_s.get(node, now_s) < NEW_S

    def forget(self) -> None:
        """Ray ends the spares with the bridge that asked for them."""
        self._have.clear()
