"""Workers on the nodes of a real Ray cluster: their resources and files, their fate when a node or the head dies, and
the signal to Ray's autoscaler while workers wait. The nodes only claim to have GPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from e2e.servers import Serving, write_model
from support import GUARD_S, free_port, module_of, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray isn't installed: make test-slow does"),
]

ray_cluster = module_of(Path(__file__).parents[1] / "ray_cluster.py")
BEGUN = """
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
WHERE = """
import os
def handle(data, context):
    if data is None:
        return None
    seen = {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""), "env": os.environ.get("TOLD", "")}
    try:
        import torchrelay_tiny
        seen["tiny"] = torchrelay_tiny.WORD
    except ImportError:
        pass
    return [seen] * len(data)
"""
REQUESTS = 600
#: A call that would wait for a place is told so after this time.
STARTUP_S = 5


@pytest.fixture(autouse=True)
def _without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's commands ask for a token as soon as the user has one."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


@contextmanager
def clusters(**env: str) -> Iterator[Any]:
    made = ray_cluster.RayCluster(env={"RAY_DEDUP_LOGS": "0", **env})
    try:
        yield made
    finally:
        made.close()


@contextmanager
def serving(
    directory: Path,
    address: str,
    models: dict[str, str],
    handler: str = WHERE,
    *,
    names: Sequence[str] = (),
    **more: Any,
) -> Iterator[Any]:
    """A server with these models, by their configurations. `names`: of those that are in its store already."""
    store = directory / "store"
    store.mkdir(exist_ok=True)
    for name, config in models.items():
        write_model(store, name, handler, config=config)
    settings: dict[str, object] = {"ray_address": address, **more}
    with Serving(directory, store, settings, ["--ncs", "--models", *models, *names]) as server:
        yield server


def workers(server: Serving, *names: str) -> list[dict[str, Any]]:
    return [worker for name in names for worker in server.describe(name)["workers"]]


def nodes(server: Serving, *names: str) -> list[str]:
    """The nodes of the workers that are ready."""
    return [one["node"]["id"] for one in workers(server, *names) if one["status"] == "READY" and "node" in one]


def placed(server: Serving, count: int, *names: str) -> list[str]:
    """The nodes of the workers, once so many are ready."""
    until(lambda: len(nodes(server, *names)) == count, lambda: (workers(server, *names), server.log))
    return nodes(server, *names)


def pinged(server: Serving) -> dict[str, Any]:
    return dict(httpx.get(f"{server.http}/ping", timeout=GUARD_S).json())


def seen(server: Serving, name: str) -> dict[str, str]:
    return dict(httpx.post(f"{server.http}/predictions/{name}", content=b"x", timeout=GUARD_S).json())


def test_two_models_outlive_a_node(tmp_path: Path) -> None:
    begun = tmp_path / "begun.txt"
    config = f"minWorkers: 2\nmaxWorkers: 2\nray: {{env: {{BEGUN: '{begun}'}}}}\n"
    with clusters() as cluster:
        for _ in range(3):
            cluster.add_node(num_cpus=2)
        with serving(tmp_path, cluster.address, {"one": config, "two": config}, BEGUN) as server:
            placed(server, 4, "one", "two")
            killed = server.describe("one")["workers"][0]["node"]["id"]

            def ask(number: int) -> tuple[str, int, str]:
                if number == REQUESTS // 3:
                    cluster.kill_node(killed)
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
            until(lambda: len(nodes(server, "one", "two")) == 4 and killed not in nodes(server, "one", "two"))


