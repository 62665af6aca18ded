"""The connections of one listener, accepted, timed, and drained at the end. Each is the asyncio protocol that owns its
socket, and speaks the client's version of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import random
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from ts_frontend.tasks import kept, owned, watched
from ts_frontend.transport.http1 import Http1
from ts_frontend.transport.http2 import PREFACE, Http2, Http2Limits
from ts_frontend.transport.limits import HEADER_BYTES_MAX, STREAMS_PER_CONNECTION_MAX, ListenerLimits
from ts_frontend.transport.stream import Data, Peer, Stream
from ts_frontend.transport.whole import BodyReader

log: Final = logging.getLogger(__name__)


#: Bytes that the socket holds before an answer waits, and at which it goes on.
WRITE_BYTES_MAX: Final = 256 * 1024
WRITE_BYTES_MIN: Final = 64 * 1024
#: Larger parts of answers are passed to the socket as they are; smaller ones are joined first.
JOIN_BYTES_MAX: Final = 64 * 1024
#: The parts that wait for a client that doesn't read, above which nothing more of its requests is read.
PARTS_MAX: Final = 4096
#: The time in which a small body comes that the client sends apart from its head.
SOON_S: Final = 0.005
#: The time in which an answer to a client that closed its half of an HTTP/1.1 connection is still given. Most such
#: clients have left.
HALF_CLOSED_S: Final = 0.01
AGE_JITTER: Final = 0.1
#: The time in which a client may read its last answers and close the connection, before the server does.
LINGER_S_MAX: Final = 2.0
#: What a client may still send meanwhile: the rest of a body that is refused.
DROPPED_BYTES_MAX: Final = 1 << 20
#: Seconds between two looks whether everything is sent.
SENT_LOOK_S: Final = 0.01


def name_in(certificate: Any) -> str:
    """The name in a client's certificate, as of `ssl.SSLObject.getpeercert`: the first alternative one that is a URI or
    a DNS name, else the common name; "" without one."""
    if not certificate:
        return ""
    found = {str(kind): str(value) for kind, value in reversed(certificate.get("subjectAltName", ()))}
    common = [str(value) for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
    return found.get("URI") or found.get("DNS") or (common[-1] if common else "")


class Connection:
    """One connection (an asyncio.Protocol). `heard_s`: when the client was last heard of, by the loop's clock."""

    __slots__ = (
        *("_arriving", "_closing", "_counted", "_dropped_bytes", "_end_timer", "_first", "_half_closed", "_inside"),
        *("_scheduled", "_server", "_socket", "_soon_timer", "_tls"),
        *("age_factor", "begun_s", "ends_s", "goes_s", "head_s", "heard_s", "http", "leaving", "loop", "paused"),
        *("peer", "progress_s", "reading", "taken_bytes", "transport", "written_bytes"),
    )

    def __init__(self, server: Server, accepted: socket.socket, *, tls: bool) -> None:
        self._server, self._socket, self._tls = server, accepted, tls
        self.loop = server.loop
        self.transport: asyncio.Transport | None = None
        self.http: Http2 | Http1 | None = None
        self.peer = Peer(None, None, "2")
        self.paused, self.reading = False, True
        self._first = b""
        self._inside = self._scheduled = self._closing = self._counted = self._half_closed = False
        self._end_timer: asyncio.TimerHandle | None = None
        #: The request whose small body is arriving.
        self._arriving: Stream | None = None
        self._soon_timer: asyncio.TimerHandle | None = None
        self._dropped_bytes = 0
        #: When the connection began, and the request's head that hasn't arrived (0: none).
        self.begun_s = self.heard_s = self.head_s = self.progress_s = 0.0
        #: Whether it was told to end; when it takes no more requests, and when it is cut.
        self.leaving = False
        #: Ages differ, so that connections that began together don't end together.
        self.age_factor = random.uniform(1 - AGE_JITTER, 1 + AGE_JITTER)
        self.goes_s = self.ends_s = math.inf
        self.written_bytes = self.taken_bytes = 0

    # --- from the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.begun_s = self.heard_s = self.loop.time()
        transport.set_write_buffer_limits(WRITE_BYTES_MAX, WRITE_BYTES_MIN)
        client, server = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        inet = isinstance(client, tuple)
        scheme = "https" if self._tls else "http"
        secured: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        name = "" if secured is None else name_in(secured.getpeercert())
        self.peer = Peer(client[:2] if inet else None, server[:2] if inet else None, "2", scheme, name)
        if secured is not None and secured.selected_alpn_protocol() == "h2":
            self._speak(http2=True)
        self._server.opened(self)

    def data_received(self, data: bytes) -> None:
        self.heard_s = self.loop.time()
        http = self.http
        if http is None:
            data = self._first + data
            if len(data) < 4 and PREFACE.startswith(data):
                self._first = data
                return
            self._first = b""
            http = self._speak(http2=data.startswith(PREFACE[:4]))
        if self._closing:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > DROPPED_BYTES_MAX and self.transport is not None:
                self.transport.pause_reading()
            return
        self._inside = True
        http.receive(data)
        self._inside = False
        if self._arriving is not None:
            self._serve_when_whole()
        if http.out or http.ended or http.queued:
            self.flush()
        if self.head_s or http.within_head:
            self.head_s = (self.head_s or self.heard_s) if http.within_head else 0.0
        if isinstance(http, Http1):
            if http.full:
                self._read_if_room(http)
            if http.whole is not None:
                self.read_body(True)

    def body_place(self) -> memoryview | None:
        """Where the socket's next bytes belong, if they are a body's; None if `data_received` gets them."""
        http = self.http
        if not isinstance(http, Http1) or http.whole is None or self._closing or http.ended:
            return None
        return http.whole.rest()

    def body_received(self, size: int) -> None:
        """So many bytes are in their place."""
        self.heard_s = self.loop.time()
        http = self.http
        if isinstance(http, Http1):
            http.placed(size)
            if http.whole is None:
                self.read_body(False)
            elif http.full:
                self._read_if_room(http)

    def read_body(self, into_place: bool) -> None:
        """Has the event loop read into `body_place`, or give all bytes to this connection."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        transport.set_protocol(BodyReader(self) if into_place else self)  # type: ignore[arg-type]  # as it is accepted
        if self.reading:  # uvloop chooses how it reads when it begins to
            transport.pause_reading()
            transport.resume_reading()

    def _speak(self, *, http2: bool) -> Http2 | Http1:
        if http2:
            self.http = Http2(self, self.peer, self._server.http2_limits)
        else:
            bytes_max = self._server.limits.request_bytes_max
            self.http = Http1(self, self.peer, self._server.http2_limits.fields_bytes_max, bytes_max)
        if self._server.draining:
            self.http.go_away(soon=True)
        return self.http

    def eof_received(self) -> bool:
        """The client sends no more. Over HTTP/2 it has left; over HTTP/1.1 a few wait for their answer."""
        http = self.http
        if self._tls or self._closing or not isinstance(http, Http1):
            return False
        self._half_closed = http.closing = True
        if http.stream is None:
            http.ended = True
            self.flush()  # an answer that is complete is still sent
            return True
        http.stream.keeps = False
        soon = self.loop.call_soon  # twice: an answer that only needs its turn is given, however late the timer is
        self._end_timer = self.loop.call_later(HALF_CLOSED_S, soon, soon, self.abort)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._arriving = None
        for timer in (self._end_timer, self._soon_timer):
            if timer is not None:
                timer.cancel()
        http, self.http = self.http, None  # which refers to this connection
        if http is not None:
            http.lose()
        self._server.unread.forget(self)
        self._server.lost(self)

    def pause_writing(self) -> None:
        self.paused = True
        if self.http is not None:
            self.http.blocked = True

    def resume_writing(self) -> None:
        self.paused = False
        if self.http is not None:
            self.http.blocked = False
            self.flush()

    # --- from HTTP

    def opened(self, stream: Stream) -> None:
        http = self.http
        if isinstance(http, Http1) and http.soon:
            self._arriving = stream
        else:
            self._serve(stream)

    def _serve(self, stream: Stream) -> None:
        stream.task = owned(self._server.serve(stream))  # which handles its own failures

    def _serve_when_whole(self) -> None:
        """Serves a request whose small body has arrived, or hasn't for SOON_S: a task that waits for it costs more."""
        stream = self._arriving
        if stream is None:
            return
        if not (stream.ended or stream.done):
            if self._soon_timer is None:
                self._soon_timer = self.loop.call_later(SOON_S, self._serve_late)
            return
        if self._soon_timer is not None:
            self._soon_timer.cancel()
        self._serve_late()

    def _serve_late(self) -> None:
        stream, self._arriving, self._soon_timer = self._arriving, None, None
        if stream is not None and not stream.done:
            self._serve(stream)

    def left(self, stream: Stream) -> None:
        """Ends the work for a client that has given up its request, or has left."""
        task, stream.task = stream.task, None
        if isinstance(task, asyncio.Future):
            task.cancel()

    def flooded(self, text: str) -> None:
        self._server.flooded(self, text)

    def wrote(self) -> None:
        if self._inside or self._scheduled:
            return
        http = self.http
        if isinstance(http, Http1) and http.stream is None:
            self.flush()  # the answer is complete: nothing comes that could be sent with it
        else:
            self._scheduled = True
            self.loop.call_soon(self._flush_later)

    def _flush_later(self) -> None:
        self._scheduled = False
        self.flush()

    # --- to the socket

    def flush(self) -> None:
        """Gives the socket what is to be sent, as long as it takes it."""
        http, transport = self.http, self.transport
        if transport is None or http is None or self._closing:
            return
        if self._arriving is not None:
            self._serve_when_whole()
        more = True
        while more and not self.paused:
            parts = http.out
            if parts:
                http.out = []
                self._pass(transport, parts)
            more = not self.paused and http.queued > 0 and (http.pump() or bool(http.out))
        if self.paused or http.queued or self._counted:
            self._count()
        if len(http.out) > PARTS_MAX or not self.reading or isinstance(http, Http1):
            self._read_if_room(http)
        if http.ended and not http.out and not http.queued:
            self._close()

    def _pass(self, transport: asyncio.Transport, parts: list[Data]) -> None:
        size = sum(map(len, parts))
        self.written_bytes += size
        if len(parts) == 1:
            transport.write(parts[0])
        elif size <= JOIN_BYTES_MAX:
            transport.write(b"".join(parts))
        else:
            transport.writelines(parts)

    def _read_if_room(self, http: Http2 | Http1) -> None:
        room = len(http.out) <= PARTS_MAX and not (isinstance(http, Http1) and http.full)
        if room != self.reading and self.transport is not None:
            self.reading = room
            if room:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def _close(self) -> None:
        if self.transport is None or self._closing:
            return
        self._closing = True
        if self._end_timer is not None:
            self._end_timer.cancel()  # the answer to a client that closed its half came in time
        if not self.reading:
            self.transport.resume_reading()
        self._end_sending()

    def _end_sending(self) -> None:
        """Closes the sending half as soon as the client has taken everything, however slowly it reads, and gives it
        LINGER_S_MAX to close the other one. What it still sends is dropped: an unread rest would reset the connection,
        and with it the answers. The socket is asked, since asyncio can't close one half of TLS."""
        transport = self.transport
        if transport is None:
            return
        if transport.get_write_buffer_size():
            self._count()  # a client that takes nothing is given up
            self._end_timer = self.loop.call_later(SENT_LOOK_S, self._end_sending)
        elif self._half_closed:
            transport.close()
        else:
            self._end_timer = self.loop.call_later(LINGER_S_MAX, self.abort)
            with contextlib.suppress(OSError):  # the client has closed the connection
                self._socket.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    # --- answers that wait

    @property
    def sent(self) -> bool:
        """Whether everything is sent, and the connection only waits for its client to close it."""
        return self._closing and (self.transport is None or not self.transport.get_write_buffer_size())

    @property
    def streams(self) -> list[Stream]:
        """The requests without a complete answer."""
        http = self.http
        if isinstance(http, Http2):
            return [*http.streams.values()]
        return [] if http is None or http.stream is None else [http.stream]

    def waiting_bytes(self) -> int:
        if self.transport is None or self.http is None:
            return 0
        return self.http.queued + self.transport.get_write_buffer_size()

    def _count(self) -> None:
        size = self.waiting_bytes()
        if size and not self._counted:
            self.progress_s, self.taken_bytes = self.loop.time(), -1
        self._counted = size > 0
        self._server.unread.count(self, size)

    def waiting_answers(self) -> int:
        return max(1, sum(stream.queued > 0 for stream in self.streams))

    def give_up_oldest(self) -> int:
        """Gives up the answer that has waited for the longest time; returns its bytes, 0 if the connection goes."""
        waiting = [stream for stream in self.streams if stream.queued]
        if not waiting:
            self.abort()
            return 0
        size = waiting[0].queued
        self._give_up(waiting[0])
        return size

    def _give_up(self, stream: Stream) -> None:
        stream.abort(overloaded=True)
        self.left(stream)

    def give_up_stalled(self, latest_s: float) -> int:
        """Gives up the answers of which the client has taken nothing since `latest_s`; returns their number."""
        http, transport = self.http, self.transport
        if http is None or transport is None:
            return 0
        buffered = transport.get_write_buffer_size()
        taken = self.written_bytes - buffered
        if taken != self.taken_bytes:
            self.taken_bytes, self.progress_s = taken, self.loop.time()
        if buffered and self.progress_s <= latest_s:
            count = max(1, len(self.streams))
            self.abort()
            return count
        if buffered or not isinstance(http, Http2):
            return 0
        stalled = http.stalled(latest_s)
        for stream in stalled:
            self._give_up(stream)
        return len(stalled)

    # --- the end

    def go_away(self, *, soon: bool) -> None:
        """Takes no more requests. `soon`: still takes those that are on their way."""
        self.leaving = True
        http = self.http
        if http is not None:
            http.go_away(soon=soon)
            self.flush()
        elif not soon:
            self.abort()


