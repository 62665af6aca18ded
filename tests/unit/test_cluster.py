"""Workers on nodes: what a request for a place asks for, and processes that wait for the next worker."""

from __future__ import annotations

from typing import Any

import pytest

from ts_frontend.config.table import ServerConfig
from ts_frontend.models.settings import Requested, resolve
from ts_frontend.workers.cluster.link import sentence
from ts_frontend.workers.cluster.resources import (
    APART_S,
    EACH_MAX,
    NEW_S,
    SILENCE_S,
    STARTED_S,
    ClusterNode,
    ClusterRequest,
    ClusterState,
    Spares,
    read_request,
    why_waiting,
)
from ts_frontend.workers.resources import CPU
from ts_frontend.workers.supervisor import device_of

ONE_CPU = ClusterRequest()


def node(
    name: str, free: float = 2.0, *, alive: bool = True, port: int = 7, zone: str = "a", address: str = ""
) -> ClusterNode:
    return ClusterNode(name, address or f"10.0.0.{name}", alive, {"CPU": 2.0}, {"CPU": free}, {"zone": zone}, port)


def due(spares: Spares, nodes: list[ClusterNode], now_s: float, *requests: ClusterRequest) -> list[str]:
    """The nodes that get a spare, once for each."""
    found = spares.due(nodes, requests or (ONE_CPU,), {}, now_s)
    return [one.id for one, count in found for _ in range(count)]


def test_there_are_none_for_workers_that_could_not_use_them() -> None:
    spares, nodes = Spares(), [node("a", zone="a"), node("b", zone="b")]
    spares.told(nodes, 0.0)
    assert due(spares, nodes, NEW_S, ClusterRequest(packages=("numpy",))) == []
    assert due(spares, nodes, NEW_S, ClusterRequest(num_gpus=1.0)) == []
    assert due(spares, nodes, NEW_S, ClusterRequest(labels={"zone": "b"})) == ["b"]
    assert spares.due(nodes, (), {}, NEW_S) == []


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


CLUSTERED = ServerConfig(ray_address="auto")


def read(section: dict[str, Any], device_type: str = "", devices: int = 0) -> tuple[ClusterRequest, list[str]]:
    warnings: list[str] = []
    return read_request(section, device_type, devices, warnings.append), warnings


def test_a_request_has_all_that_ray_can_be_asked_for() -> None:
    given: dict[str, Any] = {
        "num_cpus": 2,
        "num_gpus": 0.5,
        "memory": "2GiB",
        "resources": {"TPU": 1},
        "labels": {"zone": "a", "ray.io/accelerator-type": "!in(H100, A100)"},
        "placement": "STRICT_SPREAD",
        "env": {"TOKEN": "x", "LEVEL": 3},
    }
    request, warnings = read(given)
    assert not warnings
    assert request == ClusterRequest(
        2.0, 0.5, 2 * 2**30, {"TPU": 1.0}, given["labels"], "STRICT_SPREAD", env={"TOKEN": "x", "LEVEL": "3"}
    )
    assert request.amounts == {"CPU": 2.0, "GPU": 0.5, "memory": 2.0 * 2**30, "TPU": 1.0}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"numGpus": 1}, "ray: numGpus is not a setting; did you mean num_gpus?"),
        ({"num_cpu": 1}, "did you mean num_cpus?"),
        ({"zebra": 1}, "ray: zebra is not a setting; there are num_cpus, num_gpus"),
        ({"num_cpus": -1}, "ray: num_cpus is -1: ignored, it must be a number, at least 0"),
        ({"num_gpus": True}, "ray: num_gpus is True: ignored"),
        ({"memory": "much"}, "ray: memory is 'much': ignored, it must be bytes, or a size such as 2GiB"),
        ({"placement": "spread"}, "one of SPREAD, PACK, STRICT_SPREAD, STRICT_PACK"),
        ({"resources": {"TPU": "one"}}, "ray: resources is {'TPU': 'one'}: ignored"),
        ({"labels": ["zone"]}, "ray: labels is ['zone']: ignored"),
        (
            {"labels": {"zone": "in(a"}},
            "ray: labels is {'zone': 'in(a'}: ignored, it must be names with selectors: a, !a",
        ),
        ({"labels": {"zone": "a b"}}, "ray: labels is {'zone': 'a b'}: ignored"),
        ({"labels": {"my zone": "a"}}, "ray: labels is {'my zone': 'a'}: ignored"),
        ({"num_cpus": 0, "placement": "SPREAD"}, "ray: placement is ignored: a placement group reserves resources"),
        ({"num_gpus": 1.5}, "more than one GPU has to be a whole number, 1 are asked for"),
    ],
)
def test_useless_settings_are_named(section: dict[str, Any], said: str) -> None:
    (warning,) = read(section)[1]
    assert said in warning


def test_a_model_for_the_cpu_gets_no_gpu() -> None:
    request, (warning,) = read({"num_gpus": 1}, "cpu")
    assert request.num_gpus == 0 and "deviceType is cpu" in warning


def test_a_worker_sees_the_gpus_that_it_was_given() -> None:
    assert device_of(ClusterRequest()) == CPU
    assert device_of(ClusterRequest(num_gpus=0.25)).group == (0,)
    assert device_of(ClusterRequest(num_gpus=2)).seen_id == 0


