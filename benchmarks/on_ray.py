"""Measures workers on the nodes of a Ray cluster: compared with local ones, while nodes die, and compared with Ray
Serve.

Usage: python benchmarks/on_ray.py [--only beside,deaths,serve] [--seconds N] [--rounds N] [--minutes N]
       [--add-after N]

The cluster has several nodes on this machine (`ray.cluster_utils.Cluster`), in an environment of its own that is made
the first time (benchmarks/.envs/ray). h2load is the client. The compared servers are measured in turns, so that other
load on the machine affects all of them alike; nodes, servers and clients share its processors.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from measuring import accounts, environments, h2load, machine
from measuring.environments import NotInstalled
from measuring.processes import Processes, ServerFailed, free_ports, processes
from measuring.ray_cluster import RayCluster
from measuring.servers import Folder, Running, run_ours
from measuring.workloads import HANDLERS, build_archive

from ts_frontend.protos.inference_pb2 import PredictionsRequest

ROOT = Path(__file__).resolve().parent.parent
APP = Path(__file__).resolve().parent / "models" / "ray" / "app.py"
RAY = "ray[default,serve]==2.60.0"
PARTS = ("beside", "deaths", "serve")
CLIENTS = 8
BODY = b"x" * 16
READY_S_MAX = 240.0
PAUSE_S = 0.05
KILL_EVERY_S = 10.0
ADD_AFTER_S = 5.0
DEATH_NODES, DEATH_CLIENTS = 6, 8
GRPC_PATH = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
#: The settings that Ray's pages recommend for a high throughput, as variables of the whole cluster.
TUNED = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
#: The time for a proxy to be ready, after which it is ended: on a busy machine it takes longer than the default of 5 s.
PATIENT = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}


def say(text: str) -> None:
    print(text, flush=True)


def interpreter() -> Path:
    """Python of the environment with Ray, Ray Serve and this checkout. Raises NotInstalled."""
    wanted = [[RAY, "cryptography >= 42"], ["--editable", str(ROOT)]]
    return environments.ensure("ray", wanted, say) / "bin" / "python"


@contextmanager
def cluster_of(python: Path, nodes: int, env: Mapping[str, str] | None = None, cpus: int = 4) -> Iterator[RayCluster]:
    made = RayCluster(str(python), {"RAY_DEDUP_LOGS": "0", **(env or {})})
    try:
        for _ in range(nodes):
            made.add_node(num_cpus=cpus)
        yield made
    finally:
        made.close()


class Ours:
    """Our server with the models `five` and `noop`, with `workers` each, on the nodes of a cluster or local. With
    `begun`, a file, both have the handler that notes there each begun request."""

    def __init__(
        self, folder: Folder, python: Path, workers: int, address: str = "", begun: Path | None = None
    ) -> None:
        folder.make()
        env = {"BEGUN": str(begun)} if begun else {}
        config = {"minWorkers": workers, "maxWorkers": workers, "ray": {"num_cpus": 1, "env": env}}
        build_archive("five", HANDLERS / "begun.py", folder.store, config)
        build_archive("noop", HANDLERS / ("begun.py" if begun else "noop.py"), folder.store, config)
        settings: dict[str, object] = {"preload_torch": "false", "number_of_gpu": 0, "job_queue_size": 1000}
        if address:
            settings["ray_address"] = address
        words = ["--model-store", str(folder.store), "--models", "five=five.mar", "noop=noop.mar"]
        self._folder, self._workers = folder, workers
        self._client = httpx.Client(timeout=30)  # a new one for each look would take a processor from the workers
        self.running: Running = run_ours(
            folder, words, settings, workers=workers, command=python.with_name("torchserve")
        )
        wait_for(self._ready, folder.processes)

    def _ready(self) -> bool:
        return all(len(self.nodes(name)) == self._workers for name in ("five", "noop"))

    def nodes(self, name: str) -> list[str]:
        """The nodes of the workers that are ready, "" for this machine's own."""
        try:
            told = self._client.get(f"http://127.0.0.1:{self.running.management_http_port}/models/{name}").json()
        except (httpx.TransportError, ValueError):
            return []
        found = told[0]["workers"] if isinstance(told, list) else []
        return [one.get("node", {}).get("id", "") for one in found if one["status"] == "READY"]


