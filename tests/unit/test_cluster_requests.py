"""What a model's workers ask of a cluster, and what is known of it: pure."""

from __future__ import annotations

from typing import Any

import pytest

from ts_frontend.config.table import ServerConfig
from ts_frontend.models.settings import Requested, resolve
from ts_frontend.workers.cluster.link import sentence
from ts_frontend.workers.cluster.resources import ClusterRequest, read_request
from ts_frontend.workers.cluster.state import SILENCE_S, ClusterNode, ClusterState, why_waiting
from ts_frontend.workers.devices import CPU
from ts_frontend.workers.supervisor import device_of

CLUSTERED = ServerConfig(ray_address="auto")


def read(section: dict[str, Any], device_type: str = "", devices: int = 0) -> tuple[ClusterRequest, list[str]]:
    warnings: list[str] = []
    return read_request(section, device_type, devices, warnings.append), warnings


def test_a_request_has_all_that_ray_can_be_asked_for() -> None:
    given = {
        "num_cpus": 2,
        "num_gpus": 0.5,
        "memory": "2GiB",
        "resources": {"TPU": 1},
        "labels": {"zone": "a"},
        "placement": "STRICT_SPREAD",
        "env": {"TOKEN": "x", "LEVEL": 3},
    }
    request, warnings = read(given)
    assert not warnings
    assert request == ClusterRequest(
        2.0, 0.5, 2 * 2**30, {"TPU": 1.0}, {"zone": "a"}, "STRICT_SPREAD", env={"TOKEN": "x", "LEVEL": "3"}
    )
    assert request.amounts == {"CPU": 2.0, "GPU": 0.5, "memory": 2.0 * 2**30, "TPU": 1.0}


@pytest.mark.parametrize(
    ("device_type", "devices", "gpus"), [("", 0, 0), ("cpu", 2, 2), ("gpu", 0, 1), ("gpu", 4, 4), ("", 2, 2)]
)
def test_gpus_follow_from_the_models_settings(device_type: str, devices: int, gpus: float) -> None:
    assert read({}, device_type, devices)[0].num_gpus == gpus


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
    settings = resolve(Requested(), {"ray": 7}, {}, CLUSTERED)
    assert settings.cluster == ClusterRequest() and "ray is 7: ignored" in settings.warnings[0]
    settings = resolve(Requested(), {"deviceIds": [0, 1]}, {}, CLUSTERED)
    assert settings.cluster == ClusterRequest(num_gpus=1) and "deviceIds is [0, 1]" in settings.warnings[0]
    settings = resolve(Requested(), {"parallelType": "tp", "torchrun": {"nproc-per-node": 2}}, {}, CLUSTERED)
    assert settings.cluster is None and "torchrun's workers run on this machine" in settings.warnings[0]


NODES = (
    ClusterNode("a" * 20, "10.0.0.1", True, {"CPU": 4.0}, {"zone": "a"}),
    ClusterNode("b" * 20, "10.0.0.2", True, {"CPU": 2.0, "GPU": 1.0}, {"zone": "b"}),
    ClusterNode("c" * 20, "10.0.0.3", False, {"CPU": 64.0}),
)


@pytest.mark.parametrize(
    ("request_", "free", "why"),
    [
        (ClusterRequest(8), {"CPU": 6.0}, "CPU: 8. That is more than any node has (at most CPU: 4)"),
        (ClusterRequest(3, 1), {"CPU": 6.0, "GPU": 1.0}, "more than any node has (at most CPU: 4, GPU: 1)"),
        (ClusterRequest(2), {"CPU": 1.0}, "waits for resources: CPU: 2. The cluster has no more (free: CPU: 1)"),
        (ClusterRequest(1), {}, "The cluster has no more (free: CPU: 0)"),
        (ClusterRequest(1, labels={"zone": "c"}), {"CPU": 6.0}, "labels zone: c: none of the 2 nodes has them"),
        (ClusterRequest(1, labels={"zone": "!in(a)"}), {"CPU": 6.0}, "waits for Ray to start its process"),
        (
            ClusterRequest(1),
            {"CPU": 6.0},
            "waits for Ray to start its process (wanted: CPU: 1; free on all nodes: CPU: 6)",
        ),
    ],
)
def test_a_worker_that_waits_says_for_what(request_: ClusterRequest, free: dict[str, float], why: str) -> None:
    assert why in why_waiting(request_, NODES, free)


def test_the_state_knows_dead_nodes_and_a_head_that_is_silent() -> None:
    state = ClusterState("10.0.0.1:6379")
    assert state.away(0.0) == "not connected yet"
    assert state.told(NODES, {"CPU": 6.0}, 10.0) == []
    assert state.described(10.0) == {"address": "10.0.0.1:6379", "state": "connected", "nodes": 2}
    (gone,) = state.told(NODES[:1], {"CPU": 4.0}, 11.0)
    assert gone.name == "10.0.0.2 (bbbbbbbb)"
    assert not state.away(11.0 + SILENCE_S)
    assert state.away(21.0) == "Ray's head at 10.0.0.1:6379 hasn't answered for 10 s"
    assert state.why_waiting(ClusterRequest(), 21.0).startswith("waits for Ray: Ray's head at")
    state.told(NODES, {}, 22.0)
    assert not state.away(22.0)
    state.lost("the bridge ended")
    assert state.described(22.0)["reason"] == "the bridge ended"
    assert "no living node" in why_waiting(ClusterRequest(), NODES[2:], {})


def test_a_line_of_rays_log_becomes_a_sentence() -> None:
    line = "[2026-01-01 10:00:00,111 E 16866 17277] rpc_client.h:204: Failed to connect to GCS. It's either GCS is …"
    assert sentence(line) == "Failed to connect to GCS"
    assert sentence("ModuleNotFoundError: No module named 'ray'") == "ModuleNotFoundError: No module named 'ray'"
