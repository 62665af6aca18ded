"""The grpcio engine: the same listeners on grpc.aio, with methods from bytes to bytes.

It is the reference for this server's own gRPC layer, and serves where h2corn doesn't run. It serves no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio

from ts_frontend.errors import Code, Draining, ServeError
from ts_frontend.grpc.call import Bidi, Call, Keepalive, ListenerLimits, Method, Routes, ServerStream, Shape, Unary
from ts_frontend.grpc.exchange import UNEXPECTED
from ts_frontend.grpc.protocol import bounded, status_details, too_large
from ts_frontend.http.unread import AnswersUnread, Unread
from ts_frontend.listeners.certificates import CertificateFiles, Pem, key_refused
from ts_frontend.listeners.listener import HEADER_BYTES_MAX, STREAMS_PER_CONNECTION_MAX, Listener, Tls
from ts_frontend.listeners.sockets import (
    CONNECTIONS_LOOK_EVERY_S,
    LINGER_S_MAX,
    QUIET_S,
    REST_FACTOR,
    ListenFailed,
    all_closed,
    cut,
    deafen,
    finish,
    limit_writes,
    listening,
    path_claimed,
    quiet,
    refuse,
    release,
    say_goaway,
    unread,
)
from ts_frontend.tasks import ENDING, kept, owned, uncancel

logger = logging.getLogger(__name__)

#: Seconds after the cancellation of calls until their statuses are sent.
SETTLE_S = 1.0
#: Seconds of a drain for GOAWAY and the calls that clients have begun, before grpcio's own drain.
QUIET_S_MAX = 1.0

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
#: A status and its message.
Failure: TypeAlias = "tuple[Code, str]"
_CODES = {int(code.value[0]): code for code in grpc.StatusCode}


class GrpcioEngine:
    """One grpc.aio server for each listener (each has limits of its own), all in one loop."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._servers = {listener.name: GrpcioServer(listener) for listener in listeners}
        logging.getLogger("grpc._cython.cygrpc").addFilter(is_news)

    async def start(self) -> None:
        started: list[GrpcioServer] = []
        try:
            for server in self._servers.values():
                started.append(server)
                await server.start()
        except BaseException:
            await asyncio.gather(*(server.drain(0) for server in started))
            raise

    def port(self, name: str) -> int:
        return self._servers[name].port

    async def drain(self, grace_s: float) -> None:
        await asyncio.gather(*(server.drain(grace_s) for server in self._servers.values()))

    async def wait(self) -> None:
        # Cancelling grpcio's own wait cancels its shutdown, and with it the drain and every call.
        ended = asyncio.gather(*(server.ended() for server in self._servers.values()))
        ended.add_done_callback(_retrieved)
        await asyncio.shield(ended)


