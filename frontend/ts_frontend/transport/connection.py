"""A client's connection: the asyncio protocol that owns its socket, and speaks the client's version of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
import ssl
from typing import TYPE_CHECKING, Any, Final

from ts_frontend.tasks import owned
from ts_frontend.transport.http1 import Http1
from ts_frontend.transport.http2 import PREFACE, Http2
from ts_frontend.transport.stream import Data, Peer, Stream
from ts_frontend.transport.whole import BodyReader

if TYPE_CHECKING:
    from ts_frontend.transport.server import Server

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
