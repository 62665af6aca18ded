"""Drains under load: whatever the system has accepted for the server is answered.

A request counts as lost if its connection was made, the request was sent, and the connection ended before the answer,
unless an answer before said `Connection: close`, or GOAWAY that the stream isn't served; a gRPC call that ended other
than OK or UNAVAILABLE, or UNAVAILABLE although it had begun. A client that was silent for GOAWAY_S, which can't be told
from an idle one, is counted apart. 5 drains; `TORCHRELAY_DRAINS=100` and
`-o faulthandler_timeout=0` for more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import re
import select
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import h2.config
import h2.connection
import h2.errors
import hpack
import pytest
from hyperframe.frame import Frame, GoAwayFrame, HeadersFrame, PingFrame, RstStreamFrame, SettingsFrame

from support import GUARD_S, until_async
from ts_frontend.transport.connection import GOAWAY_S

DRAINS = int(os.environ.get("TORCHRELAY_DRAINS", "5"))
LOAD_S, WORK_S = 0.4, 0.004
#: So many calls are answered before a drain of the second test begins.
CALLS_BEFORE = 200
CALL = "/test.Echo/Slow"
GRPC_HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":authority", "test"),
    (":path", CALL),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]
REQUEST = f"GET /work?{WORK_S} HTTP/1.1\r\nHost: test\r\n\r\n".encode()
MESSAGE = str(WORK_S).encode()
OK, UNAVAILABLE = "0", "14"
FRAME_HEAD_BYTES = 9
#: By then a connection to nobody has told its end.
BROKEN_S = 0.2
#: What connecting ends with once nobody listens; a SYN that was dropped is sent again after a second.
REFUSED = (ConnectionRefusedError, ConnectionResetError, FileNotFoundError)
#: The messages of a stream, each of which gives everything else its turn before it comes.
STREAM_MESSAGES = 400


@contextlib.asynccontextmanager
async def connected(address: int | str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """`address`: a port, or the path of a Unix socket."""
    if isinstance(address, int):
        reader, writer = await asyncio.open_connection("127.0.0.1", address)
    else:
        reader, writer = await asyncio.open_unix_connection(address)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


class Load:
    """Clients of one server, at these ports or paths, until it refuses connections, and the results of their requests.
    `says_goaway`: of HTTP/2's clients, each learns before the end of its connection that its calls aren't served. The
    end alone says it to gRPC's clients (UNAVAILABLE), and to nobody else."""

    def __init__(self, grpc_at: int | str, http_at: int | str, says_goaway: bool) -> None:
        self._grpc_at, self._http_at, self._says_goaway = grpc_at, http_at, says_goaway
        self.seen: Counter[str] = Counter()

    async def run(self, drain: Callable[[], None]) -> Counter[str]:
        clients = [
            *(self._keep_alive(0) for _ in range(8)),
            *(self._keep_alive(0.05) for _ in range(8)),
            *(self._one_by_one() for _ in range(8)),
            *(self._http2(streams=4) for _ in range(4)),
            *(self._grpcio(calls=8) for _ in range(2)),
        ]
        async with contextlib.AsyncExitStack() as stays:
            for address in (self._grpc_at, self._http_at):  # clients that stay, and neither ask nor close
                await stays.enter_async_context(connected(address))
            await self._exchange(*await stays.enter_async_context(connected(self._http_at)), time.monotonic())
            tasks = [asyncio.create_task(client) for client in clients]
            await asyncio.sleep(LOAD_S)
            drain()
            await asyncio.wait_for(asyncio.gather(*tasks), GUARD_S)
            return self.seen

    # --- HTTP/1.1

    async def _keep_alive(self, think_s: float) -> None:
        """One request after another on a connection, with pauses between; a new one when the server asks for it."""
        with contextlib.suppress(*REFUSED):
            while True:
                spoke_s: float | None = time.monotonic()
                async with connected(self._http_at) as (reader, writer):
                    while spoke_s is not None:
                        spoke_s = await self._exchange(reader, writer, spoke_s)
                        await asyncio.sleep(random.uniform(0, think_s))

    async def _one_by_one(self) -> None:
        with contextlib.suppress(*REFUSED):
            while True:
                begun_s = time.monotonic()
                async with connected(self._http_at) as (reader, writer):
                    await self._exchange(reader, writer, begun_s)

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, spoke_s: float
    ) -> float | None:
        """When this request was sent; None if the connection may not be used again. `spoke_s`: when the one before was
        sent, or the connection was begun. A client that has been silent for GOAWAY_S counts as idle, and the server may
        close its connection at the moment at which it asks: on a busy machine this happens to a client that pauses for
        less."""
        if reader.at_eof():
            return None  # closed while it was idle: nothing was asked
        head = b""
        now_s = time.monotonic()
        try:
            writer.write(REQUEST)
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            assert length, head
            await reader.readexactly(int(length[1]))
        except (OSError, asyncio.IncompleteReadError) as error:
            idle = not head and now_s - spoke_s >= GOAWAY_S
            end = f"lost after {len(head)} bytes: {type(error).__name__}"
            self.seen[f"HTTP/1.1 {'closed after a silence' if idle else end}"] += 1
            return None
        self.seen["HTTP/1.1 answered"] += 1
        return None if b"connection: close" in head.lower() else now_s

    # --- HTTP/2 and gRPC

    async def _http2(self, streams: int) -> None:
        with contextlib.suppress(*REFUSED):
            while True:
                begun_s = time.monotonic()
                async with connected(self._grpc_at) as (reader, writer):
                    await Http2(self.seen, reader, writer, begun_s, self._says_goaway).run(streams)

    async def _grpcio(self, calls: int) -> None:
        at = self._grpc_at
        await call_on(f"127.0.0.1:{at}" if isinstance(at, int) else f"unix:{at}", None, calls, self.seen)