def wait_for(look: Any, started: Processes) -> None:
    """Returns when `look` returns something true. Raises ServerFailed."""
    end_s = time.monotonic() + READY_S_MAX
    while not look():
        started.check()
        if time.monotonic() > end_s:
            raise ServerFailed(f"a server wasn't ready within {READY_S_MAX:g} s")
        time.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Way:
    """The protocol of requests to a model."""

    http_port: int
    grpc_port: int

    def load(self, model: str, clients: int, seconds: float, *, grpc: bool = False) -> h2load.Load:
        """Runs the load. Raises LoadFailed if a request has no right answer."""
        if grpc:
            request = PredictionsRequest(model_name=model, input={"data": BODY}).SerializeToString()
            url = f"http://127.0.0.1:{self.grpc_port}{GRPC_PATH}"
            found = h2load.run(url, h2load.grpc_body(request), clients, seconds)
        else:
            url = f"http://127.0.0.1:{self.http_port}/predictions/{model}"
            found = h2load.run(url, BODY, clients, seconds, http1_type="application/octet-stream")
        if found.failed or not found.requests:
            raise h2load.LoadFailed(f"{url}: {found.failed} requests failed, {found.requests} were answered")
        return found


def p50_ms(found: h2load.Load) -> float:
    return h2load.percentile(found.latencies_s, 0.5) * 1000


def shown(values: Sequence[float], digits: int = 0) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


# --- beside local workers


def beside(python: Path, folder: Path, started: Processes, options: argparse.Namespace) -> None:
    """Measures two models of two workers each, on three nodes and on this machine, in turns."""
    with cluster_of(python, 3) as cluster:
        ways = {
            "nodes": Ours(Folder(folder / "nodes", started), python, 2, cluster.address).running,
            "local": Ours(Folder(folder / "local", started), python, 2).running,
        }
        asked = {name: Way(one.http_port, one.grpc_port) for name, one in ways.items()}
        for way in asked.values():
            for model in ("five", "noop"):
                way.load(model, CLIENTS, 2.0)
        rows: dict[str, dict[str, list[float]]] = {}

        def note(row: str, name: str, value: float) -> None:
            rows.setdefault(row, {"nodes": [], "local": []})[name].append(value)

        for number in range(options.rounds):
            for name in ("nodes", "local") if number % 2 == 0 else ("local", "nodes"):
                way = asked[name]
                note("handler of 5 ms, requests/s", name, way.load("five", CLIENTS, options.seconds).rate)
                note("no-op, requests/s", name, way.load("noop", CLIENTS, options.seconds).rate)
                note("no-op, 1 connection, p50 ms", name, p50_ms(way.load("noop", 1, options.seconds)))
                with ThreadPoolExecutor(2) as pool:
                    both = list(pool.map(lambda model, way=way: way.load(model, 4, options.seconds), ("five", "noop")))
                note("both at once: handler of 5 ms, requests/s", name, both[0].rate)
                note("both at once: no-op, requests/s", name, both[1].rate)
    say("\nWorkers on three nodes beside local ones, two models of two workers each, 8 connections (4 each at once):")
    for row, values in rows.items():
        ratios = [one / other for one, other in zip(values["nodes"], values["local"], strict=True)]
        digits = 2 if "ms" in row.rpartition(",")[2] else 0
        say(
            f"  {row}: nodes {shown(values['nodes'], digits)}; local {shown(values['local'], digits)}; "
            f"ratio {statistics.median(ratios):.2f} ({shown(ratios, 2)})"
        )


# --- nodes that die


@dataclass
class Tally:
    """The results of requests. `failed`: the ids of failed ones, with status and text."""

    answered: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    wrong: int = 0


