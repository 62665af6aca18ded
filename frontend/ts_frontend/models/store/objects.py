"""Models from stores of objects (s3://, gs://): an object is an archive, all objects below a prefix are a folder.
`s3.py` and `gcs.py` speak to the stores. Blocking."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ts_frontend.errors import ArchiveNotFound, InvalidArgument, ServeError
from ts_frontend.models.extraction import create_file, safe_parts
from ts_frontend.models.store.http import (
    DownloadLimits,
    Stop,
    Transfer,
    bounded,
    check_digest,
    failure,
    new_file,
    new_folder,
)

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


@dataclass(frozen=True, slots=True)
class Place:
    """The place that `s3://bucket/key` or `gs://bucket/key` names; `key` "": all of the bucket."""

    bucket: str
    key: str

    @property
    def name(self) -> str:
        """The file name of a downloaded copy."""
        return self.key.rstrip("/").rpartition("/")[2] or self.bucket

    @property
    def prefix(self) -> str:
        """The prefix of its objects' keys, when it is a folder."""
        return f"{self.key.rstrip('/')}/" if self.key else ""


def parse(url: str) -> Place:
    """The place of such a URL. Raises InvalidArgument for one without a bucket."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise InvalidArgument(f"url {url!a}: {bucket!a} is not a bucket name; write {scheme.lower()}://BUCKET/PREFIX")
    return Place(bucket, key.lstrip("/"))


@dataclass(frozen=True, slots=True)
class Object:
    """`name` is relative to the folder, "" for one that only marks a folder. `version`: of its content."""

    key: str
    name: str
    size: int
    version: str


class Body:
    """An object's bytes, `size` of them however many the store sends; `stop` interrupts a read."""

    def __init__(self, body: Any, size: int, stop: Stop) -> None:
        self._body, self.size, self._stop = body, size, stop
        self._left = size

    def read(self, size: int, /) -> bytes:
        if not self._left:
            return b""
        data: bytes = self._stop.waited(partial(self._body.read, min(size, self._left)))
        self._left -= len(data)
        return data

    def close(self) -> None:
        self._body.close()


class Bucket(Protocol):
    """The objects at a place, of one of the stores. Raises the errors of the store's library."""

    def archive(self) -> tuple[Body | None, Exception | None]:
        """The object at the place, or None and the error if access was denied."""

    def open(self, key: str, version: str) -> Body:
        """Opens an object; fails when its content has changed."""

    def below(self) -> Iterator[list[Object]]:
        """The objects of the folder, page by page."""

    def folders(self) -> Iterator[list[str]]:
        """The names of the folders in this one, page by page."""


@contextmanager
def explained(is_its: Callable[[Exception], bool], told: Callable[[Exception], ServeError]) -> Iterator[None]:
    """Turns the errors of a store's library into ServeErrors. Nothing else is caught."""
    try:
        yield
    except ServeError:
        raise
    except Exception as error:
        if not is_its(error):
            raise
        raise told(error) from error


class Kind(NamedTuple):
    """A store's connection to a place, and what turns its library's errors into ServeErrors."""

    bucket: Callable[[str, Place, DownloadLimits, Stop], Bucket]
    explained: Callable[[str, Place], AbstractContextManager[None]]


def download(kind: Kind, url: str, target: Path, limits: DownloadLimits, stop: Stop, sha256: str | None = None) -> None:
    """Puts the object at `url`, or the folder of those below it, at `target`, which must not exist.

    Raises ArchiveExists, ArchiveNotFound (no such bucket or key), InvalidArchive (an object's name is no file's),
    DownloadFailed; nothing stays behind then.
    """
    place = parse(url)
    with bounded(url, limits, stop), kind.explained(url, place):
        bucket = kind.bucket(url, place, limits, stop)
        found, refused = bucket.archive()
        if found is not None:
            with closing(found), new_file(target) as file:
                transfer = Transfer(url, target.name, found.size, limits, stop)
                check_digest(url, transfer.copy(found, file, found.size), sha256)
        elif sha256 is not None:
            raise refused or InvalidArgument(f"{url}: there is no such object, and a folder has no SHA-256")
        else:
            transfer = _download_folder(bucket, url, target, limits, stop, refused)
        transfer.finish()


def folders(kind: Kind, url: str, limits: DownloadLimits, stop: Stop) -> list[str]:
    """The names of the folders in the folder `url`. Raises ArchiveNotFound (no such bucket), DownloadFailed."""
    place = parse(url)
    with bounded(url, limits, stop), kind.explained(url, place):
        found: list[str] = []
        for names in kind.bucket(url, place, limits, stop).folders():
            found += filter(None, names)
            _check_number(len(found), "folders", limits, url)
        return found


def _check_number(count: int, what: str, limits: DownloadLimits, url: str) -> None:
    if count > limits.files_max:
        raise failure(url, f"it has more than {limits.files_max} {what}; extract_files_max raises the limit")


def _download_folder(
    bucket: Bucket, url: str, target: Path, limits: DownloadLimits, stop: Stop, refused: Exception | None
) -> Transfer:
    objects: list[Object] = []
    for page in bucket.below():
        objects += [one for one in page if one.name]
        _check_number(len(objects), "files", limits, url)
    if not objects:
        raise refused or ArchiveNotFound(f"Model not found at: {url} (the bucket has nothing there)")
    transfer = Transfer(url, target.name, sum(one.size for one in objects), limits, stop)
    with new_folder(target) as folder:
        for one in objects:
            parts = safe_parts(target, one.name)
            with (
                closing(bucket.open(one.key, one.version)) as body,
                create_file(target, folder, parts, one.name, 0) as file,
            ):
                transfer.copy(body, file, one.size)
                file.flush()
                os.fsync(file.fileno())
    return transfer
