"""Measures how cancels on a connection affect its other streams, and the cost of a call, on each engine.

Usage: python benchmarks/cancels.py [--rates 10,20,40,75] [--streams 10] [--seconds 12]

The server is an engine in a process of its own, without models; the client is grpcio with one channel.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import grpc
import psutil

from ts_frontend.grpc.call import Call, Method, Shape, routes
from ts_frontend.listeners.listener import Listener
from ts_frontend.listeners.listeners import make_engine

KINDS = ("h2corn", "grpcio")
PIECE_EVERY_S = 0.1
UNARY_CALLS = 3000
HANG, ECHO, PIECES = "/bench.Cancels/Hang", "/bench.Cancels/Echo", "/bench.Cancels/Pieces"


async def hang(call: Call, data: bytes) -> bytes:
    await asyncio.Event().wait()
    return data


async def echo(call: Call, data: bytes) -> bytes:
    return data


async def pieces(call: Call, data: bytes) -> AsyncIterator[Sequence[bytes]]:
    for number in range(int(data)):
        yield [b"%d" % number]
        await asyncio.sleep(PIECE_EVERY_S)


async def serve(kind: str) -> None:
    """Prints the port, and serves until stdin ends."""
    table = routes(
        Method(HANG, Shape.UNARY, hang), Method(ECHO, Shape.UNARY, echo), Method(PIECES, Shape.SERVER_STREAM, pieces)
    )
    engine = make_engine(kind, [Listener("bench", "127.0.0.1", 0, table)])
    await engine.start()
    print(json.dumps(engine.port("bench")), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await engine.drain(0)


class Row(NamedTuple):
    """The result of one rate. `whole`: streams that had all their pieces; `first_lost_s`: the time at which the first
    was lost, None for none."""

    kind: str
    cancels_per_s: float
    cancels: int
    streams: int
    whole: int
    first_lost_s: float | None
    error: str


def measured(kind: str, port: int, cancels_per_s: float, streams: int, seconds: float) -> Row:
    options = [("grpc.use_local_subchannel_pool", 1)]
    ends: list[tuple[float, str]] = []
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        asked = b"%d" % int(seconds / PIECE_EVERY_S)
        begun_s = time.monotonic()

        def read() -> None:
            error = ""
            try:
                for _ in channel.unary_stream(PIECES)(asked):
                    pass
            except grpc.RpcError as raised:
                error = raised.details() or str(raised.code())
            ends.append((time.monotonic() - begun_s, error))

        readers = [threading.Thread(target=read) for _ in range(streams)]
        for reader in readers:
            reader.start()
        cancels = 0
        while time.monotonic() - begun_s < seconds:
            call = channel.unary_unary(HANG).future(b"")
            cancels += 1
            time.sleep(max(0.0, begun_s + cancels / cancels_per_s - time.monotonic()))
            call.cancel()
        for reader in readers:
            reader.join()
    lost = sorted((at_s, error) for at_s, error in ends if error)
    first_s, error = lost[0] if lost else (None, "")
    return Row(kind, cancels_per_s, cancels, streams, streams - len(lost), first_s, error)


def cpu_us(port: int, server: psutil.Process) -> float:
    """CPU time of the server for each unary call, one after another."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(ECHO)
        call(b"hello")
        before = sum(server.cpu_times()[:2])
        for _ in range(UNARY_CALLS):
            call(b"hello")
        return (sum(server.cpu_times()[:2]) - before) / UNARY_CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="10,20,40,75", help="cancels in a second, one run each")
    parser.add_argument("--streams", type=int, default=10, help="streams beside them, on the same connection")
    parser.add_argument("--seconds", type=float, default=12.0, help="length of a run")
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve(given.serve))
        return
    for kind in KINDS:
        command = [sys.executable, __file__, "--serve", kind]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None and server.stdout is not None
            port = json.loads(server.stdout.readline())
            print(f"{kind}: {cpu_us(port, psutil.Process(server.pid)):.0f} µs of CPU for a unary call")
            for rate in given.rates.split(","):
                row = measured(kind, port, float(rate), given.streams, given.seconds)
                lost = "" if row.first_lost_s is None else f", one lost after {row.first_lost_s:.1f} s: {row.error}"
                print(
                    f"{kind}: {row.cancels_per_s:g} cancels/s, {row.cancels} in all: {row.whole} of {row.streams}"
                    f" streams whole{lost}",
                    flush=True,
                )
            server.stdin.close()


if __name__ == "__main__":
    main()
