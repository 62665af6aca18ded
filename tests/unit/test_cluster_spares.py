"""The nodes on which Ray keeps a process for the next worker."""

from __future__ import annotations

from ts_frontend.workers.cluster.resources import (
    APART_S,
    EACH_MAX,
    NEW_S,
    STARTED_S,
    ClusterNode,
    ClusterRequest,
    Spares,
)

ONE_CPU = ClusterRequest()


def node(
    name: str, free: float = 2.0, *, alive: bool = True, port: int = 7, zone: str = "a", address: str = ""
) -> ClusterNode:
    return ClusterNode(name, address or f"10.0.0.{name}", alive, {"CPU": 2.0}, {"CPU": free}, {"zone": zone}, port)


def due(spares: Spares, nodes: list[ClusterNode], now_s: float, *requests: ClusterRequest) -> list[str]:
    """The nodes that get a spare, once for each."""
    found = spares.due(nodes, requests or (ONE_CPU,), {}, now_s)
    return [one.id for one, count in found for _ in range(count)]


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


def test_nodes_of_one_machine_get_theirs_one_after_the_other() -> None:
    spares = Spares()
    nodes = [node("a", address="10.0.0.1"), node("b", address="10.0.0.1"), node("c", address="10.0.0.2")]
    spares.told(nodes, 0.0)
    assert due(spares, nodes, NEW_S) == ["a", "c"]
    spares.told(nodes, NEW_S + APART_S - 0.1)
    assert due(spares, nodes, NEW_S + APART_S - 0.1) == []
    spares.told(nodes, NEW_S + APART_S)
    assert due(spares, nodes, NEW_S + APART_S) == ["b"]


def test_a_taken_or_ended_process_is_replaced() -> None:
    spares, nodes = Spares(), [node("a"), node("b")]
    spares.told(nodes, 0.0)
    assert due(spares, nodes, NEW_S) == ["a", "b"]
    spares.taken("b")
    later_s = NEW_S + APART_S
    assert due(spares, nodes, later_s) == ["b"]
    spares.forget()
    assert due(spares, nodes, later_s + APART_S) == ["a", "b"]
    spares.told([node("a")], 3 * NEW_S)
    spares.told(nodes, 3 * NEW_S + 1)
    assert due(spares, nodes, 3 * NEW_S + 2) == [], "a node that comes back is a new one"


def test_there_are_none_for_workers_that_could_not_use_them() -> None:
    spares, nodes = Spares(), [node("a", zone="a"), node("b", zone="b")]
    spares.told(nodes, 0.0)
    assert due(spares, nodes, NEW_S, ClusterRequest(packages=("numpy",))) == []
    assert due(spares, nodes, NEW_S, ClusterRequest(num_gpus=1.0)) == []
    assert due(spares, nodes, NEW_S, ClusterRequest(labels={"zone": "b"})) == ["b"]
    assert spares.due(nodes, (), {}, NEW_S) == []


def test_a_worker_gets_a_process_on_the_node_with_the_fewest_workers() -> None:
    spares, nodes = Spares(), [node("a"), node("b"), node("c")]
    spares.told(nodes, 0.0)
    later_s = NEW_S + STARTED_S
    assert spares.choose(nodes, ONE_CPU, {}, NEW_S) == "", "no process is ready anywhere"
    assert due(spares, nodes, NEW_S) == ["a", "b", "c"]
    assert spares.choose([node("a"), node("b", 0.5), node("c")], ONE_CPU, {"a": 1}, later_s) == "c"
    assert spares.choose([node("a"), node("b", 0.5)], ONE_CPU, {"a": 1}, later_s) == "a", "no room on the other one"
    assert spares.choose(nodes, ONE_CPU, {}, later_s) == "b"
    assert spares.choose(nodes, ONE_CPU, {}, later_s) == "", "all are taken"


def test_a_process_that_has_started_is_worth_a_neighbour() -> None:
    spares, nodes = Spares(), [node("old", 3.0)]
    spares.told(nodes, 0.0)
    nodes.append(node("young"))
    spares.told(nodes, STARTED_S)
    assert due(spares, nodes, NEW_S) == ["old"]
    now_s = NEW_S + STARTED_S
    assert due(spares, nodes, now_s) == ["young"]
    assert spares.choose(nodes, ONE_CPU, {"old": 1}, now_s) == "old"
    assert spares.choose(nodes, ONE_CPU, {"old": 1}, now_s) == "young", "it will start soon"


def test_the_loss_of_any_node_finds_spares_on_the_others() -> None:
    def counts(nodes: list[ClusterNode], workers: dict[str, int]) -> dict[str, int]:
        spares = Spares()
        spares.told(nodes, 0.0)
        return {one.id: count for one, count in spares.due(nodes, [ONE_CPU], workers, NEW_S)}

    roomy = [node(name, 9.0) for name in ("a", "b", "c")]
    assert counts(roomy, {"a": 2, "b": 1}) == {"a": 1, "b": 1, "c": 1}
    assert counts(roomy, {"a": 4, "b": 1}) == {"a": 2, "b": 2, "c": 2}
    assert counts([*roomy[:2], node("c", 1.5)], {"a": 4}) == {"a": 2, "b": 2, "c": 1}, "no room for two"
    assert set(counts(roomy, {"a": 40}).values()) == {EACH_MAX}
    assert counts(roomy[:1], {"a": 3}) == {"a": 3}, "only its workers can die"


def test_each_worker_takes_one_process_of_its_node() -> None:
    spares, nodes = Spares(), [node("a", 9.0)]
    spares.told(nodes, 0.0)
    wanted = {"a": 2}
    assert [count for _, count in spares.due(nodes, [ONE_CPU], wanted, NEW_S)] == [2]
    assert spares.choose(nodes, ONE_CPU, wanted, NEW_S) == "a"
    assert [count for _, count in spares.due(nodes, [ONE_CPU], wanted, NEW_S + APART_S)] == [1]
    spares.lost("a")
    assert spares.choose(nodes, ONE_CPU, wanted, NEW_S) == ""
