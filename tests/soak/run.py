"""Mixed load with faults on a real server, from clients that have nothing of ours: grpcio, h2 and plain sockets.

Usage: python tests/soak/run.py [--seconds S] [--requests N] [--rate R] [--kill-every-s S]

A server is started, warmed up for a while and examined; then come calls of every kind, R a second,
until both S seconds have passed and N requests have ended, while workers are killed, models scaled and registered anew.
Each request carries bytes of its own, and its answer their digest. Afterwards the server is examined again; a table
shows each count with its goal. The exit status is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import heapq
import json
import os
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import grpc
import grpc.aio
import h2.config
import h2.connection
import h2.events
import h2.exceptions
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from e2e.servers import Serving, write_model
from soak import notes
from soak.table import Row, difference, finish, options
from ts_frontend.protos.inference_pb2 import PredictionResponse, PredictionsRequest

GUARD_S = 60.0
#: Nothing that was accepted may take longer: kills and new registrations included.
HANG_S = 40.0
SERVICE = "/org.pytorch.serve.grpc.inference.InferenceAPIsService"
BODY_BYTES_MAX = 8_000
PIECES = 5
SCALE_EVERY_S, REGISTER_EVERY_S = 3.0, 5.0
MEMORY_GROWTH_BYTES_MAX, DESCRIPTORS_MORE_MAX, TASKS_MORE_MAX = 20 << 20, 8, 8

BATCH_MAX = 4
#: A body is `ID ASK PADDING`; the ID is the one of the request, too.
STREAM = """
import asyncio, hashlib

async def handle(data, context):
    if data is None:
        return
    digest = hashlib.sha256(bytes(data[0].get("data") or data[0].get("body"))).hexdigest()
    for index in range({pieces}):
        await asyncio.sleep(0.002)
        yield [f"{{index}}:{{digest}};"]
"""
#: In the server: a socket that tells how many of asyncio's tasks are alive.
TASKS = """
import asyncio, gc, os, socket, threading

def serve():
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(os.environ["SOAK_TASKS"], str(os.getpid())))
    listener.listen()
    while True:
        guest, _ = listener.accept()
        alive = [one for one in gc.get_objects() if isinstance(one, asyncio.Task) and not one.done()]
        guest.sendall(str(len(alive)).encode())
        del alive
        guest.close()

if os.environ.get("SOAK_TASKS"):
    threading.Thread(target=serve, daemon=True).start()
"""


class Gone(Exception):
    """The connection ended before an answer did."""


class Hung(Exception):
    """No answer came within HANG_S."""


class Broken(Exception):
    """More than one answer, or bytes that are none."""


class Answer(NamedTuple):
    """`status`: of HTTP or of gRPC, as text. `body`: of an error of gRPC, its message."""

    status: str
    body: bytes


def make_body(ask: str) -> bytes:
    return f"{secrets.token_hex(8)} {ask} ".encode() + os.urandom(random.randrange(BODY_BYTES_MAX))


def expected(body: bytes, streamed: bool) -> bytes:
    digest = hashlib.sha256(body).hexdigest()
    return ("".join(f"{index}:{digest};" for index in range(PIECES)) if streamed else digest).encode()


def name_of(body: bytes) -> str:
    """The ID of a request: in its body, for the handler, and in its headers, for the server's log."""
    return body.split(b" ", 1)[0].decode()


def grpc_body(model: str, body: bytes) -> bytes:
    return bytes(PredictionsRequest(model_name=model, input={"data": body}).SerializeToString())