#: Connections that are accepted before other work has its turn.
ACCEPTED_AT_ONCE_MAX: Final = 64
#: The errors of a system, or a process, without room for another connection. They pass when others are closed.
EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: Seconds until such a system is asked again.
AGAIN_S: Final = 1.0
#: Seconds between two looks at all connections; a shorter limit of theirs is kept more exactly.
TICK_S: Final = 1.0
TICKS_IN_LIMIT: Final = 4
#: Seconds in which requests that are on their way still come after a connection was told to end.
GOAWAY_S: Final = 0.25
#: The time in which a drain waits for a quiet HTTP/1.1 connection.
QUIET_S_MAX: Final = 1.0
#: Seconds between two looks at a drain, and after the cancellation of calls until their statuses are sent.
DRAIN_LOOK_S: Final = 0.02
SETTLE_S: Final = 1.0
#: The time limit of a TLS handshake.
HANDSHAKE_S_MAX: Final = 10.0
#: The longest silence of an HTTP/1.1 connection, also where HTTP/2 may be silent for ever.
HTTP1_IDLE_S_MAX: Final = 120.0
PING_TIMEOUT_MS: Final = 20_000


class Server:
    """Accepts connections on listening sockets (`start`) and has `serve` answer their requests. `told_flooded` is
    called for each connection whose client reset too many streams."""

    def __init__(
        self,
        name: str,
        limits: ListenerLimits,
        serve: Callable[[Stream], Coroutine[Any, Any, None]],
        told_flooded: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.limits, self.serve = name, limits, serve
        self.unread = limits.unread
        self.loop = asyncio.get_running_loop()
        keepalive = limits.keepalive
        interval_ms = keepalive.min_ping_interval_without_data_ms
        self.http2_limits = Http2Limits(
            STREAMS_PER_CONNECTION_MAX,
            HEADER_BYTES_MAX,
            limits.resets_max,
            limits.resets_per_s,
            interval_ms / 1000,
            idle_pings=keepalive.permit_without_calls,
        )
        self.draining = False
        self.connections: set[Connection] = set()
        self._told_flooded = told_flooded
        self._sockets: Sequence[socket.socket] = ()
        self._context: ssl.SSLContext | None = None
        self._accepting = self._full = False
        self._opening = 0
        self._again: asyncio.TimerHandle | None = None
        self._ticking: asyncio.Task[None] | None = None

    def start(self, sockets: Sequence[socket.socket], context: ssl.SSLContext | None) -> None:
        """`context`: the certificate, None without TLS."""
        self._sockets, self._context = sockets, context
        self._accept_more()
        self._ticking = kept(self._tick, f"{self.name}: the watch over its connections")

    def renew(self, context: ssl.SSLContext) -> None:
        """New connections get another certificate; the present ones end with their requests."""
        self._context = context
        for one in [*self.connections]:
            self._retire(one, math.inf)

    # --- accepting

    def _accept_more(self) -> None:
        self._again = None
        if not self._accepting and not self.draining:
            self._accepting = True
            for one in self._sockets:
                self.loop.add_reader(one.fileno(), self._accept, one)

    def _accept_none(self) -> None:
        if self._accepting:
            self._accepting = False
            for one in self._sockets:
                self.loop.remove_reader(one.fileno())

    def _accept(self, listening: socket.socket) -> None:
        most = self.limits.connections_max
        for _ in range(ACCEPTED_AT_ONCE_MAX):
            if most and len(self.connections) + self._opening >= most:
                self._full = True
                self._accept_none()  # further clients wait in the system's queue
                return
            try:
                accepted, _ = listening.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # the client has left
            except OSError as error:
                if error.errno == errno.EINVAL:  # a Unix socket that refuses clients, and nobody waits any longer
                    self._accept_none()
                    return
                if error.errno not in EXHAUSTED:
                    raise
                log.error("%s: no further connection can be accepted: %s", self.name, error.strerror)
                self._accept_none()
                self._again = self.loop.call_later(AGAIN_S, self._accept_more)
                return
            accepted.setblocking(False)
            self._opening += 1
            watched(self._open(accepted), f"{self.name}: the beginning of a connection")

    async def _open(self, accepted: socket.socket) -> None:
        context = self._context
        limit_s = None if context is None else HANDSHAKE_S_MAX
        try:
            await self.loop.connect_accepted_socket(
                lambda: Connection(self, accepted, tls=context is not None),  # type: ignore[type-var]
                accepted,
                ssl=context,
                ssl_handshake_timeout=limit_s,
            )
        except (OSError, ssl.SSLError) as error:
            accepted.close()
            log.debug("%s: a connection didn't begin: %s", self.name, error)
        finally:
            self._opening -= 1
            self._room()

    def opened(self, connection: Connection) -> None:
        self.connections.add(connection)

    def lost(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._room()

    def _room(self) -> None:
        if self._full and len(self.connections) + self._opening < self.limits.connections_max:
            self._full = False
            self._accept_more()

    def flooded(self, connection: Connection, text: str) -> None:
        self._told_flooded()
        log.warning(
            "%s: %s takes no more requests on its connection: %s (http2_resets_max, http2_resets_per_second)",
            self.name,
            connection.peer.name,
            text,
        )

    # --- time limits

    async def _tick(self) -> None:
        limits, keepalive = self.limits, self.limits.keepalive
        shortest_s = min(limits.head_s_max, limits.idle_s_max, limits.connection_age_s_max)
        if keepalive.time_ms is not None:
            shortest_s = min(shortest_s, keepalive.time_ms / 1000)
        while True:
            await asyncio.sleep(min(TICK_S, shortest_s / TICKS_IN_LIMIT))
            now_s = self.loop.time()
            for one in [*self.connections]:
                self._check(one, now_s)

    def _check(self, one: Connection, now_s: float) -> None:
        http, limits = one.http, self.limits
        silent_s = now_s - one.heard_s
        if now_s >= one.ends_s or (http is None and now_s - one.begun_s > limits.head_s_max):
            one.abort()
        elif now_s >= one.goes_s:
            one.goes_s = math.inf
            one.go_away(soon=False)
        elif isinstance(http, Http2):
            late = one.head_s and now_s - one.head_s > limits.head_s_max
            if late or (http.within_frame and silent_s > limits.head_s_max):
                one.abort()
            elif not http.streams and silent_s > limits.idle_s_max:
                one.go_away(soon=False)
            else:
                self._keep_alive(one, http, silent_s)
        elif http is not None and http.stream is None:
            if one.head_s and now_s - one.head_s > limits.head_s_max:
                one.abort()
            elif silent_s > min(limits.idle_s_max, HTTP1_IDLE_S_MAX):
                one.go_away(soon=False)
        if not one.leaving and now_s - one.begun_s > limits.connection_age_s_max * one.age_factor:
            self._retire(one, limits.connection_age_grace_s)

    def _retire(self, one: Connection, grace_s: float) -> None:
        """Asks a client to take another connection; the present requests go on for `grace_s` seconds."""
        now_s = self.loop.time()
        one.goes_s, one.ends_s = now_s + GOAWAY_S, now_s + grace_s
        one.go_away(soon=True)

    def _keep_alive(self, one: Connection, http: Http2, silent_s: float) -> None:
        keepalive = self.limits.keepalive
        if keepalive.time_ms is None:
            return
        time_ms = max(keepalive.time_ms, keepalive.min_time_between_pings_ms or 0)
        timeout_ms = PING_TIMEOUT_MS if keepalive.timeout_ms is None else keepalive.timeout_ms
        if http.pinged and silent_s * 1000 > time_ms + timeout_ms:
            one.abort()
        elif keepalive.max_pings_without_data and http.pings >= keepalive.max_pings_without_data:
            return
        elif not http.pinged and silent_s * 1000 > time_ms:
            http.ping()
            one.flush()

    # --- the end

    def stop_accepting(self) -> None:
        """Accepts the connections that wait, and no more: the listening sockets may be closed."""
        for one in self._sockets:
            self._accept(one)
        self._accept_none()
        self._sockets = ()
        if self._again is not None:
            self._again.cancel()

    async def drain(self, grace_s: float, abort: Callable[[], int]) -> None:
        """Ends the connections: each takes the requests that are on their way, and ends when all have their answers
        and the client has read them. After `grace_s`, `abort` cancels those that still run and returns their number;
        after another SETTLE_S, what is left is cut."""
        now_s = self.loop.time
        begun_s = now_s()
        self.draining = True
        for one in [*self.connections]:
            one.go_away(soon=True)
        told: set[Connection] = set()
        while (self.connections or self._opening) and now_s() - begun_s < grace_s:
            await asyncio.sleep(DRAIN_LOOK_S)
            for one in [*self.connections]:
                if one not in told and self._may_tell(one, now_s() - begun_s, grace_s):
                    told.add(one)
                    one.go_away(soon=False)
            if not any(one.streams or not one.sent for one in self.connections) and not self._opening:
                break
        count = abort()
        if count:
            log.warning("%s: %d calls did not end in %g s and were cancelled", self.name, count, grace_s)
            await self._until(lambda: not any(one.streams for one in self.connections), SETTLE_S)
        for one in [*self.connections]:
            one.go_away(soon=False)
        await self._until(lambda: not self.connections, min(LINGER_S_MAX, max(SETTLE_S, grace_s)))
        if self.connections:
            log.warning("%s: connections whose clients don't read were shut down", self.name)
        for one in [*self.connections]:
            one.abort()
        if self._ticking is not None:
            self._ticking.cancel()

    def _may_tell(self, one: Connection, drained_s: float, grace_s: float) -> bool:
        """Whether no request is on its way to a connection that was told to end: a while later for HTTP/2, whose client
        learns which requests weren't taken; for HTTP/1.1, once it was quiet for so long."""
        quiet_s = drained_s if isinstance(one.http, Http2) else min(drained_s, self.loop.time() - one.heard_s)
        return quiet_s >= min(GOAWAY_S, grace_s) or drained_s >= QUIET_S_MAX

    async def _until(self, reached: Callable[[], bool], limit_s: float) -> None:
        begun_s = self.loop.time()
        while not reached() and self.loop.time() - begun_s < limit_s:  # noqa: ASYNC110 - or until the limit
            await asyncio.sleep(DRAIN_LOOK_S)
