"""What of Triton's model repositories is served: at start, by calls, or as the files change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from ts_frontend.errors import Code, InvalidArgument, ModelNotFound, ServeError
from ts_frontend.models.formats import triton as layout
from ts_frontend.models.formats.triton import ModelDirectory
from ts_frontend.models.manager import ModelManager
from ts_frontend.models.model import Model
from ts_frontend.models.settings import Requested
from ts_frontend.models.store.store import Fetched
from ts_frontend.tasks import side_by_side

log = logging.getLogger(__name__)


class Loading:
    """One load at a time of each name. `config_text` stands for a directory's config.pbtxt. All raise ServeError."""

    def __init__(self, administration: ModelManager, gpus: int) -> None:
        self._administration = administration
        self._gpus = gpus

    async def directory(self, directory: ModelDirectory, fetched: Fetched) -> None:
        """The directory's versions, and no others; the highest is the default. All of them or, if one can't be started,
        what there was before. `fetched` is the directory."""
        registry = self._administration.registry
        started: list[Model] = []
        try:
            for version in directory.versions:
                archive = directory.archive(version, self._gpus)
                requested = Requested(model_name=directory.name)
                started.append(await self._administration.started(fetched, archive, requested))
        except BaseException:
            for model in started:
                await self._administration.give_up(model)
            raise
        for model in started:
            self._administration.place(model)
        registry.set_default(directory.name, str(directory.versions[-1]))
        self._leave_only(directory.name, started)

    async def files(self, name: str, config_text: str | None, files: Mapping[str, bytes]) -> None:
        """A directory in Triton's layout with these files, by their paths in it."""
        fetched = await self._administration.installation.made_apart(name, partial(layout.write, files))
        await self._copy(name, fetched, config_text)

    async def elsewhere(self, name: str, url: str, config_text: str | None) -> None:
        """What is at `url`, a name of the model store or an allowed URL: a directory in Triton's layout, everything
        else as an archive, which may hold such a directory."""
        await self._fetched(name, await self._administration.installation.fetch_apart(url), config_text)

    async def mlservers(self, name: str, paths: Sequence[str], config_text: str | None) -> None:
        """All versions of a model of MLServer's, by their paths in the model store, and no others."""
        if config_text is not None:
            raise _unused(name)
        requested = Requested(model_name=name, initial_workers=max(self._gpus, 1))
        loaded = []
        for path in paths:
            fetched = await self._administration.installation.fetch_apart(path)
            archive = await self._administration.installation.opened(fetched, requested)
            loaded.append(await self._administration.replace(fetched, archive, requested))
        self._leave_only(name, loaded)

    def _leave_only(self, name: str, models: Sequence[Model]) -> None:
        """Takes out the other versions."""
        for model in self._administration.registry.versions(name):
            if model not in models:
                self._administration.tasks.background(self._administration.take_out(model))

    async def _fetched(self, name: str, fetched: Fetched, config_text: str | None) -> None:
        if await asyncio.to_thread(layout.is_model, fetched.path):
            await self._copy(name, fetched, config_text)
            return
        try:
            await self._archive(name, fetched, config_text)
        except BaseException:
            await self._administration.installation.discard(fetched)
            raise

    async def _copy(self, name: str, fetched: Fetched, config_text: str | None) -> None:
        """A directory in Triton's layout; a failure removes it."""
        try:
            await self.directory(await asyncio.to_thread(layout.read, fetched.path, config_text, name), fetched)
        except OSError as error:
            await self._administration.installation.discard(fetched)
            raise InvalidArgument(f"model {name!r} can't be read: {error}") from error
        except BaseException:
            await self._administration.installation.discard(fetched)
            raise

    async def _archive(self, name: str, fetched: Fetched, config_text: str | None) -> None:
        requested = Requested(model_name=name, initial_workers=max(self._gpus, 1))
        archive = await self._administration.installation.opened(fetched, requested)
        if fetched.folder is not None and archive.owned:
            await self._administration.installation.discard(fetched)  # what was unpacked is enough
        unpacked = Fetched(archive.dir, fetched.url, archive.owned, archive.dir if archive.owned else None)
        if not archive.handler and await asyncio.to_thread(layout.is_model, archive.dir):
            await self._copy(name, unpacked, config_text)
        elif config_text is not None:
            await self._administration.installation.discard(unpacked)
            raise _unused(fetched.url)
        else:
            await self._administration.replace(fetched, archive, requested)


def _unused(what: str) -> InvalidArgument:
    return InvalidArgument(f"load parameter 'config': {what} is an archive, which has its own settings")


ALL = "*"
#: Why a model isn't there that a call has unloaded.
UNLOADED = "unloaded"


class ControlRefused(ServeError):
    """The control mode doesn't let clients load and unload."""

    code, http_status, type_name = Code.FAILED_PRECONDITION, 400, "BadRequestException"

    def __init__(self, verb: str) -> None:
        super().__init__(
            f"explicit model {verb} is not allowed: start the server with --model-control-mode explicit for it"
        )


