"""Measures many models on demand of which few fit into memory: the start, random first requests, and the memory.

Usage: python benchmarks/many_models.py [--models N] [--fit N] [--requests N] [--clients N] [--megabytes N] [--packed N]
    [--seed N]

Each model is an archive with a handler that holds `--megabytes` MB of its own, and a file of `--packed` MiB. A request
is cold if its answer has `x-cold-start-ms`, the time that it waited for the load. The rest of its time, compared with
that of a load with free memory, is the server's overhead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from measuring import accounts, machine
from measuring.processes import Processes, ServerFailed, free_ports, processes

MIB = 1 << 20
READY_S_MAX = 600.0
ANSWER_S_MAX = 120.0
LOOK_S = 0.05
HANDLER = """
import os

class Heavy:
    def initialize(self, context):
        self.name = context.manifest["model"]["modelName"]
        self.weights = os.urandom(1 << 20) * {megabytes}

    def handle(self, data, context):
        return [self.name] * len(data)
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answered request: its seconds, and the seconds that it waited for a load (0 for none). `failure`: "" without
    one."""

    wall_s: float
    cold_s: float
    failure: str = ""


def write_models(store: Path, count: int, megabytes: int, packed: int) -> None:
    store.mkdir()
    weights = os.urandom(packed * MIB)
    for number in range(count):
        model = {"modelName": f"m{number}", "handler": "handler.py:Heavy", "modelVersion": "1.0"}
        with zipfile.ZipFile(store / f"m{number}.mar", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
            archive.writestr("handler.py", HANDLER.format(megabytes=megabytes))
            if weights:
                archive.writestr("weights.bin", weights, zipfile.ZIP_STORED)


class Server:
    """A running server of these models. `memory_max`: bytes for the models that are loaded."""

    def __init__(self, folder: Path, started: Processes, memory_max: int) -> None:
        inference, management, metrics = free_ports(3)
        self.url, self.management = f"http://127.0.0.1:{inference}", f"http://127.0.0.1:{management}"
        lines = {
            "inference_address": self.url,
            "management_address": self.management,
            "metrics_address": f"http://127.0.0.1:{metrics}",
            "enable_grpc": "false",
            "load_models": "all",
            "load_on_demand": "true",
            "default_workers_per_model": 1,
            "model_memory_max": memory_max,
            "model_keep_alive_s": 0,
            "preload_torch": "false",
            "number_of_gpu": 0,
            "job_queue_size": 1000,
            "log_location": folder / "logs",
            "temp_dir": folder,
        }
        (folder / "config.properties").write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
        command = [str(Path(sys.executable).with_name("torchserve")), "--start", "--foreground", "--ncs"]
        command += ["--ts-config", str(folder / "config.properties"), "--model-store", str(folder / "store")]
        begun_s = time.monotonic()
        env = {name: value for name, value in os.environ.items() if not name.startswith("TS_")}
        env["TMPDIR"] = str(folder)
        self.process = started.start(command, env, folder, folder / "console.log")
        while not self._answers():
            started.check()
            if time.monotonic() - begun_s > READY_S_MAX:
                raise ServerFailed(f"it hasn't started within {READY_S_MAX:g} s")
            time.sleep(LOOK_S)
        self.start_s, self.start_cpu_s = time.monotonic() - begun_s, accounts.cpu_s(self.process)
        self.before = {one.pid for one in self.process.children(recursive=True)}

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ping").status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, client: httpx.Client, name: str) -> Answer:
        begun_s = time.monotonic()
        try:
            answer = client.post(f"{self.url}/predictions/{name}", content=b"x")
        except httpx.HTTPError as error:
            return Answer(time.monotonic() - begun_s, 0.0, f"{name}: {type(error).__name__}: {error}")
        cold_s = int(answer.headers.get("x-cold-start-ms", 0)) / 1000
        right = answer.status_code == 200 and answer.text == name
        failure = "" if right else f"{name}: {answer.status_code} {answer.text[:200]}"
        return Answer(time.monotonic() - begun_s, cold_s, failure)

    @contextmanager
    def watched(self) -> Iterator[list[int]]:
        """Yields a list that collects the memory of all workers together (PSS, bytes), read again and again. Workers
        are read one after the other: a reading in which one of them ended counts it beside its successor, so it is left
        out."""
        found: list[int] = []
        over = threading.Event()

        def look() -> None:
            while not over.wait(LOOK_S):
                workers = [one for one in self.process.children(recursive=True) if one.pid not in self.before]
                total = sum(map(pss, workers))
                if all(map(is_alive, workers)):
                    found.append(total)

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            yield found
        finally:
            over.set()
            watcher.join()


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


def at_random(server: Server, names: Sequence[str], requests: int, clients: int, chance: random.Random) -> list[Answer]:
    with ThreadPoolExecutor(clients) as pool, httpx.Client(timeout=ANSWER_S_MAX) as client:
        return list(pool.map(lambda name: server.ask(client, name), [chance.choice(names) for _ in range(requests)]))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure many models on demand, of which few fit into memory.")
    parser.add_argument("--models", type=int, default=1000, help="known models (default: 1000)")
    parser.add_argument("--fit", type=int, default=20, help="models that fit into memory (default: 20)")
    parser.add_argument("--requests", type=int, default=500, help="requests to models at random (default: 500)")
    parser.add_argument("--clients", type=int, default=1, help="requests at a time (default: 1)")
    parser.add_argument("--megabytes", type=int, default=16, help="of a model's own (default: 16)")
    parser.add_argument("--packed", type=int, default=0, help="MiB of a file in each archive (default: 0)")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(words)


def run(options: argparse.Namespace) -> int:
    """Prints the results, and returns the number of failed requests."""
    print(f"{options.models} models of which {options.fit} fit. {machine.busy()}\n", flush=True)
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="bench-") as name, processes() as started:
        folder = Path(name)
        write_models(folder / "store", options.models, options.megabytes, options.packed)
        one = one_model_bytes(folder, started)
        limit = one * options.fit
        server = Server(folder, started, limit)
        print(f"start: {server.start_s:.1f} s, CPU {server.start_cpu_s:.1f} s, until it listens", flush=True)
        print(f"unpacked by then: {unpacked_bytes(folder) / MIB:.0f} MiB", flush=True)
        alone = loads_alone(server, options.fit // 2)
        print(f"a load with room for it: p50 {statistics.median(alone):.3f} s of {len(alone)}", flush=True)
        with server.watched() as memory:
            names = [f"m{number}" for number in range(options.models)]
            begun_s = time.monotonic()
            answers = at_random(server, names, options.requests, options.clients, chance)
            took_s = time.monotonic() - begun_s
        failed = [answer.failure for answer in answers if answer.failure]
        cold = sorted(answer.wall_s for answer in answers if answer.cold_s)
        warm = sorted(answer.wall_s for answer in answers if not answer.cold_s and not answer.failure)
        print(f"{len(answers)} requests, {options.clients} at a time, in {took_s:.1f} s: {len(failed)} failed")
        print(f"cold: {len(cold)}, {percentiles(cold)}")
        print(f"warm: {len(warm)}, {percentiles(warm)}")
        if cold:
            print(f"cold p50 - load p50: {statistics.median(cold) - statistics.median(alone):+.3f} s")
        print(f"memory: at most {max(memory) / MIB:.0f} MiB of {limit / MIB:.0f} MiB ({one / MIB:.0f} MiB a model)")
        for text in failed[:5]:
            print(text)
        return len(failed)


def one_model_bytes(folder: Path, started: Processes) -> int:
    """The memory of a loaded model, from describe, plus a tenth."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        alone = Path(name)
        (alone / "store").mkdir()
        (alone / "store" / "m0.mar").write_bytes((folder / "store" / "m0.mar").read_bytes())
        server = Server(alone, started, 1 << 40)
        with httpx.Client(timeout=ANSWER_S_MAX) as client:
            server.ask(client, "m0")
        found = httpx.get(f"{server.management}/models/m0").json()[0]["loadOnDemand"]["knownMemory"]
        started.end_one(server.process)
        return int(found * 1.1)


def unpacked_bytes(folder: Path) -> int:
    """The disk space of the server's copies of the archives' files."""
    found = folder.glob("torchrelay-server-*/models/**/*")
    return sum(file.stat().st_blocks * 512 for file in found if file.is_file())


def loads_alone(server: Server, count: int) -> list[float]:
    """Seconds of first requests while memory for their models is free."""
    with httpx.Client(timeout=ANSWER_S_MAX) as client:
        answers = [server.ask(client, f"m{number}") for number in range(count + 1)]
    return [answer.wall_s for answer in answers[1:]]  # the first one counts as all memory


def percentiles(seconds: Sequence[float]) -> str:
    if not seconds:
        return "none"
    at = [seconds[min(len(seconds) - 1, int(len(seconds) * part))] for part in (0.5, 0.9, 0.99)]
    return f"p50 {at[0]:.3f} s, p90 {at[1]:.3f} s, p99 {at[2]:.3f} s, longest {seconds[-1]:.3f} s"


def main() -> None:
    try:
        sys.exit(1 if run(parse()) else 0)
    except ServerFailed as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