def test_workers_are_given_what_their_models_ask_for(tmp_path: Path) -> None:
    """Each model's configuration says where its workers may be; two more don't fit, and say so until they do."""
    models = {
        "halves": "minWorkers: 4\nmaxWorkers: 4\nray: {num_cpus: 0, num_gpus: 0.5, labels: {zone: a}}\n",
        "one_gpu": "minWorkers: 1\nmaxWorkers: 1\ndeviceType: gpu\nray: {num_cpus: 0, labels: {zone: b}}\n",
        "special": "minWorkers: 1\nmaxWorkers: 1\nray: {num_cpus: 0, resources: {special: 1}, env: {TOLD: word}}\n",
        "memory": "minWorkers: 1\nmaxWorkers: 1\nray: {num_cpus: 0.1, memory: 3GiB}\n",
        "not_a": "minWorkers: 2\nmaxWorkers: 2\nray: {num_cpus: 0.1, labels: {zone: '!in(a,b)'}}\n",
        "spread": "minWorkers: 3\nmaxWorkers: 3\nray: {placement: STRICT_SPREAD}\n",
        "packed": "minWorkers: 2\nmaxWorkers: 2\nray: {placement: STRICT_PACK, labels: {zone: 'in(a,b)'}}\n",
        "apart": "minWorkers: 1\nmaxWorkers: 9\nray: {num_cpus: 0.1, placement: STRICT_SPREAD}\n",
    }
    with clusters() as cluster:
        gib = 1 << 30
        a = cluster.add_node(num_cpus=3, num_gpus=2, memory=gib, labels={"zone": "a"})
        b = cluster.add_node(num_cpus=3, num_gpus=1, memory=gib, labels={"zone": "b"}, resources={"special": 1})
        c = cluster.add_node(num_cpus=3, memory=4 * gib, labels={"zone": "c"})
        with serving(tmp_path, cluster.address, models, default_startup_timeout=STARTUP_S) as server:
            assert placed(server, 1, "one_gpu") == [b]
            assert placed(server, 1, "special") == [b]
            assert placed(server, 1, "memory") == [c]
            assert placed(server, 2, "not_a") == [c, c]
            assert sorted(placed(server, 3, "spread")) == sorted([a, b, c])
            assert set(placed(server, 2, "packed")) in ({a}, {b})
            assert placed(server, 4, "halves") == [a] * 4
            gpus = sorted(gpu for worker in workers(server, "halves") for gpu in worker["node"]["gpus"])
            assert gpus == ["0", "0", "1", "1"], "two workers share each GPU"
            assert seen(server, "halves")["gpus"] in ("0", "1"), "and each sees its own alone"
            assert seen(server, "one_gpu")["gpus"] == "0"
            assert seen(server, "special") == {"gpus": "", "env": "word"}
            assert server.describe("halves")["ray"]["resources"] == {"GPU": 0.5}
            assert server.describe("spread")["ray"]["placement"] == "STRICT_SPREAD"

            with pytest.raises(grpc.RpcError) as refused:
                server.scale("special", 2)
            words = "waits for resources: special: 1. The cluster has no more (free: special: 0)"
            assert words in str(refused.value.details())
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
            (waiting,) = [one for one in workers(server, "special") if one["status"] != "READY"]
            assert waiting["waitsFor"] == words
            assert f"of special_1.0 {words}" in server.log
            assert seen(server, "special")["env"], "those that have a place go on"
            d = cluster.add_node(num_cpus=1, resources={"special": 1})
            assert sorted(placed(server, 2, "special")) == sorted([b, d])

            with pytest.raises(grpc.RpcError) as refused:
                server.scale("apart", 1)
            assert (
                "9 places (STRICT_SPREAD) of CPU: 0.1, each on a node of its own. The cluster has 4 such nodes"
                in str(refused.value.details())
            )


def test_placement_groups_spread_and_pack_and_move_when_a_node_dies(tmp_path: Path) -> None:
    """SPREAD and PACK are wishes: where they can't be met any more, workers are placed all the same."""
    models = {
        "spread": "minWorkers: 3\nmaxWorkers: 3\nray: {num_cpus: 1, placement: SPREAD}\n",
        "packed": "minWorkers: 3\nmaxWorkers: 3\nray: {num_cpus: 1, placement: PACK}\n",
        "partly": "minWorkers: 2\nmaxWorkers: 4\nray: {num_cpus: 0.5, placement: SPREAD}\n",
        "large": "minWorkers: 1\nmaxWorkers: 8\nray: {num_cpus: 0.1, placement: PACK}\n",
    }
    with clusters() as cluster:
        added = {cluster.add_node(num_cpus=10) for _ in range(3)}
        with serving(tmp_path, cluster.address, models) as server:
            assert set(placed(server, 3, "spread")) == added, "one on each"
            (home,) = set(placed(server, 3, "packed"))
            assert len(set(placed(server, 2, "partly"))) == 2, "also those of a group that has more places"
            server.scale("partly", 4)
            assert set(placed(server, 4, "partly")) == added
            server.scale("large", 8)
            assert len(set(placed(server, 8, "large"))) == 1

            cluster.kill_node(home)
            left = added - {home}

            def elsewhere(name: str, count: int) -> bool:
                found = nodes(server, name)
                return len(found) == count and home not in found

            until(lambda: elsewhere("spread", 3), lambda: (workers(server, "spread"), server.log))
            assert set(nodes(server, "spread")) == left, "more than one on a node, for want of others"
            until(lambda: elsewhere("packed", 3), lambda: (workers(server, "packed"), server.log))
            until(lambda: elsewhere("partly", 4), lambda: (workers(server, "partly"), server.log))
            for name in models:
                assert seen(server, name) == {"gpus": "", "env": ""}


