"""Models from Google Cloud Storage, as Vertex AI names them: an object is an archive, all objects below a prefix are a
folder. Blocking.

Credentials come from the environment, as for Google's tools: GOOGLE_APPLICATION_CREDENTIALS, or the machine's service
account; STORAGE_EMULATOR_HOST names another server, without credentials. google-cloud-storage is imported on first use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from ts_frontend.errors import ArchiveNotFound, ServeError
from ts_frontend.models.store import objects
from ts_frontend.models.store.http import DownloadLimits, Stop, failure
from ts_frontend.models.store.objects import Body, Object, Place

EXTRA = 'pip install "torchrelay[gcs]"'
NO_CREDENTIALS = (
    "no Google credentials were found: set GOOGLE_APPLICATION_CREDENTIALS in the server's environment, or give its "
    "machine a service account"
)
#: Modules of the errors of Google's library, its transport and its credentials.
_ITS = ("google.", "requests.", "urllib3.")


class Bucket:
    """The objects at a place. Raises Google's errors."""

    def __init__(self, url: str, place: Place, limits: DownloadLimits, stop: Stop) -> None:
        self._place, self._stop = place, stop
        self._timeout = (limits.connect_timeout_s, limits.timeout_s)
        self._client = stop.waited(partial(_connected, url))
        self._bucket = self._client.bucket(place.bucket)

    def archive(self) -> tuple[Body | None, Exception | None]:
        """The object at the place, or None and the error if access was denied."""
        place = self._place
        if not place.key or place.key.endswith("/"):
            return None, None
        try:
            blob = self._stop.waited(partial(self._bucket.get_blob, place.key, timeout=self._timeout))
        except Exception as error:
            if getattr(error, "code", None) != 403:
                raise
            return None, error
        return (None, None) if blob is None else (self.open(place.key, str(blob.generation)), None)

    def open(self, key: str, version: str) -> Body:
        """Opens that generation of an object."""
        blob = self._bucket.blob(key, generation=int(version))
        self._stop.waited(partial(blob.reload, timeout=self._timeout))
        return Body(blob.open("rb", timeout=self._timeout), blob.size, self._stop)

    def below(self) -> Iterator[list[Object]]:
        """The objects of the folder, page by page; the name of one that only marks a folder is ""."""
        for page in self._pages():
            yield [self._object(one) for one in page]

    def folders(self) -> Iterator[list[str]]:
        """The names of the folders in this one, page by page."""
        for page in self._pages(delimiter="/"):
            list(page)  # a page's prefixes are known when it was read
            yield [one[len(self._place.prefix) :].rstrip("/") for one in page.prefixes]

    def _pages(self, **more: str) -> Iterator[Any]:
        where = {"prefix": self._place.prefix, "timeout": self._timeout, **more}
        pages = iter(self._client.list_blobs(self._place.bucket, **where).pages)
        while (page := self._stop.waited(partial(next, pages, None))) is not None:
            yield page

    def _object(self, one: Any) -> Object:
        name = "" if one.name.endswith("/") else one.name[len(self._place.prefix) :]
        return Object(one.name, name, int(one.size or 0), str(one.generation))


def _connected(url: str) -> Any:
    try:
        from google.cloud import storage  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise failure(url, f"gs:// needs the package google-cloud-storage, which is not installed: {EXTRA}") from None
    return storage.Client()


def explained(url: str, place: Place) -> AbstractContextManager[None]:
    """Turns the library's errors into ServeErrors."""
    return objects.explained(_is_its, partial(_error, url, place))


def _is_its(error: Exception) -> bool:
    return type(error).__module__.startswith(_ITS)


def _error(url: str, place: Place, error: Exception) -> ServeError:
    code = getattr(error, "code", None)
    if type(error).__name__ == "DefaultCredentialsError":
        return failure(url, NO_CREDENTIALS)
    if code == 404:
        return ArchiveNotFound(f"Model not found at: {url} (there is no bucket {place.bucket}, or an object is gone)")
    if code in (401, 403):
        return failure(url, f"access is denied: the server's Google credentials don't allow it ({error})")
    return failure(url, str(error) or type(error).__name__)
