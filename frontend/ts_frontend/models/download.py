"""Copying an archive from a URL into the model store: streamed, bounded, checked, and there whole or not at all.

All of it blocks; callers use a thread.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ts_frontend.errors import ArchiveExists, ServeError
from ts_frontend.models.remote import Allow, DownloadLimits, Stop, failure, open_remote

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 1 << 20
_PARTIAL_PREFIX = ".download-"


@dataclass(slots=True)
class Progress:
    """Lines for the log, one every `every_s` seconds at most. Pure: time is an argument."""

    name: str
    total_bytes: int | None
    started_s: float
    every_s: float = 2.0
    _last_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._last_s = self.started_s

    def line(self, done_bytes: int, now_s: float) -> str | None:
        """What to say now, None if it's too soon."""
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


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def download(
    url: str, target: Path, allow: Allow, limits: DownloadLimits, stop: Stop, sha256: str | None = None
) -> None:
    """Puts what lies at `url` (http, https, file) at `target`, which must not exist.

    `allow(url)` is asked for every hop: it raises ServeError, or returns True where an address that isn't public is
    fine too. `stop` ends it early. `sha256`: the digest it must have, hexadecimal.
    Raises ArchiveExists, DownloadFailed, and what `allow` raises; nothing stays behind then.
    """
    try:
        with _open(url, allow, limits, stop) as (source, total_bytes), _partial(target) as (file, partial):
            digest = _copy(source, file, _Transfer(url, target.name, total_bytes, limits, stop))
            _check_digest(url, digest, sha256)
            _publish(file, partial, target)
    except ServeError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise failure(url, _reason(error)) from error


def _reason(error: Exception) -> str:
    text = str(error.strerror or error) if isinstance(error, OSError) else str(error)
    return text or type(error).__name__


@contextmanager
def _open(url: str, allow: Allow, limits: DownloadLimits, stop: Stop) -> Iterator[tuple[_Readable, int | None]]:
    """What lies at `url`, and how many bytes it says it has."""
    if urlsplit(url).scheme.lower() == "file":
        allow(url)
        path = Path(url2pathname(urlsplit(url).path))
        if path.exists() and not path.is_file():
            raise failure(url, "it is not a file")
        with path.open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size
        return
    with open_remote(url, allow, limits, stop) as response:
        yield response, response.length


@dataclass(frozen=True, slots=True)
class _Transfer:
    """One download: `total_bytes` is what the source announced, None if it didn't."""

    url: str
    name: str
    total_bytes: int | None
    limits: DownloadLimits
    stop: Stop

    def check_size(self, count: int) -> None:
        if count > self.limits.bytes_max:
            reason = f"it has more than {self.limits.bytes_max} bytes; download_bytes_max raises the limit"
            raise failure(self.url, reason)


def _copy(source: _Readable, file: IO[bytes], transfer: _Transfer) -> str:
    """Copies to the end; the SHA-256 of what came, hexadecimal."""
    transfer.check_size(transfer.total_bytes or 0)
    progress = Progress(transfer.name, transfer.total_bytes, time.monotonic())
    digest, done_bytes = hashlib.sha256(), 0
    while data := source.read(_CHUNK_BYTES):
        if transfer.stop.is_set():
            raise failure(transfer.url, "it was cancelled")
        done_bytes += len(data)
        transfer.check_size(done_bytes)
        digest.update(data)
        file.write(data)
        if line := progress.line(done_bytes, time.monotonic()):
            _log.info("%s", line)
    if transfer.total_bytes is not None and done_bytes != transfer.total_bytes:
        raise failure(transfer.url, f"it ended after {done_bytes} of {transfer.total_bytes} bytes")
    _log.info("%s", progress.summary(done_bytes, time.monotonic()))
    return digest.hexdigest()


def _check_digest(url: str, digest: str, expected: str | None) -> None:
    if expected is not None and digest != expected.lower():
        raise failure(url, f"its SHA-256 is {digest}, not {expected.lower()}")


def check_file_digest(url: str, path: Path, expected: str) -> None:
    """Raises DownloadFailed when the file's SHA-256 is another one."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            digest.update(data)
    _check_digest(url, digest.hexdigest(), expected)


@contextmanager
def _partial(target: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """A file beside `target` that is gone afterwards."""
    partial = target.parent / f"{_PARTIAL_PREFIX}{secrets.token_hex(8)}"
    try:
        with partial.open("xb") as file:
            yield file, partial
    finally:
        partial.unlink(missing_ok=True)


def _publish(file: IO[bytes], partial: Path, target: Path) -> None:
    """Gives the finished file its name, unless another has it: a link is atomic and never overwrites."""
    file.flush()
    os.fsync(file.fileno())
    try:
        os.link(partial, target)
    except FileExistsError:
        raise exists(target) from None
    except OSError:  # a file system without hard links
        if target.exists():
            raise exists(target) from None
        os.replace(partial, target)
    _sync_directory(target.parent)


def exists(target: Path) -> ArchiveExists:
    return ArchiveExists(f"Model file already exists {target.name}")


def _sync_directory(directory: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
