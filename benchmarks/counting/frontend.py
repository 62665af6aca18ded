"""The frontend without a network: requests go into the connections of a listener as the event loop hands them over, and
come back from a stand-in for the worker at the other end of its socket.

Usage: python benchmarks/counting/frontend.py LIBRARY FOLDER

Everything between is the real server, with the settings of the benchmark's `ours`. FOLDER gets a record of its messages
to the workers, for `worker.py`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import pickle
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import hpack
import uvloop
from measuring.h2load import grpc_body
from measuring.open_inference import INFER, MODEL, MODELS, NAMED, VALUES
from measuring.workloads import NOOP, PIECES, PIECES_STREAM, YIELDS, Workload

from counting.counter import Counter
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.decoder import Decoder
from ts.protocol.frames import PREDICT, Chunk, Item, Load, Message, Pairs, Pieces, Predict, Ready, encode_bytes
from ts_frontend.config.load import Option, load_config
from ts_frontend.http.routing import HTTP_INFERENCE
from ts_frontend.listeners.listeners import INFERENCE
from ts_frontend.listeners.serving import ServedListener
from ts_frontend.models.startup import load_at_startup
from ts_frontend.scheduling import queues
from ts_frontend.server import Parts, open_caches
from ts_frontend.telemetry.logging.logs import setup_logs
from ts_frontend.telemetry.metrics.registry import open_metrics
from ts_frontend.transport import http2
from ts_frontend.transport.connection import Connection
from ts_frontend.transport.server import Server
from ts_frontend.workers.devices import Inventory
from ts_frontend.workers.process import Channels, ExitStatus, LineSink, ProcessSpec, WorkerProcess
from ts_frontend.workers.spawning import worker_env
from ts_frontend.workers.supervisor import Supervisor

CLIENTS = 8
#: The number of pieces of a stream that are ready together.
TOGETHER = 20
#: The file with the messages to the workers.
ASKED = "asked"
#: The number of messages of each kind that are recorded.
NOTED = 16
#: In place of the socket that a connection's transport owns: it is used only with TLS.
NO_SOCKET = socket.socket()
#: The names of models in archives.
WORKLOADS = (NOOP, PIECES_STREAM, YIELDS)
SETTINGS = {
    "access_log": "false",
    "console_log": "false",
    "metrics_mode": "prometheus",
    "default_workers_per_model": "1",
    "exit_on_error": "true",  # and wait for the workers
    "number_of_gpu": "0",
    "ncs": "true",
}


@dataclass(slots=True)
class Part:
    """The present answer of all workers: `times` the frame `more`, then the frame `answer`. `loads`: the first
    messages to the workers, by model; `requests`: the first messages with requests."""

    answer: bytes = b""
    more: bytes = b""
    times: int = 0
    loads: dict[str, Load] = field(default_factory=dict)
    requests: list[Predict] = field(default_factory=list)


class StandIn:
    """A worker that answers at once, in the same loop: its cost is small, and the same for each commit."""

    def __init__(self, sock: socket.socket, part: Part) -> None:
        sock.setblocking(False)
        self._sock, self._part = sock, part
        self._decoder = Decoder(1 << 30)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._readable)

    def _readable(self) -> None:
        data = self._sock.recv(1 << 18)
        job_ids = _job_ids(data) if len(self._part.requests) == NOTED else None
        if job_ids is None:
            job_ids = self._read(data)
        if job_ids:
            self._answer(job_ids, self._part.times)

    def _read(self, data: bytes) -> list[bytes]:
        """Handles every message and returns the ids of the jobs that were sent; slow."""
        found: list[bytes] = []
        for message in self._decoder.feed(data):
            if isinstance(message, Predict):
                if len(self._part.requests) < NOTED:
                    self._part.requests.append(message)
                found += [item.job_id.to_bytes(8, "little") for item in message.items]
            else:
                self._control(message)
        return found

    def _control(self, message: Message) -> None:
        if isinstance(message, Load):
            self._part.loads[message.settings["model_name"]] = message
            ready = Ready({"pid": os.getpid(), "handler_kind": "blocking", "load_s": 0.0})
            self._sock.send(encode_bytes(ready))

    def _answer(self, job_ids: Sequence[bytes], left: int) -> None:
        """Sends a frame for each of the requests now, and the other frames in the loop's next turns."""
        frame = self._part.more if left else self._part.answer
        head, body = frame[:8], frame[16:]
        self._sock.send(b"".join([head + job_id + body for job_id in job_ids]))
        if left:
            self._loop.call_soon(self._answer, job_ids, left - 1)