async def call_on(address: str, credentials: grpc.ChannelCredentials | None, calls: int, seen: Counter[str]) -> None:
    """So many calls and two streams at a time over a channel of grpcio's, one after another until one is refused."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        grpc.aio.insecure_channel(address, options)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options)
    ) as channel:
        call, stream = channel.unary_unary(CALL), channel.unary_stream("/test.Echo/Stream")
        streams = (_streams(stream, seen) for _ in range(2))
        await asyncio.gather(*(_calls(call, seen) for _ in range(calls)), *streams)


async def _calls(call: Any, seen: Counter[str]) -> None:
    while True:
        try:
            await call(MESSAGE, timeout=GUARD_S)
            seen["gRPC answered"] += 1
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                seen["gRPC refused"] += 1
            else:
                seen[f"gRPC lost: {error.code().name} {error.details()}"] += 1
            return


async def _streams(stream: Any, seen: Counter[str]) -> None:
    while True:
        came = 0
        try:
            async for _ in stream(json.dumps([1] * STREAM_MESSAGES).encode(), timeout=GUARD_S):
                came += 1
            seen["streams answered" if came == STREAM_MESSAGES else f"streams lost after {came} messages"] += 1
        except grpc.aio.AioRpcError as error:
            refused = error.code() is grpc.StatusCode.UNAVAILABLE and not came
            lost = f"streams lost after {came} messages: {error.code().name} {error.details()}"
            seen["streams refused" if refused else lost] += 1
            return


class Http2:
    """gRPC calls on one connection, begun at `spoke_s`, until the server says GOAWAY. Frames are read here: h2 reads
    none after GOAWAY."""

    def __init__(
        self,
        seen: Counter[str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        spoke_s: float,
        says_goaway: bool,
    ) -> None:
        self._seen, self._reader, self._writer = seen, reader, writer
        self._spoke_s, self._says_goaway = spoke_s, says_goaway
        #: The first stream of the next frames, and the first one after a silence, until such a one is answered.
        self._unsent = self._late = math.inf
        self._sender = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._decoder = hpack.Decoder()
        self._open: set[int] = set()
        self._leaving = False

    async def run(self, streams: int) -> None:
        self._sender.initiate_connection()
        for _ in range(streams):
            self._call()
        ended = "end"
        try:
            while self._open:
                self._send()
                frame, length = Frame.parse_frame_header(memoryview(await self._reader.readexactly(9)))
                frame.parse_body(memoryview(await self._reader.readexactly(length)))
                self._take(frame)
        except (OSError, asyncio.IncompleteReadError) as error:
            ended = type(error).__name__
        lost = f"lost: {ended}{' after GOAWAY' if self._leaving else ''}" if self._says_goaway else "ended"
        for number in self._open:
            late = self._leaving and number >= self._late
            self._seen[f"HTTP/2 {'closed after a silence' if late else lost}"] += 1

    def _send(self) -> None:
        """A client that has been silent for GOAWAY_S, on a busy machine also one that has just connected, counts as
        idle: the server, whose GOAWAY it hasn't read yet, may close its connection at this moment."""
        if data := self._sender.data_to_send():
            now_s = time.monotonic()
            if now_s - self._spoke_s >= GOAWAY_S:
                self._late = min(self._late, self._unsent)
            self._spoke_s, self._unsent = now_s, math.inf
            self._writer.write(data)

    def _call(self) -> None:
        number = self._sender.get_next_available_stream_id()
        self._sender.send_headers(number, GRPC_HEADERS)
        self._sender.send_data(number, b"\0" + len(MESSAGE).to_bytes(4, "big") + MESSAGE, end_stream=True)
        self._open.add(number)
        self._unsent = min(self._unsent, number)

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, HeadersFrame):
            headers: dict[Any, Any] = dict(self._decoder.decode(frame.data))
            if "END_STREAM" in frame.flags:
                self._ended(frame.stream_id, headers["grpc-status"])
        elif isinstance(frame, RstStreamFrame) and frame.stream_id in self._open:
            self._open.discard(frame.stream_id)
            refused = frame.error_code == h2.errors.ErrorCodes.REFUSED_STREAM
            self._seen["HTTP/2 refused" if refused else f"HTTP/2 lost: reset {frame.error_code}"] += 1
        elif isinstance(frame, GoAwayFrame):
            self._leaving = True
            unread = {number for number in self._open if number > frame.last_stream_id}
            self._seen["HTTP/2 refused"] += len(unread)
            self._open -= unread
        elif isinstance(frame, (PingFrame, SettingsFrame)) and "ACK" not in frame.flags:
            answer = PingFrame(0, frame.opaque_data) if isinstance(frame, PingFrame) else SettingsFrame(0)
            answer.flags.add("ACK")
            self._writer.write(answer.serialize())

    def _ended(self, number: int, status: str) -> None:
        if number >= self._late:
            self._late = math.inf
        self._open.discard(number)
        what = {OK: "answered", UNAVAILABLE: "refused"}.get(status, f"lost: grpc-status {status}")
        self._seen[f"HTTP/2 {what}"] += 1
        if not self._leaving:
            self._call()