class GrpcioServer:
    """One listener: its grpc.aio server, and the calls that run on it. `port`: 0 for a Unix socket."""

    def __init__(self, listener: Listener) -> None:
        self.port = 0
        self._name = listener.name
        self._listener = listener
        self._running = RunningCalls(lambda clients: cut(self._ports, clients=clients))
        self._server: grpc.aio.Server | None = None
        self._following: asyncio.Task[None] | None = None
        self._finished: dict[int, socket.socket] = {}

    async def start(self) -> None:
        listener = self._listener
        if listener.http_app is not None:
            logger.warning("%s: grpcio serves only gRPC; the HTTP routes of this address need h2corn", listener.name)
        self._server = grpc.aio.server(options=server_options(listener.limits))
        self._server.add_generic_rpc_handlers((BytesHandler(listener.routes, listener.limits, self._running),))
        certificate = Certificate(listener.name, listener.tls) if listener.tls else None
        self.port = _bind(self._server, listener, certificate)
        await self._server.start()
        for one in listening(self._ports):
            with one:
                limit_writes(one, listener.limits.write_s_max)
        if certificate is not None and certificate.tls.check_s:
            self._following = kept(
                partial(certificate.files.follow, certificate.renew), f"{listener.name}: the watch over TLS files"
            )

    async def ended(self) -> None:
        if self._server is not None:
            await self._server.wait_for_termination()

    async def drain(self, grace_s: float) -> None:
        latest_s = time.monotonic() + grace_s
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        limit_s = min(QUIET_S_MAX, grace_s / 2)
        if grace_s:
            await _refuse(self._ports)
            if self._takes_goaway:
                await self._send_away(limit_s)
        await self._turn_away(latest_s, grace_s, limit_s)
        if self._server is not None:
            await self._stop(self._server, latest_s, grace_s)

    async def _stop(self, server: grpc.aio.Server, latest_s: float, grace_s: float) -> None:
        """grpcio's own drain, with a time limit."""
        finish(self._ports, self._paths, None, self._finished)
        if self._ports:
            await all_closed([*self._finished.values()], min(LINGER_S_MAX, latest_s - time.monotonic()))
        linger_s = 0.0
        try:
            # At the end of its grace grpcio would answer CANCELLED; the calls are ended UNAVAILABLE before.
            stopping = owned(server.stop(grace_s + 2 * SETTLE_S))
            stopping.add_done_callback(_retrieved)
            await asyncio.wait([stopping], timeout=latest_s - time.monotonic())
            if stopping.done():
                linger_s = min(LINGER_S_MAX, grace_s) if self._paths else 0.0
                return
            self._abort(grace_s)
            await asyncio.wait([stopping], timeout=SETTLE_S)
            if not stopping.done():
                cut(self._ports, self._paths)
                logger.warning("%s: connections whose clients don't read were shut down", self._name)
                await asyncio.wait([stopping], timeout=SETTLE_S)
        finally:
            held = [*self._finished.values()]
            self._finished.clear()
            await release(held, linger_s)

    def _abort(self, grace_s: float) -> None:
        count = self._running.abort()
        if count:
            logger.warning("%s: %d calls did not end in %g s and were cancelled", self._name, count, grace_s)

    async def _send_away(self, limit_s: float) -> None:
        """Sends a GOAWAY before grpcio drains: grpcio cancels the calls that arrive between its first GOAWAY and its
        last one, and can't send only the first."""
        await say_goaway(self._ports, limit_s / 2)
        await quiet(self._ports, (), 0.0, limit_s / 2)

    async def _turn_away(self, latest_s: float, grace_s: float, quiet_s_max: float) -> None:
        """Refuses new calls until the running ones have ended, and closes the connections before grpcio drains, so that
        it has nothing to cancel. A client that couldn't be sent a GOAWAY is disconnected as soon as none of its calls
        runs."""
        self._running.refuse()
        if not await self._all_ended(latest_s):
            self._abort(grace_s)
            await self._all_ended(time.monotonic() + SETTLE_S)
        if self._takes_goaway:
            await quiet(self._ports, (), 0.0, quiet_s_max)
        deafen(self._paths)
        await self._all_ended(time.monotonic() + quiet_s_max, refused=True)

    async def _all_ended(self, latest_s: float, *, refused: bool = False) -> bool:
        """Returns whether all calls have ended, and their answers been sent, by `latest_s` (`time.monotonic()`).
        `refused`: also waits until no call was refused for QUIET_S, since grpcio hands calls over one by one; and until
        clients of Unix sockets have read everything, since a later write would fail before their read."""
        running = self._running
        while running.peers(refused=refused) or (
            refused and (time.monotonic() - running.refused_at_s < QUIET_S or unread(self._paths))
        ):
            begun_s = time.monotonic()
            if begun_s >= latest_s:
                return False
            if not self._takes_goaway:
                finish(self._ports, self._paths, running.peers(refused=True), self._finished)
            await asyncio.sleep(max(CONNECTIONS_LOOK_EVERY_S, REST_FACTOR * (time.monotonic() - begun_s)))
        return True

    @property
    def _takes_goaway(self) -> bool:
        """Whether this server can send a GOAWAY itself: without TLS, and if the system reports which data was
        acknowledged."""
        return not (self._listener.tls or self._listener.path)

    @property
    def _ports(self) -> set[int]:
        return {self.port} if self.port else set()

    @property
    def _paths(self) -> set[str]:
        return {self._listener.path} if self._listener.path else set()


def _retrieved(done: asyncio.Future[Any]) -> None:
    """Retrieves the exception, which nothing awaits when a second signal ends the server."""
    if not done.cancelled():
        done.exception()


def is_news(record: logging.LogRecord) -> bool:
    """Returns False for a record about an answer that couldn't be sent because its client had disconnected, which
    grpcio sometimes logs as an error."""
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


