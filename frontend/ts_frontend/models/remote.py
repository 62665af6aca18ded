"""Answers of web servers: connections to checked addresses, redirects followed by hand. Blocking.

Each hop must be allowed anew, and the address that was checked is the one that's connected to: a name that resolves
differently the second time gains nothing.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeAlias
from urllib.parse import SplitResult, urljoin, urlsplit

from ts_frontend.errors import DownloadFailed
from ts_frontend.models.stop import Stop

BYTES_MAX = 100 << 30
TIMEOUT_S = 60.0
TOTAL_S = 6 * 3600.0
FILES_MAX = 100_000
_REDIRECTS_MAX = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = MappingProxyType({"User-Agent": "torchrelay", "Accept-Encoding": "identity"})
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

#: Raises ServeError for a URL that may not be used; True: an address that isn't public is fine too.
Allow: TypeAlias = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    """`timeout_s` is the longest silence, also while connecting (then at most `connect_timeout_s`); `total_s`: all that
    a download may take. `files_max`: of a folder."""

    bytes_max: int = BYTES_MAX
    timeout_s: float = TIMEOUT_S
    connect_timeout_s: float = 10.0
    total_s: float = TOTAL_S
    files_max: int = FILES_MAX


def failure(url: str, reason: str) -> DownloadFailed:
    return DownloadFailed(f"Failed to download archive from: {url}: {reason}")


@contextmanager
def open_remote(
    url: str, allow: Allow, limits: DownloadLimits, stop: Stop, headers: Mapping[str, str] = MappingProxyType({})
) -> Iterator[http.client.HTTPResponse]:
    """The first answer that's no redirect; it has status 200. `headers` are for `url` alone, not for where it leads.
    Raises DownloadFailed, OSError, HTTPException."""
    first = url
    for _ in range(_REDIRECTS_MAX + 1):
        with _answer(url, allow(url), limits, stop, headers if url is first else {}) as response:
            if response.status == 200:
                yield response
                return
            location = response.headers.get("Location") if response.status in _REDIRECTS else None
            if location is None:
                raise failure(first, f"the server answered {response.status} {response.reason}")
        url = _redirected(first, url, location)
    raise failure(first, f"more than {_REDIRECTS_MAX} redirects")


@contextmanager
def _answer(
    url: str, private: bool, limits: DownloadLimits, stop: Stop, headers: Mapping[str, str]
) -> Iterator[http.client.HTTPResponse]:
    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    with closing(_connection(parts, private, limits, stop)) as connection:
        connection.request("GET", path, headers={**_HEADERS, **headers})
        with closing(connection.getresponse()) as response:
            yield response


def _redirected(first: str, url: str, location: str) -> str:
    target = urljoin(url, location)
    scheme = urlsplit(target).scheme.lower()
    if scheme not in ("http", "https") or (scheme == "http" and urlsplit(url).scheme.lower() == "https"):
        raise failure(first, f"redirected to {target!a}, which is not allowed from {urlsplit(url).scheme}")
    return target


class _Connection(http.client.HTTPConnection):
    """Connects as it's told to: to an address that was checked."""

    def __init__(self, host: str, port: int, connect: Callable[[str, int], socket.socket]) -> None:
        super().__init__(host, port)
        self._connect = connect

    def connect(self) -> None:
        self.sock = self._connect(self.host, self.port)


def _connection(parts: SplitResult, private: bool, limits: DownloadLimits, stop: Stop) -> http.client.HTTPConnection:
    secure = parts.scheme.lower() == "https"

    def connect(host: str, port: int) -> socket.socket:
        sock = _connect(host, port, private, limits)
        stop.watch(partial(_wake, sock))
        if secure:
            sock = _secured(sock, host)
            stop.watch(partial(_wake, sock))
        return sock

    return _Connection(parts.hostname or "", parts.port or (443 if secure else 80), connect)


def _wake(sock: socket.socket) -> None:
    """Who waits for `sock` in another thread waits no more."""
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not TLS's own: that isn't for two threads


def _secured(raw: socket.socket, host: str) -> socket.socket:
    try:
        return ssl.create_default_context().wrap_socket(raw, server_hostname=host)
    except BaseException:
        raw.close()
        raise


def _connect(host: str, port: int, private: bool, limits: DownloadLimits) -> socket.socket:
    """A socket to the first address of `host` that answers. Raises OSError."""
    error: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if not private and not is_public(str(address[0])):
            raise OSError(f"{host} is at {address[0]}, which is not a public address; allowed_urls can allow the URL")
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(min(limits.connect_timeout_s, limits.timeout_s))
            sock.connect(address)
            sock.settimeout(limits.timeout_s)
            return sock
        except OSError as failed:
            sock.close()
            error = failed
    raise error or OSError(f"{host} has no address")


def is_public(address: str) -> bool:
    """False for loopback, private, link-local (cloud metadata) and every other special range; IPv4 inside IPv6 too."""
    ip = ipaddress.ip_address(address.split("%")[0])
    embedded = getattr(ip, "ipv4_mapped", None) or getattr(ip, "sixtofour", None)
    if ip in _NAT64:
        embedded = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.is_global and not ip.is_multicast and (embedded is None or is_public(str(embedded)))