def ask_on(port: int, number: int, tally: Tally, over: threading.Event) -> None:
    """One client, which sends requests to both models, one after the other."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    count = 0
    while not over.is_set():
        count += 1
        word = f"{number}-{count}"
        try:
            client.request("POST", "/predictions/" + ("five", "noop")[count % 2], body=word)
            answer = client.getresponse()
            text = answer.read().decode()
            status = answer.status
        except (OSError, http.client.HTTPException) as error:
            client.close()
            tally.failed.append((word, f"{type(error).__name__}: {error}"))
            continue
        if status != 200:
            tally.failed.append((word, f"{status} {text[:300]}"))
        else:
            tally.answered += 1
            tally.wrong += text != word


def deaths(python: Path, folder: Path, started: Processes, options: argparse.Namespace) -> None:
    """Kills nodes and later adds others, under load. A file has the requests that were begun."""
    begun = folder / "begun.txt"
    chance = random.Random(options.seed)
    placed_s: list[float] = []
    kills = 0
    with cluster_of(python, 0) as cluster:
        nodes = [cluster.add_node(num_cpus=2) for _ in range(DEATH_NODES)]
        ours = Ours(Folder(folder / "deaths", started), python, 2, cluster.address, begun)
        over, tallies = threading.Event(), [Tally() for _ in range(DEATH_CLIENTS)]
        clients = [
            threading.Thread(target=ask_on, args=(ours.running.http_port, number, tally, over))
            for number, tally in enumerate(tallies)
        ]
        for one in clients:
            one.start()
        try:
            end_s = time.monotonic() + options.minutes * 60
            next_s = time.monotonic() + KILL_EVERY_S
            while next_s < end_s:
                time.sleep(max(0.0, next_s - time.monotonic()))
                next_s = time.monotonic() + KILL_EVERY_S
                killed = nodes.pop(chance.randrange(len(nodes)))
                had = [killed in ours.nodes(name) for name in ("five", "noop")]
                kills += 1
                with ThreadPoolExecutor(1) as pool:
                    begun_s = time.monotonic()
                    added = pool.submit(replace_node, cluster, killed, options.add_after)
                    if any(had):
                        placed_s += placement(ours, killed, begun_s)
                    nodes.append(added.result())
        finally:
            over.set()
            for one in clients:
                one.join()
        started.end_one(ours.running.process)
    ran = begun.read_text().split()
    known = set(ran)
    failed = [one for tally in tallies for one in tally.failed]
    not_begun = [one for one in failed if one[0] not in known]
    say(f"\nNodes that die: {kills} in {options.minutes:g} min, {DEATH_NODES} at a time, {DEATH_CLIENTS} clients:")
    say(f"  answered: {sum(tally.answered for tally in tallies)}, wrong: {sum(tally.wrong for tally in tallies)}")
    say(f"  failed: {len(failed)}, of which the handler had not begun: {len(not_begun)}")
    say(f"  begun twice: {len(ran) - len(known)}")
    if placed_s:
        say(
            f"  placed again ({len(placed_s)} nodes had a worker): median {statistics.median(placed_s):.1f} s, "
            f"longest {max(placed_s):.1f} s; {sum(one <= 5.0 for one in placed_s)} within 5 s"
        )
    for word, text in (not_begun or failed)[:5]:
        say(f"  {word}: {text}")


def replace_node(cluster: RayCluster, killed: str, after_s: float) -> str:
    """Kills a node, and adds another one some seconds later: its start takes the processors of this machine, on which
    the surviving nodes are, too, as a node on a machine of its own wouldn't."""
    cluster.kill_node(killed)
    time.sleep(after_s)
    return cluster.add_node(num_cpus=2)


def placement(ours: Ours, killed: str, begun_s: float) -> list[float]:
    """Seconds until all workers are ready again on other nodes; nothing if they aren't within a minute."""
    while time.monotonic() - begun_s < 60.0:
        found = [ours.nodes(name) for name in ("five", "noop")]
        if all(len(nodes) == 2 and killed not in nodes for nodes in found):
            return [time.monotonic() - begun_s]
        time.sleep(PAUSE_S)
    say("  a worker was not placed again within 60 s")
    return []


# --- Ray Serve


def beside_serve(python: Path, folder: Path, started: Processes, options: argparse.Namespace) -> None:
    """Measures one worker and one replica of Ray Serve on the same cluster, in turns; first with Ray Serve's
    settings for throughput."""
    for title, env in (("Ray Serve tuned for throughput", TUNED), ("Ray Serve with its defaults", {})):
        place, env = folder / title.rpartition(" ")[2], {"PYTHONPATH": str(APP.parent), **PATIENT, **env}
        with cluster_of(python, 3, env) as cluster:
            ours = Ours(Folder(place / "ours", started), python, 1, cluster.address).running
            theirs = Folder(place / "serve", started)
            theirs.make()
            http_port, grpc_port = free_ports(2)
            command = [str(python), str(APP), cluster.address, str(http_port), str(grpc_port)]
            driver = theirs.run(command, env)
            log = theirs.folder / "console.log"
            wait_for(lambda log=log: "ready" in log.read_text(errors="replace").splitlines(), started)
            roots = [psutil.Process(cluster.pid), ours.process, driver]
            ways = {"ours": Way(ours.http_port, ours.grpc_port), "serve": Way(http_port, grpc_port)}
            compare(title, ways, roots, options)
            for one in (driver, ours.process):
                started.end_one(one)