def test_settings_place_workers_in_the_cluster_unless_the_model_stays() -> None:
    assert resolve(Requested(), {}, {}, ServerConfig()).cluster is None
    assert resolve(Requested(), {}, {}, CLUSTERED).cluster == ClusterRequest()
    assert resolve(Requested(), {"ray": False}, {}, CLUSTERED).cluster is None
    assert resolve(Requested(), {"ray": {"num_cpus": 3}}, {}, CLUSTERED).cluster == ClusterRequest(3.0)
    assert resolve(Requested(), {}, {"ray": {"num_cpus": 3}}, CLUSTERED).cluster == ClusterRequest(3.0)
    settings = resolve(Requested(), {"ray": {"num_gpu": 1}}, {}, ServerConfig())
    assert settings.cluster is None and "did you mean num_gpus?" in settings.warnings[0], "told without a cluster, too"
    settings = resolve(Requested(), {"ray": 7}, {}, CLUSTERED)
    assert settings.cluster == ClusterRequest() and "ray is 7: ignored" in settings.warnings[0]
    settings = resolve(Requested(), {"deviceIds": [0, 1]}, {}, CLUSTERED)
    assert settings.cluster == ClusterRequest(num_gpus=1) and "deviceIds is [0, 1]" in settings.warnings[0]
    settings = resolve(Requested(), {"parallelType": "tp", "torchrun": {"nproc-per-node": 2}}, {}, CLUSTERED)
    assert settings.cluster is None and "torchrun's workers run on this machine" in settings.warnings[0]


def node_with(name: str, total: float, free: float, alive: bool = True, **more: float) -> ClusterNode:
    """A node whose zone is its name, with CPUs, and as many of others as are free."""
    return ClusterNode(
        name * 20, f"10.0.0.{ord(name) - 96}", alive, {"CPU": total, **more}, {"CPU": free, **more}, {"zone": name}
    )


NODES = (node_with("a", 4, 2), node_with("b", 2, 2, GPU=1), node_with("c", 64, 64, alive=False))
FULL = (node_with("a", 4, 0), node_with("b", 2, 1, GPU=1))


def grouped(strategy: str, bundles: int, cpus: float = 1.0, **labels: str) -> ClusterRequest:
    return ClusterRequest(cpus, group=strategy, bundles=bundles, labels=labels)


@pytest.mark.parametrize(
    ("request_", "nodes", "why"),
    [
        (ClusterRequest(8), NODES, "CPU: 8. That is more than any node has (at most CPU: 4)"),
        (ClusterRequest(3, 1), NODES, "more than any node has (at most CPU: 4, GPU: 1)"),
        (ClusterRequest(2), FULL, "waits for resources: CPU: 2. The cluster has no more (free: CPU: 1)"),
        (ClusterRequest(3), NODES, "waits for resources: CPU: 3. No node has so much left (at most CPU: 2)"),
        (ClusterRequest(1, labels={"zone": "a"}), FULL, "The cluster has no more with its labels (free: CPU: 0)"),
        (
            ClusterRequest(3, labels={"zone": "b"}),
            NODES,
            "more than any node with its labels has (at most CPU: 2)",
        ),
        (ClusterRequest(1, labels={"zone": "c"}), NODES, "labels zone: c: none of the 2 nodes has them"),
        (ClusterRequest(1, labels={"zone": "!in(a, b)"}), NODES, "none of the 2 nodes has them"),
        (ClusterRequest(1, labels={"zone": "!in(a)"}), NODES, "waits for Ray to start its process"),
        (ClusterRequest(1), NODES, "waits for Ray to start its process (there is room: CPU: 1)"),
        (
            grouped("STRICT_SPREAD", 3),
            NODES,
            "waits for its placement group: 3 places (STRICT_SPREAD) of CPU: 1, each on a node of its own. The cluster "
            "has 2 such nodes",
        ),
        (
            grouped("STRICT_PACK", 5),
            NODES,
            "places (STRICT_PACK) of CPU: 1, all on one node. That is more than any",
        ),
        (grouped("PACK", 5), NODES, "5 places (PACK) of CPU: 1. The cluster has no more (free: CPU: 4)"),
        (grouped("SPREAD", 2), NODES, "2 places (SPREAD) of CPU: 1, which Ray hasn't reserved yet"),
        (grouped("STRICT_SPREAD", 2, zone="b"), NODES, "The cluster has 1 such nodes with its labels"),
        (ClusterRequest(), NODES[2:], "no living node"),
    ],
)
def test_a_worker_that_waits_says_for_what(request_: ClusterRequest, nodes: tuple[ClusterNode, ...], why: str) -> None:
    assert why in why_waiting(request_, nodes)


def test_the_state_knows_dead_nodes_and_a_head_that_is_silent() -> None:
    state = ClusterState("10.0.0.1:6379")
    assert state.away(0.0) == "not connected yet"
    assert state.told(NODES, 10.0) == []
    assert state.described(10.0) == {"address": "10.0.0.1:6379", "state": "connected", "nodes": 2}
    (gone,) = state.told(NODES[:1], 11.0)
    assert gone.name == "10.0.0.2 (bbbbbbbb)"
    assert not state.away(11.0 + SILENCE_S)
    assert state.away(21.0) == "Ray's head at 10.0.0.1:6379 hasn't answered for 10 s"
    assert state.why_waiting(ClusterRequest(), 21.0).startswith("waits for Ray: Ray's head at")
    state.told(NODES, 22.0)
    assert not state.away(22.0)
    state.lost("the bridge ended")
    assert state.described(22.0)["reason"] == "the bridge ended"


def test_a_line_of_rays_log_becomes_a_sentence() -> None:
    line = "[2026-01-01 10:00:00,111 E 16866 17277] rpc_client.h:204: Failed to connect to GCS. It's either GCS is …"
    assert sentence(line) == "Failed to connect to GCS"
    assert sentence("ModuleNotFoundError: No module named 'ray'") == "ModuleNotFoundError: No module named 'ray'"
