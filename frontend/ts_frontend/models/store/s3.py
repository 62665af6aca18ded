"""Objects of S3 or of a compatible store. Blocking.

Endpoint, region and credentials come from the environment, as for the AWS command line: AWS_ENDPOINT_URL,
AWS_DEFAULT_REGION, AWS_ACCESS_KEY_ID, AWS_PROFILE, or the machine's role. boto3 is imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ts_frontend.errors import ArchiveNotFound, ServeError
from ts_frontend.models.store import objects
from ts_frontend.models.store.http import DownloadLimits, Stop, failure
from ts_frontend.models.store.objects import Body, Place

EXTRA = 'pip install "torchrelay[s3]"'
NO_CREDENTIALS = (
    "no AWS credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, in the server's "
    "environment, or give its machine a role"
)
_ATTEMPTS = 3
_WITHOUT_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError")
_MODULES = ("botocore.", "boto3.", "urllib3.")


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


def is_of_s3(error: Exception) -> bool:
    return type(error).__module__.startswith(_MODULES)


def reason_of(error: Exception) -> str:
    """The text of an error of botocore, boto3 or urllib3."""
    if type(error).__name__ in _WITHOUT_CREDENTIALS:
        return NO_CREDENTIALS
    if code_of(error) in objects.Bucket.DENIED:
        return f"access is denied: the server's AWS credentials don't allow it ({error})"
    return str(error) or type(error).__name__


def code_of(error: Exception) -> str:
    """The code of S3's answer, "" when it has none."""
    response: dict[str, Any] = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _told(url: str, place: Place, error: Exception) -> ServeError:
    code = code_of(error)
    if code == "NoSuchBucket":
        return ArchiveNotFound(f"Model not found at: {url} (there is no bucket {place.bucket})")
    if code in ("PreconditionFailed", *objects.Bucket.ABSENT):
        return failure(url, "an object changed while the folder was downloaded; try again")
    return failure(url, reason_of(error))


class Bucket(objects.Bucket):
    """The objects at a place."""

    MODULES = _MODULES
    connected, code_of, told = staticmethod(connected), staticmethod(code_of), staticmethod(_told)

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
    with Bucket.explained(url, Place("", "")):
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