@pytest.mark.parametrize("placement", ["", ", placement: SPREAD", ", placement: PACK"])
def test_a_worker_is_placed_again_before_ray_notices_the_death(tmp_path: Path, placement: str) -> None:
    """The end of its connection is enough, also for a placement group that has a free place on another node, or was on
    the dead node as a whole."""
    config = {"one": f"minWorkers: 2\nmaxWorkers: 4\nray: {{num_cpus: 1{placement}}}\n"}
    with clusters() as cluster:
        for _ in range(3):
            cluster.add_node(num_cpus=4)
        with serving(tmp_path, cluster.address, config) as server:
            victim = placed(server, 2, "one")[0]
            begun_s = time.monotonic()
            cluster.kill_node(victim)
            noticed_s = again_s = 0.0

            def over() -> bool:
                nonlocal noticed_s, again_s
                now_s = time.monotonic() - begun_s
                if not noticed_s and "of the cluster has left" in server.log:
                    noticed_s = now_s
                found = nodes(server, "one")
                if not again_s and len(found) == 2 and victim not in found:
                    again_s = now_s
                return bool(noticed_s and again_s)

            until(over, lambda: (workers(server, "one"), server.log))
            print(f"placed again {again_s:.1f} s after the kill{placement}; Ray noticed it after {noticed_s:.1f} s")
            assert again_s < noticed_s


#: A stream that notes why it has ended, calls that take as long as their request says, and lines and metrics of both.
LIVELY = """
import os, time

def handle(data, context):
    if data is None:
        return None
    words = [bytes(row.get("data") or row.get("body")).decode() for row in data]
    print("heard", *words)
    context.metrics.add_counter("Heard", len(words))
    if words[0].startswith("count"):
        return counted(int(words[0].split()[1]), context)
    time.sleep(float(words[0]))
    return [f"{len(words)} until {context.remaining_s(0):.1f}" for _ in words]

def counted(most, context):
    for number in range(most):
        if context.cancelled:
            break
        yield [f"{number} "]
        time.sleep(0.01)
    print("stream left" if context.cancelled else "stream ended")
"""


METRICS = """
dimensions: [&model_name ModelName, &level Level]
model_metrics:
  counter:
    - {name: Heard, unit: count, dimensions: [*model_name, *level]}
"""


def test_requests_on_nodes_are_like_those_on_local_workers(tmp_path: Path) -> None:
    """Streams, cancels, deadlines, batches, lines and metrics, over the connection to a node."""
    models = {
        "stream": "minWorkers: 1\nmaxWorkers: 1\n",
        "batch": "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\nmaxBatchDelay: 2000\n",
    }
    measured = tmp_path / "metrics.yaml"
    measured.write_text(METRICS)
    more: dict[str, Any] = {"metrics_mode": "prometheus", "metrics_config": measured}
    with clusters() as cluster:
        cluster.add_node(num_cpus=4)
        with serving(tmp_path, cluster.address, models, LIVELY, **more) as server:
            placed(server, 2, *models)
            assert b"".join(server.stream("stream", b"count 5")) == b"0 1 2 3 4 "
            server.wait_for_log("stream ended")
            with httpx.stream(
                "POST", f"{server.http}/predictions/stream", content=b"count 100000", timeout=GUARD_S
            ) as one:
                assert next(one.iter_raw()).startswith(b"0 ")
            server.wait_for_log("stream left")
            with pytest.raises(grpc.RpcError) as late:
                server.predict("stream", b"1", timeout=0.3)
            assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            told = server.predict("stream", b"0", timeout=50).decode()
            assert 40 < float(told.split()[-1]) <= 50, "the caller's deadline, by the clock of the worker"
            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(lambda _: server.predict("batch", b"0"), range(4)))
            assert [one.split()[0] for one in found] == [b"4"] * 4, "one batch"

            def heard() -> list[str]:
                """The handler's own metric, which the server learns from the worker's lines."""
                text = httpx.get(f"http://127.0.0.1:{server.port('http_metrics')}/metrics").text
                return [line for line in text.splitlines() if line.startswith("Heard{") and '"batch"' in line]

            until(heard)
            assert [float(line.split()[-1]) for line in heard()] == [4.0]