class Http1:
    """One connection at a time, one request after another: bytes after an answer are a second one."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, model: str, body: bytes, leave_after_s: float | None = None) -> Answer:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        head = f"POST /predictions/{model} HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {name_of(body)}\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        try:
            writer.write(head.encode() + body)
            if leave_after_s is not None:
                await asyncio.sleep(leave_after_s)
                self.close()
                return Answer("left", b"")
            return await self._answer(reader)
        except (OSError, asyncio.IncompleteReadError) as error:
            self.close()
            raise Gone(repr(error)) from None
        except BaseException:
            self.close()
            raise

    async def _answer(self, reader: asyncio.StreamReader) -> Answer:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        first, *lines = head.split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        if not first.startswith("http/1.1 "):
            raise Broken(first)
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        else:
            body = await reader.readexactly(int(headers["content-length"]))
        if reader._buffer:  # type: ignore[attr-defined]
            raise Broken(f"bytes after the answer: {bytes(reader._buffer)!r}")  # type: ignore[attr-defined]
        if headers.get("connection") == "close":
            self.close()
        return Answer(first.split()[1], body)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class _Exchange:
    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.answers = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Http2:
    """Many requests at a time on one connection, of HTTP or (`grpc`) of gRPC by hand."""

    def __init__(self, port: int, *, grpc: bool) -> None:
        self._port, self._grpc = port, grpc
        self._lock = asyncio.Lock()
        self._exchanges: dict[int, _Exchange] = {}
        self._reading: asyncio.Task[None] | None = None
        self.broken = 0

    async def ask(self, model: str, body: bytes, leave_after_s: float | None = None) -> Answer:
        try:
            stream, exchange = await self._sent(model, body)
            if leave_after_s is not None:
                await asyncio.sleep(leave_after_s)
                with contextlib.suppress(h2.exceptions.ProtocolError):
                    self._http.reset_stream(stream, 8)
                    self._flush()
                self._exchanges.pop(stream, None)
                return Answer("left", b"")
            await exchange.ended
        except (OSError, h2.exceptions.ProtocolError) as error:
            raise Gone(repr(error)) from None
        if not self._grpc:
            return Answer(exchange.headers[b":status"].decode(), exchange.body)
        status = exchange.headers.get(b"grpc-status", b"none").decode()
        told = unquote_to_bytes(exchange.headers.get(b"grpc-message", b""))
        return Answer(status, _joined(exchange.body) if status == "0" else told)

    async def _sent(self, model: str, body: bytes) -> tuple[int, _Exchange]:
        async with self._lock:
            if self._reading is None or self._reading.done():
                await self._connect()
            path, more = f"/predictions/{model}", [("x-request-id", name_of(body))]
            if self._grpc:
                method = "StreamPredictions" if model == "stream" else "Predictions"
                path, more = f"{SERVICE}/{method}", [*more, ("content-type", "application/grpc"), ("te", "trailers")]
                message = grpc_body(model, body)
                body = b"\0" + len(message).to_bytes(4, "big") + message
            stream = self._http.get_next_available_stream_id()
            exchange = self._exchanges[stream] = _Exchange()
            names = [(":method", "POST"), (":path", path), (":scheme", "http"), (":authority", "localhost")]
            self._http.send_headers(stream, names + more)
            while body:
                size = min(self._http.local_flow_control_window(stream), self._http.max_outbound_frame_size, len(body))
                if size:
                    self._http.send_data(stream, body[:size], end_stream=size == len(body))
                    body = body[size:]
                self._flush()
                if body and not size:
                    await asyncio.wait_for(self._window.wait(), HANG_S)
                    self._window.clear()
            return stream, exchange

    async def _connect(self) -> None:
        reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding=None))
        self._http.initiate_connection()
        self._window = asyncio.Event()
        self._exchanges = {}
        self._flush()
        self._reading = asyncio.create_task(self._read(reader, self._exchanges))

    def _flush(self) -> None:
        self._writer.write(self._http.data_to_send())

    async def _read(self, reader: asyncio.StreamReader, exchanges: dict[int, _Exchange]) -> None:
        try:
            while data := await reader.read(1 << 16):
                for event in self._http.receive_data(data):
                    self._take(event, exchanges)
                self._flush()
        except h2.exceptions.ProtocolError:
            self.broken += 1
        except OSError:
            pass
        finally:
            self._writer.close()
            for exchange in exchanges.values():
                if not exchange.ended.done():
                    exchange.ended.set_exception(ConnectionError("the connection ended"))
                    exchange.ended.exception()

    def _take(self, event: Any, exchanges: dict[int, _Exchange]) -> None:
        if isinstance(event, h2.events.WindowUpdated):
            self._window.set()
        if isinstance(event, h2.events.DataReceived):
            self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        exchange = exchanges.get(getattr(event, "stream_id", 0) or 0)
        if exchange is None:
            return
        if isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
            exchange.headers |= dict(event.headers)
            exchange.answers += isinstance(event, h2.events.ResponseReceived)
            self.broken += exchange.answers > 1
        elif isinstance(event, h2.events.DataReceived):
            exchange.body += event.data
        elif isinstance(event, h2.events.StreamEnded):
            exchanges.pop(event.stream_id)
            exchange.ended.set_result(None)
        elif isinstance(event, h2.events.StreamReset):
            exchanges.pop(event.stream_id)
            exchange.ended.set_exception(ConnectionError(f"the stream was reset: {event.error_code}"))

    def close(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._writer.close()


def _joined(data: bytes) -> bytes:
    """The predictions of gRPC messages."""
    found = b""
    while data:
        size = int.from_bytes(data[1:5], "big")
        found += PredictionResponse.FromString(data[5 : 5 + size]).prediction
        data = data[5 + size :]
    return found


class Grpcio:
    """grpcio's own client."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        plain: Any = {"request_serializer": None, "response_deserializer": PredictionResponse.FromString}
        self._one = self._channel.unary_unary(f"{SERVICE}/Predictions", **plain)
        self._many = self._channel.unary_stream(f"{SERVICE}/StreamPredictions", **plain)

    async def ask(self, model: str, body: bytes, leave_after_s: float | None = None) -> Answer:
        message = grpc_body(model, body)
        timeout = leave_after_s if leave_after_s and random.random() < 0.5 else None
        method = self._many if model == "stream" else self._one
        call = method(message, timeout=timeout, metadata=(("x-request-id", name_of(body)),))
        if leave_after_s is not None and timeout is None:
            await asyncio.sleep(leave_after_s)
            call.cancel()
            return Answer("left", b"")
        try:
            if model == "stream":
                return Answer("0", b"".join([piece.prediction async for piece in call]))
            return Answer("0", (await call).prediction)
        except grpc.aio.AioRpcError as error:
            return Answer("deadline" if timeout else str(error.code().value[0]), (error.details() or "").encode())

    async def stop(self) -> None:
        await self._channel.close()