def listener_at(place: str, certificates: Path, folders: pytest.TempPathFactory) -> dict[str, Any]:
    """A listener for gRPC on a TCP port without TLS, with TLS, or on a Unix socket."""
    files = {"certificate_file": "server.crt", "key_file": "server.key"}
    if place == "TLS":
        return {"name": "grpc", "tls": {key: str(certificates / name) for key, name in files.items()}}
    return {"name": "grpc", **({"path": str(folders.mktemp("u") / "s")} if place == "Unix" else {})}


@pytest.mark.parametrize("place", ["TCP", "Unix"])
@pytest.mark.long
def test_drains_under_load_lose_nothing(
    place: str, run_server: Any, certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    total: Counter[str] = Counter()
    took_s = []
    for _ in range(DRAINS):
        listeners = [listener_at(place, certificates, tmp_path_factory) for _ in range(2)]
        listeners[1] |= {"name": "http", "http": "only"}
        with run_server(*listeners) as server:
            grpc_at, http_at = (one.get("path", server.ports[one["name"]]) for one in listeners)
            load = Load(grpc_at, http_at, says_goaway=True)
            begun_s = time.monotonic()
            seen = asyncio.run(load.run(lambda: server.drain(30)))
            printed, status = server.end()
            took_s.append(time.monotonic() - begun_s - LOAD_S)
        assert status == 0
        said = json.loads(printed)
        seen["begun, not answered"] = said["begun"] - seen["gRPC answered"] - seen["HTTP/2 answered"]
        total += seen
    print(f"\n{place}, {DRAINS} drains of up to {max(took_s):.2f} s: {dict(total)}")
    assert all(total[f"{what} answered"] for what in ("HTTP/1.1", "HTTP/2", "gRPC", "streams"))
    assert not {what: count for what, count in total.items() if "lost" in what or "not answered" in what}


@pytest.mark.parametrize("place", ["TLS", "Unix"])
@pytest.mark.long
def test_drains_end_no_call_cancelled(
    place: str, run_server: Any, certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    listener = listener_at(place, certificates, tmp_path_factory)
    authority = (certificates / "ca.crt").read_bytes()
    credentials = grpc.ssl_channel_credentials(authority) if place == "TLS" else None
    total: Counter[str] = Counter()

    async def load(server: Any) -> None:
        address = f"unix:{listener['path']}" if place == "Unix" else f"127.0.0.1:{server.port}"
        tasks = [asyncio.create_task(call_on(address, credentials, 8, total)) for _ in range(4)]
        enough = total["gRPC answered"] + CALLS_BEFORE
        await until_async(lambda: total["gRPC answered"] > enough)
        server.drain(30)
        await asyncio.wait_for(asyncio.gather(*tasks), GUARD_S)

    for _ in range(DRAINS):
        with run_server(listener) as server:
            asyncio.run(load(server))
            printed, status = server.end()
        assert status == 0
        total["begun"] += json.loads(printed)["begun"]
    print(f"\n{place}, {DRAINS} drains: {dict(total)}")
    assert total["gRPC answered"] == total["begun"] and total["gRPC refused"]
    assert not [what for what in total if "lost" in what], total


@pytest.mark.parametrize("place", ["TCP", "TLS", "Unix"])
def test_a_client_that_writes_before_it_reads_its_answer_gets_the_answer(
    place: str, run_server: Any, certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The client was busy while the server answered and ended the connection. If nobody read its next bytes, it
    would learn of that first; grpcio's clients drop answers that they haven't read in this case."""
    listener = listener_at(place, certificates, tmp_path_factory)
    sender = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    sender.initiate_connection()
    with run_server(listener) as server, connected_to(listener, server.port) as link:
        begin_call(sender, link)
        until_begun(listener, server.port)
        server.drain(30)
        look = select.poll()
        look.register(link, select.POLLRDHUP)
        assert look.poll(GUARD_S * 1000)
        begin_call(sender, link)
        look.modify(link, 0)  # a broken connection is told without being asked for
        assert not look.poll(BROKEN_S * 1000), "the connection broke"
        if place != "Unix":
            sender.ping(b"are you?")
            link.sendall(sender.data_to_send())
            assert not look.poll(BROKEN_S * 1000), "the connection broke by what came later"
        received = b"".join(iter(lambda: link.recv(65536), b""))
        link.close()
        printed, status = server.end()
    assert (json.loads(printed), status) == ({"begun": 1, "ended": 1}, 0)
    assert grpc_statuses(received)[1] == OK


@contextlib.contextmanager
def connected_to(listener: dict[str, Any], port: int) -> Iterator[socket.socket]:
    """A connection to a listener; with TLS whatever its certificate says."""
    with socket.socket(socket.AF_UNIX if "path" in listener else socket.AF_INET) as link:
        link.settimeout(GUARD_S)
        link.connect(listener.get("path") or ("127.0.0.1", port))
        if "tls" not in listener:
            yield link
            return
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with context.wrap_socket(link) as wrapped:
            yield wrapped


def begin_call(sender: h2.connection.H2Connection, link: socket.socket) -> None:
    number = sender.get_next_available_stream_id()
    sender.send_headers(number, GRPC_HEADERS)
    sender.send_data(number, b"\0" + len(MESSAGE).to_bytes(4, "big") + MESSAGE, end_stream=True)
    link.sendall(sender.data_to_send())


def until_begun(listener: dict[str, Any], port: int) -> None:
    """Returns when the server has begun the first call of CALL."""
    with connected_to(listener, port) as link:
        sender = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        sender.initiate_connection()
        sender.send_headers(1, [*GRPC_HEADERS[:3], (":path", "/test.Probe/Wait"), *GRPC_HEADERS[4:]])
        sender.send_data(1, b"\0\0\0\0\x071 begun", end_stream=True)
        link.sendall(sender.data_to_send())
        received = b""
        while 1 not in grpc_statuses(received):
            data = link.recv(65536)
            assert data, "the server ended the connection"
            received += data


def grpc_statuses(received: bytes) -> dict[int, str]:
    """The statuses of the streams that have ended."""
    decoder, found = hpack.Decoder(), {}
    while len(received) >= FRAME_HEAD_BYTES:
        frame, length = Frame.parse_frame_header(memoryview(received[:FRAME_HEAD_BYTES]))
        if len(received) < FRAME_HEAD_BYTES + length:
            break
        frame.parse_body(memoryview(received[FRAME_HEAD_BYTES : FRAME_HEAD_BYTES + length]))
        received = received[FRAME_HEAD_BYTES + length :]
        if isinstance(frame, HeadersFrame):
            headers: dict[Any, Any] = dict(decoder.decode(frame.data))
            if "END_STREAM" in frame.flags:
                found[frame.stream_id] = str(headers["grpc-status"])
    return found
