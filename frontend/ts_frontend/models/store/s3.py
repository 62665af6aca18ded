"""Models from S3 or a compatible store: an object is an archive, all objects below a prefix are a folder. Blocking.

Endpoint, region and credentials come from the environment, as for the AWS command line: AWS_ENDPOINT_URL,
AWS_DEFAULT_REGION, AWS_ACCESS_KEY_ID, AWS_PROFILE, or the machine's role. boto3 is imported on first use.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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

EXTRA = 'pip install "torchrelay[s3]"'
NO_CREDENTIALS = (
    "no AWS credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, in the server's "
    "environment, or give its machine a role"
)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_ATTEMPTS = 3
_WITHOUT_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError")
_ABSENT, _DENIED = ("NoSuchKey", "404"), ("AccessDenied", "403")


@dataclass(frozen=True, slots=True)
class Place:
    """The place that `s3://bucket/key` names; `key` "": all of the bucket."""

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
    """The place of an s3:// URL. Raises InvalidArgument for one without a bucket."""
    bucket, _, key = url.partition("://")[2].partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise InvalidArgument(f"url {url!a}: {bucket!a} is not a bucket name; write s3://BUCKET/PREFIX")
    return Place(bucket, key.lstrip("/"))


def download(url: str, target: Path, limits: DownloadLimits, stop: Stop, sha256: str | None = None) -> None:
    """Puts the object at `url`, or the folder of those below it, at `target`, which must not exist.

    Raises ArchiveExists, ArchiveNotFound (no such bucket or key), InvalidArchive (an object's name is no file's),
    DownloadFailed; nothing stays behind then.
    """
    place = parse(url)
    with bounded(url, limits, stop), _explained(url, place):
        bucket = _Bucket(place, stop.waited(partial(connected, url, limits)), stop)
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


def folders(url: str, limits: DownloadLimits, stop: Stop) -> list[str]:
    """The names of the folders in the folder `url`. Raises ArchiveNotFound (no such bucket), DownloadFailed."""
    place = parse(url)
    with bounded(url, limits, stop), _explained(url, place):
        bucket = _Bucket(place, stop.waited(partial(connected, url, limits)), stop)
        return bucket.folders(limits.files_max, url)


def _download_folder(
    bucket: _Bucket, url: str, target: Path, limits: DownloadLimits, stop: Stop, refused: Exception | None
) -> Transfer:
    objects = bucket.below(limits.files_max, url)
    if not objects:
        raise refused or ArchiveNotFound(f"Model not found at: {url} (the bucket has nothing there)")
    transfer = Transfer(url, target.name, sum(one.size for one in objects), limits, stop)
    with new_folder(target) as folder:
        for one in objects:
            parts = safe_parts(target, one.name)
            with (
                closing(bucket.open(one.key, one.etag)) as body,
                create_file(target, folder, parts, one.name, 0) as file,
            ):
                transfer.copy(body, file, one.size)
                file.flush()
                os.fsync(file.fileno())
    return transfer


@dataclass(frozen=True, slots=True)
class _Object:
    """`name` is relative to the folder."""

    key: str
    name: str
    size: int
    etag: str


class _Body:
    """An object's bytes; `stop` interrupts a read."""

    def __init__(self, body: Any, size: int, stop: Stop) -> None:
        self._body, self.size, self._stop = body, size, stop

    def read(self, size: int, /) -> bytes:
        data: bytes = self._stop.waited(partial(self._body.read, size))
        return data

    def close(self) -> None:
        self._body.close()