def test_workers_on_nodes_are_added_under_load_and_models_loaded_on_demand(tmp_path: Path) -> None:
    models = {
        "busy": "minWorkers: 1\nmaxWorkers: 3\nautoscale: {targetQueue: 0, upAfter: 0.2, downAfter: 2}\n",
        "rare": "minWorkers: 1\nmaxWorkers: 1\nloadOnDemand: true\nkeepAlive: 2\n",
    }
    with clusters() as cluster:
        added = {cluster.add_node(num_cpus=2) for _ in range(2)}
        with serving(tmp_path, cluster.address, models, LIVELY) as server:
            assert len(placed(server, 1, "busy")) == 1
            with ThreadPoolExecutor(9) as pool:
                answers = [pool.submit(server.predict, "busy", b"2") for _ in range(27)]
                assert set(placed(server, 3, "busy")) <= added
                assert all(one.result(GUARD_S).startswith(b"1 ") for one in answers)
            placed(server, 1, "busy")
            assert server.describe("busy")["autoscale"]["lastDecision"]["to"] == 1

            assert workers(server, "rare") == []
            assert server.describe("rare")["loadOnDemand"]["state"] == "known"
            cold = httpx.post(f"{server.http}/predictions/rare", content=b"0", timeout=GUARD_S)
            assert cold.status_code == 200 and int(cold.headers["x-cold-start-ms"]) > 0
            (node,) = nodes(server, "rare")
            assert node in added
            (worker,) = workers(server, "rare")
            until(lambda: server.describe("rare")["loadOnDemand"]["state"] == "known", lambda: server.log)
            until(lambda: not psutil.pid_exists(worker["pid"]))


ONE = {"one": "minWorkers: 1\nmaxWorkers: 2\n"}


def test_the_loss_of_the_head_leaves_what_lives_serving(tmp_path: Path) -> None:
    """Without storage of its own, a head that returns has a new cluster: workers are placed there when it has nodes."""
    with clusters() as cluster:
        cluster.add_node(num_cpus=2)
        with serving(tmp_path, cluster.address, ONE, default_startup_timeout=STARTUP_S) as server:
            placed(server, 1, "one")
            cluster.end_head()
            away = until(lambda: pinged(server).get("ray"), lambda: server.log)
            assert str(away).startswith("away: ")
            assert pinged(server)["status"] == "Healthy"
            assert server.describe("one")["ray"]["state"] == "away"
            with pytest.raises(grpc.RpcError, match="waits for Ray"):
                server.scale("one", 2)
            assert seen(server, "one") == {"gpus": "", "env": ""}
            server.wait_for_log("waits for Ray")
            cluster.renew()
            node = cluster.add_node(num_cpus=2)
            assert placed(server, 2, "one") == [node, node]
            assert seen(server, "one") == {"gpus": "", "env": ""}
            assert "ray" not in pinged(server)


@contextmanager
def redis() -> Iterator[int]:
    """A Redis server without files of its own; its port."""
    root = Path(sys.prefix) / "redis" / "root"
    if not root.is_dir():
        pytest.skip("ts_scripts/debian_packages.py redis has not been run")
    port = free_port()
    child = subprocess.Popen(
        [root / "usr" / "bin" / "redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", ""],
        env={**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(map(str, root.glob("usr/lib/*-linux-gnu")))},
        stdout=subprocess.DEVNULL,
    )
    try:
        yield port
    finally:
        child.terminate()
        child.wait(GUARD_S)


@contextmanager
def storage(kind: str, directory: Path) -> Iterator[dict[str, str]]:
    """The variables of a cluster whose head keeps its state there."""
    if kind == "redis":
        with redis() as port:
            yield {"RAY_REDIS_ADDRESS": f"127.0.0.1:{port}"}
    else:
        (directory / "gcs").mkdir()
        yield {"RAY_gcs_storage": kind, "RAY_gcs_storage_path": str(directory / "gcs")}


@contextmanager
def asked_on(server: Serving, name: str) -> Iterator[list[int]]:
    """Requests one after the other, for the time of the block; the statuses of their answers."""
    statuses: list[int] = []
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=GUARD_S) as client:
            while not over.is_set():
                statuses.append(client.post(f"{server.http}/predictions/{name}", content=b"x").status_code)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield statuses
        finally:
            over.set()
        asking.result(GUARD_S)


