"""Copying an archive from a URL into the model store: streamed, bounded, checked, and there whole or not at all.

All of it blocks; callers use a thread.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Protocol
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ts_frontend.errors import ArchiveExists, ServeError
from ts_frontend.models.remote import Allow, DownloadLimits, failure, open_remote
from ts_frontend.models.stop import Stop, Stopped

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


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Transfer:
    """One download, of a file or of a folder's files: counts, tells, and ends it when it becomes too much.
    `total_bytes` is what the source announced, None if it didn't. Raises DownloadFailed."""

    def __init__(self, url: str, name: str, total_bytes: int | None, limits: DownloadLimits, stop: Stop) -> None:
        self._url, self._limits, self._stop = url, limits, stop
        self._done_bytes = 0
        self._progress = Progress(name, total_bytes, time.monotonic())
        self._check_size(total_bytes or 0)

    def copy(self, source: Readable, file: IO[bytes], size: int | None) -> str:
        """Copies to the end, which is after `size` bytes when that is known; the SHA-256 of what came, hexadecimal."""
        digest, first = hashlib.sha256(), self._done_bytes
        while data := source.read(_CHUNK_BYTES):
            self._stop.check()
            self._count(len(data))
            digest.update(data)
            file.write(data)
        self._stop.check()
        if size is not None and self._done_bytes - first != size:
            raise failure(self._url, f"it ended after {self._done_bytes - first} of {size} bytes")
        return digest.hexdigest()

    def finish(self) -> None:
        _log.info("%s", self._progress.summary(self._done_bytes, time.monotonic()))

    def _count(self, count: int) -> None:
        self._done_bytes += count
        self._check_size(self._done_bytes)
        if line := self._progress.line(self._done_bytes, time.monotonic()):
            _log.info("%s", line)

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
    """Puts what lies at `url` (http, https, file) at `target`, which must not exist.

    `allow(url)` is asked for every hop: it raises ServeError, or returns True where an address that isn't public is
    fine too. `stop` ends it early. `sha256`: the digest it must have, hexadecimal. `headers`: for the first hop.
    Raises ArchiveExists, DownloadFailed, and what `allow` raises; nothing stays behind then.
    """
    with (
        bounded(url, limits, stop),
        _open(url, allow, limits, stop, headers) as (source, total_bytes),
        new_file(target) as file,
    ):
        transfer = Transfer(url, target.name, total_bytes, limits, stop)
        check_digest(url, transfer.copy(source, file, total_bytes), sha256)
        transfer.finish()


@contextmanager
def bounded(url: str, limits: DownloadLimits, stop: Stop) -> Iterator[None]:
    """What is done within the block may take `limits.total_s`; what goes wrong in it becomes DownloadFailed."""
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
) -> Iterator[tuple[Readable, int | None]]:
    """What lies at `url`, and how many bytes it says it has."""
    if urlsplit(url).scheme.lower() == "file":
        allow(url)
        path = Path(url2pathname(urlsplit(url).path))
        if path.exists() and not path.is_file():
            raise failure(url, "it is not a file")
        with path.open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size
        return
    with open_remote(url, allow, limits, stop, headers) as response:
        yield response, response.length


def check_digest(url: str, digest: str, expected: str | None) -> None:
    if expected is not None and digest != expected.lower():
        raise failure(url, f"its SHA-256 is {digest}, not {expected.lower()}")


def check_file_digest(url: str, path: Path, expected: str, stop: Stop) -> None:
    """Raises DownloadFailed when the file's SHA-256 is another one; Stopped."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            stop.check()
            digest.update(data)
    check_digest(url, digest.hexdigest(), expected)


@contextmanager
def new_file(target: Path) -> Iterator[IO[bytes]]:
    """A file that gets the name `target` when the block is done, and is gone when that fails."""
    partial = _partial(target)
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _publish(partial, target)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """The same for a folder. Its files are the block's to sync."""
    partial = _partial(target)
    partial.mkdir()
    try:
        yield partial
        if os.path.lexists(target):
            raise exists(target)
        try:
            os.rename(partial, target)  # fails on a folder that another filled meanwhile
        except OSError:
            if target.exists():
                raise exists(target) from None
            raise
        _sync_directory(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _partial(target: Path) -> Path:
    return target.parent / f"{_PARTIAL_PREFIX}{secrets.token_hex(8)}"


def _publish(partial: Path, target: Path) -> None:
    """Gives the finished file its name, unless another has it: a link is atomic and never overwrites."""
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
