"""The connections of one listener: accepted, timed, and drained at the end."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from ts_frontend.tasks import kept, watched
from ts_frontend.transport.connection import LINGER_S_MAX, Connection
from ts_frontend.transport.http2 import Http2, Http2Limits
from ts_frontend.transport.limits import HEADER_BYTES_MAX, STREAMS_PER_CONNECTION_MAX, ListenerLimits
from ts_frontend.transport.stream import Stream

logger: Final = logging.getLogger(__name__)

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
                logger.error("%s: no further connection can be accepted: %s", self.name, error.strerror)
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
            logger.debug("%s: a connection didn't begin: %s", self.name, error)
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
        logger.warning(
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
            logger.warning("%s: %d calls did not end in %g s and were cancelled", self.name, count, grace_s)
            await self._until(lambda: not any(one.streams for one in self.connections), SETTLE_S)
        for one in [*self.connections]:
            one.go_away(soon=False)
        await self._until(lambda: not self.connections, min(LINGER_S_MAX, max(SETTLE_S, grace_s)))
        if self.connections:
            logger.warning("%s: connections whose clients don't read were shut down", self.name)
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
