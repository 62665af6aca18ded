"""The model store: from the `url` of a register call to a file or directory on this machine.

A name is looked up inside the store, where links are followed: anyone who may write to the store decides what is
loaded. Other sources must be allowed: by default only TorchServe's model zoo, else the URLs of `allowed_urls`.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from ts_frontend.config.kinds import is_hub_name, nearest
from ts_frontend.errors import ArchiveNotFound, InvalidArgument, UrlForbidden
from ts_frontend.models.archive import Pin, Stamp, digest, is_gguf, real
from ts_frontend.models.formats.format import StoredModel
from ts_frontend.models.formats.formats import Formats
from ts_frontend.models.store import hub, objects
from ts_frontend.models.store.http import DEFAULT_LIMITS, DownloadLimits, check_digest, download, exists, failure
from ts_frontend.tasks import Stop, owned, undone_on_failure

_URL_CHARS_MAX = 4096
_NAME_BYTES_MAX = 255
#: The most names of a store in an error.
NAMES_SHOWN_MAX = 10
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
PIN = re.compile(r"#sha256=([0-9A-Fa-f]{64})\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ODD = re.compile(r"[ \\]")


def check_text(url: str, plain: str) -> None:
    """Raises InvalidArgument or ArchiveNotFound for a malformed URL: with `..` in its path, blanks, backslashes,
    credentials or an invalid #sha256= pin."""
    if not plain:
        raise ArchiveNotFound("empty url")
    if len(url) > _URL_CHARS_MAX:
        raise InvalidArgument(f"url has {len(url)} characters; at most {_URL_CHARS_MAX} are allowed")
    if ".." in unquote(unquote(plain)):
        raise ArchiveNotFound(f"Relative path is not allowed in url: {url}")
    remote = SCHEME.match(plain)
    if _CONTROL.search(plain) or (remote and _ODD.search(plain)):
        raise InvalidArgument(f"url {url!a} has a blank, a backslash or a control character")
    if "#sha256=" in plain:
        raise InvalidArgument(f"url {url!a}: #sha256= needs 64 hexadecimal digits")
    if remote:
        _check_remote(url, plain, remote[1].lower())


def _check_remote(url: str, plain: str, scheme: str) -> None:
    if scheme in _OBJECTS:
        objects.parse(plain)
        return
    if scheme == "hf":
        hub.parse(plain)
        return
    if scheme not in ("http", "https", "file"):
        raise InvalidArgument(f"url {url!a}: {scheme} is not supported; http, https, s3, gs, hf and file are")
    try:
        parts = urlsplit(plain)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError as error:
        raise InvalidArgument(f"url {url!a}: {error}") from error
    if "@" in parts.netloc or not port_is_fine or (scheme == "file") != (not parts.hostname):
        raise InvalidArgument(f"url {url!a}: give a host without user and password (file:///path has no host)")


def file_name(url: str) -> str:
    name = objects.parse(url).name if _kind(url) is not None else unquote(urlsplit(url).path.rpartition("/")[2])
    if not name or name.startswith(".") or set(name) & set("/\\") or not name.isprintable():
        raise failure(url, f"{name!a}, the last part of its path, can't be a file's name")
    if len(name.encode()) > _NAME_BYTES_MAX:
        raise failure(url, f"the last part of its path is longer than {_NAME_BYTES_MAX} bytes")
    return name


#: The stores of objects by the schemes of their URLs.
_OBJECTS: dict[str, type[objects.Bucket]] = {"s3": objects.S3Bucket, "gs": objects.GoogleBucket}


def _kind(url: str) -> type[objects.Bucket] | None:
    """The store of objects that has the URL; None for another URL."""
    scheme, found, _ = url.partition("://")
    return _OBJECTS.get(scheme.lower()) if found else None


_log = logging.getLogger(__name__)
_ARCHIVE_SUFFIXES = (".mar", ".model", ".tar.gz", ".tgz")
#: TorchServe's models and workflows under both host names, which its examples and clients use.
_ZOO = r"https://torchserve\.(?:pytorch\.org|s3\.amazonaws\.com)/[mw]ar_files/[\w.-]+"
#: Returns the path for a copy of a URL, and the new folder made for it, if any.
_Place = Callable[[str], "tuple[Path, Path | None]"]


