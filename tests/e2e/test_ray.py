"""Workers on three nodes of a real Ray cluster: their nodes are described, and requests outlive the end of a node."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.conftest import Serving, write_model
from support import GUARD_S, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray isn't installed (torchrelay[ray])"),
]

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = {node.node_id: node for node in [cluster.add_node(num_cpus=2) for _ in range(3)]}
cluster.wait_for_nodes()
print("at", cluster.address, flush=True)
for line in sys.stdin:
    cluster.remove_node(nodes.pop(line.strip()), allow_graceful=False)
    print("removed", flush=True)
cluster.shutdown()
"""
HANDLER = """
import os, time
def handle(data, context):
    if data is None:
        return None
    words = [bytes(row.get("data") or row.get("body")).decode() for row in data]
    with open(os.environ["BEGUN"], "a") as file:
        file.write("".join(word + "\\n" for word in words))
    time.sleep(0.005)
    return words
"""
REQUESTS = 600


class RayCluster:
    """The cluster's own process, which ends nodes by their ids."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self._said("at")

    def _said(self, word: str) -> str:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise AssertionError(f"the cluster ended with status {self._child.wait()}")

    def end_node(self, node: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(node + "\n")
        self._child.stdin.flush()
        self._said("removed")

    def close(self) -> None:
        self._child.communicate(timeout=GUARD_S)


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    made = RayCluster()
    yield made
    made.close()


def test_two_models_outlive_a_node(cluster: RayCluster, tmp_path: Path) -> None:
    store, begun = tmp_path / "store", tmp_path / "begun.txt"
    store.mkdir()
    for name in ("one", "two"):
        write_model(store, name, HANDLER, config=f"minWorkers: 2\nmaxWorkers: 2\nray: {{env: {{BEGUN: '{begun}'}}}}\n")
    server = Serving(tmp_path, store, {"ray_address": cluster.address}, ["--ncs", "--models", "one", "two"])
    try:
        server.wait_started()

        def workers() -> list[dict[str, Any]]:
            return [worker for name in ("one", "two") for worker in server.describe(name)["workers"]]

        def nodes() -> list[str]:
            return [worker["node"]["id"] for worker in workers() if worker["status"] == "READY" and "node" in worker]

        until(lambda: len(nodes()) == 4, workers)
        killed = server.describe("one")["workers"][0]["node"]["id"]

        def ask(number: int) -> tuple[str, int, str]:
            if number == REQUESTS // 3:
                cluster.end_node(killed)
            answer = httpx.post(
                f"{server.http}/predictions/{('one', 'two')[number % 2]}", content=f"r{number}", timeout=GUARD_S
            )
            return f"r{number}", answer.status_code, answer.text

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(REQUESTS)))
        ran = begun.read_text().split()
        assert [one for one in answers if one[1] != 200 and one[0] not in ran] == [], "not begun, and not answered"
        assert all(text == word for word, status, text in answers if status == 200)
        assert len(ran) == len(set(ran)), "nothing ran twice"
        until(lambda: len(nodes()) == 4 and killed not in nodes(), workers)
    finally:
        server.terminate()
