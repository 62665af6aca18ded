"""Connections that h2corn closes because their clients cancel more than CANCELS_MAX calls in WINDOW_S seconds.

Calls that are cancelled before they begin count for h2corn and are not seen here, so that half as many are enough.

h2corn 2.0.0 counts the RST_STREAM frames of a connection, closes it (GOAWAY ENHANCE_YOUR_CALM) and doesn't report it.
It is recognised by many calls cancelled in a short time, followed by a closed connection in the kernel's table: closed
by the server, or by a client that read the GOAWAY first. A client that disconnects with many calls running cancels them
all at the same moment, and isn't counted. A client that disconnects by itself after nearly as many cancels is counted.
Connections over Unix sockets, and through proxies that report their clients' addresses, can't be found in the table."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from ts_frontend.http.departures import ConnectionKey, packed, unmapped
from ts_frontend.http.request import Scope
from ts_frontend.tasks import watched

logger = logging.getLogger(__name__)

#: Compiled into h2corn (h2/state.rs). A window begins with the first cancel after the previous window.
CANCELS_MAX, WINDOW_S = 200, 10.0
SEEN_MIN = CANCELS_MAX // 2
#: The most connections whose cancels are counted; the ones whose last cancel is longest ago are dropped first, as are
#: those without a cancel in the last window.
CONNECTIONS_MAX = 1024
LOOK_EVERY_S = 0.1
TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
#: Seconds after the last cancel by which h2corn has closed the connection, if it does.
SETTLED_S = 2.0
#: FIN_WAIT1, FIN_WAIT2, TIME_WAIT, CLOSING of linux/tcp_states.h: the server closed the connection first.
_CLOSED_HERE: frozenset[str | None] = frozenset({"04", "05", "06", "0B"})
_ESTABLISHED = "01"
#: Cancels over a longer time weren't caused by the end of their connection.
AT_ONCE_S = 0.5


class Floods:
    """The cancelled calls of one listener's connections. `closed` is called for each connection that h2corn closed."""

    def __init__(self, listener: str, closed: Callable[[], None], tables: Sequence[Path] = TABLES) -> None:
        self._listener = listener
        self._closed = closed
        self._tables = tables
        self._cancels: OrderedDict[tuple[str, int], deque[float]] = OrderedDict()
        self._looking: dict[tuple[str, int], asyncio.Task[None]] = {}

    def cancelled(self, scope: Scope) -> None:
        """Counts a call that a client has cancelled, or whose connection has ended."""
        client, server = scope.get("client"), scope.get("server")
        if scope["http_version"] != "2" or not client or not server or not server[1]:
            return
        key = (client[0], client[1])
        now_s = time.monotonic()
        times = self._cancels.pop(key, None) or deque(maxlen=SEEN_MIN + 1)
        times.append(now_s)
        self._cancels[key] = times
        self._forget(now_s)
        taken_s = now_s - times[0]
        if len(times) > SEEN_MIN and taken_s <= WINDOW_S and key not in self._looking:
            self._look(key, server[1], times)

    def _forget(self, now_s: float) -> None:
        """Drops the connections whose last cancel is older than the window, and those over CONNECTIONS_MAX."""
        cancels = self._cancels
        while len(cancels) > CONNECTIONS_MAX or now_s - cancels[next(iter(cancels))][-1] > WINDOW_S:
            cancels.popitem(last=False)

    def _look(self, client: tuple[str, int], own_port: int, times: deque[float]) -> None:
        host = packed(client[0])
        if host is not None:
            connection = ConnectionKey(host, client[1], own_port)
            self._looking[client] = task = watched(
                self._tell(client, connection, times), "The check for closed connections"
            )
            task.add_done_callback(lambda _: self._looking.pop(client))

    async def _tell(self, client: tuple[str, int], connection: ConnectionKey, times: deque[float]) -> None:
        """Waits a moment for the connection to be closed, and reports it if h2corn closed it."""
        while True:
            settled = time.monotonic() - times[-1] > SETTLED_S
            state = await asyncio.to_thread(self._state, connection)
            if state != _ESTABLISHED:
                self._cancels.pop(client, None)
                if times[-1] - times[0] > AT_ONCE_S or state in _CLOSED_HERE:
                    self._say(client)
                return
            if settled:
                return
            await asyncio.sleep(LOOK_EVERY_S)

    def _say(self, client: tuple[str, int]) -> None:
        self._closed()
        logger.warning(
            "%s: h2corn closed the connection of %s:%d, and with it all of its calls, because more than %d of them were"
            " cancelled in %g s. Clients that cancel so many should spread them over several connections; with"
            " grpc_engine=grpcio gRPC has no such limit (docs/grpc.md)",
            self._listener,
            *client,
            CANCELS_MAX,
            WINDOW_S,
        )

    def _state(self, connection: ConnectionKey) -> str | None:
        """Returns the connection's state in the kernel, None when no table lists it. It counts as open if a table can't
        be read or doesn't exist, as on macOS."""
        known = False
        for table in self._tables:
            try:
                with table.open(encoding="ascii") as lines:
                    for found, state in read_table(lines, {connection.own_port}):
                        if found == connection:
                            return state
            except FileNotFoundError:
                continue
            except OSError:
                return _ESTABLISHED
            known = True
        return None if known else _ESTABLISHED


def read_table(lines: Iterable[str], own_ports: set[int]) -> Iterator[tuple[ConnectionKey, str]]:
    """The connections to `own_ports` in a table of the kernel, each with its state (proc(5): /proc/net/tcp). Line by
    line, since a table may have many thousands of connections that have ended."""
    ends = {f":{port:04X}": port for port in own_ports}
    for line in itertools.islice(lines, 1, None):
        _, local, remote, state, *_ = line.split(maxsplit=4)
        own_port = ends.get(local[-5:])
        if own_port is not None:
            address, _, port = remote.partition(":")
            yield ConnectionKey(_in_network_order(address), int(port, 16), own_port), state


def _in_network_order(text: str) -> bytes:
    """Returns an address of the tables in network order. The tables have words of 32 bits in the machine's order, which
    is little-endian."""
    raw = bytes.fromhex(text)
    words = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return unmapped(words)
