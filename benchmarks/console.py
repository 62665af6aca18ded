"""Measures the cost of an open console for a server's requests, and the age of the data that it shows.

Usage: python benchmarks/console.py [--models 60] [--calls 4000] [--rounds 6] [--readers 1]

The calls go over HTTP to one model of many, from one client in this process. Rounds with and without readers of the
events take turns; the server's CPU time is that of its own process, without its workers. The fixed cost of two samples
a second is reported apart from the additional cost of each call.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from ts_frontend.console.collector import LINGER_S

HANDLER = Path(__file__).resolve().parent / "handlers" / "noop.py"
IDLE_S = 5.0
SERVE = "import sys; from ts_frontend.cli.main import main; sys.exit(main())"


def write_models(store: Path, count: int) -> None:
    for number in range(count):
        folder = store / f"model{number}"
        (folder / "MAR-INF").mkdir(parents=True)
        shutil.copy(HANDLER, folder / "handler.py")
        model = {"modelName": folder.name, "handler": "handler.py", "modelVersion": "1.0"}
        (folder / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"runtime": "python", "model": model}))


def ports_of(process: subprocess.Popen[str]) -> dict[str, int]:
    """The ports of a server, read from its start message."""
    assert process.stdout is not None
    found: dict[str, int] = {}
    for line in process.stdout:
        name, _, address = line.partition(" listens on http://127.0.0.1:")
        if address:
            found[name.split()[-1]] = int(address.split()[0])
        if len(found) == 3:
            return found
    raise SystemExit("the server did not start")


@contextmanager
def serving(folder: Path, count: int) -> Iterator[tuple[psutil.Process, dict[str, int]]]:
    write_models(folder / "store", count)
    settings = {
        **{f"{api}_address": "http://127.0.0.1:0" for api in ("inference", "management", "metrics")},
        "grpc_inference_port": 0,
        "grpc_management_port": 0,
        "preload_torch": "false",
        "number_of_gpu": 0,
        "default_workers_per_model": 1,
        "temp_dir": folder,
        "log_location": folder / "logs",
    }
    (folder / "config.properties").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    words = ["--start", "--foreground", "--ncs", "--ts-config", str(folder / "config.properties")]
    words += ["--model-store", str(folder / "store"), "--models", "all"]
    process = subprocess.Popen([sys.executable, "-c", SERVE, *words], stdout=subprocess.PIPE, text=True, cwd=folder)
    try:
        ports = ports_of(process)
        assert process.stdout is not None
        threading.Thread(target=process.stdout.read, daemon=True).start()  # so that it never waits for us
        yield psutil.Process(process.pid), ports
    finally:
        process.terminate()
        process.wait()


class Reading(threading.Thread):
    """Reads the events until `end`. `ages_s`: the age of each sample once it is parsed here; `pauses_s`: the time from
    one sample to the next."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.ages_s: list[float] = []
        self.pauses_s: list[float] = []
        self.bytes = 0
        self._over = False
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._connection.request("GET", "/console/events")
        self._answer = self._connection.getresponse()

    def run(self) -> None:
        before_s, name = 0.0, b""
        for line in self._answer:
            self.bytes += len(line)
            if self._over:
                break
            if line.startswith(b"event: "):
                name = line.removeprefix(b"event: ").strip()
            elif line.startswith(b"data: ") and name == b"sample":
                sample, now_s = json.loads(line.removeprefix(b"data: ")), time.time()
                self.ages_s.append(now_s - sample["t"])
                if before_s:
                    self.pauses_s.append(now_s - before_s)
                before_s = now_s
        self._connection.close()

    def end(self) -> None:
        self._over = True
        self.join()


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def called(port: int, calls: int) -> None:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        for _ in range(calls):
            connection.request("POST", "/predictions/model0", b"x")
            answer = connection.getresponse()
            if answer.read() and answer.status != 200:
                raise SystemExit(f"status {answer.status}")


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))] if values else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("models", 60), ("calls", 4000), ("rounds", 6), ("readers", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    found: dict[bool, list[float]] = {False: [], True: []}
    idle: dict[bool, list[float]] = {False: [], True: []}
    ages_s: list[float] = []
    pauses_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), asked.models) as (process, ports):
        port = ports["http_inference"]
        called(port, asked.calls)  # warm
        for number in range(2 * asked.rounds):
            watched = bool(number % 2)
            readers = [Reading(ports["http_management"]) for _ in range(asked.readers if watched else 0)]
            for reader in readers:
                reader.start()
            begun_s, before_s = time.monotonic(), cpu_s(process)
            called(port, asked.calls)
            spent_s, seconds = cpu_s(process) - before_s, time.monotonic() - begun_s
            before_s, begun_s = cpu_s(process), time.monotonic()
            time.sleep(IDLE_S)
            idle[watched].append((cpu_s(process) - before_s) / (time.monotonic() - begun_s))
            found[watched].append((spent_s - idle[watched][-1] * seconds) / asked.calls * 1e6)
            for reader in readers:
                reader.end()
                ages_s += reader.ages_s
                pauses_s += reader.pauses_s
            if watched:
                time.sleep(LINGER_S + 1)  # until the collector has ended
    plain, open_ = (statistics.median(found[key]) for key in (False, True))
    ratios = [watched / alone for alone, watched in zip(found[False], found[True], strict=True)]
    quiet, sampling = (statistics.median(idle[key]) * 1e3 for key in (False, True))
    print(f"{asked.models} models, {asked.readers} readers, {asked.rounds} rounds of {asked.calls} calls each")
    print(f"CPU of the server's process for a call: {plain:.1f} µs, with the console open {open_:.1f} µs")
    print(f"the same, in pairs of rounds: {statistics.median(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f})")
    print(f"CPU without calls: {quiet:.1f} ms a second, with the console open {sampling:.1f} ms")
    print(f"samples: p95 of the age {p95(ages_s) * 1e3:.0f} ms, of the pause between two {p95(pauses_s) * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
