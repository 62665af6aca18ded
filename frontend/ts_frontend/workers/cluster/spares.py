"""The nodes on which Ray keeps a started process for the next actor, since the start of one takes most of the time in
which a lost worker is replaced. Pure: times are arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ts_frontend.workers.cluster.resources import ClusterRequest
from ts_frontend.workers.cluster.state import ClusterNode, has_room

#: Seconds for which a node is new: Ray's own processes on it are still starting, and take its processors.
NEW_S = 8.0


class Spares:
    """The known nodes, and those with a spare process."""

    def __init__(self) -> None:
        self._seen_s: dict[str, float] = {}
        self._have: dict[str, None] = {}  # in the order of their requests

    def told(self, nodes: Iterable[ClusterNode], now_s: float) -> None:
        """Takes an update of the cluster's state."""
        living = [node.id for node in nodes if node.alive]
        self._seen_s = {node: self._seen_s.get(node, now_s) for node in living}
        self._have = {node: None for node in self._have if node in living}

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
            and now_s - self._seen_s.get(node.id, now_s) >= NEW_S
            and any(has_room(request, node) for request in wanted)
        ]
        self._have.update(dict.fromkeys(node.id for node in found))
        return found

    def choose(self, nodes: Iterable[ClusterNode], request: ClusterRequest, workers: Mapping[str, int]) -> str:
        """The node for a worker: of these, one with room and a spare, which counts as taken from now on; "" for none.
        `workers`: how many each node has. The one with the fewest is taken, so that a dead node costs few."""
        rooms = {node.id for node in nodes if has_room(request, node)}
        found = min((node for node in self._have if node in rooms), key=lambda node: workers.get(node, 0), default="")
        self.taken(found)
        return found

    def taken(self, node: str) -> None:
        """Notes that a node has none any more: an actor was placed there, or the node is lost."""
        self._have.pop(node, None)

    def forget(self) -> None:
        """Ray ends the spares with the bridge that asked for them."""
        self._have.clear()
