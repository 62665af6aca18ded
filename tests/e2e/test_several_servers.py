"""Several servers that share a snapshot: all follow when one registers, scales, prefers or unregisters a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from e2e.servers import Serving, write_model
from support import until
from ts_frontend.models.sharing import NAME

SAYS = "def handle(data, context):\n    return [{word!r}] * len(data or ())\n"


class Group:
    """Servers with one store and one shared directory."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.store, self.place = directory, directory / "store", directory / "shared"
        self.store.mkdir()
        self.place.mkdir()
        self.servers: list[Serving] = []
        for name in ("a", "b", "c", "d"):
            write_model(self.store, name, SAYS.format(word=name))
        write_model(self.store, "a", SAYS.format(word="a2"), version="2.0", directory="a2")

    def begin(self, *arguments: str) -> Serving:
        directory = self.directory / f"server{len(self.servers)}"
        directory.mkdir()
        settings: dict[str, object] = {
            "shared_snapshot": self.place,
            "shared_snapshot_poll_secs": 0.1,
            "default_workers_per_model": 1,
            "metrics_mode": "prometheus",
        }
        self.servers.append(Serving(directory, self.store, settings, ["--ncs", *arguments]))
        return self.servers[-1]

    def start(self, *arguments: str) -> Serving:
        return self.begin(*arguments).wait_started()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path)
    yield made
    for server in made.servers:
        if server.process.poll() is None:
            server.terminate()


def says(server: Serving, name: str, word: str, version: str = "") -> Callable[[], bool]:
    def look() -> bool:
        try:
            return server.predict(name, b"x", version=version).decode() == word
        except grpc.RpcError:
            return False

    return look


def gone(server: Serving, name: str, version: str = "") -> Callable[[], bool]:
    path = f"models/{name}/{version}" if version else f"models/{name}"
    return lambda: httpx.get(f"{server.http_management}/{path}").status_code == 404


def ping(server: Serving) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{server.http}/ping").json()
    return answer


def two_with_both_versions(group: Group) -> tuple[Serving, Serving]:
    """Two servers with the versions 1.0 and 2.0 of a; the first one was started with it, the other one got 2.0."""
    one, other = group.begin("--models", "a"), group.begin()
    for server in (one, other):
        server.wait_started()
    until(says(other, "a", "a"), lambda: other.log)
    other.register("a2", initial_workers=1)
    until(says(one, "a", "a2", "2.0"), lambda: one.log)
    return one, other


def test_what_one_server_does_all_do(group: Group) -> None:
    one, other = two_with_both_versions(group)
    assert one.predict("a", b"x") == b"a"
    httpx.put(f"{one.http_management}/models/a/2.0/set-default").raise_for_status()
    until(says(other, "a", "a2"), lambda: other.log)
    assert one.scale("a", 2)
    until(lambda: len(other.worker_pids("a")) == 2, lambda: other.log)
    assert other.describe("a")["sharedSnapshot"] == {"inStep": True}
    with ThreadPoolExecutor(2) as clients:  # at the same time, at both
        for done in [clients.submit(one.register, "b"), clients.submit(other.register, "c")]:
            done.result()
    for server in (one, other):
        until(says(server, "b", "b"), lambda server=server: server.log)
        until(says(server, "c", "c"), lambda server=server: server.log)
    other.unregister("b")
    other.unregister("a", "1.0")
    until(gone(one, "b"), lambda: one.log)
    until(gone(one, "a", "1.0"), lambda: one.log)
    # A server that starts takes them all; what was unregistered stays so, although its start names it.
    third = group.start("--models", "b")
    until(lambda: httpx.get(f"{third.http}/v2/health/ready").status_code == 200, lambda: third.log)
    assert (third.predict("a", b"x"), third.predict("c", b"x")) == (b"a2", b"c")
    assert gone(third, "b")() and third.describe("a")["minWorkers"] == 2
    for server in (third, other):  # the end of a server takes nothing from the others
        assert server.terminate() == 0, server.log
    tree = json.loads((group.place / NAME).read_text())
    assert {name: list(model["versions"]) for name, model in tree["models"].items()} == {"a": ["2.0"], "c": ["1.0"]}
    assert one.predict("a", b"x") == b"a2"


def test_each_server_has_its_own_rollout_and_all_share_its_promotion(group: Group) -> None:
    one, other = two_with_both_versions(group)

    def rollout(server: Serving, method: str = "GET", action: str = "", **given: Any) -> httpx.Response:
        return httpx.request(method, f"{server.http_management}/models/a/rollout{action}", json=given or None)

    def divided(server: Serving) -> list[str]:
        ids = ({"x-request-id": f"caller-{number}"} for number in range(20))
        return [httpx.post(f"{server.http}/predictions/a", content=b"x", headers=each).text for each in ids]

    rollout(one, "PUT", version="2.0", steps=[50], judge=False).raise_for_status()
    assert rollout(other).status_code == 404 and set(divided(other)) == {"a"}
    rollout(other, "PUT", version="2.0", steps=[50], judge=False).raise_for_status()
    until(lambda: set(divided(one)) == set(divided(other)) == {"a", "a2"})
    assert divided(one) == divided(other)
    rollout(one, "POST", "/rollback").raise_for_status()
    assert rollout(other).json()["state"] == "running" and set(divided(other)) == {"a", "a2"}
    rollout(other, "POST", "/promote").raise_for_status()
    until(says(one, "a", "a2"), lambda: one.log)
    rollout(one, "PUT", version="1.0", steps=[50], judge=False).raise_for_status()
    rollout(other, "PUT", version="1.0", steps=[50], judge=False).raise_for_status()
    rollout(other, "POST", "/promote").raise_for_status()
    until(lambda: rollout(one).json()["state"] == "promoted", lambda: rollout(one).text)


def test_what_fails_is_told_and_tried_again(group: Group) -> None:
    """The place is away, and comes again; a model can't be loaded, and can be later."""
    one, other = group.begin("--models", "a"), group.begin()
    for server in (one, other):
        server.wait_started()
    until(says(other, "a", "a"), lambda: other.log)
    group.place.rename(group.directory / "away")
    until(lambda: "No such file or directory" in str(ping(other).get("sharedSnapshot")), lambda: other.log)
    assert ping(other)["status"] == "Healthy" and other.predict("a", b"x") == b"a"
    assert "No such file" in other.describe("a")["sharedSnapshot"]["failure"]
    metrics = httpx.get(f"http://127.0.0.1:{other.port('http_metrics')}/metrics").text
    assert "ts_shared_snapshot_failures{" in metrics
    one.register("b")
    (group.directory / "away").rename(group.place)
    until(says(other, "b", "b"), lambda: other.log)
    until(lambda: "sharedSnapshot" not in ping(other), lambda: other.log)
    tree = json.loads((group.place / NAME).read_text())
    tree["models"]["e"] = {"default": "1.0", "versions": {"1.0": {**tree["models"]["b"]["versions"]["1.0"]}}}
    tree["models"]["e"]["versions"]["1.0"] |= {"marName": "e", "stamp": "e"}
    tree["models"]["e"]["versions"]["1.0"]["torchrelay"] |= {"url": "e"}
    (group.place / "new").write_text(json.dumps(tree))
    (group.place / "new").replace(group.place / NAME)
    until(lambda: "Model e 1.0 of the shared snapshot can't be served here" in str(ping(other)), lambda: other.log)
    write_model(group.store, "e", SAYS.format(word="e"))
    until(says(other, "e", "e"), lambda: other.log)
    until(says(one, "e", "e"), lambda: one.log)
    assert ping(other) == {"status": "Healthy"}