class Slow(NamedTuple):
    """A request that took long. `begun_s`: after the load began."""

    seconds: float
    begun_s: float
    what: str

    def told(self, faults: list[Fault]) -> str:
        """With the faults that fell into its time."""
        end_s = self.begun_s + self.seconds
        beside = [one for one in faults if one.begun_s < end_s and one.ended_s > self.begun_s]
        told = [f"{one.name} {one.begun_s - self.begun_s:+.2f} to {one.ended_s - self.begun_s:+.2f}" for one in beside]
        return f"{self.seconds:.2f} s from {self.begun_s:.2f}: {self.what}; {', '.join(told) or 'no fault'}"


class Fault(NamedTuple):
    name: str
    begun_s: float
    ended_s: float


SLOWEST = 10


class Tally:
    """The outcomes of the requests. `failed`: answers of the model `echo` that failed with a worker, by the request's
    ID, to be compared with the begun requests."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.failed: dict[str, str] = {}
        self.kills: list[notes.Kill] = []
        self.begun_s = time.monotonic()
        self.faults: list[Fault] = []
        self.slowest: list[Slow] = []

    @property
    def accepted(self) -> int:
        return sum(self.outcomes.values())

    def took(self, one: Slow) -> None:
        heapq.heappush(self.slowest, one)
        if len(self.slowest) > SLOWEST:
            heapq.heappop(self.slowest)

    def count(self, prefix: str) -> int:
        return sum(count for name, count in self.outcomes.items() if name.split()[-1] == prefix)


#: What may come of a request, beside its answer: over HTTP, and over gRPC by number.
FINE = {"200", "0"}
FAILED_ITEM = {"422", "9"}
#: A killed worker's begun requests (500, 507; UNAVAILABLE), a full queue or no worker (503).
UNDER_KILLS = {"500", "507", "503", "14", "8"}
UNREGISTERED = {"404", "5"}
KINDS = (
    ("echo", "echo", 60),
    ("echo", "slow", 10),
    ("echo", "fail", 10),
    ("stream", "echo", 12),
    ("moving", "echo", 8),
)
LEAVE_SHARE = 0.1


async def one(client: Any, name: str, tally: Tally) -> None:
    model, ask, _ = random.choices(KINDS, [kind[2] for kind in KINDS])[0]
    body = make_body(ask)
    leave = random.random() * 0.03 if random.random() < LEAVE_SHARE else None
    begun_s = time.monotonic()
    try:
        answer: Answer = await asyncio.wait_for(client.ask(model, body, leave), HANG_S)
    except TimeoutError:
        tally.outcomes[f"{name} {model} hung"] += 1
        return
    except Gone:
        tally.outcomes[f"{name} {model} gone"] += 1
        return
    except Broken as error:
        tally.wrong.append(f"{name} {model} {ask}: {error}")
        return
    what = f"{name} {model} {ask} {answer.status}"
    tally.took(Slow(time.monotonic() - begun_s, begun_s - tally.begun_s, what))
    tally.outcomes[f"{name} {model} {answer.status}"] += 1
    if answer.status in ("left", "deadline"):
        return
    allowed = (FAILED_ITEM if ask == "fail" and model != "stream" else FINE) | UNDER_KILLS
    allowed |= UNREGISTERED if model == "moving" else set()
    if answer.status not in allowed:
        tally.wrong.append(f"{name} {model} {ask}: status {answer.status} {answer.body[:200]!r}")
    elif answer.status in FINE and answer.body != expected(body, model == "stream"):
        tally.wrong.append(f"{name} {model} {ask}: {answer.body[:200]!r}")
    elif model == "echo" and answer.status in UNDER_KILLS:
        tally.failed[name_of(body)] = f"{name}: {answer.status} {answer.body[:300]!r}"


async def hammer(
    client: Any, name: str, tally: Tally, over: Callable[[], bool], pause_s: float, counter: list[int]
) -> None:
    while not over():
        begun_s = time.monotonic()
        await one(client, name, tally)
        counter[0] += 1
        await asyncio.sleep(max(0.0, pause_s * random.uniform(0.5, 1.5) - (time.monotonic() - begun_s)))


async def disturb(every_s: float, act: Callable[[], object], over: asyncio.Event, tally: Tally) -> None:
    while not over.is_set():
        begun_s = time.monotonic() - tally.begun_s
        with contextlib.suppress(grpc.RpcError, ProcessLookupError, IndexError, TimeoutError):
            await asyncio.to_thread(act)
            tally.faults.append(Fault(act.__name__, begun_s, time.monotonic() - tally.begun_s))
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(over.wait(), every_s)


class State(NamedTuple):
    """Of the server's main process."""

    memory_bytes: int
    descriptors: int
    tasks: int
    busy: int


