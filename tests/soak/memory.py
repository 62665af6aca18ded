"""The memory that stays in the server's main process after very many requests that end in every way.

Usage: python tests/soak/memory.py [--requests N] [--streams N] [--registrations N] [--warm-up N]

Unary requests over gRPC, of which every tenth fails; streams that their clients give up after the first piece, over
gRPC and HTTP/1.1 in turns; models that are registered and unregistered. A warm-up of all three comes first. The main
process is examined after it and at the end: memory, descriptors, asyncio's tasks.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

sys.path.insert(0, str(Path(__file__).parent.parent))

import raw
from soak.run import DESCRIPTORS_MORE_MAX, MEMORY_GROWTH_BYTES_MAX, TASKS, TASKS_MORE_MAX, state_of
from soak.table import Row, difference, finish, options, running
from ts_frontend.protos.inference_pb2 import PredictionsRequest

CLIENTS, CHANNELS = 16, 4
BODY_BYTES_MAX = 4000
HANDLER = """
from ts.utils.util import PredictionException

def handle(data, context):
    if data is None:
        return None
    bodies = [bytes(row.get("data") or row.get("body")) for row in data]
    return [PredictionException("as asked", 422) if body[:1] == b"f" else body for body in bodies]
"""
STREAM = """
import asyncio

async def handle(data, context):
    while data is not None:
        yield ["x" * 500]
        await asyncio.sleep(0.001)
"""
MODELS = {
    "echo": (HANDLER, "minWorkers: 1\nbatchSize: 8\n"),
    "stream": (STREAM, "minWorkers: 1\n"),
    "moving": (HANDLER, "minWorkers: 1\n"),
}


def models(directory: Path) -> dict[str, tuple[str, str]]:
    (directory / "python").mkdir()
    (directory / "python" / "sitecustomize.py").write_text(TASKS)
    return MODELS


def environment(directory: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(directory / "python"), "SOAK_TASKS": str(directory)}


async def each(count: int, work: Callable[[int], Awaitable[None]]) -> None:
    """`work(0)`, `work(1)`, …, CLIENTS of them at a time."""
    numbers: Iterator[int] = iter(range(count))

    async def client() -> None:
        for number in numbers:
            await work(number)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


class Load:
    """The three kinds of load; `ends` counts their outcomes."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._http = server.port("http_inference")
        local = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(server.inference, local) for _ in range(CHANNELS)]
        self._unary = itertools.cycle(one.unary_unary(f"{raw.INFERENCE}/Predictions") for one in self._channels)
        self._streams = itertools.cycle(
            one.unary_stream(f"{raw.INFERENCE}/StreamPredictions") for one in self._channels
        )
        self.ends: Counter[str] = Counter()

    async def request(self, number: int) -> None:
        body = (b"f" if number % 10 == 0 else b"o") + random.randbytes(random.randrange(BODY_BYTES_MAX))
        message = PredictionsRequest(model_name="echo", input={"data": body}).SerializeToString()
        try:
            await next(self._unary)(message, timeout=60)
            self.ends["answered"] += 1
        except grpc.aio.AioRpcError as error:
            self.ends[f"request {error.code().name}"] += 1

    async def stream(self, number: int) -> None:
        await (self._http_stream() if number % 2 else self._grpc_stream())

    async def _grpc_stream(self) -> None:
        call = next(self._streams)(PredictionsRequest(model_name="stream", input={"data": b"x"}).SerializeToString())
        try:
            await call.read()
            call.cancel()
            self.ends["stream given up"] += 1
        except grpc.aio.AioRpcError as error:  # a connection with many cancels takes no more calls
            self.ends[f"stream {error.code().name}"] += 1

    async def _http_stream(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._http)
        writer.write(b"POST /predictions/stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nx")
        await reader.readuntil(b"xxx")
        writer.close()
        await writer.wait_closed()
        self.ends["stream given up"] += 1

    async def registrations(self, count: int) -> None:
        for _ in range(count):
            await asyncio.to_thread(self._server.unregister, "moving")
            await asyncio.to_thread(self._server.register, "moving")
            self.ends["registration"] += 1

    async def all(self, requests: int, streams: int, registrations: int) -> None:
        await each(requests, self.request)
        await each(streams, self.stream)
        await self.registrations(registrations)

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in self._channels))


async def loaded(server: Any, directory: Path, given: argparse.Namespace) -> list[Row]:
    warming = Load(server)
    await warming.all(given.warm_up, given.warm_up // 10, max(3, given.warm_up // 1000))
    await warming.close()
    before, begun_s = await state_of(server, directory), time.monotonic()
    load = Load(server)
    await load.all(given.requests, given.streams, given.registrations)
    await load.close()
    after = await state_of(server, directory)
    ends = ", ".join(f"{name} {count}" for name, count in sorted(load.ends.items()))
    return [
        Row("ends", "", f"{ends}, in {time.monotonic() - begun_s:.0f} s", True),
        difference("memory, MB", before.memory_bytes / 1e6, after.memory_bytes / 1e6, MEMORY_GROWTH_BYTES_MAX / 1e6),
        difference("descriptors", before.descriptors, after.descriptors, DESCRIPTORS_MORE_MAX),
        difference("tasks", before.tasks, after.tasks, TASKS_MORE_MAX),
        Row("queued or running afterwards", "0", str(after.busy), not after.busy),
    ]


def measure(given: argparse.Namespace) -> list[Row]:
    with running(models, metrics_mode="prometheus", env=environment) as server:
        return asyncio.run(loaded(server, server.directory, given))


def main() -> None:
    parser = options("What stays in the main process.")
    parser.add_argument("--requests", type=int, default=20_000, help="unary ones, of which a tenth fails (20 000)")
    parser.add_argument("--streams", type=int, default=2_000, help="that are given up (2 000)")
    parser.add_argument("--registrations", type=int, default=10, help="(10)")
    parser.add_argument("--warm-up", type=int, default=10_000, help="requests before the first look (10 000)")
    given = parser.parse_args()
    finish(measure(given))


if __name__ == "__main__":
    main()
