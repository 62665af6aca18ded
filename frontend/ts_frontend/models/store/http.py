"""Downloads from web servers: connections to checked addresses, redirects followed by this module. Blocking.

Every redirect's target is checked like the first URL, and the connection goes to the very address that was checked, so
that a second DNS answer (DNS rebinding) has no effect.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import ipaddress
import logging
import os
import secrets
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, TypeAlias
from urllib.parse import SplitResult, urljoin, urlsplit
from urllib.request import url2pathname

from ts_frontend.config.files import sync_directory
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import ArchiveExists, DownloadFailed, ServeError
from ts_frontend.tasks import Stop, Stopped

log = logging.getLogger(__name__)

_REDIRECTS_MAX = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = MappingProxyType({"User-Agent": "torchrelay", "Accept-Encoding": "identity"})
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

#: Raises ServeError for a forbidden URL; returns True if its address needn't be public.
Allow: TypeAlias = Callable[[str], bool]
#: Returns at most so many bytes, b"" at the end.
Read: TypeAlias = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    """`timeout_s`: the longest wait for data, and for a connection (there at most `connect_timeout_s`); `total_s`: the
    longest download. `files_max`: of a folder."""

    bytes_max: int = 100 << 30
    timeout_s: float = 60.0
    connect_timeout_s: float = 10.0
    total_s: float = 6 * 3600.0
    files_max: int = 100_000


DEFAULT_LIMITS = DownloadLimits()


def limits_of(config: ServerConfig) -> DownloadLimits:
    return DownloadLimits(
        config.download_bytes_max,
        config.download_timeout_s,
        total_s=config.download_total_timeout_s,
        files_max=config.extract_files_max,
    )


def failure(url: str, reason: str) -> DownloadFailed:
    return DownloadFailed(f"Failed to download archive from: {url}: {reason}")


@contextmanager
def open_remote(
    url: str, allow: Allow, limits: DownloadLimits, stop: Stop, headers: Mapping[str, str] = MappingProxyType({})
) -> Iterator[http.client.HTTPResponse]:
    """The first response that isn't a redirect; its status is 200. `headers` are sent to `url`, not to the targets of
    redirects. Raises DownloadFailed, OSError, HTTPException."""
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
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not the TLS socket's shutdown, which isn't thread-safe


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


_CHUNK_BYTES = 1 << 20
_PARTIAL_PREFIX = ".download-"


@dataclass(slots=True)
class DownloadProgress:
    """Lines for the log, one every `every_s` seconds at most. Pure: time is an argument."""

    name: str
    total_bytes: int | None
    started_s: float
    every_s: float = 2.0
    _last_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._last_s = self.started_s

    def line(self, done_bytes: int, now_s: float) -> str | None:
        if now_s - self._last_s < self.every_s:
            return None
        self._last_s = now_s
        return f"Downloading {self.name}: {self._share(done_bytes)}, {self._rate(done_bytes, now_s)}"

    def summary(self, done_bytes: int, now_s: float) -> str:
        return f"Downloaded {self.name}: {_megabytes(done_bytes)} MB, {self._rate(done_bytes, now_s)}"

    def _share(self, done_bytes: int) -> str:
        if not self.total_bytes:
            return f"{_megabytes(done_bytes)} MB"
        percent = 100 * done_bytes // self.total_bytes
        return f"{percent} % of {_megabytes(self.total_bytes)} MB"

    def _rate(self, done_bytes: int, now_s: float) -> str:
        return f"{_megabytes(done_bytes / max(now_s - self.started_s, 1e-3))} MB/s"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.1f}"


class Transfer:
    """One download, of a file or of a folder's files: counts its bytes, logs its progress, and ends it above the size
    limit. `total_bytes` is the size that the source announced, None if it didn't. Raises DownloadFailed."""

    def __init__(self, url: str, name: str, total_bytes: int | None, limits: DownloadLimits, stop: Stop) -> None:
        self._url, self._limits, self._stop = url, limits, stop
        self._done_bytes = 0
        self._progress = DownloadProgress(name, total_bytes, time.monotonic())
        self._check_size(total_bytes or 0)

    def copy(self, read: Read, file: IO[bytes], size: int | None) -> str:
        """Copies `size` bytes, or to the end if it is None; returns the SHA-256 of the data, hexadecimal."""
        digest, first = hashlib.sha256(), self._done_bytes
        while data := read(_CHUNK_BYTES):
            self._stop.check()
            self._count(len(data))
            digest.update(data)
            file.write(data)
        self._stop.check()
        if size is not None and self._done_bytes - first != size:
            raise failure(self._url, f"it ended after {self._done_bytes - first} of {size} bytes")
        return digest.hexdigest()

    def count(self, count: int) -> None:
        """Counts bytes that others have written."""
        self._stop.check()
        self._count(count)

    def finish(self) -> None:
        log.info("%s", self._progress.summary(self._done_bytes, time.monotonic()))

    def _count(self, count: int) -> None:
        self._done_bytes += count
        self._check_size(self._done_bytes)
        if line := self._progress.line(self._done_bytes, time.monotonic()):
            log.info("%s", line)

    def _check_size(self, count: int) -> None:
        if count > self._limits.bytes_max:
            reason = f"it has more than {self._limits.bytes_max} bytes; download_bytes_max raises the limit"
            raise failure(self._url, reason)