def _job_ids(data: bytes) -> list[bytes] | None:
    """The job ids in whole messages; None if a message has several requests, which `_read` handles."""
    found, at, end = [], 0, len(data)
    while at < end:
        size = int.from_bytes(data[at : at + 4], "little")
        if data[at + 4] == PREDICT:
            if data[at + 16] != 1:
                return None
            found.append(data[at + 20 : at + 28])
        at += 16 + size
    return found


class _NoProcess(WorkerProcess):
    """The process of a stand-in, which doesn't exist and can't be killed."""

    def kill(self) -> None:
        self.ended(ExitStatus(0))

    def release(self) -> None:
        self.progress.close()


class StandInLauncher:
    def __init__(self, part: Part) -> None:
        self._part = part
        self._running: list[StandIn] = []

    async def launch(self, spec: ProcessSpec, sink: LineSink) -> WorkerProcess:
        channels = Channels()
        self._running.append(StandIn(channels.worker_sock, self._part))
        return _NoProcess(os.getpid(), spec.name, channels.sock, channels.progress)

    async def close(self) -> None:
        """Nothing was started."""


class Wire(asyncio.Transport):
    """The client's end of a connection in place of a socket. `wrote` gets what the server sends."""

    def __init__(self, wrote: Callable[[bytes], None]) -> None:
        super().__init__({"peername": ("127.0.0.1", 50000), "sockname": ("127.0.0.1", 8080)})
        self._wrote = wrote

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._wrote(bytes(data))

    def writelines(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        self._wrote(b"".join(parts))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Everything is taken at once."""

    def get_write_buffer_size(self) -> int:
        return 0


class Client:
    """A client with a connection, and one request at a time."""

    def __init__(self, server: Server) -> None:
        self.body = bytearray()
        self._answered = asyncio.Event()
        self._connection = Connection(server, NO_SOCKET, tls=False)
        self._connection.connection_made(Wire(self._read))

    async def ask(self, requests: int) -> None:
        for _ in range(requests):
            self._answered.clear()
            self._connection.data_received(self._request())
            await self._answered.wait()

    def _request(self) -> bytes:
        """The bytes of the next request."""
        raise NotImplementedError

    def _read(self, data: bytes) -> None:
        """Reads whole frames, or chunks."""
        raise NotImplementedError


class GrpcClient(Client):
    """One whose calls have h2load's headers, all in the table of HPACK after the first call."""

    def __init__(self, server: Server, workload: Workload) -> None:
        super().__init__(server)
        body = grpc_body(workload.request)
        head = [
            *((":method", "POST"), (":scheme", "http"), (":authority", "127.0.0.1:8080"), (":path", workload.path)),
            *(("user-agent", "h2load nghttp2/1.52.0"), ("content-type", "application/grpc"), ("te", "trailers")),
            ("content-length", str(len(body))),
        ]
        encoder = hpack.Encoder()
        self._block, self._indexed = encoder.encode(head), encoder.encode(head)
        self._data, self._number = body, -1
        settings = b"\0\x04" + http2.WINDOW_MAX.to_bytes(4, "big")
        window = (http2.WINDOW_MAX - http2.FIRST_WINDOW_BYTES).to_bytes(4, "big")
        opening = http2.frame(http2.SETTINGS, 0, 0, settings) + http2.frame(http2.WINDOW_UPDATE, 0, 0, window)
        self._connection.data_received(http2.PREFACE + opening)

    def _request(self) -> bytes:
        self._number += 2
        block, self._block = self._block, self._indexed
        head = http2.frame(http2.HEADERS, http2.END_HEADERS, self._number, block)
        return head + http2.frame(http2.DATA, http2.END_STREAM, self._number, self._data)

    def _read(self, data: bytes) -> None:
        at, end = 0, len(data)
        while at < end:
            begin = at + http2.FRAME_HEAD_BYTES
            kind, flags = data[at + 3], data[at + 4]
            at = begin + int.from_bytes(data[at : at + 3], "big")
            if kind == http2.DATA:
                self.body += data[begin:at]
            if kind <= http2.HEADERS and flags & http2.END_STREAM:
                self._answered.set()


class HttpClient(Client):
    """One of HTTP/1.1."""

    def __init__(self, server: Server, workload: Workload) -> None:
        super().__init__(server)
        body = workload.http_body
        lines = [
            *(f"POST {workload.http_path} HTTP/1.1", "host: 127.0.0.1:8080", "user-agent: h2load nghttp2/1.52.0"),
            *(f"content-type: {workload.http_type}", f"content-length: {len(body)}", "", ""),
        ]
        self._bytes = "\r\n".join(lines).encode() + body
        self._in_body = False

    def _request(self) -> bytes:
        return self._bytes

    def _read(self, data: bytes) -> None:
        at = 0
        if not self._in_body:
            at = data.index(b"\r\n\r\n") + 4
            if b"\r\ncontent-length:" in data[:at]:
                self.body += data[at:]
                self._answered.set()
                return
            self._in_body = True
        while at < len(data):
            begin = data.index(b"\r\n", at) + 2
            size = int(data[at : begin - 2], 16)
            self.body += data[begin : begin + size]
            at = begin + size + 2
            if not size:
                self._in_body = False
                self._answered.set()


class Clients:
    """CLIENTS clients with one kind of request. `wanted`: the body of the answer."""

    def __init__(self, kind: type[GrpcClient | HttpClient], server: Server, workload: Workload, wanted: bytes) -> None:
        self._make = partial(kind, server, workload)
        self._wanted = wanted
        self._clients: list[Client] = []

    async def run(self, requests: int, counted: AbstractContextManager[None]) -> None:
        """Raises AssertionError for wrong answers."""
        if not self._clients:
            self._clients = [self._make() for _ in range(CLIENTS)]
            await asyncio.gather(*(client.ask(1) for client in self._clients))
        for client in self._clients:
            client.body.clear()
        share, rest = divmod(requests, CLIENTS)
        with counted:
            await asyncio.gather(*(one.ask(share + (at < rest)) for at, one in enumerate(self._clients)))
        body = b"".join([client.body for client in self._clients])
        assert body == self._wanted * requests, body[:200]


def infer_answer() -> bytes:
    """The worker's answer to INFER."""
    output = pb.ModelInferResponse.InferOutputTensor(name="y", datatype="FP32", shape=[1, len(VALUES)])
    raw = INFER.request[-4 * len(VALUES) :]
    return pb.ModelInferResponse(
        model_name=MODEL, model_version="1", outputs=[output], raw_output_contents=[raw]
    ).SerializeToString()


class Row(NamedTuple):
    """One figure: the request, its model, and the data and headers of the worker's answer, `pieces` times."""

    name: str
    model: str
    clients: Clients
    data: bytes
    headers: Pairs = ()
    pieces: int = 1


def rows(over_grpc: Server, over_http: Server) -> list[Row]:
    tensor, json = infer_answer(), INFER.http_body
    pieces = grpc_body(PIECES_STREAM.answer[0]) * PIECES
    by_grpc, by_http = partial(Clients, GrpcClient, over_grpc), partial(Clients, HttpClient, over_http)
    return [
        Row("gRPC no-op", NOOP.name, by_grpc(NOOP, grpc_body(NOOP.answer[0])), b"ok"),
        Row("HTTP no-op", NOOP.name, by_http(NOOP, b"ok"), b"ok"),
        Row("ModelInfer gRPC", MODEL, by_grpc(INFER, grpc_body(tensor)), tensor),
        Row("ModelInfer JSON", MODEL, by_http(INFER, json), json),
        Row("ModelInfer named", MODEL, by_grpc(NAMED, grpc_body(tensor)), tensor),
        Row("stream piece", PIECES_STREAM.name, by_grpc(PIECES_STREAM, pieces), b"ok", (), PIECES),
        Row(
            "stream piece, HTTP",
            PIECES_STREAM.name,
            by_http(PIECES_STREAM, b"ok" * PIECES),
            b"ok",
            (),
            PIECES,
        ),
        Row("yielded piece", YIELDS.name, by_grpc(YIELDS, pieces), b"ok", (), PIECES),
    ]


async def count(counter: Counter, parts: Parts, part: Part) -> dict[str, tuple[str, list[Item], int]]:
    """Measures everything. Returns for each row the model, the messages to its worker, and the pieces of an answer."""
    servers = {one.name: Server(one.name, one.limits, ServedListener(one).serve) for one in parts.listeners.served}
    asked = {}
    for row in rows(servers[INFERENCE], servers[HTTP_INFERENCE]):
        part.answer, part.times = encode_bytes(Chunk(0, row.data, headers=row.headers)), 0
        if row.pieces > 1:
            together = [row.data] * TOGETHER
            part.answer, part.more = (encode_bytes(Pieces(0, together, last)) for last in (True, False))
            part.times = row.pieces // TOGETHER - 1
        part.requests.clear()
        few, many = (2, 10) if row.pieces > 1 else (5 * CLIENTS, 15 * CLIENTS)
        await counter.measure(row.name, row.clients.run, few, many, row.pieces)
        items = [item for predict in part.requests for item in predict.items]
        asked[row.name] = row.model, items, row.pieces
    return asked


async def main(library: Path, folder: Path) -> None:
    store, work = folder / "store", folder / "work"
    for path in (store, work):
        path.mkdir()
    for workload in WORKLOADS:
        workload.prepare(store)
    shutil.copytree(MODELS / "triton", folder / "repository")
    places = {"model_store": str(store), "model_repository": str(folder / "repository"), "log_location": str(folder)}
    loaded = ",".join(f"{workload.name}.mar" for workload in WORKLOADS)
    settings = {**SETTINGS, **places, "load_models": loaded}
    config = load_config([Option(key, value, "the measurement") for key, value in settings.items()], environ={})
    logs = setup_logs(config)
    logging.disable(logging.INFO)
    part = Part()
    supervisor = Supervisor(
        worker_env(config),
        work_dir=work,
        first_worker_id=9000,
        first_distribution_id=29500,
        fork=False,
        inventory=Inventory(),
        on_line=lambda *_: None,
        launcher=StandInLauncher(part),
    )
    parts = Parts(config, logs, open_metrics(config, logs), None, None, supervisor, work, open_caches(config))

    async def no_workflows(_: object) -> list[str]:
        return []

    failures = await load_at_startup(config, parts.manager, parts.store, no_workflows, 0, lambda _: None)
    failures += await parts.repository.start(())
    assert not failures, failures
    assert all(model.ready for model in parts.registry)
    asked = await count(Counter(library), parts, part)
    loads = {name: load.settings for name, load in part.loads.items()}
    (folder / ASKED).write_bytes(pickle.dumps((loads, asked)))


if __name__ == "__main__":
    # Without time limits: under callgrind, on a busy machine, each would be exceeded now and then.
    queues.SOLE_AHEAD_S = queues.AHEAD_S = math.inf
    uvloop.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
    sys.stdout.flush()
    os._exit(0)