class FilesRefused(ServeError):
    """A client may choose among the operator's models, but not bring code of its own."""

    code, http_status, type_name = Code.FAILED_PRECONDITION, 400, "BadRequestException"

    def __init__(self) -> None:
        super().__init__(
            "load parameter 'file:' is not allowed: start the server with --model-control-mode explicit for it, or use "
            "model_path"
        )


@dataclass(slots=True)
class _Known:
    """A model of a repository that was to be loaded: what of it was read, and why it isn't served."""

    stamp: object = None
    reason: str = ""
    versions: tuple[str, ...] = ("",)


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A line of the index. `state`: READY, UNAVAILABLE, or "" for what was never loaded. `version`: "" when none was
    found."""

    name: str
    version: str
    state: str
    reason: str


class Repository:
    """`mode`: none (all models, at start), poll (and as the files change, every `poll_s`), explicit (those named, and
    by calls). Without directories it serves calls for archives of the model store. `urls`: directories in S3, each
    without a slash at its end; a model of theirs is downloaded when it is loaded."""

    def __init__(
        self,
        administration: ModelManager,
        directories: Sequence[Path],
        mode: str,
        poll_s: float,
        gpus: int,
        urls: Sequence[str] = (),
        *,
        loads_at_once_max: int = 4,
    ) -> None:
        self._administration = administration
        self._directories, self._urls = directories, urls
        self._mode = mode if directories or urls else "explicit"
        self._takes_files = mode == "explicit"
        self._poll_s = poll_s
        self._loads_at_once_max = loads_at_once_max
        self._loading = Loading(administration, gpus)
        self._known: dict[str, _Known] = {}
        self._busy: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def start(self, wanted: Sequence[str]) -> list[str]:
        """Loads what is to be there from the start (`wanted`: in explicit mode); a sentence for what couldn't be."""
        names = list(wanted) if self._mode == "explicit" and ALL not in wanted else await self._names()
        said = await side_by_side([self._start(name) for name in names], self._loads_at_once_max)
        return [failure for failure in said if failure]

    async def _start(self, name: str) -> str:
        """Loads it; why it couldn't be, or "". One model's mistake is no other's."""
        try:
            url = None if self._is_here(name) else await self._url_of(name)
            work = self._load(name) if url is None else self._load_remote(name, url, None)
            await self._one_at_a_time(name, work)
        except ServeError as error:
            failure = f"Failed to load model: {name}: {error.message}"
            log.error("%s", failure)
        except Exception as error:
            failure = f"Failed to load model: {name}: {type(error).__name__}: {error}"
            self._known.setdefault(name, _Known()).reason = failure
            log.exception("%s", failure)
        else:
            return ""
        return failure

    async def watch(self) -> None:
        """In poll mode: follows the files, until cancelled. What can't be read now is looked at again the next time."""
        while self._mode == "poll":
            await asyncio.sleep(self._poll_s)
            try:
                await self._follow()
            except (OSError, ServeError) as error:
                log.error("The model repositories can't be read: %s", error)

    async def _follow(self) -> None:
        names = set(await self._names())
        for name in [name for name in self._known if name not in names]:
            log.info("Model %s is gone from its repository", name)
            with contextlib.suppress(ModelNotFound):
                await self._unload(name)
        await side_by_side([self._follow_one(name) for name in sorted(names)], self._loads_at_once_max)

    async def _follow_one(self, name: str) -> None:
        """One model's mistake must not keep the others from being followed."""
        known = self._known.get(name, _Known())
        before = known.reason
        if known.stamp is not None and known.stamp == await self._stamp(name):
            return
        try:
            await self._one_at_a_time(name, self._load(name))
        except ServeError as error:
            if error.message != before:
                log.error("Model %s could not be loaded: %s", name, error.message)
        except Exception:
            log.exception("Model %s could not be loaded", name)

    async def _stamp(self, name: str) -> object:
        """What changes with the model's files; None when it can't be told."""
        try:
            return await asyncio.to_thread(layout.stamp, layout.find(self._directories, name))
        except (ServeError, OSError):
            return None

    async def _names(self) -> list[str]:
        found = [await asyncio.to_thread(layout.names, path) for path in self._directories]
        found += [await self._administration.installation.folders(url) for url in self._urls]
        return sorted({name for names in found for name in names})

    # --- calls

    async def load(
        self,
        name: str,
        config_text: str | None = None,
        url: str | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Loads or reloads a model, and returns when it is ready: of a repository, or an archive of the model store, or
        what is at `url` (a path or an allowed URL): an archive, or a model's directory; or `files`, by their paths in
        the model's directory. The old one serves until the new one can, and goes on if that fails. Raises
        ServeError."""
        self._check("load")
        if files is not None:
            if not self._takes_files:
                raise FilesRefused
            work = self._loading.files(name, config_text, files)
        elif url is not None:
            work = self._loading.elsewhere(name, url, config_text)
        elif self._is_here(name):
            work = self._load(name, config_text)
        elif (remote := await self._url_of(name)) is not None:
            work = self._load_remote(name, remote, config_text)
        elif paths := [
            one.path for one in await self._administration.installation.mlserver_models() if one.name == name
        ]:
            work = self._loading.mlservers(name, paths, config_text)
        else:
            work = self._loading.elsewhere(name, self._archive_of(name), config_text)
        await self._administration.tasks.load(self._one_at_a_time(name, work))

    async def unload(self, name: str) -> None:
        """Takes all versions out; returns at once, what they accepted is answered. A model that could be loaded and
        isn't there need not be taken out. ModelNotFound for any other."""
        self._check("unload")
        here = self._is_here(name)
        try:
            await self._administration.tasks.detached(self._unload(name, remembered=here))
        except ModelNotFound:
            if not here:
                raise

    def _check(self, verb: str) -> None:
        if self._mode != "explicit":
            raise ControlRefused(verb)
        self._administration.check_model_api()

    def _is_here(self, name: str) -> bool:
        try:
            layout.find(self._directories, name)
            return True
        except ModelNotFound:
            return False

    async def _url_of(self, name: str) -> str | None:
        """Where the model lies in S3, None when it doesn't. InvalidArgument when several repositories have it."""
        names = [(url, await self._administration.installation.folders(url)) for url in self._urls]
        found = [f"{url}/{name}" for url, there in names if name in there]
        if len(found) > 1:
            raise InvalidArgument(f"model {name!r} is in several repositories: {', '.join(found)}")
        return found[0] if found else None

    def _archive_of(self, name: str) -> str:
        """The archive of the model store with the model's name. ModelNotFound."""
        for archive in self._administration.installation.archives():
            if name in (archive, archive.removesuffix(".mar"), archive.removesuffix(".tar.gz")):
                return archive
        raise ModelNotFound(name)

    async def index(self, only_ready: bool) -> list[IndexEntry]:
        """Every version that is or should be served, and the models that were never loaded."""
        names: list[str] = []
        if not only_ready:
            with contextlib.suppress(OSError, ServeError):  # a directory that is away just now
                names = await self._names()
        registry, found = self._administration.registry, []
        for model in registry:
            if model.workflow:
                continue
            reason = "" if model.ready else self._known.get(model.name, _Known()).reason or _unready(model)
            found.append(IndexEntry(model.name, model.version, "READY" if model.ready else "UNAVAILABLE", reason))
        served = {model.name for model in registry}
        found += [
            IndexEntry(name, version, "UNAVAILABLE", known.reason)
            for name, known in self._known.items()
            if known.reason and name not in served
            for version in known.versions
        ]
        known_names = served | set(self._known)
        found += [IndexEntry(name, "", "", "") for name in names if name not in known_names]
        if not only_ready:
            known = {(model.name, model.version) for model in registry}
            found += [
                IndexEntry(one.name, one.version, "UNAVAILABLE", "it is not loaded")
                for one in await self._administration.installation.mlserver_models()
                if (one.name, one.version) not in known
            ]
        return sorted((one for one in found if one.state == "READY" or not only_ready), key=lambda one: one.name)

    # --- models of a repository

    async def _load(self, name: str, config_text: str | None = None) -> None:
        known = self._known.setdefault(name, _Known())
        try:
            path = layout.find(self._directories, name)
            known.stamp, directory = await asyncio.to_thread(_read, path, config_text)
            known.versions = tuple(map(str, directory.versions))
            await self._loading.directory(directory, Fetched(directory.path, str(directory.path), downloaded=False))
            known.reason = ""
        except ServeError as error:
            known.reason = error.message
            raise

    async def _load_remote(self, name: str, url: str, config_text: str | None) -> None:
        known = self._known.setdefault(name, _Known())
        try:
            await self._loading.elsewhere(name, f"{url}/", config_text)
            known.reason = ""
        except ServeError as error:
            known.reason = error.message
            raise

    async def _one_at_a_time(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            async with self._alone(name):
                await work
        finally:
            work.close()  # in case that its turn never came

    def _alone(self, name: str) -> asyncio.Lock:
        """Held while a model is loaded or unloaded; the others need not wait for it."""
        lock = self._busy.get(name)
        if lock is None:
            lock = self._busy[name] = asyncio.Lock()
        return lock

    async def _unload(self, name: str, remembered: bool = False) -> None:
        """Raises ModelNotFound when nothing of it is served. `remembered`: the index goes on listing it."""
        async with self._alone(name):
            self._known.pop(name, None)
            models = self._administration.registry.versions(name)
            for model in models:
                self._administration.tasks.background(self._administration.take_out(model))
            if remembered:
                self._known[name] = _Known(reason=UNLOADED, versions=tuple(model.version for model in models))


def _unready(model: Model) -> str:
    failure = model.pool.load_failure
    return "no worker is ready" if failure is None else failure.message


def _read(path: Path, config_text: str | None) -> tuple[object, ModelDirectory]:
    """Its stamp and what it is. InvalidArgument, also when files can't be read. Blocking."""
    try:
        return layout.stamp(path), layout.read(path, config_text)
    except OSError as error:
        raise InvalidArgument(f"model {path.name!r} can't be read: {error}") from error
