"""A server with stand-in services, in a process of its own.

argv[1]: JSON {"listeners": [{"name", "host", "port", "limits", "tls", "http", "path", "path_mode"}]}; `http`:
true beside gRPC, "only" without it.
Prints one JSON line: {"ports"} when it listens, or {"error"}. A line with seconds on stdin drains; then {"begun",
"ended"} (calls of Slow) is printed and the process ends.
"""

from __future__ import annotations

import asyncio
import json
import math
import resource
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import uvloop

import ts_frontend.protos.inference_pb2  # noqa: F401  # reflection tells of what has been imported
from ts_frontend import errors
from ts_frontend.errors import ServeError
from ts_frontend.grpc.call import Call, Method, Shape, routes
from ts_frontend.grpc.health import health_methods, reflection_methods
from ts_frontend.http.request import BodyLimits, HttpRequest
from ts_frontend.listeners.serving import Serving
from ts_frontend.listeners.sockets import Listener, Tls
from ts_frontend.transport.limits import Arriving, ListenerLimits, Unread, drained
from ts_frontend.transport.stream import Stream

ARRIVING = Arriving()
BIG_PIECE = bytes(64 * 1024)


class Events:
    """Things that happened, by name; whoever asks for one waits until it has."""

    def __init__(self) -> None:
        self._events: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def happened(self, name: str) -> None:
        self._events[name].set()

    async def wait(self, call: Call, data: bytes) -> bytes:
        await self._events[data.decode()].wait()
        return data


class SettableHealth:
    """A health source that a test sets through a call."""

    def __init__(self) -> None:
        self._status: dict[str, bool] = {"": True}
        self._change = asyncio.Event()

    def status(self, service: str) -> bool | None:
        return self._status.get(service)

    async def changed(self) -> None:
        await self._change.wait()

    async def set(self, call: Call, data: bytes) -> bytes:
        self._status.update(json.loads(data))
        self._change.set()
        self._change = asyncio.Event()
        return b""


