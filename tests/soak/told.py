"""How long it takes until a handler knows that nobody waits for it any more, and until a dead worker gets nothing.

Usage: python tests/soak/told.py [--count N]

A handler says by a datagram when it has begun and when it was told, with the system's monotonic clock. In between the
client leaves, or its deadline passes: each of N times (200) for each kind of handler, and each way to call. Workers are
killed N / 4 times. One request is on its way at a time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc

sys.path.insert(0, str(Path(__file__).parent.parent))

import raw
from soak.table import Row, finish, latency_row, options, running
from ts_frontend.protos.inference_pb2 import PredictionsRequest

TOLD_GOAL_MS, ROUTED_GOAL_MS, READY_GOAL_MS = 20.0, 50.0, 100.0
GUARD_S = 60.0
#: Of a client's wait after the handler has begun, and of a deadline.
LEAVES_AFTER_S_MAX = 0.05
DEADLINE_S = (0.05, 0.15)
#: What hasn't begun so long after its deadline never will.
NEVER_BEGUN_S = 3.0

SAY = """
import asyncio, socket, time

SAYS = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

def say(word):
    SAYS.sendto(f"{{word}} {{time.monotonic()}}".encode(), {path!r})
"""
BLOCKING = """
def handle(data, context):
    if data is None:
        return None
    say("begun")
    while not context.cancelled:
        time.sleep(0.0005)
    say("told")
    return ["x"]
"""
ASYNC = """
async def handle(data, context):
    if data is None:
        return None
    say("begun")
    try:
        await asyncio.Event().wait()
    finally:
        say("told")
"""
STREAM = """
def handle(data, context):
    if data is None:
        return
    say("begun")
    try:
        while True:
            yield ["x"]
            time.sleep(0.0005)
    finally:
        say("told")
"""
QUICK = """
def handle(data, context):
    return None if data is None else ["x"] * len(data)
"""
KINDS = {"blocking": BLOCKING, "async": ASYNC, "stream": STREAM}
#: The Open Inference Protocol's limit of a request, in microseconds.
TENSORS = (
    '{"parameters": {"timeout": %d}, "inputs": [{"name": "data", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}'
)


class Listening:
    """The notes of handlers."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "said"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))

    def hear(self, word: str, timeout_s: float = GUARD_S) -> float:
        """When it was said. RuntimeError for another word, TimeoutError when none came in time."""
        self._socket.settimeout(timeout_s)
        said, at_s = self._socket.recv(100).decode().split()
        if said != word:
            raise RuntimeError(f"a handler said {said}, not {word}")
        return float(at_s)

    def close(self) -> None:
        self._socket.close()


class Way(NamedTuple):
    """A way to call: `begin(model, streamed, deadline_s)` returns a function that gives up the call, and one that frees
    the rest."""

    name: str
    begin: Callable[[str, bool, float | None], tuple[Callable[[], object], Callable[[], object]]]
    has_deadline: bool


def ways(server: Any, channel: grpc.Channel) -> list[Way]:
    http, native = server.port("http_inference"), server.port("grpc_inference")

    def by_hand(model: str, streamed: bool, deadline_s: float | None) -> Any:
        call = raw.Prediction(native, model, b"x", streamed=streamed, timeout_s=deadline_s)
        return call.leave, call.close

    def by_grpcio(model: str, streamed: bool, deadline_s: float | None) -> Any:
        kind = channel.unary_stream if streamed else channel.unary_unary
        method = kind(f"{raw.INFERENCE}/{'StreamPredictions' if streamed else 'Predictions'}")
        message = PredictionsRequest(model_name=model, input={"data": b"x"}).SerializeToString()
        call = method(message, timeout=deadline_s) if streamed else method.future(message, timeout=deadline_s)
        return call.cancel, call.cancel

    def over_http(client: Any) -> Any:
        def begin(model: str, streamed: bool, deadline_s: float | None) -> Any:
            path, body = f"/predictions/{model}", b"x"
            if deadline_s is not None:
                path = f"/v2/models/{model}" + ("/infer_stream" if streamed else "/versions/1.0/infer")
                body = (TENSORS % (deadline_s * 1e6)).encode()
            call = client(http, path, body, {"content-type": "application/json"})
            return call.leave, call.sock.close

        return begin

    return [
        Way("gRPC, by hand", by_hand, True),
        Way("gRPC, grpcio", by_grpcio, True),
        Way("HTTP/2", over_http(raw.Http2), True),
        Way("HTTP/1.1", over_http(raw.Http1), True),
    ]


def left(way: Way, kind: str, heard: Listening, deadline_s: float | None = None) -> float:
    leave, free = way.begin(kind, kind == "stream", deadline_s)
    heard.hear("begun")
    time.sleep(random.uniform(0, LEAVES_AFTER_S_MAX))
    left_s = time.monotonic()
    leave()
    told_s = heard.hear("told")
    free()
    return told_s - left_s


