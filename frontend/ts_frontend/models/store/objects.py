"""Models from stores of objects (s3://, gs://): an object is an archive, all objects below a prefix are a folder.
`s3.py` and `gcs.py` speak to the stores. Blocking."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

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


class Bucket(ABC):
    """The objects at a place. Each store's class names the modules and codes of its library's errors."""

    MODULES: ClassVar[tuple[str, ...]]
    ABSENT, DENIED = ("NoSuchKey", "404"), ("AccessDenied", "403")

    def __init__(self, url: str, place: Place, limits: DownloadLimits, stop: Stop) -> None:
        self._place, self._limits, self._stop = place, limits, stop
        self._client = stop.waited(partial(self.connected, url, limits))

    @staticmethod
    @abstractmethod
    def connected(url: str, limits: DownloadLimits) -> Any:
        """A client. Raises DownloadFailed without the library."""

    @staticmethod
    @abstractmethod
    def code_of(error: Exception) -> str:
        """The code of the store's answer, "" when there is none."""

    @staticmethod
    @abstractmethod
    def told(url: str, place: Place, error: Exception) -> ServeError:
        """The library's error for clients."""

    @abstractmethod
    def open(self, key: str, version: str) -> Body:
        """Opens an object. `version`: fails when its content has another; "": any."""

    @abstractmethod
    def listed(self, delimiter: str | None) -> Iterable[Any]:
        """The pages of the objects, and of the prefixes that end with the delimiter, below the place."""

    @abstractmethod
    def objects_of(self, page: Any) -> Iterable[tuple[str, int, str]]:
        """Keys, sizes and versions of a page."""

    @abstractmethod
    def prefixes_of(self, page: Any) -> Iterable[str]:
        """The prefixes of a page."""

    def archive(self) -> tuple[Body | None, Exception | None]:
        """The object at the place, or None and the error if access was denied: without the right to list the bucket, S3
        denies missing objects, too."""
        key = self._place.key
        if not key or key.endswith("/"):
            return None, None
        try:
            return self.open(key, ""), None
        except Exception as error:
            if self.code_of(error) not in (*self.ABSENT, *self.DENIED):
                raise
            return None, error if self.code_of(error) in self.DENIED else None

    def below(self) -> Iterator[list[Object]]:
        begin = len(self._place.prefix)
        for page in self._pages(None):
            found = self.objects_of(page)
            yield [Object(key, "" if key.endswith("/") else key[begin:], size, of) for key, size, of in found]

    def folders(self) -> Iterator[list[str]]:
        for page in self._pages("/"):
            yield [one[len(self._place.prefix) :].rstrip("/") for one in self.prefixes_of(page)]

    def _pages(self, delimiter: str | None) -> Iterator[Any]:
        pages = iter(self.listed(delimiter))
        while (page := self._stop.waited(partial(next, pages, None))) is not None:
            yield page

    @classmethod
    def explained(cls, url: str, place: Place) -> AbstractContextManager[None]:
        """Turns the errors of the store's library into ServeErrors."""
        return explained(cls.MODULES, partial(cls.told, url, place))


@contextmanager
def explained(modules: tuple[str, ...], told: Callable[[Exception], ServeError]) -> Iterator[None]:
    """Turns the errors of a library, of classes in `modules`, into ServeErrors. Nothing else is caught."""
    try:
        yield
    except ServeError:
        raise
    except Exception as error:
        if not type(error).__module__.startswith(modules):
            raise
        raise told(error) from error


def download(
    kind: type[Bucket], url: str, target: Path, limits: DownloadLimits, stop: Stop, sha256: str | None = None
) -> None:
    """Puts the object at `url`, or the folder of those below it, at `target`, which must not exist.

    Raises ArchiveExists, ArchiveNotFound (no such bucket or key), InvalidArchive (an object's name is no file's),
    DownloadFailed; nothing stays behind then.
    """
    place = parse(url)
    with bounded(url, limits, stop), kind.explained(url, place):
        bucket = kind(url, place, limits, stop)
        found, refused = bucket.archive()
        if found is not None:
            with closing(found), new_file(target) as file:
                transfer = Transfer(url, target.name, found.size, limits, stop)
                check_digest(url, transfer.copy(found.read, file, found.size), sha256)
        elif sha256 is not None:
            raise refused or InvalidArgument(f"{url}: there is no such object, and a folder has no SHA-256")
        else:
            transfer = _download_folder(bucket, url, target, limits, stop, refused)
        transfer.finish()


def folders(kind: type[Bucket], url: str, limits: DownloadLimits, stop: Stop) -> list[str]:
    """The names of the folders in the folder `url`. Raises ArchiveNotFound (no such bucket), DownloadFailed."""
    place = parse(url)
    with bounded(url, limits, stop), kind.explained(url, place):
        found: list[str] = []
        for names in kind(url, place, limits, stop).folders():
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
                transfer.copy(body.read, file, one.size)
                file.flush()
                os.fsync(file.fileno())
    return transfer