async def state_of(server: Serving, directory: Path) -> State:
    """The server's state once it has come to rest; after GUARD_S, the state as it is."""
    process = psutil.Process(server.process.pid)
    end_s = time.monotonic() + GUARD_S
    while True:
        busy = await _busy(server)
        if not busy or time.monotonic() > end_s:
            break
        await asyncio.sleep(0.2)
    found = []
    for _ in range(10):  # connections that were closed are let go of a little later
        reader, writer = await asyncio.open_unix_connection(str(directory / str(server.process.pid)))
        found.append((int(await reader.read()), process.num_fds()))
        writer.close()
        await asyncio.sleep(0.5)
    tasks, descriptors = map(min, zip(*found, strict=True))
    return State(process.memory_info().rss, descriptors, tasks, busy)


async def _busy(server: Serving) -> int:
    """Requests that are queued or running, by its metrics."""
    port = int(server.log.split("metrics listens on ")[1].split("\n")[0].rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    lines = (await reader.read()).decode().splitlines()
    writer.close()
    gauges = [line for line in lines if line.startswith(("ts_queued_requests{", "ts_running_requests{"))]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in gauges))


async def load(
    server: Serving, tally: Tally, begun: Path, seconds: float, requests: int, rate: float, kill_every_s: float
) -> None:
    """`begun`: the folder of the handlers' notes."""
    http, native = server.port("http_inference"), server.port("grpc_inference")
    clients: list[tuple[str, Any, int]] = [
        *(("HTTP/1.1", Http1(http), 1) for _ in range(8)),
        *(("HTTP/2", Http2(http, grpc=False), 4) for _ in range(2)),
        *(("gRPC by h2", Http2(native, grpc=True), 4) for _ in range(2)),
        *(("gRPC by grpcio", Grpcio(native), 4) for _ in range(2)),
    ]
    end_s, counter, over = time.monotonic() + seconds, [0], asyncio.Event()
    loops = sum(count for _, _, count in clients)

    def kill() -> None:
        tally.kills.append(notes.kill(random.choice(server.worker_pids("echo")), begun))

    def scale() -> None:
        server.scale("echo", random.choice((2, 3)))

    def register() -> None:
        server.unregister("moving")
        server.register("moving")

    faults = ((kill_every_s, kill), (SCALE_EVERY_S, scale), (REGISTER_EVERY_S, register))
    disturbing = [asyncio.create_task(disturb(every_s, act, over, tally)) for every_s, act in faults]

    def ended() -> bool:
        return time.monotonic() > end_s and counter[0] >= requests

    work: list[Awaitable[None]] = [
        hammer(client, name, tally, ended, loops / rate, counter)
        for name, client, count in clients
        for _ in range(count)
    ]
    await asyncio.gather(*work)
    over.set()
    await asyncio.gather(*disturbing)
    for _, client, _ in clients:
        if isinstance(client, Grpcio):
            await client.stop()
        else:
            client.close()
        tally.wrong += ["HTTP/2: a second answer, or a broken frame"] * getattr(client, "broken", 0)
    with contextlib.suppress(grpc.RpcError):  # it may have been killed between being taken out and put in again
        await asyncio.to_thread(server.register, "moving")
    await asyncio.to_thread(server.scale, "echo", 2)