def download(
    url: str,
    target: Path,
    allow: Allow,
    limits: DownloadLimits,
    stop: Stop,
    sha256: str | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Downloads `url` (http, https, file) to `target`, which must not exist.

    `allow(url)` is called for every hop: it raises ServeError, or returns True if its address needn't be public.
    `stop` ends it early. `sha256`: the digest it must have, hexadecimal. `headers`: for the first hop. Raises
    ArchiveExists, DownloadFailed, and the errors of `allow`; nothing stays behind then.
    """
    with (
        bounded(url, limits, stop),
        _open(url, allow, limits, stop, headers) as (read, total_bytes),
        new_file(target) as file,
    ):
        transfer = Transfer(url, target.name, total_bytes, limits, stop)
        check_digest(url, transfer.copy(read, file, total_bytes), sha256)
        transfer.finish()


@contextmanager
def bounded(url: str, limits: DownloadLimits, stop: Stop) -> Iterator[None]:
    """Limits the block to `limits.total_s`; Stopped, OSError, HTTPException and ValueError become DownloadFailed."""
    late = f"it took more than {limits.total_s:g} s; download_total_timeout_s raises the limit"
    try:
        with stop.after(limits.total_s, late):
            yield
    except ServeError:
        raise
    except Stopped as stopped:
        raise failure(url, str(stopped)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise failure(url, stop.reason or _reason(error)) from error


def _reason(error: Exception) -> str:
    text = str(error.strerror or error) if isinstance(error, OSError) else str(error)
    return text or type(error).__name__


@contextmanager
def _open(
    url: str, allow: Allow, limits: DownloadLimits, stop: Stop, headers: Mapping[str, str]
) -> Iterator[tuple[Read, int | None]]:
    """The data at `url`, and its announced size in bytes, None without one."""
    if urlsplit(url).scheme.lower() == "file":
        allow(url)
        path = Path(url2pathname(urlsplit(url).path))
        if path.exists() and not path.is_file():
            raise failure(url, "it is not a file")
        with path.open("rb") as file:
            yield file.read, os.fstat(file.fileno()).st_size
        return
    with open_remote(url, allow, limits, stop, headers) as response:
        yield response.read, response.length


def check_digest(url: str, digest: str, expected: str | None) -> None:
    if expected is not None and digest != expected.lower():
        raise failure(url, f"its SHA-256 is {digest}, not {expected.lower()}")


@contextmanager
def new_file(target: Path) -> Iterator[IO[bytes]]:
    """A new file: it is named `target` after the block, and deleted if the block fails."""
    partial = _partial(target)
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _publish(partial, target)
    except OSError as error:
        raise _placed(error, target) from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """The same for a folder; the block syncs its files."""
    partial = _partial(target)
    try:
        partial.mkdir()
        yield partial
        if os.path.lexists(target):
            raise exists(target)
        try:
            os.rename(partial, target)  # fails if another call filled the folder
        except OSError:
            if target.exists():
                raise exists(target) from None
            raise
        sync_directory(target.parent)
    except OSError as error:
        raise _placed(error, target) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _placed(error: OSError, target: Path) -> OSError:
    """The same error, with the directory if that is full."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    return OSError(error.errno, f"{error.strerror}; make room in {target.parent}")


def _partial(target: Path) -> Path:
    return target.parent / f"{_PARTIAL_PREFIX}{secrets.token_hex(8)}"


def _publish(partial: Path, target: Path) -> None:
    """Gives the finished file its name, unless the name is taken: link() is atomic and never overwrites."""
    try:
        os.link(partial, target)
    except FileExistsError:
        raise exists(target) from None
    except OSError:  # a file system without hard links
        if target.exists():
            raise exists(target) from None
        os.replace(partial, target)
    sync_directory(target.parent)


def exists(target: Path) -> ArchiveExists:
    return ArchiveExists(f"Model file already exists {target.name}")
