"""The model store: from the `url` of a register call to a file or directory on this machine.

A name is looked up inside the store: whoever may put a link there may put a model there. Anything else has to be
allowed. By default only TorchServe's own model zoo is; `allowed_urls` replaces that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from ts_frontend.errors import ArchiveNotFound, InvalidArgument
from ts_frontend.models import mlserver_model
from ts_frontend.models.download import check_file_digest, download, exists
from ts_frontend.models.mlserver_model import Defaults
from ts_frontend.models.remote import BYTES_MAX, TIMEOUT_S, DownloadLimits, Stop, failure

_log = logging.getLogger(__name__)
_URL_CHARS_MAX = 4096
_NAME_BYTES_MAX = 255
_ARCHIVE_SUFFIXES = (".mar", ".model", ".tar.gz", ".tgz")
_ZOO = r"https://torchserve\.pytorch\.org/mar_files/[\w.-]+"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PIN = re.compile(r"#sha256=([0-9A-Fa-f]{64})\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ODD = re.compile(r"[ \\]")


@dataclass(frozen=True, slots=True)
class Fetched:
    """An archive file or model directory. `url` is as it was given; `downloaded`: `path` is a copy made for it."""

    path: Path
    url: str
    downloaded: bool


class Store:
    """`model_store`: the directory, None without one. `allowed_urls`: regular expressions, each must match a whole URL,
    in any case; None: only the model zoo. Beside that, what lies inside the store is always allowed.
    `missing`, `place`: how errors begin that say what isn't there, and what they call the store. `mlserver`: of its
    models.

    Raises InvalidArgument for an expression that isn't one.
    """

    def __init__(
        self,
        model_store: Path | None,
        allowed_urls: Iterable[str] | None = None,
        *,
        download_bytes_max: int = BYTES_MAX,
        download_timeout_s: float = TIMEOUT_S,
        missing: str = "Model not found at",
        place: str = "model store",
        mlserver: Defaults = Defaults(),  # noqa: B008 (frozen)
    ) -> None:
        self._root = model_store.resolve() if model_store is not None else None
        self._explicit = allowed_urls is not None
        self._allowed = tuple(_pattern(text) for text in ([_ZOO] if allowed_urls is None else allowed_urls))
        self._limits = DownloadLimits(download_bytes_max, download_timeout_s)
        self._missing, self._place = missing, place
        self._mlserver = mlserver

    async def fetch(self, url: str) -> Fetched:
        """The archive at `url`, copied into the store if it comes from elsewhere.

        A caller who is cancelled stops the download and leaves nothing behind.
        Raises ArchiveNotFound (not there, or not allowed), ArchiveExists, DownloadFailed, InvalidArgument.
        """
        stop = Stop()
        work = asyncio.ensure_future(asyncio.to_thread(self._fetch_now, url, stop))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            work.add_done_callback(self._discard_unwanted)
            raise

    async def recall(self, url: str, name: str) -> Fetched:
        """What `fetch(url)` gave in an earlier life of the server; a copy that was made then is `name` in the store.

        Raises as `fetch`.
        """
        scheme = _SCHEME.match(url)
        if scheme is None or (
            scheme[1].lower() == "file" and self._root is not None and not (self._root / name).is_file()
        ):
            return await self.fetch(url)
        found = await self.fetch(name)
        path = Path(url2pathname(urlsplit(url).path)) if scheme[1].lower() == "file" else None
        return Fetched(found.path, url, downloaded=path is None or path.resolve() != found.path.resolve())

    def _discard_unwanted(self, work: asyncio.Future[Fetched]) -> None:
        if not work.cancelled() and work.exception() is None:
            self.discard(work.result())

    def discard(self, fetched: Fetched) -> None:
        """Deletes the copy that a download made; what was there before stays. Blocking, never fails."""
        if not fetched.downloaded:
            return
        try:
            fetched.path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("Could not delete %s: %s", fetched.path, error.strerror)

    def names(self) -> list[str]:
        """What ALL stands for: every archive and every directory of the store that isn't hidden, by name; instead of a
        directory, those in it that have a model-settings.json. "." is the store itself."""
        if self._root is None:
            return []
        with os.scandir(self._root) as entries:
            names = [entry.name for entry in entries if _is_archive(entry)]
        return mlserver_model.in_store(self._root, names, self._mlserver)

    def _fetch_now(self, url: str, stop: Stop) -> Fetched:
        try:
            return self._fetch(url, stop)
        except OSError as error:
            raise ArchiveNotFound(f"{self._missing}: {url} ({error.strerror or error})") from error

    def _fetch(self, url: str, stop: Stop) -> Fetched:
        pin = _PIN.search(url)
        plain = url[: pin.start()] if pin else url
        _check_text(url, plain)
        scheme = _SCHEME.match(plain)
        if scheme is None:
            return Fetched(self._inside(url, plain, pin), url, downloaded=False)
        if scheme[1].lower() == "file":
            path = Path(url2pathname(urlsplit(plain).path))
            if self._lies_inside(path) or (path.is_dir() and self._allow(plain)):
                return Fetched(self._used_in_place(url, path, pin), url, downloaded=False)
        return Fetched(self._copied(plain, pin, stop), url, downloaded=True)

    def _inside(self, url: str, plain: str, pin: re.Match[str] | None) -> Path:
        """A name in the store (a link there leads where its operator wanted), or an absolute path: inside it, or
        elsewhere if its file:// URL is allowed."""
        if self._root is None:
            raise ArchiveNotFound(f"{self._missing}: {url} (there is no {self._place})")
        path = self._root / plain
        absolute = Path(plain).is_absolute()
        if not absolute and any(part.startswith(".") for part in Path(plain).parts):
            raise ArchiveNotFound(f"{self._missing}: {url} (hidden files are no models)")
        if path == self._root and not (mlserver_model.is_one(path) or self._mlserver.is_model):
            raise ArchiveNotFound(f"{self._missing}: {url} (it is the {self._place} itself)")
        if absolute and not self._lies_inside(path):
            self._allow(path.as_uri(), shown=url)
        return self._used_in_place(url, path, pin)

    def _lies_inside(self, path: Path) -> bool:
        """True when, links followed, it's in the store; a path that isn't there counts by its name."""
        try:
            real = path.resolve()
        except (OSError, RuntimeError):  # a ring of links
            return False
        return self._root is not None and self._root in real.parents

    def _used_in_place(self, url: str, path: Path, pin: re.Match[str] | None) -> Path:
        if not path.is_file() and not path.is_dir():
            raise ArchiveNotFound(f"{self._missing}: {url}")
        if pin is not None:
            if path.is_dir():
                raise InvalidArgument(f"{url}: a directory has no SHA-256; leave #sha256= out")
            check_file_digest(url, path, pin[1])
        return path.resolve()

    def _copied(self, url: str, pin: re.Match[str] | None, stop: Stop) -> Path:
        """Downloads into the store, under the URL's last path segment."""
        self._allow(url)
        if self._root is None:
            raise failure(url, f"there is no {self._place} to put it into")
        target = self._root / _file_name(url)
        if os.path.lexists(target):
            raise exists(target)
        _log.info("Downloading %s to %s", url.split("?")[0], target)
        download(url, target, self._allow_hop, self._limits, stop, pin[1] if pin else None)
        return target

    def _allow_hop(self, url: str) -> bool:
        """`_allow` for where a redirect leads: such a URL is as suspicious as a caller's."""
        _check_text(url, url)
        return self._allow(url)

    def _allow(self, url: str, shown: str | None = None) -> bool:
        """Raises ArchiveNotFound unless `url` may be used. True: the operator named it, wherever it leads."""
        if any(pattern.fullmatch(url) for pattern in self._allowed):
            return self._explicit
        setting = (
            "allowed_urls"
            if self._explicit
            else f"allowed_urls (not set: only files of the {self._place}, and the model zoo)"
        )
        raise ArchiveNotFound(f"Given URL {shown or url} does not match any allowed URL(s); setting: {setting}")


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise InvalidArgument(f"allowed_urls: {text!a} is not a regular expression: {error}") from error


