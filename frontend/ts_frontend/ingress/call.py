"""What a service sees of a call, and what an engine needs to know of a service.

Engines (h2corn, grpcio) turn bytes on a listener into `Call`s and hand them to the `Method` registered under
the path; services take message bytes and give message bytes. A status other than OK is a raised `ServeError`.
A client that cancels, or a deadline that passes, cancels the task that runs the method (asyncio.CancelledError).
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from ts_frontend.ingress.asgi import AsgiApp

Metadata: TypeAlias = "Sequence[tuple[str, str | bytes]]"


class ClientGone(Exception):
    """The client reset the stream or closed the connection: nobody is left to answer."""


@dataclass(slots=True)
class Call:
    """One RPC. `deadline_s`: `time.monotonic()` seconds, `math.inf` for none. Keys of metadata are lower case;
    values of `-bin` keys are bytes. `initial` and `trailing` are sent with the answer: append to them before
    the first message, respectively before the method ends. `request_id`: "" until the service has given it one."""

    path: str
    metadata: Metadata = ()
    deadline_s: float = math.inf
    peer: str = ""
    initial: list[tuple[str, str | bytes]] = field(default_factory=list)
    trailing: list[tuple[str, str | bytes]] = field(default_factory=list)
    request_id: str = ""

    def value(self, key: str) -> str | bytes | None:
        """The last value of a metadata key, None when the client sent none."""
        found = None
        for name, value in self.metadata:
            if name == key:
                found = value
        return found


class Shape(Enum):
    """How many messages go each way."""

    UNARY = "unary"
    SERVER_STREAM = "server stream"
    BIDI = "bidirectional"


Unary: TypeAlias = Callable[[Call, bytes], Awaitable[bytes]]
#: A server stream yields the messages that are ready together as one list, so that they share a write.
ServerStream: TypeAlias = Callable[[Call, bytes], AsyncIterator[Sequence[bytes]]]
Bidi: TypeAlias = Callable[[Call, AsyncIterator[bytes]], AsyncIterator[Sequence[bytes]]]


@dataclass(frozen=True, slots=True)
class Method:
    """One method of a service, under its full path (`/package.Service/Method`)."""

    path: str
    shape: Shape
    run: Unary | ServerStream | Bidi


Routes: TypeAlias = Mapping[str, Method]


def routes(*methods: Method) -> dict[str, Method]:
    """The methods by path; two of one path are a programming error."""
    table: dict[str, Method] = {}
    for method in methods:
        if method.path in table:
            raise ValueError(f"{method.path} is registered twice")
        table[method.path] = method
    return table


@dataclass(frozen=True, slots=True)
class Keepalive:
    """HTTP/2's pings, both ways, as gRPC has them; milliseconds, None for the engine's own. `time_ms`: a client that is
    silent for so long is pinged, and closed when it doesn't answer within `timeout_ms`."""

    time_ms: int | None = None
    timeout_ms: int | None = None
    permit_without_calls: bool = True
    max_pings_without_data: int = 0
    min_time_between_pings_ms: int | None = None
    min_ping_interval_without_data_ms: int = 5000


@dataclass(frozen=True, slots=True)
class Limits:
    """What a listener accepts. Sizes in bytes, times in seconds; `math.inf` for no limit. `head_pause_s_max`: how long
    a client may pause while it sends a request's head."""

    request_bytes_max: int = 6_553_500
    response_bytes_max: int = 6_553_500
    connection_age_s_max: float = math.inf
    connection_age_grace_s: float = math.inf
    head_pause_s_max: float = 10.0
    keepalive: Keepalive = Keepalive()


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files; `client_ca_file` asks clients for certificates signed by it (mTLS). `check_s`: seconds between two
    looks for new files; 0: none."""

    certificate_file: str
    key_file: str
    client_ca_file: str | None = None
    check_s: float = 0.0


def _nothing() -> None:
    """Nobody counts."""


@dataclass(frozen=True, slots=True)
class Listener:
    """One address and what answers there. `port` 0 takes a free one (`Engine.port` tells); `path` is a Unix socket's,
    instead of host and port, and `path_mode` who may connect to it. `http_app` answers what isn't gRPC (without one:
    404); with it and without `routes` there is no gRPC. Only the h2corn engine serves an `http_app`. `flooded` is
    called for each connection that h2corn closes because its client cancelled too many calls."""

    name: str
    host: str
    port: int
    routes: Routes
    limits: Limits = Limits()
    tls: Tls | None = None
    http_app: AsgiApp | None = None
    path: str = ""
    path_mode: int = 0o600
    flooded: Callable[[], None] = _nothing
