"""A Ray cluster of several nodes on this machine, in a process of its own (`ray.cluster_utils.Cluster`), which an
interpreter with Ray runs: `python ray_cluster.py`. Orders are lines of JSON, and so are their answers.

The resources of a node are those that it reports, including GPUs that needn't exist.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

END_S_MAX = 60.0
#: The time for a node's processes to start: on a busy machine they take longer than Ray's limit of 30 s.
PATIENT = {"RAY_raylet_start_wait_time_s": "180"}


class RayCluster:
    """The cluster for its user: a head without CPUs, and the added nodes. `python`: an interpreter with Ray; `env`:
    further variables for all its processes."""

    def __init__(self, python: str = sys.executable, env: Mapping[str, str] | None = None) -> None:
        self._child = subprocess.Popen(
            [python, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **PATIENT, **(env or {})},
            start_new_session=True,
        )
        self.pid = self._child.pid
        self.address = str(self._said()["address"])

    def _said(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"the Ray cluster ended with status {self._child.wait()}")

    def _ask(self, **order: Any) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(order) + "\n")
        self._child.stdin.flush()
        return self._said()

    def add_node(self, **resources: Any) -> str:
        """Adds a node with the options of `Cluster.add_node` (num_cpus, num_gpus, memory, resources, labels);
        returns its id."""
        return str(self._ask(order="add", **resources)["id"])

    def kill_node(self, node: str) -> None:
        """Kills a node with all its processes."""
        self._ask(order="kill", id=node)

    def end_head(self) -> None:
        """Kills the server that has the cluster's state (GCS)."""
        self._ask(order="end_head")

    def return_head(self) -> None:
        """Starts the head again, at the same port. The head needs storage for its state (`RAY_gcs_storage`)."""
        self._ask(order="return_head")

    def renew(self) -> None:
        """Ends all nodes and begins a new cluster at the same address."""
        self._ask(order="renew")

    def close(self) -> None:
        """Ends the cluster."""
        try:
            self._child.communicate(timeout=END_S_MAX)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.communicate()


class _Played:
    """The cluster itself, in its own process."""

    def __init__(self) -> None:
        self.nodes: dict[str, Any] = {}
        self.cluster = self._made()
        self.address = str(self.cluster.address)

    @staticmethod
    def _made(**head: Any) -> Any:
        from ray.cluster_utils import Cluster

        return Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **head})

    def add(self, **resources: Any) -> dict[str, Any]:
        node = self.cluster.add_node(**resources)
        self.nodes[node.node_id] = node
        return {"id": node.node_id}

    def kill(self, id: str) -> dict[str, Any]:
        self.cluster.remove_node(self.nodes.pop(id), allow_graceful=False)
        return {}

    def end_head(self) -> dict[str, Any]:
        self.cluster.head_node.kill_gcs_server()
        return {}

    def return_head(self) -> dict[str, Any]:
        self.cluster.head_node.start_gcs_server()
        return {}

    def renew(self) -> dict[str, Any]:
        for node in (*self.nodes.values(), self.cluster.head_node):
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        self.nodes.clear()
        self.cluster = self._made(gcs_server_port=int(self.address.rpartition(":")[2]))
        return {}


def main() -> None:
    played = _Played()
    print(json.dumps({"address": played.address}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(played, order.pop("order"))(**order)), flush=True)
    played.cluster.shutdown()


if __name__ == "__main__":
    main()
