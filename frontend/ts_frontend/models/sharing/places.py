"""The storage of the shared document: a file in a directory, or an object in S3. Blocking.

Reads are atomic; a write succeeds only if the content is still the one that the writer has read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ts_frontend.config.files import read_beginning, replace_file
from ts_frontend.config.kinds import bucket_of
from ts_frontend.errors import InvalidArgument, ServeError
from ts_frontend.models.sharing.document import DOCUMENT_BYTES_MAX
from ts_frontend.models.store import s3
from ts_frontend.models.store.http import DownloadLimits, Stop
from ts_frontend.models.store.objects import parse

NAME = "torchrelay-models.json"
#: The longest wait for a directory's lock, which is held for milliseconds.
LOCK_S_MAX = 10.0
#: The timeout of each read from S3.
S3_S_MAX = 10.0
_ABSENT, _UNCHANGED = ("NoSuchKey", "404"), ("304", "NotModified")
_OVERTAKEN = ("PreconditionFailed", "412", "ConditionalRequestConflict", "409")


class SharedSnapshotFailed(ServeError):
    """The shared snapshot can't be read or written."""

    remedy = "Fix the directory or bucket that `shared_snapshot` names, or the rights on it; the server tries again."


class Content(NamedTuple):
    """The document's bytes and their tag; both are empty when there is no document."""

    data: bytes
    tag: str


class SharedFile:
    """A file in a directory that all servers mount. A file lock serializes the writers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __str__(self) -> str:
        return str(self.directory / NAME)

    def read(self, tag: str, stop: Stop) -> Content | None:
        """The content; None if its tag is still `tag`. Raises SharedSnapshotFailed."""
        with self._explained():
            found = stop.waited(self._content)
        return None if tag and found.tag == tag else found

    def write(self, data: bytes, tag: str, stop: Stop) -> str | None:
        """Replaces the content with that tag; returns the new tag, None for another's. Raises SharedSnapshotFailed."""
        with self._explained():
            return stop.waited(partial(self._write, data, tag))

    def _content(self) -> Content:
        try:
            data = read_beginning(self.directory / NAME, DOCUMENT_BYTES_MAX + 1)
        except FileNotFoundError:
            self.directory.stat()  # a directory that isn't mounted must not look empty
            return Content(b"", "")
        return Content(data, _tag(data))

    def _write(self, data: bytes, tag: str) -> str | None:
        with self._locked():
            if self._content().tag != tag:
                return None
            replace_file(self.directory / NAME, data, 0o660)
            return _tag(data)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.directory / f".{NAME}.lock", os.O_RDWR | os.O_CREAT, 0o660)
        try:
            latest_s = time.monotonic() + LOCK_S_MAX
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > latest_s:
                        raise OSError(None, f"another server has held its lock for {LOCK_S_MAX:g} s") from None
                    time.sleep(0.02)
            yield
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SharedSnapshotFailed(f"{self}: {error.strerror or error}") from error


class SharedObject:
    """An object in S3, or a compatible store with conditional writes. Methods as of `SharedFile`."""

    def __init__(self, url: str) -> None:
        place = parse(url)
        self.url = f"s3://{place.bucket}/{place.prefix}{NAME}"
        self._where = {"Bucket": place.bucket, "Key": f"{place.prefix}{NAME}"}
        self._client: Any = None

    def __str__(self) -> str:
        return self.url

    def read(self, tag: str, stop: Stop) -> Content | None:
        with self._explained():
            return stop.waited(partial(self._read, tag))

    def _read(self, tag: str) -> Content | None:
        client = self._connected()
        try:
            answer = client.get_object(**self._where, **({"IfNoneMatch": tag} if tag else {}))
            return Content(answer["Body"].read(DOCUMENT_BYTES_MAX + 1), answer["ETag"])
        except client.exceptions.ClientError as error:
            if s3.code_of(error) in _UNCHANGED:
                return None
            if s3.code_of(error) in _ABSENT:
                return Content(b"", "")
            raise

    def write(self, data: bytes, tag: str, stop: Stop) -> str | None:
        with self._explained():
            return stop.waited(partial(self._write, data, tag))

    def _write(self, data: bytes, tag: str) -> str | None:
        client = self._connected()
        only_over = {"IfMatch": tag} if tag else {"IfNoneMatch": "*"}
        try:
            answer = client.put_object(**self._where, Body=data, ContentType="application/json", **only_over)
        except client.exceptions.ClientError as error:
            if s3.code_of(error) in (*_OVERTAKEN, *_ABSENT):
                return None
            raise
        return str(answer["ETag"])

    def _connected(self) -> Any:
        if self._client is None:
            limits = DownloadLimits(timeout_s=S3_S_MAX, connect_timeout_s=S3_S_MAX)
            self._client = s3.connected(self.url, limits)
        return self._client

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ServeError as error:  # no boto3
            raise SharedSnapshotFailed(error.message) from error
        except Exception as error:
            if not s3.is_of_s3(error):
                raise
            raise SharedSnapshotFailed(f"{self}: {s3.reason_of(error)}") from error


#: A storage of the document.
SharedPlace: TypeAlias = SharedFile | SharedObject


def _tag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def shared_place(setting: Path) -> SharedPlace:
    url = bucket_of(setting)
    if url is not None and not url.startswith("s3:"):
        raise InvalidArgument(f"shared_snapshot = {url}: a directory and s3://BUCKET/PREFIX are possible")
    return SharedFile(setting) if url is None else SharedObject(url)
