"""The nodes on which Ray keeps started processes for the next actors, since the start of one takes most of the time in
which a lost worker is replaced. Pure: times are arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ts_frontend.workers.cluster.resources import ClusterRequest
from ts_frontend.workers.cluster.state import ClusterNode, has_room, room_for

#: Seconds for which a node is new: Ray's own processes on it are still starting, and take its processors.
NEW_S = 8.0
#: Seconds after which a process that was asked for has started.
STARTED_S = 5.0
#: Seconds between the requests to two nodes of one machine: a start takes half a second of its processors.
APART_S = 3.0
#: The most spare processes of a node.
EACH_MAX = 4


class Spares:
    """The known nodes, and those with spare processes."""

    def __init__(self) -> None:
        self._seen_s: dict[str, float] = {}
        self._asked_s: dict[str, list[float]] = {}  # the time of the request for each one, oldest first
        self._busy_s: dict[str, float] = {}  # until when a machine starts others, by its address

    def told(self, nodes: Iterable[ClusterNode], now_s: float) -> None:
        """Takes an update of the cluster's state."""
        living = [node.id for node in nodes if node.alive]
        self._seen_s = {node: self._seen_s.get(node, now_s) for node in living}
        self._asked_s = {node: asked for node, asked in self._asked_s.items() if node in living}
        self._busy_s = {address: until_s for address, until_s in self._busy_s.items() if until_s > now_s}

    def due(
        self, nodes: Iterable[ClusterNode], requests: Sequence[ClusterRequest], workers: Mapping[str, int], now_s: float
    ) -> list[tuple[ClusterNode, int]]:
        """The nodes that get spares now, and how many: they aren't new, and have room for a worker with one of these
        requests. Each has one, or more if the others would otherwise have too few for the workers of a node that dies.
        `workers`: how many each node has. Environments with packages need processes of their own."""
        wanted = [request for request in requests if not request.packages]
        rooms = {node.id: max((room_for(one, node) for one in wanted), default=0) for node in nodes if node.port}
        others = sum(room > 0 for room in rooms.values()) - 1
        each = min(EACH_MAX, max(1, math.ceil(max(workers.values(), default=0) / max(1, others))))
        found = []
        for node in nodes:
            missing = min(each, rooms.get(node.id, 0)) - len(self._asked_s.get(node.id, ()))
            old = now_s - self._seen_s.get(node.id, now_s) >= NEW_S
            if missing > 0 and old and self._busy_s.get(node.address, 0.0) <= now_s:
                self._busy_s[node.address] = now_s + APART_S
                self._asked_s.setdefault(node.id, []).extend([now_s] * missing)
                found.append((node, missing))
        return found

    def choose(
        self, nodes: Iterable[ClusterNode], request: ClusterRequest, workers: Mapping[str, int], now_s: float
    ) -> str:
        """The node for a worker: of these, one with room and a spare, which counts as taken from now on; "" for none.
        One whose spare has started comes first, then the one with the fewest workers, so that a dead node costs
        few."""
        rooms = {node.id for node in nodes if has_room(request, node)}
        found = min(
            (node for node in self._asked_s if node in rooms),
            key=lambda node: (now_s - self._asked_s[node][0] < STARTED_S, workers.get(node, 0)),
            default="",
        )
        self.taken(found)
        return found

    def taken(self, node: str) -> None:
        """Notes that a node has one less: an actor was placed there."""
        asked = self._asked_s.get(node, [])
        del asked[:1]
        if not asked:
            self._asked_s.pop(node, None)

    def lost(self, node: str) -> None:
        """Notes that a node has none any more."""
        self._asked_s.pop(node, None)

    def forget(self) -> None:
        """Ray ends the spares with the bridge that asked for them."""
        self._asked_s.clear()
