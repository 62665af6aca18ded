"""Models from stores of objects (s3://, gs://): an object is an archive, all objects below a prefix are a folder.
Blocking.

Endpoint, region and credentials of S3 or a compatible store come from the environment, as for the AWS command line:
AWS_ENDPOINT_URL, AWS_DEFAULT_REGION, AWS_ACCESS_KEY_ID, AWS_PROFILE, or the machine's role. Those of Google Cloud
Storage, whose models Vertex AI names, as for Google's tools: GOOGLE_APPLICATION_CREDENTIALS, or the machine's service
account; STORAGE_EMULATOR_HOST names another server, without credentials. Each library is imported on first use.
"""

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
from ts_frontend.models.archive import create_file, safe_parts
from ts_frontend.models.store.http import DownloadLimits, Transfer, bounded, check_digest, failure, new_file, new_folder
from ts_frontend.tasks import Stop

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


S3_EXTRA = 'pip install "torchrelay[s3]"'
NO_AWS_CREDENTIALS = (
    "no AWS credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, in the server's "
    "environment, or give its machine a role"
)
_ATTEMPTS = 3
_WITHOUT_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError")
_S3_MODULES = ("botocore.", "boto3.", "urllib3.")


def s3_client(url: str, limits: DownloadLimits) -> Any:
    """A client of S3. Raises DownloadFailed without boto3."""
    session = _session(url)
    from botocore.config import Config

    settings = Config(
        connect_timeout=min(limits.connect_timeout_s, limits.timeout_s),
        read_timeout=limits.timeout_s,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        user_agent_extra="torchrelay",
    )
    return session.client("s3", config=settings)


def _session(url: str) -> Any:
    try:
        from boto3.session import Session
    except ImportError:
        raise failure(url, f"S3 needs the package boto3, which is not installed: {S3_EXTRA}") from None
    return Session()


def is_of_s3(error: Exception) -> bool:
    return type(error).__module__.startswith(_S3_MODULES)


def s3_reason(error: Exception) -> str:
    """The text of an error of botocore, boto3 or urllib3."""
    if type(error).__name__ in _WITHOUT_CREDENTIALS:
        return NO_AWS_CREDENTIALS
    if s3_code(error) in Bucket.DENIED:
        return f"access is denied: the server's AWS credentials don't allow it ({error})"
    return str(error) or type(error).__name__


def s3_code(error: Exception) -> str:
    """The code of S3's answer, "" when it has none."""
    response: dict[str, Any] = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _s3_error(url: str, place: Place, error: Exception) -> ServeError:
    code = s3_code(error)
    if code == "NoSuchBucket":
        return ArchiveNotFound(f"Model not found at: {url} (there is no bucket {place.bucket})")
    if code in ("PreconditionFailed", *Bucket.ABSENT):
        return failure(url, "an object changed while the folder was downloaded; try again")
    return failure(url, s3_reason(error))


class S3Bucket(Bucket):
    """The objects at a place in S3."""

    MODULES = _S3_MODULES
    connected, code_of, told = staticmethod(s3_client), staticmethod(s3_code), staticmethod(_s3_error)

    def open(self, key: str, version: str) -> Body:
        which = {"Bucket": self._place.bucket, "Key": key} | ({"IfMatch": version} if version else {})
        answer = self._stop.waited(partial(self._client.get_object, **which))
        return Body(answer["Body"], answer["ContentLength"], self._stop)

    def listed(self, delimiter: str | None) -> Iterable[Any]:
        where = {"Bucket": self._place.bucket, "Prefix": self._place.prefix}
        where |= {"Delimiter": delimiter} if delimiter else {}
        pages: Iterable[Any] = self._client.get_paginator("list_objects_v2").paginate(**where)
        return pages

    def objects_of(self, page: Any) -> Iterable[tuple[str, int, str]]:
        return ((one["Key"], one["Size"], one.get("ETag", "")) for one in page.get("Contents", ()))

    def prefixes_of(self, page: Any) -> Iterable[str]:
        return (one["Prefix"] for one in page.get("CommonPrefixes", ()))


def signed(url: str, stop: Stop) -> dict[str, str]:
    """Headers that sign a GET of an object's http(s) URL with the server's AWS credentials. Raises DownloadFailed."""
    with S3Bucket.explained(url, Place("", "")):
        work: Callable[[], dict[str, str]] = partial(_signed, url)
        return stop.waited(work)


def _signed(url: str) -> dict[str, str]:
    session = _session(url)
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest

    credentials, region = session.get_credentials(), session.region_name
    if credentials is None:
        raise failure(url, NO_AWS_CREDENTIALS)
    if not region:
        raise failure(url, "s3_sse_kms needs AWS_DEFAULT_REGION, the bucket's region, in the server's environment")
    request = AWSRequest("GET", url)
    S3SigV4Auth(credentials.get_frozen_credentials(), "s3", region).add_auth(request)
    return dict(request.headers.items())


GOOGLE_EXTRA = 'pip install "torchrelay[gcs]"'
NO_GOOGLE_CREDENTIALS = (
    "no Google credentials were found: set GOOGLE_APPLICATION_CREDENTIALS in the server's environment, or give its "
    "machine a service account"
)


def _google_client(url: str, limits: DownloadLimits) -> Any:
    try:
        from google.cloud import storage  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise failure(
            url, f"gs:// needs the package google-cloud-storage, which is not installed: {GOOGLE_EXTRA}"
        ) from None
    return storage.Client()


def _google_code(error: Exception) -> str:
    return str(getattr(error, "code", ""))


def _google_error(url: str, place: Place, error: Exception) -> ServeError:
    code = _google_code(error)
    if type(error).__name__ == "DefaultCredentialsError":
        return failure(url, NO_GOOGLE_CREDENTIALS)
    if code == "404":
        return ArchiveNotFound(f"Model not found at: {url} (there is no bucket {place.bucket}, or an object is gone)")
    if code in ("401", "403"):
        return failure(url, f"access is denied: the server's Google credentials don't allow it ({error})")
    return failure(url, str(error) or type(error).__name__)


class GoogleBucket(Bucket):
    """The objects at a place in Google Cloud Storage."""

    #: Google's library, its transport and its credentials.
    MODULES = ("google.", "requests.", "urllib3.")
    connected, code_of, told = staticmethod(_google_client), staticmethod(_google_code), staticmethod(_google_error)

    @property
    def _timeout(self) -> tuple[float, float]:
        return self._limits.connect_timeout_s, self._limits.timeout_s

    def open(self, key: str, version: str) -> Body:
        blob = self._client.bucket(self._place.bucket).blob(key, generation=int(version) if version else None)
        self._stop.waited(partial(blob.reload, timeout=self._timeout))
        return Body(blob.open("rb", timeout=self._timeout), blob.size, self._stop)

    def listed(self, delimiter: str | None) -> Iterable[Any]:
        where = {"prefix": self._place.prefix, "delimiter": delimiter, "timeout": self._timeout}
        pages: Iterable[Any] = self._client.list_blobs(self._place.bucket, **where).pages
        return pages

    def objects_of(self, page: Any) -> Iterable[tuple[str, int, str]]:
        return ((one.name, int(one.size or 0), str(one.generation)) for one in page)

    def prefixes_of(self, page: Any) -> Iterable[str]:
        list(page)  # a page's prefixes are known when it was read
        return map(str, page.prefixes)
