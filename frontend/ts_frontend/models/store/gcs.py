"""Models from Google Cloud Storage, as Vertex AI names them: an object is an archive, all objects below a prefix are a
folder. Blocking.

Credentials come from the environment, as for Google's tools: GOOGLE_APPLICATION_CREDENTIALS, or the machine's service
account; STORAGE_EMULATOR_HOST names another server, without credentials. google-cloud-storage is imported on first use.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from ts_frontend.errors import ArchiveNotFound, ServeError
from ts_frontend.models.store import objects
from ts_frontend.models.store.http import DownloadLimits, failure
from ts_frontend.models.store.objects import Body, Place

EXTRA = 'pip install "torchrelay[gcs]"'
NO_CREDENTIALS = (
    "no Google credentials were found: set GOOGLE_APPLICATION_CREDENTIALS in the server's environment, or give its "
    "machine a service account"
)


def _connected(url: str, limits: DownloadLimits) -> Any:
    try:
        from google.cloud import storage  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise failure(url, f"gs:// needs the package google-cloud-storage, which is not installed: {EXTRA}") from None
    return storage.Client()


def _code_of(error: Exception) -> str:
    return str(getattr(error, "code", ""))


def _told(url: str, place: Place, error: Exception) -> ServeError:
    code = _code_of(error)
    if type(error).__name__ == "DefaultCredentialsError":
        return failure(url, NO_CREDENTIALS)
    if code == "404":
        return ArchiveNotFound(f"Model not found at: {url} (there is no bucket {place.bucket}, or an object is gone)")
    if code in ("401", "403"):
        return failure(url, f"access is denied: the server's Google credentials don't allow it ({error})")
    return failure(url, str(error) or type(error).__name__)


class Bucket(objects.Bucket):
    """The objects at a place."""

    #: Google's library, its transport and its credentials.
    MODULES = ("google.", "requests.", "urllib3.")
    connected, code_of, told = staticmethod(_connected), staticmethod(_code_of), staticmethod(_told)

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
