"""A listener's description: its address, its routes and limits, and its TLS files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ts_frontend.grpc.call import Routes
from ts_frontend.http.request import HttpService
from ts_frontend.transport.limits import ListenerLimits


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
    """One address and its services. `port` 0 takes a free one (`Serving.port` returns it); `path`: a Unix socket's, in
    place of host and port, and `path_mode` its file mode. `http` answers requests other than gRPC (without it: 404);
    with it and without `routes` there is no gRPC. `flooded` is called for each connection whose client resets too many
    streams. `shared`: several frontends listen there; `sibling`: this one got its sockets from the lead."""

    name: str
    host: str
    port: int
    routes: Routes
    limits: ListenerLimits = ListenerLimits()
    tls: Tls | None = None
    http: HttpService | None = None
    path: str = ""
    path_mode: int = 0o600
    flooded: Callable[[], None] = _nothing
    shared: bool = False
    sibling: bool = False

    @property
    def where(self) -> str:
        return f"{self.name} {self.path or f'{self.host}:{self.port}'}"