def _bind(server: grpc.aio.Server, listener: Listener, certificate: Certificate | None) -> int:
    """Binds a server and returns its port; 0 for a Unix socket, whose file grpcio deletes when it stops listening."""
    if listener.path:
        with path_claimed(listener), _umask(0o777 & ~listener.path_mode):
            _add_port(server, listener, f"unix:{listener.path}", certificate)
        return 0
    host = listener.host.strip("[]")
    address = f"[{host}]:{listener.port}" if ":" in host else f"{host}:{listener.port}"
    return _add_port(server, listener, address, certificate)


def _add_port(server: grpc.aio.Server, listener: Listener, address: str, certificate: Certificate | None) -> int:
    try:
        if certificate is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, certificate.credentials()))
    except RuntimeError as error:
        if certificate is not None and not _usable(certificate):
            raise key_refused(certificate.tls) from None
        raise ListenFailed(listener, str(error)) from error


def _usable(certificate: Certificate) -> bool:
    """Whether grpcio can use the certificate; its own error names only the address."""
    server = grpc.server(ThreadPoolExecutor(1))
    try:
        return bool(server.add_secure_port("127.0.0.1:0", certificate.credentials()))
    except RuntimeError:
        return False
    finally:
        server.stop(None)


async def _refuse(ports: Collection[int]) -> None:
    found = listening(ports)
    try:
        await refuse(found)
    finally:
        for one in found:
            one.close()


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    """Sets the umask while grpcio makes the socket's file: changing its mode afterwards would be too late."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def server_options(limits: ListenerLimits) -> list[tuple[str, int]]:
    """grpcio's channel arguments; ages in milliseconds."""
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", limits.request_bytes_max),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION_MAX),
        ("grpc.max_metadata_size", HEADER_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", HEADER_BYTES_MAX),
    ]
    if limits.connections_max:
        options.append(("grpc.max_allowed_incoming_connections", limits.connections_max))
    options += keepalive_options(limits.keepalive)
    if math.isfinite(limits.connection_age_s_max):
        options.append(("grpc.max_connection_age_ms", round(limits.connection_age_s_max * 1000)))
    if math.isfinite(limits.connection_age_grace_s):
        options.append(("grpc.max_connection_age_grace_ms", round(limits.connection_age_grace_s * 1000)))
    return options


def keepalive_options(keepalive: Keepalive) -> list[tuple[str, int]]:
    """gRPC's channel arguments (their names in C are longer: GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS)."""
    wanted = {
        "grpc.keepalive_time_ms": keepalive.time_ms,
        "grpc.keepalive_timeout_ms": keepalive.timeout_ms,
        "grpc.keepalive_permit_without_calls": int(keepalive.permit_without_calls),
        "grpc.http2.max_pings_without_data": keepalive.max_pings_without_data,
        "grpc.http2.min_time_between_pings_ms": keepalive.min_time_between_pings_ms,
        "grpc.http2.min_ping_interval_without_data_ms": keepalive.min_ping_interval_without_data_ms,
    }
    return [(name, value) for name, value in wanted.items() if value is not None]


