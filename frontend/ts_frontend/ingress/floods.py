"""Connections that h2corn closes because their clients cancel more than CANCELS_MAX calls in WINDOW_S seconds.

h2corn 2.0.0 counts the RST_STREAM frames of a connection, closes it (GOAWAY ENHANCE_YOUR_CALM), and tells nobody. What
can be seen is that its calls were cancelled, so many in so short a time, and that our side closed it: the kernel's
table of connections says so (departures.py has its form). Connections over Unix sockets and through proxies that tell
their clients' addresses can't be recognised there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from ts_frontend.ingress.asgi import Scope
from ts_frontend.ingress.departures import TABLES, Connection, packed, read_table

logger = logging.getLogger(__name__)

#: Compiled into h2corn (h2/state.rs). Its window begins with the first cancel after the last window's end.
CANCELS_MAX, WINDOW_S = 200, 10.0
#: Connections whose cancels are counted; of more, those whose last cancel is longest ago are forgotten.
CONNECTIONS_MAX = 1024
LOOK_EVERY_S, LOOKS_MAX = 0.05, 40
#: FIN_WAIT1, FIN_WAIT2, TIME_WAIT, CLOSING of linux/tcp_states.h: our side closed the connection first.
_CLOSED_HERE = frozenset({"04", "05", "06", "0B"})
_ESTABLISHED = "01"


class Floods:
    """The cancelled calls of one listener's connections. `closed` is called for each connection that h2corn closed."""

    def __init__(self, listener: str, closed: Callable[[], None], tables: Sequence[Path] = TABLES) -> None:
        self._listener = listener
        self._closed = closed
        self._tables = tables
        self._cancels: OrderedDict[tuple[str, int], deque[float]] = OrderedDict()
        self._looking: set[asyncio.Task[None]] = set()

    def cancelled(self, scope: Scope) -> None:
        """A client has cancelled a call, or its connection has ended."""
        client, server = scope.get("client"), scope.get("server")
        if scope["http_version"] != "2" or not client or not server or not server[1]:
            return
        key = (client[0], client[1])
        now_s = time.monotonic()
        times = self._cancels.pop(key, None) or deque(maxlen=CANCELS_MAX + 1)
        times.append(now_s)
        if len(times) > CANCELS_MAX and now_s - times[0] <= WINDOW_S:
            times.clear()
            self._look(key, server[1])
        self._cancels[key] = times
        if len(self._cancels) > CONNECTIONS_MAX:
            self._cancels.popitem(last=False)

    def _look(self, client: tuple[str, int], own_port: int) -> None:
        host = packed(client[0])
        if host is not None:
            task = asyncio.create_task(self._tell(client, Connection(host, client[1], own_port)))
            self._looking.add(task)
            task.add_done_callback(self._looking.discard)

    async def _tell(self, client: tuple[str, int], connection: Connection) -> None:
        """Says it, once our side has closed the connection; that may take a moment."""
        for _ in range(LOOKS_MAX):
            state = await asyncio.to_thread(self._state, connection)
            if state in _CLOSED_HERE:
                self._closed()
                logger.warning(
                    "%s: h2corn closed the connection of %s:%d, and with it all of its calls, because more than %d of"
                    " them were cancelled in %g s. Clients that cancel so many should spread them over several"
                    " connections; with grpc_engine=grpcio there is no such limit (docs/grpc.md)",
                    self._listener,
                    *client,
                    CANCELS_MAX,
                    WINDOW_S,
                )
                return
            if state != _ESTABLISHED:
                return  # the client closed it
            await asyncio.sleep(LOOK_EVERY_S)

    def _state(self, connection: Connection) -> str | None:
        """As the kernel has it; None when it is in no table, or the tables can't be read."""
        for table in self._tables:
            try:
                found = dict(read_table(table.read_text(), {connection.own_port}))
            except OSError:
                continue
            if connection in found:
                return found[connection]
        return None
