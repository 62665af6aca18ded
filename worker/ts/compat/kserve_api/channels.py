"""The connections of one event loop to a predictor: `grpc.aio` for gRPC, `http.client` in threads for HTTP."""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead, RemoteDisconnected
from typing import Any

from ts.protocol.codes import Code

#: The most connections over HTTP to a server, each with a thread.
OPEN_MAX = 64
#: The largest body: protobuf's largest message, which limits answers over gRPC.
BODY_BYTES_MAX = (1 << 31) - 1
#: The most bytes of an answer's header fields over gRPC.
HEAD_BYTES_MAX = 1 << 16
#: The longest wait for a connection over HTTP, after which a call that was given up frees its thread.
CONNECT_S_MAX = 20.0
#: In the text of a call that a server takes back, unseen, because it has as many as it takes at a time: grpcio's server
#: counts one for a moment after its answer. gRPC's library repeats it once only. The pauses double.
_REFUSED, _PAUSE_S_FIRST, _PAUSE_S_MAX = "RST_STREAM with error code 7", 0.002, 1.0
_PIECE_BYTES = 1 << 20
_LATE = "the predictor didn't answer in time"


class Unanswered(Exception):
    """A call has no answer. `unseen`: no connection could be made for it."""

    def __init__(self, code: Code, message: str, unseen: bool = False) -> None:
        super().__init__(message)
        self.code, self.message, self.unseen = code, message, unseen


def address(host: str, port: int) -> tuple[str, int]:
    """The name and the port of HOST or HOST:PORT, with `port` where there is none. Raises ValueError."""
    name, _, given = host.rpartition(":") if host.rpartition("]")[2].count(":") == 1 else (host, "", "")
    if given and not given.isdecimal():
        raise ValueError(f"{host!r} is no HOST:PORT")
    return name.strip("[]"), int(given or port)


class Channel:
    """Unary gRPC calls to `host`, HOST or HOST:PORT. `authorities`: PEM, for TLS."""

    def __init__(self, host: str, authorities: bytes | None = None) -> None:
        import grpc.aio

        self._grpc = grpc
        name, port = address(host, 80 if authorities is None else 443)  # as KServe's client
        self._target = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
        self._credentials = None if authorities is None else grpc.ssl_channel_credentials(authorities)
        self._options = (
            ("grpc.max_receive_message_length", BODY_BYTES_MAX),
            ("grpc.max_send_message_length", BODY_BYTES_MAX),
            ("grpc.max_metadata_size", HEAD_BYTES_MAX),
            ("grpc.absolute_max_metadata_size", HEAD_BYTES_MAX),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),  # a replaced channel shares no connection with its successor
        )
        self._channel: Any = None
        #: The calls of each channel that are under way.
        self._calls: Counter[Any] = Counter()

    async def call(self, path: str, message: bytes, metadata: Sequence[tuple[str, str]], timeout_s: float) -> bytes:
        """The answer's message. Raises Unanswered."""
        end_s, pause_s = time.monotonic() + timeout_s, _PAUSE_S_FIRST
        while True:
            channel = self._channel
            if channel is None:
                channel = self._channel = self._made()
            left_s = max(end_s - time.monotonic(), 0.001)
            self._calls[channel] += 1
            try:
                answer: bytes = await channel.unary_unary(path)(message, timeout=left_s, metadata=metadata)
            except self._grpc.aio.AioRpcError as error:
                if _REFUSED not in (error.details() or "") or pause_s > min(_PAUSE_S_MAX, left_s):
                    raise self._failure(channel, error) from error
            else:
                return answer
            finally:
                await self._ended(channel)
            await asyncio.sleep(pause_s)
            pause_s *= 2

    async def _ended(self, channel: Any) -> None:
        """A call has ended: the last one of a channel that was replaced closes it."""
        self._calls[channel] -= 1
        if not self._calls[channel]:
            del self._calls[channel]
            if channel is not self._channel:
                await channel.close()

    async def close(self) -> None:
        """Closes the channel; running calls fail."""
        if self._channel is not None:
            await self._channel.close()

    def _made(self) -> Any:
        if self._credentials is None:
            return self._grpc.aio.insecure_channel(self._target, self._options)
        return self._grpc.aio.secure_channel(self._target, self._credentials, self._options)

    def _failure(self, channel: Any, error: Any) -> Unanswered:
        """What `error` says. The next call has a new channel where this one would wait before it connects, or where
        its connection may be dead; calls that are under way keep theirs, which ends with the last of them."""
        code, text = Code(error.code().value[0]), error.details() or error.code().name
        lost = channel.get_state() is self._grpc.ChannelConnectivity.TRANSIENT_FAILURE
        if channel is self._channel and (lost or code == Code.DEADLINE_EXCEEDED):
            self._channel = None
        if lost and code == Code.UNAVAILABLE:
            return Unanswered(code, f"{self._target} can't be reached: {text}")
        return Unanswered(code, _LATE if text == "Deadline Exceeded" else text)