def compare(title: str, ways: Mapping[str, Way], roots: Sequence[psutil.Process], options: argparse.Namespace) -> None:
    """Measures loads in turns. CPU time is that of all processes of the cluster and both servers, less their idle
    use."""
    say(f"\n{title}, one replica beside one worker of ours on the same three nodes, {CLIENTS} connections:")
    idle = used(roots, options.seconds, lambda: time.sleep(options.seconds))
    say(f"  idle: all processes together use {idle:.2f} cores (taken off below)")
    for grpc in (False, True):
        for model in ("noop", "five"):
            row = f"{'gRPC' if grpc else 'HTTP'}, {'no-op' if model == 'noop' else 'handler of 5 ms'}"
            try:
                show(row, *turns(ways, model, grpc, roots, idle, options))
            except h2load.LoadFailed as error:
                say(f"  {row}: {error}")


def used(roots: Sequence[psutil.Process], seconds: float, work: Any) -> float:
    """Cores that the trees of these processes use while `work` runs for these seconds. Processes that end meanwhile are
    left out, since the parents of some of Ray's processes don't wait for them."""
    before_s = own_cpu_s(roots)
    work()
    return sum(spent_s - before_s.get(pid, 0.0) for pid, spent_s in own_cpu_s(roots).items()) / seconds


def own_cpu_s(roots: Sequence[psutil.Process]) -> dict[int, float]:
    """CPU seconds of each process of the trees, without its children's."""
    found = {}
    for process in (one for root in roots for one in accounts.tree(root)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found


def turns(
    ways: Mapping[str, Way],
    model: str,
    grpc: bool,
    roots: Sequence[psutil.Process],
    idle: float,
    options: argparse.Namespace,
) -> tuple[dict[str, list[h2load.Load]], dict[str, list[float]]]:
    """The loads of each server, and its CPU ms for a request."""
    loads: dict[str, list[h2load.Load]] = {name: [] for name in ways}
    cpu_ms: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way.load(model, CLIENTS, 2.0, grpc=grpc)
    for number in range(options.rounds):
        for name in sorted(ways, reverse=bool(number % 2)):

            def work(name: str = name) -> None:
                loads[name].append(ways[name].load(model, CLIENTS, options.seconds, grpc=grpc))

            cores = used(roots, options.seconds, work) - idle
            cpu_ms[name].append(cores / loads[name][-1].rate * 1000)
    return loads, cpu_ms


def show(row: str, loads: Mapping[str, Sequence[h2load.Load]], cpu_ms: Mapping[str, Sequence[float]]) -> None:
    rates = {name: [one.rate for one in found] for name, found in loads.items()}
    p50s = {name: statistics.median(map(p50_ms, found)) for name, found in loads.items()}
    faster = statistics.median(one / other for one, other in zip(rates["ours"], rates["serve"], strict=True))
    cheaper = statistics.median(one / other for one, other in zip(cpu_ms["ours"], cpu_ms["serve"], strict=True))
    say(
        f"  {row}: requests/s ours {shown(rates['ours'])}; Ray Serve {shown(rates['serve'])}; ratio {faster:.2f}\n"
        f"    p50 ours {p50s['ours']:.2f} ms, Ray Serve {p50s['serve']:.2f} ms; CPU ms a request ours "
        f"{shown(cpu_ms['ours'], 3)}; Ray Serve {shown(cpu_ms['serve'], 3)}; ratio {cheaper:.2f}"
    )


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure workers on the nodes of a Ray cluster.")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each load (default: 2)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each (default: 9)")
    parser.add_argument("--minutes", type=float, default=5.0, help="for which nodes die (default: 5)")
    parser.add_argument(
        "--add-after",
        type=float,
        default=ADD_AFTER_S,
        metavar="N",
        help=f"seconds from a node's death until another one is added (default: {ADD_AFTER_S:g})",
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(words)
    unknown = set(options.only.split(",")) - {*PARTS}
    if unknown:
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return options


def run(options: argparse.Namespace) -> None:
    """Raises NotInstalled, ServerFailed, LoadFailed."""
    h2load.version()
    python = interpreter()
    say(f"{RAY}, {json.dumps(machine.describe())}. {machine.busy()}")
    parts = {"beside": beside, "deaths": deaths, "serve": beside_serve}
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory(prefix="bench-") as folder, processes() as started:
            parts[name](python, Path(folder), started, options)


def main() -> None:
    try:
        run(parse())
    except (NotInstalled, ServerFailed, h2load.LoadFailed, RuntimeError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