def _check_text(url: str, plain: str) -> None:
    """Refuses what no honest URL has: paths that climb, blanks, backslashes, credentials, an unreadable pin."""
    if not plain:
        raise ArchiveNotFound("empty url")
    if len(url) > _URL_CHARS_MAX:
        raise InvalidArgument(f"url has {len(url)} characters; at most {_URL_CHARS_MAX} are allowed")
    if ".." in unquote(unquote(plain)):
        raise ArchiveNotFound(f"Relative path is not allowed in url: {url}")
    remote = _SCHEME.match(plain)
    if _CONTROL.search(plain) or (remote and _ODD.search(plain)):
        raise InvalidArgument(f"url {url!a} has a blank, a backslash or a control character")
    if "#sha256=" in plain:
        raise InvalidArgument(f"url {url!a}: #sha256= needs 64 hexadecimal digits")
    if remote:
        _check_remote(url, plain, remote[1].lower())


def _check_remote(url: str, plain: str, scheme: str) -> None:
    if scheme not in ("http", "https", "file"):
        raise InvalidArgument(f"url {url!a}: {scheme} is not supported; http, https and file are")
    try:
        parts = urlsplit(plain)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError as error:
        raise InvalidArgument(f"url {url!a}: {error}") from error
    if "@" in parts.netloc or not port_is_fine or (scheme == "file") != (not parts.hostname):
        raise InvalidArgument(f"url {url!a}: give a host without user and password (file:///path has no host)")


def _file_name(url: str) -> str:
    """The name that a download gets: the last segment of the URL's path."""
    name = unquote(urlsplit(url).path.rpartition("/")[2])
    if not name or name.startswith(".") or set(name) & set("/\\") or not name.isprintable():
        raise failure(url, f"{name!a}, the last part of its path, can't be a file's name")
    if len(name.encode()) > _NAME_BYTES_MAX:
        raise failure(url, f"the last part of its path is longer than {_NAME_BYTES_MAX} bytes")
    return name


def _is_archive(entry: os.DirEntry[str]) -> bool:
    if entry.name.startswith("."):
        return False
    return entry.is_dir() or (entry.is_file() and entry.name.endswith(_ARCHIVE_SUFFIXES))
