"""The nodes on which Ray keeps a process for the next worker."""

from __future__ import annotations

from ts_frontend.workers.cluster.resources import ClusterRequest
from ts_frontend.workers.cluster.spares import NEW_S, Spares
from ts_frontend.workers.cluster.state import ClusterNode

ONE_CPU = ClusterRequest()


def node(name: str, free: float = 2.0, *, alive: bool = True, port: int = 7, zone: str = "a") -> ClusterNode:
    return ClusterNode(name, "10.0.0.1", alive, {"CPU": 2.0}, {"CPU": free}, {"zone": zone}, port)


def due(spares: Spares, nodes: list[ClusterNode], now_s: float, *requests: ClusterRequest) -> list[str]:
    return [one.id for one in spares.due(nodes, requests or (ONE_CPU,), now_s)]


def test_each_node_with_room_gets_one_when_it_is_no_longer_new() -> None:
    spares, nodes = Spares(), [node("a"), node("full", 0.5), node("dead", alive=False), node("unknown", port=0)]
    spares.told(nodes, 0.0)
    assert due(spares, nodes, NEW_S - 0.1) == []
    assert due(spares, nodes, NEW_S) == ["a"]
    assert due(spares, nodes, NEW_S) == [], "it has one"
    nodes.append(node("b"))
    spares.told(nodes, NEW_S + 1)
    assert due(spares, nodes, NEW_S + 2) == []
    assert due(spares, nodes, 2 * NEW_S + 1) == ["b"]


def test_a_taken_or_ended_process_is_replaced() -> None:
    spares, nodes = Spares(), [node("a"), node("b")]
    spares.told(nodes, 0.0)
    assert due(spares, nodes, NEW_S) == ["a", "b"]
    spares.taken("b")
    assert due(spares, nodes, NEW_S) == ["b"]
    spares.forget()
    assert due(spares, nodes, NEW_S) == ["a", "b"]
    spares.told([node("a")], NEW_S)
    spares.told(nodes, NEW_S + 1)
    assert due(spares, nodes, NEW_S + 2) == [], "a node that comes back is a new one"


def test_there_are_none_for_workers_that_could_not_use_them() -> None:
    spares, nodes = Spares(), [node("a", zone="a"), node("b", zone="b")]
    spares.told(nodes, 0.0)
    assert due(spares, nodes, NEW_S, ClusterRequest(packages=("numpy",))) == []
    assert due(spares, nodes, NEW_S, ClusterRequest(num_gpus=1.0)) == []
    assert due(spares, nodes, NEW_S, ClusterRequest(labels={"zone": "b"})) == ["b"]
    assert spares.due(nodes, (), NEW_S) == []


def test_a_worker_gets_a_process_on_the_node_with_the_fewest_workers() -> None:
    spares, nodes = Spares(), [node("a"), node("b"), node("c")]
    spares.told(nodes, 0.0)
    assert spares.choose(nodes, ONE_CPU, {}) == "", "no process is ready anywhere"
    assert due(spares, nodes, NEW_S) == ["a", "b", "c"]
    assert spares.choose([node("a"), node("b", 0.5), node("c")], ONE_CPU, {"a": 1}) == "c"
    assert spares.choose([node("a"), node("b", 0.5)], ONE_CPU, {"a": 1}) == "a", "no room on the other one"
    assert spares.choose(nodes, ONE_CPU, {}) == "b"
    assert spares.choose(nodes, ONE_CPU, {}) == "", "all are taken"