class _Bucket:
    """The objects at a place, read through `client`. Raises botocore's errors."""

    def __init__(self, place: Place, client: Any, stop: Stop) -> None:
        self._place, self._client, self._stop = place, client, stop

    def archive(self) -> tuple[_Body | None, Exception | None]:
        """The object at the place, or None and the error if access was denied: without the right to list the bucket, S3
        denies missing objects, too."""
        place = self._place
        if not place.key or place.key.endswith("/"):
            return None, None
        try:
            return self.open(place.key), None
        except self._client.exceptions.ClientError as error:
            if code_of(error) not in (*_ABSENT, *_DENIED):
                raise
            return None, error if code_of(error) in _DENIED else None

    def open(self, key: str, etag: str | None = None) -> _Body:
        """Opens an object. `etag`: fails when the object has changed since."""
        which = {"Bucket": self._place.bucket, "Key": key} | ({"IfMatch": etag} if etag else {})
        answer = self._stop.waited(partial(self._client.get_object, **which))
        return _Body(answer["Body"], answer["ContentLength"], self._stop)

    def below(self, files_max: int, url: str) -> list[_Object]:
        """The objects of the folder; Raises DownloadFailed for more than `files_max`."""
        found: list[_Object] = []
        for page in self._pages():
            found += [one for one in map(self._object, page.get("Contents", ())) if one.name]
            if len(found) > files_max:
                raise failure(url, f"it has more than {files_max} files; extract_files_max raises the limit")
        return found

    def folders(self, files_max: int, url: str) -> list[str]:
        """The names of the folders in this one; Raises DownloadFailed for more than `files_max`."""
        found: list[str] = []
        for page in self._pages(Delimiter="/"):
            found += [one["Prefix"][len(self._place.prefix) :].rstrip("/") for one in page.get("CommonPrefixes", ())]
            if len(found) > files_max:
                raise failure(url, f"it has more than {files_max} folders; extract_files_max raises the limit")
        return [name for name in found if name]

    def _pages(self, **more: str) -> Iterator[dict[str, Any]]:
        where = {"Bucket": self._place.bucket, "Prefix": self._place.prefix, **more}
        pages = iter(self._client.get_paginator("list_objects_v2").paginate(**where))
        while (page := self._stop.waited(partial(next, pages, None))) is not None:
            yield page

    def _object(self, one: dict[str, Any]) -> _Object:
        """An object of the folder; its name is "" if it only marks a folder."""
        key = one["Key"]
        name = "" if key.endswith("/") else key[len(self._place.prefix) :]
        return _Object(key, name, one["Size"], one.get("ETag", ""))


def connected(url: str, limits: DownloadLimits) -> Any:
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
        raise failure(url, f"S3 needs the package boto3, which is not installed: {EXTRA}") from None
    return Session()


@contextmanager
def _explained(url: str, place: Place) -> Iterator[None]:
    """Turns the errors of botocore, boto3 and urllib3 into ServeErrors. Nothing else is caught."""
    try:
        yield
    except ServeError:
        raise
    except Exception as error:
        if not is_of_s3(error):
            raise
        raise _error(url, place, error) from error


def _error(url: str, place: Place, error: Exception) -> ServeError:
    code = code_of(error)
    if code == "NoSuchBucket":
        return ArchiveNotFound(f"Model not found at: {url} (there is no bucket {place.bucket})")
    if code in ("PreconditionFailed", *_ABSENT):
        return failure(url, "an object changed while the folder was downloaded; try again")
    return failure(url, reason_of(error))


def is_of_s3(error: Exception) -> bool:
    """Whether it is an error of botocore, boto3 or urllib3."""
    return type(error).__module__.startswith(("botocore.", "boto3.", "urllib3."))


def reason_of(error: Exception) -> str:
    """The text of an error of botocore, boto3 or urllib3."""
    if type(error).__name__ in _WITHOUT_CREDENTIALS:
        return NO_CREDENTIALS
    if code_of(error) in _DENIED:
        return f"access is denied: the server's AWS credentials don't allow it ({error})"
    return str(error) or type(error).__name__


def code_of(error: Exception) -> str:
    """The code of S3's answer, "" when it has none."""
    response: dict[str, Any] = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def signed(url: str, stop: Stop) -> dict[str, str]:
    """Headers that sign a GET of an object's http(s) URL with the server's AWS credentials. Raises DownloadFailed."""
    with _explained(url, Place("", "")):
        work: Callable[[], dict[str, str]] = partial(_signed, url)
        return stop.waited(work)


def _signed(url: str) -> dict[str, str]:
    session = _session(url)
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest

    credentials, region = session.get_credentials(), session.region_name
    if credentials is None:
        raise failure(url, NO_CREDENTIALS)
    if not region:
        raise failure(url, "s3_sse_kms needs AWS_DEFAULT_REGION, the bucket's region, in the server's environment")
    request = AWSRequest("GET", url)
    S3SigV4Auth(credentials.get_frozen_credentials(), "s3", region).add_auth(request)
    return dict(request.headers.items())
