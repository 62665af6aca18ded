"""A listener's description for the engines: its address, its routes and limits, and its TLS files.

Engines (h2corn, grpcio) turn bytes on a listener into `Call`s and hand them to the `Method` registered under
the path; services take message bytes and give message bytes. A status other than OK is a raised `ServeError`.
A client that cancels, or a deadline that passes, cancels the task that runs the method (asyncio.CancelledError).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ts_frontend.grpc.call import ListenerLimits, Routes
from ts_frontend.http.request import AsgiApp

#: The limits of an HTTP/2 connection, the same with both engines: requests at a time, and the bytes of a request's
#: headers.
STREAMS_PER_CONNECTION_MAX = 4096
HEADER_BYTES_MAX = 64 * 1024


def _nothing() -> None:
    """Does nothing: the default of `flooded`."""


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files; `client_ca_file` makes clients present certificates signed by it (mTLS). `check_s`: seconds between
    two checks for changed files; 0: none."""

    certificate_file: str
    key_file: str
    client_ca_file: str | None = None
    check_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Listener:
    """One address and its services. `port` 0 takes a free one (`Engine.port` returns it); `path`: a Unix socket's, in
    place of host and port, and `path_mode` its file mode. `http_app` answers requests other than gRPC (without one:
    404); with it and without `routes` there is no gRPC. Only the h2corn engine serves an `http_app`. `flooded` is
    called for each connection that h2corn closes because its client cancelled too many calls."""

    name: str
    host: str
    port: int
    routes: Routes
    limits: ListenerLimits = ListenerLimits()
    tls: Tls | None = None
    http_app: AsgiApp | None = None
    path: str = ""
    path_mode: int = 0o600
    flooded: Callable[[], None] = _nothing