@pytest.mark.parametrize("kind", ["rocksdb", "redis"])
def test_a_head_that_returns_with_its_state_goes_on(tmp_path: Path, kind: str) -> None:
    with storage(kind, tmp_path) as kept, clusters(**kept) as cluster:
        cluster.add_node(num_cpus=2)
        with serving(tmp_path, cluster.address, ONE) as server:
            placed(server, 1, "one")
            pid = server.describe("one")["workers"][0]["pid"]
            with asked_on(server, "one") as statuses:
                until(lambda: statuses)
                cluster.end_head()
                away = until(lambda: pinged(server).get("ray"), lambda: server.log)
                assert str(away).startswith("away: ") and pinged(server)["status"] == "Healthy"
                begun = len(statuses)
                until(lambda: len(statuses) > begun, lambda: server.log)
                begun_s = time.monotonic()
                cluster.return_head()
                until(lambda: "ray" not in pinged(server), lambda: server.log)
                print(f"{kind}: connected again {time.monotonic() - begun_s:.1f} s after the head's return began")
                assert server.describe("one")["ray"]["state"] == "connected"
                server.scale("one", 2)
                placed(server, 2, "one")
                begun = len(statuses)
                until(lambda: len(statuses) > begun, lambda: server.log)
            assert set(statuses) == {200}, "no request noticed it"
            assert pid in [one["pid"] for one in workers(server, "one")], "the one that lived goes on"
            server.scale("one", 1)
            placed(server, 1, "one")


def test_packages_of_a_model_are_there_on_a_node(tmp_path: Path) -> None:
    """A requirements file becomes an environment that Ray makes; the package is a wheel, so that no index is asked."""
    wheel = tmp_path / "torchrelay_tiny-1.0-py3-none-any.whl"
    about = "torchrelay_tiny-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torchrelay_tiny.py", "WORD = 'found'\n")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: torchrelay-tiny\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    model = tmp_path / "store" / "one"
    (tmp_path / "store").mkdir()
    write_model(tmp_path / "store", "one", WHERE, config="useVenv: true\n")
    (model / "requirements.txt").write_text(f"# what it needs\ntorchrelay-tiny @ {wheel.as_uri()}\n")
    manifest = json.loads((model / "MAR-INF" / "MANIFEST.json").read_text())
    manifest["model"]["requirementsFile"] = "requirements.txt"
    (model / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
    with clusters() as cluster:
        cluster.add_node(num_cpus=2)
        with serving(tmp_path, cluster.address, {}, names=["one"]) as server:
            placed(server, 1, "one")
            assert seen(server, "one")["tiny"] == "found"
            assert server.describe("one")["ray"]["packages"] == [f"torchrelay-tiny @ {wheel.as_uri()}"]


@contextmanager
def autoscaled(directory: Path, **env: str) -> Iterator[str]:
    """A head with an autoscaler, which may start no node; its address."""
    port = free_port()
    address = f"{ray_host()}:{port}"
    config = {
        "cluster_name": "fake",
        "max_workers": 0,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 60,
        "provider": {"type": "fake_multinode", "gcs_address": address},
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "small": {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 0},
        },
        "head_node_type": "ray.head.default",
        **{key: {} for key in ("auth", "docker", "file_mounts")},
        **{f"{kind}setup_commands": [] for kind in ("", "head_", "worker_")},
        **{f"{kind}start_ray_commands": [] for kind in ("head_", "worker_")},
        **{key: [] for key in ("initialization_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter")},
        "file_mounts_sync_continuously": False,
    }
    (directory / "autoscaler.json").write_text(json.dumps(config))
    words = ["start", "--head", "--block", f"--port={port}", "--num-cpus=0", "--include-dashboard=false"]
    words += [f"--autoscaling-config={directory / 'autoscaler.json'}", "--disable-usage-stats"]
    head = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *words],
        env={**os.environ, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", **env},
        start_new_session=True,
    )
    try:
        yield address
    finally:
        members = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        head.wait(GUARD_S)
        for one in members:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(members)


def ray_host() -> str:
    import ray.util

    return str(ray.util.get_node_ip_address())


def test_a_cluster_that_wants_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"one": "minWorkers: 1\nray: {num_cpus: 1}\n"}
    keyed = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    with autoscaled(tmp_path, **keyed) as address:
        with pytest.raises(AssertionError, match="set RAY_AUTH_MODE=token"), serving(tmp_path, address, config):
            pass
        for name, value in keyed.items():
            monkeypatch.setenv(name, value)
        with serving(tmp_path, address, {}, names=["one"]) as server:
            until(lambda: all("waitsFor" in one for one in workers(server, "one")))


def test_rays_autoscaler_sees_the_workers_that_wait(tmp_path: Path) -> None:
    config = {"one": "minWorkers: 3\nmaxWorkers: 3\nray: {num_cpus: 1}\n"}
    with autoscaled(tmp_path) as address, serving(tmp_path, address, config) as server:
        until(lambda: all("waitsFor" in one for one in workers(server, "one")))
        asked = [sys.executable, "-m", "ray.scripts.scripts", "status", f"--address={address}"]

        def told() -> str:
            return subprocess.run(asked, capture_output=True, text=True).stdout

        until(lambda: "{'CPU': 1.0}: 3+ pending tasks/actors" in told(), told)