class Certificate:
    """A listener's certificate in grpcio's form. Handshakes ask for it in grpcio's threads."""

    def __init__(self, name: str, tls: Tls) -> None:
        self.tls = tls
        self.files = CertificateFiles(name, tls)
        self._renewed: grpc.ServerCertificateConfiguration | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Returns grpcio's credentials. Raises CertificateRefused."""
        first = _configuration(self.files.read())
        return grpc.dynamic_ssl_server_credentials(first, self._fetch, self.tls.client_ca_file is not None)

    async def renew(self, pem: Pem) -> None:
        """Replaces the certificate for the next handshakes."""
        self._renewed = _configuration(pem)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns a renewed certificate, None if it is the same as before."""
        renewed, self._renewed = self._renewed, None
        return renewed


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.client_ca)


class BytesHandler(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio has no types
    """Finds the method of a path and wraps it for grpcio, once for each method."""

    def __init__(self, routes: Routes, limits: ListenerLimits, running: RunningCalls) -> None:
        self._handlers = {path: _wrap(method, limits, running) for path, method in routes.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        path: str = handler_call_details.method
        return self._handlers.get(path) or grpc.unary_unary_rpc_method_handler(_unimplemented(path))


def _unimplemented(path: str) -> Callable[[bytes, Context], Awaitable[bytes]]:
    async def run(_: bytes, context: Context) -> bytes:
        context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        context.set_details(f"Method {path} is unimplemented")
        return b""

    return run


class RunningCalls:
    """The tasks of the calls that run on one listener."""

    def __init__(self, cut_off: Callable[[set[str]], None] = lambda clients: None) -> None:
        self._cut_off = cut_off
        #: The addresses of the clients that are cut off next.
        self._unread: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        #: The clients' addresses by the tasks of calls, until their answers have been sent.
        self._peers: dict[asyncio.Task[Any], str] = {}
        self._refused: dict[asyncio.Task[Any], str] = {}
        #: When a call was last refused (`time.monotonic()` seconds).
        self.refused_at_s = 0.0
        self._aborted = self._refusing = False

    def refuse(self) -> None:
        """Answers new calls UNAVAILABLE from now on."""
        self._refusing = True

    def abort(self) -> int:
        """Cancels the calls, which then answer UNAVAILABLE; returns how many."""
        self._aborted = True
        for task in self._tasks:
            task.cancel()
        return len(self._tasks)

    def peers(self, *, refused: bool) -> set[str]:
        """The addresses of the clients with running calls, or whose answers are being sent; `refused`: also of refused
        calls."""
        return {*self._peers.values(), *(self._refused.values() if refused else ())}

    def returned(self, call: Call, unread: Unread, answer: bytes) -> bytes:
        """Counts an answer as waiting until grpcio has sent it, in the call's own task, and returns it."""
        task = asyncio.current_task()
        assert task is not None
        one = unread.add(call.peer, task, len(answer))

        def ended(_: asyncio.Task[Any]) -> None:
            unread.remove(call.peer, one)
            if one.passed:
                self.gave_up(call.peer)

        task.add_done_callback(ended)
        return answer

    def gave_up(self, peer: str) -> None:
        """Closes the connection of a client with answers that were given up: grpcio can't end a call whose answer it
        has, and keeps it until then."""
        if not self._unread:
            asyncio.get_running_loop().call_soon(self._cut)
        self._unread.add(peer)

    def _cut(self) -> None:
        clients, self._unread = self._unread, set()
        self._cut_off(clients)

    async def run(self, call: Call, context: Context, work: Coroutine[Any, Any, bytes]) -> bytes:
        """Awaits a call's work in the call's own task, and ends the call with a status if the work fails."""
        task = asyncio.current_task()
        assert task is not None
        if self._refusing:
            work.close()
            self._refused[task] = call.peer
            self.refused_at_s = time.monotonic()
            task.add_done_callback(self._refused.__delitem__)
            return await _end(call, context, *_failure(call, Draining(ENDING)))
        self._tasks.add(task)
        self._peers[task] = call.peer
        task.add_done_callback(self._peers.__delitem__)
        try:
            return await work
        except Exception as error:
            failure = _failure(call, error)
            if isinstance(error, AnswersUnread):
                self.gave_up(call.peer)
        except asyncio.CancelledError:
            if not self._aborted:
                raise
            uncancel()
            failure = _failure(call, Draining(ENDING))
        finally:
            self._tasks.discard(task)
        return await _end(call, context, *failure)


def _wrap(method: Method, limits: ListenerLimits, running: RunningCalls) -> grpc.RpcMethodHandler[bytes, bytes]:
    run: Any = method.run
    if method.shape is Shape.UNARY:
        return grpc.unary_unary_rpc_method_handler(_unary(method.path, run, limits, running))
    if method.shape is Shape.SERVER_STREAM:
        return grpc.unary_stream_rpc_method_handler(_server_stream(method.path, run, limits, running))
    return grpc.stream_stream_rpc_method_handler(_bidi(method.path, run, limits, running))


