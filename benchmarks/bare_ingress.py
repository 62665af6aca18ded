"""Our network layer alone, without a queue or workers: the least that the server can cost.

Usage: python benchmarks/bare_ingress.py PORT [--pieces N] [--http]

`Predictions` echoes its request; `StreamPredictions` answers N small pieces, one by one. Ends with SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import AsyncIterator, Sequence

import uvloop

from ts.protocol.memory import keep_freed
from ts_frontend.grpc.call import Call, Method, Shape, routes
from ts_frontend.listeners.serving import Serving
from ts_frontend.listeners.sockets import Listener
from ts_frontend.protos.inference_pb2 import PredictionResponse
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub as Names
from ts_frontend.transport.limits import arrival
from ts_frontend.transport.stream import Stream

DRAIN_S_MAX = 1.0


async def echo(call: Call, message: bytes) -> bytes:
    return message


def methods(pieces: int) -> tuple[Method, ...]:
    piece = (PredictionResponse(prediction=b"ok").SerializeToString(),)

    async def stream(call: Call, message: bytes) -> AsyncIterator[Sequence[bytes]]:
        for _ in range(pieces):
            yield piece

    return (
        Method(Names.Predictions_PATH, Shape.UNARY, echo),
        Method(Names.StreamPredictions_PATH, Shape.SERVER_STREAM, stream),
    )


async def http_echo(stream: Stream) -> None:
    body = stream.body()
    while not stream.ended:
        await arrival(stream)
        body += stream.body()
    stream.respond(200, [(b"content-length", b"%d" % len(body))], body)


def listener(port: int, pieces: int, http: bool) -> Listener:
    if http:
        return Listener("bare", "127.0.0.1", port, {}, http=http_echo)
    return Listener("bare", "127.0.0.1", port, routes(*methods(pieces)))


async def serve(port: int, pieces: int, http: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    serving = Serving([listener(port, pieces, http)])
    await serving.start()
    await stop.wait()
    await serving.drain(DRAIN_S_MAX)


def main() -> None:
    keep_freed()  # as in the server
    parser = argparse.ArgumentParser(description="Our ingress without anything behind it.")
    parser.add_argument("port", type=int)
    parser.add_argument("--pieces", type=int, default=1)
    parser.add_argument("--http", action="store_true", help="an HTTP service that echoes, instead of gRPC")
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.pieces, options.http))


if __name__ == "__main__":
    main()