class Connections:
    """POST requests to `host`, HOST or HOST:PORT. Connections are kept between requests; one that the server has closed
    while it was idle is replaced."""

    def __init__(self, host: str, tls: ssl.SSLContext | None = None) -> None:
        self._host, self._tls = host, tls
        self._name, self._port = address(host, 80 if tls is None else 443)
        self._idle: list[HTTPConnection] = []
        self._threads = ThreadPoolExecutor(OPEN_MAX, "predictor")

    async def post(self, path: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> tuple[int, bytes]:
        """Status and body of the answer. Raises Unanswered; ValueError for a header that can't be sent."""
        request = _Request()
        work = asyncio.get_running_loop().run_in_executor(
            self._threads, self._ask, request, path, body, headers, timeout_s
        )
        try:
            return await asyncio.wait_for(work, max(timeout_s, 0.001))
        except TimeoutError:
            raise Unanswered(Code.DEADLINE_EXCEEDED, _LATE) from None
        finally:
            request.end()

    def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().close()
        self._threads.shutdown(wait=False)

    # --- in a thread

    def _ask(
        self, request: _Request, path: str, body: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        while True:
            connection = self._unused()
            is_new = connection is None
            if connection is None:
                connection = self._connected(timeout_s)
            try:
                request.use(connection)
                try:
                    connection.request("POST", path, body, dict(headers))
                    answer = connection.getresponse()
                except (BrokenPipeError, ConnectionResetError, RemoteDisconnected):
                    if is_new:
                        raise
                    connection.close()
                    continue  # the server had closed it before the request came
                found = answer.status, _body(answer)
            except (OSError, HTTPException) as error:
                connection.close()
                text = f"the predictor {self._host} can't be reached: the connection was lost: {error!r}"
                raise Unanswered(Code.UNAVAILABLE, text) from error
            except BaseException:
                connection.close()
                raise
            if request.let_go() and connection.sock is not None:
                self._idle.append(connection)
            else:
                connection.close()
            return found

    def _unused(self) -> HTTPConnection | None:
        while True:
            try:
                found = self._idle.pop()
            except IndexError:
                return None
            waiting = select.poll()
            waiting.register(found.sock, select.POLLIN)
            if not waiting.poll(0):
                return found
            found.close()  # the server has closed it, or sent what nobody asked for

    def _connected(self, timeout_s: float) -> HTTPConnection:
        wait_s = min(timeout_s + 1.0, CONNECT_S_MAX)  # the loop counts the call's own time
        if self._tls is None:
            made = HTTPConnection(self._name, self._port, timeout=wait_s)
        else:
            made = HTTPSConnection(self._name, self._port, timeout=wait_s, context=self._tls)
        try:
            made.connect()
        except OSError as error:  # ssl.SSLError is one
            made.close()
            text = f"the predictor {self._host} can't be reached: {error}"
            raise Unanswered(Code.UNAVAILABLE, text, unseen=True) from error
        made.sock.settimeout(None)
        return made


class _Request:
    """One request, which the loop ends while a thread waits for its answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_over = False

    def use(self, connection: HTTPConnection) -> None:
        """Raises ConnectionAbortedError for a request that is over."""
        with self._lock:
            if self._is_over:
                raise ConnectionAbortedError("the call was given up")
            self._socket = connection.sock

    def let_go(self) -> bool:
        """Whether the connection can take another request."""
        with self._lock:
            self._socket = None
            return not self._is_over

    def end(self) -> None:
        with self._lock:
            self._is_over = True
            if self._socket is not None:
                with suppress(OSError):  # it is closed already
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # TLS's own would pull it from the thread


def _body(answer: Any) -> bytes:
    """The answer's body. Raises HTTPException."""
    pieces, size = [], 0
    while size + (answer.length or 0) <= BODY_BYTES_MAX and (piece := answer.read(_PIECE_BYTES)):
        pieces.append(piece)
        size += len(piece)
    if size + (answer.length or 0) > BODY_BYTES_MAX:
        raise HTTPException(f"its body is over {BODY_BYTES_MAX} bytes")
    if answer.length:
        raise IncompleteRead(b"", answer.length)
    return b"".join(pieces)
