"""Measures the overhead of a transformer: the same program run by KServe's server and by this one, before the same
predictor.

Usage: python benchmarks/kserve_transformers.py [--protocols v1,v2,grpc-v2] [--clients 1,16] [--rounds N] [--seconds S]

The overhead is the median latency through the transformer less that of direct requests to the predictor, in the same
round. Rounds are interleaved: in each, the predictor and both transformers are loaded in turns. CPU time is that of
the transformer's process tree for each request, which says more than latencies on a machine that is shared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from measuring import machine, open_inference
from measuring.processes import Processes, failures_as_messages, processes
from measuring.results import Spread, aligned
from measuring.servers import Folder, Running
from peers.loads import Target, closed, turned
from peers.questions import Call, Question, by_open_inference
from peers.scenarios import CPU, P50
from peers.shared_servers import until_right
from peers.systems import SYSTEMS, run_kserve, run_ours_kserve

PROTOCOLS = ("v1", "v2", "grpc-v2")
TRANSFORMERS = {"kserve": run_kserve, "ours": run_ours_kserve}
DIRECT = "predictor"
MODEL = "identity"
START_S_MAX, WARM_UP_S = 120.0, 2.0
V1_INSTANCES = [open_inference.VALUES]


@dataclass(frozen=True, slots=True)
class Round:
    """Median latencies and CPU time for each request by server, in one round of one load."""

    protocol: str
    clients: int
    p50_ms: Mapping[str, float]
    cpu_us: Mapping[str, float]

    def overhead_ms(self, server: str) -> float:
        return self.p50_ms[server] - self.p50_ms[DIRECT]

    @property
    def overheads(self) -> float:
        """Our overheads divided by KServe's."""
        return self.overhead_ms("ours") / self.overhead_ms("kserve")

    @property
    def cpu(self) -> float:
        return self.cpu_us["ours"] / self.cpu_us["kserve"]


def question(protocol: str) -> Question:
    """A request with a tensor of 16 numbers, which the answer returns."""
    if protocol != "v1":
        return by_open_inference(Call("noop"), http=protocol == "v2")
    body = json.dumps({"instances": V1_INSTANCES}).encode()
    return Question(f"/v1/models/{MODEL}:predict", body, "application/json", _is_right)


def _is_right(messages: Sequence[bytes]) -> bool:
    return [json.loads(one) for one in messages] == [{"predictions": V1_INSTANCES}]


def targets(folder: Path, started: Processes, protocol: str) -> dict[str, Target]:
    """The predictor, and both transformers before it, once each has answered. Raises NotInstalled, ServerFailed,
    WrongAnswer."""

    def place(name: str) -> Folder:
        made = Folder(folder / f"{protocol}-{name}", started)
        made.make()
        return made

    def target(name: str, running: Running) -> Target:
        port = running.grpc_port if protocol == "grpc-v2" else running.http_port
        until_right(asked, port, name, running, started, time.monotonic() + START_S_MAX)
        return Target(name, running, asked, port)

    asked = question(protocol)
    found = {DIRECT: target(DIRECT, SYSTEMS["ours-triton"].start(place(DIRECT), ["noop"], 1))}
    words = [f"--model_name={MODEL}", f"--predictor_host=127.0.0.1:{found[DIRECT].port}"]
    for name, run in TRANSFORMERS.items():
        running = run(place(name), "transformer.py", [*words, f"--predictor_protocol={protocol}"])
        found[name] = target(name, running)
    return found


def measure(found: Mapping[str, Target], protocol: str, clients: int, number: int, seconds: float) -> Round:
    """Measures one load on each server in turn. Raises LoadFailed, NoAnswer, WrongAnswer."""
    p50_ms, cpu_us = {}, {}
    for name in turned(list(found), number):
        figures = closed(found[name], clients, seconds)
        p50_ms[name], cpu_us[name] = figures[P50], figures[CPU]
    return Round(protocol, clients, p50_ms, cpu_us)


def report(rounds: Sequence[Round]) -> str:
    lines = [["protocol", "clients", "predictor ms", "KServe's overhead ms", "ours ms", "ours / KServe's"]]
    lines[0] += ["KServe's CPU µs", "ours µs", "ours / KServe's"]
    for protocol, clients in dict.fromkeys((one.protocol, one.clients) for one in rounds):
        some = [one for one in rounds if (one.protocol, one.clients) == (protocol, clients)]
        columns = (
            [one.p50_ms[DIRECT] for one in some],
            *([one.overhead_ms(name) for one in some] for name in TRANSFORMERS),
            [one.overheads for one in some],
            *([one.cpu_us[name] for one in some] for name in TRANSFORMERS),
            [one.cpu for one in some],
        )
        lines.append([protocol, str(clients), *(Spread.of(values).text() for values in columns)])
    return aligned(lines)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what a transformer adds to a request.")
    parser.add_argument("--protocols", default=",".join(PROTOCOLS), help="comma list (default: all three)")
    parser.add_argument("--clients", default="1,16", help="comma list of how many ask at a time (default: 1,16)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each load (default: 2)")
    options = parser.parse_args(words)
    options.protocols = options.protocols.split(",")
    options.clients = [int(one) for one in options.clients.split(",")]
    if not set(options.protocols) <= set(PROTOCOLS):
        parser.error(f"protocols are {', '.join(PROTOCOLS)}")
    return options


def run(options: argparse.Namespace) -> None:
    print(f"What a transformer adds to a request. {machine.busy()}", flush=True)
    rounds: list[Round] = []
    for protocol in options.protocols:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder, processes() as started:
            found = targets(Path(folder), started, protocol)
            for target in found.values():
                target.load(max(options.clients), WARM_UP_S)
            for number in range(options.rounds):
                for clients in options.clients:
                    rounds.append(measure(found, protocol, clients, number, options.seconds))
                    shown = ", ".join(f"{name} {ms:.3f} ms" for name, ms in rounds[-1].p50_ms.items())
                    print(f"round {number + 1}/{options.rounds}  {protocol}, {clients} clients: {shown}", flush=True)
    print(f"\n{report(rounds)}")


def main() -> None:
    options = parse()
    with failures_as_messages():
        run(options)


if __name__ == "__main__":
    main()
