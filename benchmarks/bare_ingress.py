"""Our network layer alone, without a queue or workers: the least that the server can cost.

Usage: python benchmarks/bare_ingress.py PORT [--engine h2corn|grpcio] [--pieces N] [--http]

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
from ts_frontend.http.request import Receive, Scope, Send
from ts_frontend.listeners.listener import Listener
from ts_frontend.listeners.listeners import make_engine
from ts_frontend.protos.inference_pb2 import PredictionResponse
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub as Names

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


async def http_echo(scope: Scope, receive: Receive, send: Send) -> None:
    parts, more = [], True
    while more:
        event = await receive()
        parts.append(event.get("body", b""))
        more = event.get("more_body", False)
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def listener(port: int, pieces: int, http: bool) -> Listener:
    if http:
        return Listener("bare", "127.0.0.1", port, {}, http_app=http_echo)
    return Listener("bare", "127.0.0.1", port, routes(*methods(pieces)))


async def serve(port: int, kind: str, pieces: int, http: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    engine = make_engine(kind, [listener(port, pieces, http)])
    await engine.start()
    await stop.wait()
    await engine.drain(DRAIN_S_MAX)


def main() -> None:
    keep_freed()  # as in the server
    parser = argparse.ArgumentParser(description="Our ingress without anything behind it.")
    parser.add_argument("port", type=int)
    parser.add_argument("--engine", default="h2corn", choices=("h2corn", "grpcio"))
    parser.add_argument("--pieces", type=int, default=1)
    parser.add_argument("--http", action="store_true", help="an HTTP application that echoes, instead of gRPC")
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.engine, options.pieces, options.http))


if __name__ == "__main__":
    main()