def _unary(
    path: str, run: Unary, limits: ListenerLimits, running: RunningCalls
) -> Callable[[bytes, Context], Awaitable[bytes]]:
    async def answer(call: Call, request: bytes, context: Context) -> bytes:
        answered = await run(call, request)
        _check_size(answered, limits)
        await _send_initial(call, context)
        context.set_trailing_metadata(tuple(call.last_metadata()))
        return answered

    async def unary(request: bytes, context: Context) -> bytes:
        call = _call(path, context)
        work = answer(call, request, context)
        del request  # the exception that ends the call refers to this frame
        return running.returned(call, limits.unread, await running.run(call, context, work))

    return unary


def _server_stream(
    path: str, run: ServerStream, limits: ListenerLimits, running: RunningCalls
) -> Callable[[bytes, Context], Awaitable[None]]:
    async def server_stream(request: bytes, context: Context) -> None:
        call = _call(path, context)
        work = _answer_stream(call, context, run(call, request), limits)
        del request  # the exception that ends the call refers to this frame
        await running.run(call, context, work)

    return server_stream


def _bidi(
    path: str, run: Bidi, limits: ListenerLimits, running: RunningCalls
) -> Callable[[AsyncIterator[bytes], Context], Awaitable[None]]:
    async def bidi(_: AsyncIterator[bytes], context: Context) -> None:
        call = _call(path, context)
        await running.run(call, context, _answer_stream(call, context, run(call, _messages(context)), limits))

    return bidi


async def _messages(context: Context) -> AsyncIterator[bytes]:
    """A stream's messages. grpcio's own iterator keeps each in memory until the next one, which may come late."""
    while True:
        message = await context.read()
        if message is grpc.aio.EOF:
            return
        yield message
        del message


async def _answer_stream(
    call: Call, context: Context, answers: AsyncIterator[Sequence[bytes]], limits: ListenerLimits
) -> bytes:
    """Writes all messages (`context.write` costs less than a yield) and returns b"", the empty rest."""
    try:
        call.stream = limits.streams.open(call.head_bytes)
        async for messages in answers:
            await _send_initial(call, context)
            for message in messages:
                _check_size(message, limits)
                await limits.unread.wait(call.peer, context.write(message), len(message), apart=True)
            message, messages = b"", ()  # the stream may rest
        await _send_initial(call, context)
        context.set_trailing_metadata(tuple(call.last_metadata()))
        return b""
    finally:
        if call.stream is not None:
            call.stream.end()
        close = getattr(answers, "aclose", None)
        if close is not None:
            await close()


def _call(path: str, context: Context) -> Call:
    remaining = context.time_remaining()
    deadline_s = math.inf if remaining is None else time.monotonic() + remaining
    metadata = [(key, value) for key, value in context.invocation_metadata() or ()]
    return Call(path, metadata, deadline_s=deadline_s, peer=_peer(context.peer()))


def _peer(uri: str) -> str:
    """ipv4:127.0.0.1:1234 -> 127.0.0.1:1234; unix: -> unix"""
    family, _, address = uri.partition(":")
    return "unix" if family == "unix" else address.replace("%5B", "[").replace("%5D", "]")


async def _send_initial(call: Call, context: Context) -> None:
    if call.initial:
        await context.send_initial_metadata(tuple(call.initial))
        call.initial = []


def _check_size(answer: bytes, limits: ListenerLimits) -> None:
    if len(answer) > limits.response_bytes_max:
        raise too_large(len(answer), limits.response_bytes_max, key="max_response_size", what="Answer")


def _failure(call: Call, error: Exception) -> Failure:
    """Returns the status and message that end the call. A client's CancelledError never comes here: it must be raised
    to grpcio, which leaks otherwise."""
    if isinstance(error, ServeError):
        call.trailing += status_details(error, call.request_id)
        return error.code, error.told()
    if isinstance(error, grpc.aio.UsageError | grpc.aio.InternalError):
        raise error  # the latter: an answer that can't be sent
    logger.error("%s failed", call.path, exc_info=error)
    return Code.INTERNAL, UNEXPECTED


async def _end(call: Call, context: Context, code: Code, message: str) -> bytes:
    """Ends the call with that status when its method returns; the empty answer isn't sent. grpcio's `abort` would raise
    an exception that grpcio keeps in a reference cycle with all frames and the call; collecting hundreds of those
    pauses the whole server."""
    await _send_initial(call, context)
    context.set_code(_CODES[code])
    context.set_details(bounded(message))
    context.set_trailing_metadata(tuple(call.last_metadata()))
    return b""