@dataclass(frozen=True, slots=True)
class Fetched:
    """An archive file or model directory. `url`: as it was given; `downloaded`: `path` is a copy made for this model;
    `folder`: the folder outside the store that holds only this copy; `pin`: the digest that the URL demands;
    `named`: the operator named it at the start; `hub`: the name of its repository of Hugging Face's hub, which is used
    in the hub's cache."""

    path: Path
    url: str
    downloaded: bool
    folder: Path | None = None
    pin: Pin | None = field(default=None, compare=False)
    named: bool = field(default=False, compare=False)
    hub: str = ""

    @property
    def recorded(self) -> str:
        """The name to give to `ModelStore.recall` with the URL."""
        return self.url if self.folder is not None else self.path.name


class ModelStore:
    """`model_store`: the directory, or None. `allowed_urls`: regular expressions for whole URLs, ignoring case; None:
    only the model zoo. Files inside the store are always allowed. `trusted`: prefixes of further allowed URLs.
    `copies`: the directory for downloads of `fetch_apart`, or None. `formats`: the formats of its models. `missing`,
    `place`: the beginning of errors about a missing archive, and the name of the store in them. `environ`: the
    environment of the server.

    Raises InvalidArgument for an invalid regular expression.
    """

    def __init__(
        self,
        model_store: Path | None,
        allowed_urls: Iterable[str] | None = None,
        *,
        limits: DownloadLimits = DEFAULT_LIMITS,
        trusted: Iterable[str] = (),
        copies: Path | None = None,
        missing: str = "Model not found at",
        place: str = "model store",
        formats: Formats | None = None,
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._root = model_store.resolve() if model_store is not None else None
        self._explicit = allowed_urls is not None
        self._allowed = tuple(_pattern(text) for text in ([_ZOO] if allowed_urls is None else allowed_urls))
        self._limits = limits
        self._trusted = tuple(trusted)
        self._copies = copies
        self._missing, self._place = missing, place
        self._formats = formats or Formats()
        self._hub = hub.Hub(environ)

    def of_adapters(self) -> ModelStore:
        """The same store, whose errors are about adapters."""
        found = copy.copy(self)
        found._missing = "Adapter not found at"
        return found

    async def fetch(self, url: str, *, signed: bool = False, named: bool = False) -> Fetched:
        """The archive at `url`, copied into the store if it comes from elsewhere. `signed`: an http(s) URL is one of S3
        and requested with the server's AWS credentials. `named`: the operator named it at the start, so that a
        directory of this machine needs no permission.

        Cancelling the caller stops the download and leaves nothing behind. Raises ArchiveNotFound (missing or not
        allowed), ArchiveExists, DownloadFailed, InvalidArgument.
        """
        if named and (path := await asyncio.to_thread(self.directory, url)) is not None:
            # A relative path is that of this start's directory, which the next may not have.
            return Fetched(path, url if Path(url).is_absolute() or SCHEME.match(url) else str(path), False, named=True)
        if named and url.lower().startswith(hub.SCHEME):
            return replace(await self._fetched(url, self._apart, False, named=True), named=True)
        place = self._apart if self._root is None and self._copies is not None else self._in_store
        return await self._fetched(url, place, signed)

    def directory(self, url: str) -> Path | None:
        """The directory of this machine, or the `.gguf` file, that the operator's `url` names outside the store: a path
        with a slash that the store doesn't have, or a `file://` URL. Blocking."""
        scheme = SCHEME.match(url)
        if "/" not in url or (scheme is not None and scheme[1].lower() != "file"):
            return None
        path = Path(url2pathname(urlsplit(url).path) if scheme else url)
        stored = self._root is not None and (self._root / path).exists() and not path.is_absolute()
        used = path.is_dir() or (is_gguf(path.name) and path.is_file())
        return real(path) if used and not stored and not self._lies_inside(path) else None

    def on_hub(self, url: str) -> str:
        """The operator's `url`; `hf://ORG/NAME` for a bare `ORG/NAME`, which is nothing on this machine. Blocking."""
        if not is_hub_name(url):
            return url
        here = any(Path(place, f"{url}{end}").exists() for place in (".", self._root or ".") for end in ("", ".mar"))
        if here:
            return url
        _log.info("There is no %s on this machine: it is taken as a name of Hugging Face's hub", url)
        return f"{hub.SCHEME}{url}"

    async def fetch_apart(self, url: str) -> Fetched:
        """The same, but a copy gets a new folder outside the store, so that there may be several per URL."""
        return await self._fetched(url, self._apart, False)

    async def folders(self, url: str) -> list[str]:
        """The names of the folders in the folder `url` of a store of objects. Raises ServeError."""
        stop, kind = Stop(), _kind(url)
        assert kind is not None, url
        try:
            return await asyncio.to_thread(objects.folders, kind, url, self._limits, stop)
        except asyncio.CancelledError:
            stop.set()
            raise

    async def made_apart(self, url: str, fill: Callable[[Path], None]) -> Fetched:
        """Makes a new folder outside the store, filled by `fill`. Raises the errors of `fill`, and OSError."""
        target, folder = self._apart("file:///model")
        fetched = Fetched(target, url, downloaded=True, folder=folder)
        async with undone_on_failure() as undo:
            undo.push_async_callback(asyncio.to_thread, self.discard, fetched)
            target.mkdir()
            await asyncio.to_thread(fill, target)
            return fetched

    async def _fetched(self, url: str, place: _Place, signed: bool, named: bool = False) -> Fetched:
        stop = Stop()
        work = owned(asyncio.to_thread(self._fetch_now, url, stop, place, signed, named))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            work.add_done_callback(self._discard_unwanted)
            raise

    async def recall(self, url: str, name: str, *, named: bool = False) -> Fetched:
        """Fetches again an archive that `fetch(url)` or `fetch_apart(url)` fetched in an earlier run; `name`: its
        `recorded`; `named`: as it was. A copy in the store is still there; one outside is downloaded again.

        Raises as `fetch`.
        """
        if named:
            return await self.fetch(url, named=True)
        scheme = SCHEME.match(url)
        if scheme is not None and name == url:
            return await self.fetch_apart(url)
        if scheme is not None and scheme[1].lower() == "hf":
            return await self.fetch(url)
        if scheme is None or (
            scheme[1].lower() == "file" and self._root is not None and not (self._root / name).is_file()
        ):
            return await self.fetch(url)
        pin = PIN.search(url)
        found = await self.fetch(name + (pin[0] if pin else ""))
        path = Path(url2pathname(urlsplit(url).path)) if scheme[1].lower() == "file" else None
        return Fetched(
            found.path, url, downloaded=path is None or path.resolve() != found.path.resolve(), pin=found.pin
        )

    def _discard_unwanted(self, work: asyncio.Future[Fetched]) -> None:
        if not work.cancelled() and work.exception() is None:
            work.get_loop().run_in_executor(None, self.discard, work.result())  # never raises

    def discard(self, fetched: Fetched) -> None:
        """Deletes the copy that a download made; files from before stay. Blocking, never fails."""
        if not fetched.downloaded:
            return
        try:
            whole = fetched.folder or fetched.path
            if whole.is_dir() and not whole.is_symlink():
                shutil.rmtree(whole)
            else:
                whole.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("Could not delete %s: %s", fetched.path, error.strerror)

    def names(self) -> list[str]:
        """The names of the models that ALL loads: every archive and directory of the store that isn't hidden; for some
        formats, the models inside a directory instead of it. "." is the store itself. Blocking."""
        if self._root is None or not self._root.is_dir():
            return []
        with os.scandir(self._root) as entries:
            names = [entry.name for entry in entries if _is_archive(entry)]
        return self._formats.in_store(self._root, names)

    def models(self) -> list[StoredModel]:
        """The models whose names are known without opening them: those in folders, no archives. Blocking."""
        if self._root is None:
            return []
        with os.scandir(self._root) as entries:
            folders = [entry.name for entry in entries if _is_archive(entry) and _is_folder(entry)]
        return self._formats.stored(self._root, folders)

    @property
    def alone(self) -> bool:
        """Whether the store is itself one model (weights) that is served although no models are named. Blocking."""
        return self._root is not None and self._root.is_dir() and self._formats.is_alone(self._root)

    def only(self) -> str:
        """The path of the store itself if it is a model, else of its only model. Raises ArchiveNotFound."""
        if self._root is None or self._formats.is_model(self._root):
            return "."
        names = self.names()
        if len(names) != 1:
            raise ArchiveNotFound(
                f"{self._missing}: {self._root} (it is not a model; it contains {', '.join(names) or 'none'})"
            )
        return names[0]

    def _fetch_now(self, url: str, stop: Stop, place: _Place, signed: bool, named: bool) -> Fetched:
        try:
            return self._fetch(url, stop, place, signed, named)
        except OSError as error:
            raise ArchiveNotFound(f"{self._missing}: {url} ({error.strerror or error})") from error

    def _fetch(self, url: str, stop: Stop, place: _Place, signed: bool, named: bool) -> Fetched:
        pin = PIN.search(url)
        plain = url[: pin.start()] if pin else url
        check_text(url, plain)
        scheme = SCHEME.match(plain)
        if scheme is None:
            path, checked = self._inside(url, plain, pin, stop)
            return Fetched(path, url, downloaded=False, pin=checked)
        if scheme[1].lower() == "file":
            path = Path(url2pathname(urlsplit(plain).path))
            if self._lies_inside(path) or (path.is_dir() and self._allow(plain)):
                path, checked = self._used_in_place(url, path, pin, stop)
                return Fetched(path, url, downloaded=False, pin=checked)
        if not named:
            self._allow(plain)
        if scheme[1].lower() == "hf":
            if pin:
                raise InvalidArgument(f"{url}: a repository has no SHA-256; name its commit, {plain}@COMMIT")
            path = self._hub.fetch(plain, self._limits, stop)
            return Fetched(path, url, downloaded=False, hub=hub.parse(plain).title)
        path, folder = place(plain)
        try:
            self._copy(plain, path, pin, stop, signed)
        except BaseException:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return Fetched(path, url, downloaded=True, folder=folder, pin=Pin(pin[1].lower()) if pin else None)

    def _inside(self, url: str, plain: str, pin: re.Match[str] | None, stop: Stop) -> tuple[Path, Pin | None]:
        """The path for a name in the store (links are followed) or an absolute path, which must be inside the store
        unless its file:// URL is allowed. Of another one, only the last part counts if the store has such an archive,
        as in TorchServe."""
        absolute = Path(plain).is_absolute()
        if self._root is None:
            if not (absolute and self.allows(Path(plain).as_uri())):
                raise ArchiveNotFound(f"{self._missing}: {url} (there is no {self._place})")
            return self._used_in_place(url, Path(plain), pin, stop)
        path = self._root / plain
        if not absolute and any(part.startswith(".") for part in Path(plain).parts):
            raise ArchiveNotFound(f"{self._missing}: {url} (hidden files are not models)")
        if path == self._root and not (self._formats.is_model(path) or self._formats.assumed):
            raise ArchiveNotFound(f"{self._missing}: {url} (it is the {self._place} itself)")
        if absolute and not self._lies_inside(path):
            stored = self._root / path.name
            of_store = stored.is_file() and self._lies_inside(stored) and not path.name.startswith(".")
            if of_store and not self.allows(path.as_uri()):
                path = stored
            else:
                self._allow(path.as_uri(), shown=url)
        return self._used_in_place(url, path, pin, stop)

    def _known(self, url: str) -> str:
        """The end of an error about a missing name: a similar name, and the names in the store."""
        if Path(url).is_absolute():
            return ""
        names = sorted(self.names())
        shown = names[:NAMES_SHOWN_MAX] + ["…"] * (len(names) > NAMES_SHOWN_MAX)
        there = ", ".join(shown) or "no archives"
        meant = nearest(url, names, 0.75) or nearest(Path(url).name, names, 0.75)
        return f"{meant or '.'} The {self._place} {self._root} has {there}"

    def _lies_inside(self, path: Path) -> bool:
        """True when the path is in the store, after following links; a missing path need not exist."""
        try:
            real = path.resolve()
        except (OSError, RuntimeError):  # a cycle of links
            return False
        return self._root is not None and self._root in real.parents

    def _used_in_place(self, url: str, path: Path, pin: re.Match[str] | None, stop: Stop) -> tuple[Path, Pin | None]:
        try:
            path.stat()
        except FileNotFoundError:
            what = f" (a link to {os.readlink(path)}, which is missing)" if path.is_symlink() else self._known(url)
            raise ArchiveNotFound(f"{self._missing}: {url}{what}") from None
        except (OSError, ValueError) as error:
            raise ArchiveNotFound(f"{self._missing}: {url} ({getattr(error, 'strerror', error)})") from None
        if not path.is_file() and not path.is_dir():
            raise ArchiveNotFound(f"{self._missing}: {url} (it is neither a file nor a directory)")
        if pin is None:
            return real(path), None
        if path.is_dir():
            raise InvalidArgument(f"{url}: a directory has no SHA-256; leave #sha256= out")
        found, sha256 = real(path), pin[1].lower()
        with found.open("rb") as file:
            stamp = Stamp.of(os.fstat(file.fileno()))
            check_digest(url, digest(file, stop), sha256)
        return found, Pin(sha256, stamp)

    def _in_store(self, url: str) -> tuple[Path, None]:
        if self._root is None:
            raise failure(url, f"there is no {self._place} to put it into")
        target = self._root / file_name(url)
        if os.path.lexists(target):
            raise exists(target)
        return target, None

    def _apart(self, url: str) -> tuple[Path, Path]:
        name = file_name(url)
        if self._copies is None:
            raise failure(url, "there is no folder for copies")
        self._copies.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=self._copies))
        return folder / name, folder

    def _copy(self, url: str, target: Path, pin: re.Match[str] | None, stop: Stop, signed: bool) -> None:
        sha256 = pin[1] if pin else None
        _log.info("Downloading %s to %s", url.split("?")[0], target)
        if (kind := _kind(url)) is not None:
            objects.download(kind, url, target, self._limits, stop, sha256)
            return
        headers = objects.signed(url, stop) if signed and not url.lower().startswith("file:") else {}
        download(url, target, self._allow_hop, self._limits, stop, sha256, headers)

    def allows(self, url: str) -> bool:
        """Whether archives may be loaded from a URL with a scheme. Names in the store need no permission."""
        try:
            self._allow(url)
        except UrlForbidden:
            return False
        return True

    def _allow_hop(self, url: str) -> bool:
        """`_allow` for the target of a redirect, which is checked like a caller's URL."""
        check_text(url, url)
        return self._allow(url)

    def _allow(self, url: str, shown: str | None = None) -> bool:
        """Raises UrlForbidden unless `url` may be used. True: the operator allowed it, even at a private address."""
        if url.startswith(self._trusted):
            return True
        if any(pattern.fullmatch(url) for pattern in self._allowed):
            return self._explicit
        now = "" if self._explicit else f"; not set, it allows files of the {self._place} and the model zoo"
        whole = f"URL {url}" if shown else "URL"
        raise UrlForbidden(
            f"Given URL {shown or url} does not match any allowed URL(s): the server is forbidden to load from there. "
            f"The key allowed_urls of its configuration opens it, with a regular expression for the whole {whole}{now}"
        )


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise InvalidArgument(f"allowed_urls: {text!a} is not a regular expression: {error}") from error


def _is_archive(entry: os.DirEntry[str]) -> bool:
    """Whether ALL loads the entry. One that is broken, such as a link to nothing, counts: its load names the error."""
    named = entry.name.endswith(_ARCHIVE_SUFFIXES) or is_gguf(entry.name)
    return not entry.name.startswith(".") and (named or _is_folder(entry))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a directory, or a link whose target can't be looked at."""
    try:
        return entry.is_dir()
    except OSError:
        return True