class Echo:
    """Methods whose behaviour a test chooses."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._sent: defaultdict[str, int] = defaultdict(int)
        self.begun = self.ended = self.floods = 0

    async def unary(self, call: Call, data: bytes) -> bytes:
        return data

    async def size(self, call: Call, data: bytes) -> bytes:
        return str(len(data)).encode()

    async def zeros(self, call: Call, data: bytes) -> bytes:
        return bytes(int(data))

    async def stream(self, call: Call, data: bytes) -> AsyncIterator[Sequence[bytes]]:
        """Messages "0", "1", ... in the groups whose sizes `data` lists."""
        number = 0
        for group in json.loads(data):
            yield [str(number + index).encode() for index in range(group)]
            number += group
            await asyncio.sleep(0)

    async def bidi(self, call: Call, requests: AsyncIterator[bytes]) -> AsyncIterator[Sequence[bytes]]:
        async for message in requests:
            yield [message, message]

    async def fail(self, call: Call, data: bytes) -> bytes:
        wanted = json.loads(data)
        call.trailing.append(("x-trailing", "of a failure"))
        call.trailing.append(("grpc-status-details-bin", b"\x08\x03"))
        raise getattr(errors, wanted["kind"])(wanted["message"])

    async def fail_stream(self, call: Call, data: bytes) -> AsyncIterator[Sequence[bytes]]:
        yield [b"before"]
        raise errors.HandlerFailed(507, "failed after one message")

    async def crash(self, call: Call, data: bytes) -> bytes:
        raise RuntimeError("a secret of the server")

    async def metadata(self, call: Call, data: bytes) -> bytes:
        call.initial.extend([("x-initial", "first"), ("x-initial-bin", b"\x00\xff")])
        call.trailing.extend([("x-trailing", "last"), ("x-trailing-bin", b"\xfe,\x01")])
        seen = [[key, value if isinstance(value, str) else list(value)] for key, value in call.metadata]
        deadline = call.deadline_s if math.isfinite(call.deadline_s) else None
        return json.dumps({"metadata": seen, "peer": call.peer, "deadline": deadline}).encode()

    async def hang(self, call: Call, data: bytes) -> bytes:
        name = data.decode()
        self._events.happened(f"{name} started")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self._events.happened(f"{name} cancelled")
            raise
        return b""

    async def hang_stream(self, call: Call, data: bytes) -> AsyncIterator[Sequence[bytes]]:
        yield [b"first"]
        yield [await self.hang(call, data)]

    async def endless(self, call: Call, data: bytes) -> AsyncIterator[Sequence[bytes]]:
        name = data.decode()
        try:
            while True:
                self._sent[name] += 1
                yield [BIG_PIECE]
                await asyncio.sleep(0)
        finally:
            self._events.happened(f"{name} closed")

    async def sent(self, call: Call, data: bytes) -> bytes:
        return str(self._sent[data.decode()]).encode()

    async def count_floods(self, call: Call, data: bytes) -> bytes:
        return str(self.floods).encode()

    def flooded(self) -> None:
        self.floods += 1

    async def slow(self, call: Call, data: bytes) -> bytes:
        self.begun += 1
        self._events.happened(f"{self.begun} begun")
        await asyncio.sleep(float(data))
        self.ended += 1
        return data


def build_routes(echo: Echo, events: Events) -> dict[str, Method]:
    source: Any = SettableHealth()
    unary = {
        "/test.Echo/Unary": echo.unary,
        "/test.Echo/Size": echo.size,
        "/test.Echo/Zeros": echo.zeros,
        "/test.Echo/Fail": echo.fail,
        "/test.Echo/Crash": echo.crash,
        "/test.Echo/Metadata": echo.metadata,
        "/test.Echo/Hang": echo.hang,
        "/test.Echo/Sent": echo.sent,
        "/test.Echo/Slow": echo.slow,
        "/test.Probe/Wait": events.wait,
        "/test.Probe/CountFloods": echo.count_floods,
        "/test.Probe/SetHealth": source.set,
    }
    streams = {
        "/test.Echo/Stream": echo.stream,
        "/test.Echo/FailStream": echo.fail_stream,
        "/test.Echo/HangStream": echo.hang_stream,
        "/test.Echo/Endless": echo.endless,
    }
    methods = [Method(path, Shape.UNARY, run) for path, run in unary.items()]
    methods += [Method(path, Shape.SERVER_STREAM, run) for path, run in streams.items()]
    methods += [Method("/test.Echo/Bidi", Shape.BIDI, echo.bidi), *health_methods(source)]
    return routes(*methods, *reflection_methods(methods))


def build_listener(asked: dict[str, Any], table: dict[str, Method], echo: Echo) -> Listener:
    tls = Tls(**asked["tls"]) if asked.get("tls") else None
    asked_limits = dict(asked.get("limits", {}))
    unread = Unread(asked_limits.pop("unread_bytes_max", math.inf), asked_limits.get("write_s_max", 120.0))
    limits = ListenerLimits(**asked_limits, unread=unread)
    service = partial(answer_http, echo) if asked.get("http") else None
    address = asked.get("host", "127.0.0.1"), asked.get("port", 0)
    path = {key: asked[key] for key in ("path", "path_mode") if key in asked}
    methods = {} if asked.get("http") == "only" else table
    return Listener(asked["name"], *address, methods, limits, tls, service, flooded=echo.flooded, **path)


async def answer_http(echo: Echo, stream: Stream) -> None:
    """Answers with the request, after the seconds in the query; never to /hang, without end to /endless/NAME, with so
    many bytes to /zeros/COUNT, with the body to /echo, and to /arriving with the bytes of such bodies."""
    head = stream.head
    if head.path == "/echo":
        try:
            stream.respond(200, [], await HttpRequest(stream, "id", BodyLimits(6_553_500, 60.0, ARRIVING)).body())
        except ServeError as error:
            stream.respond(error.http_status, [], error.message.encode())
        return
    if head.path == "/arriving":
        stream.respond(200, [], str(ARRIVING.bytes).encode())
        return
    if head.path.startswith("/endless/"):
        stream.begin(200, [])
        pieces = echo.endless(Call(head.path), head.path.removeprefix("/endless/").encode())
        try:
            async for piece in pieces:
                stream.write(piece[0])
                if stream.queued:
                    await drained(stream)
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]
    if head.path.startswith("/zeros/"):
        stream.respond(200, [], bytes(int(head.path.removeprefix("/zeros/"))))
        return
    if head.path == "/hang":
        await asyncio.Event().wait()
    await asyncio.sleep(float(head.query or 0))
    body = f"{head.method} {head.path} HTTP/{stream.peer.version}".encode()
    stream.respond(200, [(b"content-type", b"text/plain")], body)


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


async def main() -> None:
    asked = json.loads(sys.argv[1])
    if asked.get("open_files"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (asked["open_files"], resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    events = Events()
    echo = Echo(events)
    table = build_routes(echo, events)
    try:
        serving = Serving([build_listener(listener, table, echo) for listener in asked["listeners"]])
        await serving.start()
    except (OSError, ServeError, ValueError) as error:
        say(error=str(error))
        return
    say(ports={listener["name"]: serving.port(listener["name"]) for listener in asked["listeners"]})
    waiting = asyncio.ensure_future(serving.wait())
    line = await asyncio.to_thread(sys.stdin.readline)
    await serving.drain(float(line or 0))
    await waiting
    say(begun=echo.begun, ended=echo.ended)


def run() -> None:
    uvloop.run(main())


if __name__ == "__main__":
    run()