def late(way: Way, kind: str, heard: Listening) -> float:
    """One whose deadline passes before its handler begins, on a busy machine, is asked again."""
    while True:
        limit_s = random.uniform(*DEADLINE_S)
        begun_s = time.monotonic()
        _, free = way.begin(kind, kind == "stream", limit_s)
        try:
            heard.hear("begun", limit_s + NEVER_BEGUN_S)
        except TimeoutError:
            free()
            continue
        told_s = heard.hear("told")
        free()
        return told_s - begun_s - limit_s


def told(server: Any, heard: Listening, count: int) -> list[Row]:
    rows = []
    with grpc.insecure_channel(server.inference) as channel:
        for way in ways(server, channel):
            for kind in KINDS:
                values_s = [left(way, kind, heard) for _ in range(count)]
                rows.append(latency_row(f"cancel, {way.name}, {kind}", values_s, TOLD_GOAL_MS))
                if way.has_deadline:
                    left(way, kind, heard, GUARD_S)  # a worker's first request with tensors imports numpy
                    values_s = [late(way, kind, heard) for _ in range(count)]
                    rows.append(latency_row(f"deadline, {way.name}, {kind}", values_s, TOLD_GOAL_MS))
    return rows


class Asking:
    """GET requests on one connection, or the next when the server has closed it after an error."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connect()

    def _connect(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", self._port), GUARD_S)
        self._reader = self._socket.makefile("rb")

    def get(self, path: str) -> tuple[int, bytes]:
        self._socket.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        status = int(self._reader.readline().split()[1])
        headers = dict(line.decode().strip().lower().split(": ", 1) for line in iter(self._reader.readline, b"\r\n"))
        body = self._reader.read(int(headers["content-length"]))
        if headers.get("connection") == "close":
            self.close()
            self._connect()
        return status, body

    def close(self) -> None:
        self._reader.close()
        self._socket.close()


def until(look: Callable[[], bool]) -> float:
    """When it was true first."""
    end_s = time.monotonic() + GUARD_S
    while not look():
        if time.monotonic() > end_s:
            raise RuntimeError(f"not within {GUARD_S} s")
    return time.monotonic()


def worker_status(asking: Asking, model: str) -> dict[int, str]:
    (found,) = json.loads(asking.get(f"/models/{model}")[1])
    return {worker["pid"]: worker["status"] for worker in found["workers"]}


def not_routed(server: Any, count: int) -> tuple[list[float], int, int]:
    """Of two workers one is killed while requests come one after another: seconds until the description no longer has
    it as ready, and how many requests came, and failed, until the next one was there."""
    seconds, asked, failed = [], 0, 0
    asking = Asking(server.port("http_management"))
    for _ in range(count):
        until(lambda: list(worker_status(asking, "pair").values()).count("READY") == 2)
        victim = random.choice(list(worker_status(asking, "pair")))
        killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        seconds.append(until(lambda: worker_status(asking, "pair").get(victim) != "READY") - killed_s)  # noqa: B023
        while list(worker_status(asking, "pair").values()).count("READY") < 2:
            asked += 1
            failed += raw.Http1(server.port("http_inference"), "/predictions/pair", b"x").end().status != "200"
    asking.close()
    return seconds, asked, failed


def not_ready(server: Any, count: int) -> list[float]:
    """The only worker is killed: seconds until the model isn't ready."""
    seconds = []
    asking = Asking(server.port("http_inference"))
    managing = Asking(server.port("http_management"))
    path = "/v2/models/single/ready"
    for _ in range(count):
        until(lambda: asking.get(path)[0] == 200)
        raw.Http1(server.port("http_inference"), "/predictions/single", b"x").end()  # else it is started again later
        (victim,) = worker_status(managing, "single")
        killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        # It is ready again soon: a look that comes too late to see that it wasn't shows that there is another worker.
        seconds.append(
            until(lambda: asking.get(path)[0] == 503 or victim not in worker_status(managing, "single")) - killed_s  # noqa: B023
        )
    asking.close()
    managing.close()
    return seconds


def measure(count: int) -> list[Row]:
    listening: list[Listening] = []

    def models(directory: Path) -> dict[str, tuple[str, str]]:
        listening.append(Listening(directory))
        say = SAY.format(path=str(listening[0].path))
        of_kinds = {kind: (say + text, "minWorkers: 1\n") for kind, text in KINDS.items()}
        return {**of_kinds, "pair": (QUICK, "minWorkers: 2\n"), "single": (QUICK, "minWorkers: 1\n")}

    with running(models) as server:
        server.scale("pair", 2)
        rows = told(server, listening[0], count)
        deaths = max(2, count // 4)
        seconds, asked, failed = not_routed(server, deaths)
        rows.append(latency_row("dead worker, until it is out of use", seconds, ROUTED_GOAL_MS))
        rows.append(Row("requests that fail after a worker's death", "0", f"{failed} of {asked}", not failed))
        rows.append(latency_row("last worker dead, until not ready", not_ready(server, deaths), READY_GOAL_MS))
    listening[0].close()
    return rows


def main() -> None:
    parser = options("How soon handlers and routing know.")
    parser.add_argument("--count", type=int, default=200, help="of each kind (200)")
    given = parser.parse_args()
    finish(measure(given.count))


if __name__ == "__main__":
    main()