#: Signs of exceptions in the server's log that no caller has heard of.
RAISED = ("never retrieved", "Task exception", "could not be settled")


async def soak(given: argparse.Namespace, directory: Path) -> list[Row]:
    store, python = directory / "store", directory / "python"
    for folder in (store, python):
        folder.mkdir()
    begun = Path(tempfile.mkdtemp(prefix="soak-begun-", dir=notes.MEMORY))
    (python / "sitecustomize.py").write_text(TASKS)
    handler = notes.handler_of(begun)
    write_model(
        store, "echo", handler, config=f"batchSize: {BATCH_MAX}\nmaxBatchDelay: 2\nminWorkers: 2\nmaxWorkers: 2\n"
    )
    write_model(store, "moving", handler)
    write_model(store, "stream", STREAM.format(pieces=PIECES))
    env = {"PYTHONPATH": str(python), "SOAK_TASKS": str(directory)}
    settings: dict[str, object] = {"metrics_mode": "prometheus", "env": env}
    server = Serving(directory, store, settings, ["--ncs"])
    try:
        server.wait_started()
        for model in ("echo", "moving", "stream"):
            await asyncio.to_thread(server.register, model)
        await load(server, Tally(), begun, given.warm_up_s, 0, given.rate, given.kill_every_s)
        before, tally = await state_of(server, directory), Tally()
        await load(server, tally, begun, given.seconds, given.requests, given.rate, given.kill_every_s)
        took_s, after = time.monotonic() - tally.begun_s, await state_of(server, directory)
        status = await asyncio.to_thread(server.terminate)
        began = await asyncio.to_thread(notes.named, begun)
    finally:
        server.terminate()
        shutil.rmtree(begun)
    print(json.dumps(dict(sorted(tally.outcomes.items())), indent=1))
    for line in tally.wrong[:20]:
        print(f"WRONG {line}")
    deaths = notes.deaths_in(server.lines)
    verdicts = {name: notes.verdict(name, deaths, tally.kills) for name in tally.failed if name not in began}
    for name, found in list(verdicts.items())[:20]:
        word = "NOT NOTED" if found.explained else "NOT BEGUN"
        print(f"{word} {tally.failed[name]}: {found.text}")
    ends = Counter(found.where for found in verdicts.values())
    lost = sum(not found.explained for found in verdicts.values())
    for slow in sorted(tally.slowest, reverse=True):
        print(f"SLOW {slow.told(tally.faults)}")
    done = Counter(fault.name for fault in tally.faults)
    raised = [line for line in server.lines if any(sign in line for sign in RAISED)]
    return [
        Row("requests", f"{given.requests} or more", f"{tally.accepted} in {took_s:.0f} s", True),
        Row("faults", "", ", ".join(f"{name} {count}" for name, count in sorted(done.items())), True),
        Row("wrong payloads, second answers, statuses", "0", str(len(tally.wrong)), not tally.wrong),
        Row("hangs (over 40 s)", "0", str(tally.count("hung")), not tally.count("hung")),
        Row("connections that ended before an answer", "0", str(tally.count("gone")), not tally.count("gone")),
        Row("failed by a killed worker", "", f"{len(tally.failed)} begun or not", True),
        Row("of them, killed between the server's and the handler's note", "", str(ends[notes.BETWEEN]), True),
        Row("of them, killed in the handler's note", "", str(ends[notes.NOTING]), True),
        Row("of them, not begun", "0", str(lost), not lost),
        Row("items that fail; left; deadlines", "", _counts(tally), True),
        Row("slowest answer", "", f"{max(tally.slowest).seconds:.2f} s" if tally.slowest else "none", True),
        difference("memory, MB", before.memory_bytes / 1e6, after.memory_bytes / 1e6, MEMORY_GROWTH_BYTES_MAX / 1e6),
        difference("descriptors", before.descriptors, after.descriptors, DESCRIPTORS_MORE_MAX),
        difference("tasks", before.tasks, after.tasks, TASKS_MORE_MAX),
        Row("queued or running afterwards", "0", str(after.busy), not after.busy),
        Row("errors nobody took", "0", str(len(raised)), not raised),
        Row("exit status", "0", str(status), status == 0),
    ]


def _counts(tally: Tally) -> str:
    items = tally.count("422") + tally.count("9")
    return f"{items}; {tally.count('left')}; {tally.count('deadline')}"


def main() -> None:
    parser = options("Mixed load with faults.")
    parser.add_argument("--seconds", type=float, default=0.0, help="at least")
    parser.add_argument("--requests", type=int, default=0, help="at least")
    parser.add_argument("--rate", type=float, default=400.0, help="requests a second, at most (400)")
    parser.add_argument("--kill-every-s", type=float, default=2.0, help="seconds between kills of a worker (2)")
    parser.add_argument("--warm-up-s", type=float, default=15.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        rows = asyncio.run(soak(given, Path(directory)))
    finish(rows)


if __name__ == "__main__":
    main()
