"""What of Triton's model repositories is served: at start, by calls, or as the files change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from ts_frontend.errors import Code, InvalidArgument, ModelNotFound, ServeError
from ts_frontend.models.administration import Administration
from ts_frontend.models.mlserver_model import Known
from ts_frontend.models.model import Model
from ts_frontend.models.settings import Requested
from ts_frontend.models.store import Fetched
from ts_frontend.repository import layout
from ts_frontend.repository.layout import ModelDirectory

log = logging.getLogger(__name__)

ALL = "*"


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


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the index. `state`: READY, UNAVAILABLE, or "" for what was never loaded."""

    name: str
    version: str
    state: str
    reason: str


class Repository:
    """`mode`: none (all models, at start), poll (and as the files change, every `poll_s`), explicit (those named, and
    by calls). Without directories it serves calls for archives of the model store."""

    def __init__(
        self, administration: Administration, directories: Sequence[Path], mode: str, poll_s: float, gpus: int
    ) -> None:
        self._administration = administration
        self._directories = directories
        self._mode = mode if directories else "explicit"
        self._takes_files = mode == "explicit"
        self._poll_s = poll_s
        self._gpus = gpus
        self._known: dict[str, _Known] = {}
        self._busy: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def start(self, wanted: Sequence[str]) -> list[str]:
        """Loads what is to be there from the start (`wanted`: in explicit mode); a sentence for what couldn't be."""
        names = list(wanted) if self._mode == "explicit" and ALL not in wanted else await self._names()
        failures = []
        for name in names:
            try:
                await self._load(name)
            except ServeError as error:
                failures.append(f"Failed to load model: {name}: {error.message}")
                log.error("%s", failures[-1])
        return failures

    async def watch(self) -> None:
        """In poll mode: follows the files, until cancelled. What can't be read now is looked at again the next time."""
        while self._mode == "poll":
            await asyncio.sleep(self._poll_s)
            try:
                await self._follow()
            except OSError as error:
                log.error("The model repositories can't be read: %s", error)

    async def _follow(self) -> None:
        names = set(await self._names())
        for name in [name for name in self._known if name not in names]:
            log.info("Model %s is gone from its repository", name)
            with contextlib.suppress(ModelNotFound):
                await self._unload(name)
        for name in sorted(names):
            known = self._known.get(name, _Known())
            before = known.reason
            if known.stamp is not None and known.stamp == await self._stamp(name):
                continue
            try:
                await self._load(name)
            except ServeError as error:
                if error.message != before:
                    log.error("Model %s could not be loaded: %s", name, error.message)

    async def _stamp(self, name: str) -> object:
        """What changes with the model's files; None when it can't be told."""
        try:
            return await asyncio.to_thread(layout.stamp, layout.find(self._directories, name))
        except (ServeError, OSError):
            return None

    async def _names(self) -> list[str]:
        found = [await asyncio.to_thread(layout.names, path) for path in self._directories]
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
            await self._administration.detached(self._load_files(name, config_text, files))
        elif url is not None:
            await self._administration.detached(self._load_from(name, url, config_text))
        elif self._is_here(name):
            await self._administration.detached(self._load(name, config_text))
        elif known := [one for one in await self._administration.mlserver_models() if one.name == name]:
            await self._administration.detached(self._load_mlservers(name, known, config_text))
        else:
            await self._administration.detached(self._load_from(name, self._archive_of(name), config_text))

    async def unload(self, name: str) -> None:
        """Takes all versions out; returns at once, what they accepted is answered."""
        self._check("unload")
        await self._administration.detached(self._unload(name))

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

    def _archive_of(self, name: str) -> str:
        """The archive of the model store with the model's name. ModelNotFound."""
        for archive in self._administration.archives():
            if name in (archive, archive.removesuffix(".mar"), archive.removesuffix(".tar.gz")):
                return archive
        raise ModelNotFound(name)

    async def index(self, only_ready: bool) -> list[Entry]:
        """Every version that is or should be served, and the models that were never loaded."""
        names: list[str] = []
        if not only_ready:
            with contextlib.suppress(OSError):  # a directory that is away just now
                names = await self._names()
        registry, found = self._administration.registry, []
        for model in registry:
            if model.workflow:
                continue
            reason = "" if model.ready else self._known.get(model.name, _Known()).reason or "no worker is ready"
            found.append(Entry(model.name, model.version, "READY" if model.ready else "UNAVAILABLE", reason))
        served = {model.name for model in registry}
        found += [
            Entry(name, "", "UNAVAILABLE", known.reason)
            for name, known in self._known.items()
            if known.reason and name not in served
        ]
        known_names = served | set(self._known)
        found += [Entry(name, "", "", "") for name in names if name not in known_names]
        if not only_ready:
            known = {(model.name, model.version) for model in registry}
            found += [
                Entry(one.name, one.version, "UNAVAILABLE", "it is not loaded")
                for one in await self._administration.mlserver_models()
                if (one.name, one.version) not in known
            ]
        return sorted((one for one in found if one.state == "READY" or not only_ready), key=lambda one: one.name)

    # --- models of a repository

    async def _load(self, name: str, config_text: str | None = None) -> None:
        async with self._alone(name):
            known = self._known.setdefault(name, _Known())
            try:
                path = layout.find(self._directories, name)
                known.stamp, directory = await asyncio.to_thread(_read, path, config_text)
                await self._serve(directory, Fetched(directory.path, str(directory.path), downloaded=False))
                known.reason = ""
            except ServeError as error:
                known.reason = error.message
                raise

    def _alone(self, name: str) -> asyncio.Lock:
        """Held while a model is loaded or unloaded; the others need not wait for it."""
        lock = self._busy.get(name)
        if lock is None:
            lock = self._busy[name] = asyncio.Lock()
        return lock

    async def _serve(self, directory: ModelDirectory, fetched: Fetched) -> None:
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
        for model in registry.versions(directory.name):
            if model not in started:
                self._administration.background(self._administration.take_out(model))

    async def _unload(self, name: str) -> None:
        """Raises ModelNotFound when nothing of it is served."""
        async with self._alone(name):
            self._known.pop(name, None)
            for model in self._administration.registry.versions(name):
                self._administration.background(self._administration.take_out(model))

    # --- archives and directories from elsewhere

    async def _load_from(self, name: str, url: str, config_text: str | None) -> None:
        async with self._alone(name):
            await self._serve_fetched(name, await self._administration.fetch_apart(url), config_text)

    async def _load_files(self, name: str, config_text: str | None, files: Mapping[str, bytes]) -> None:
        async with self._alone(name):
            fetched = await self._administration.made_apart(name, partial(layout.write, files))
            await self._serve_directory(name, fetched, config_text)

    async def _serve_fetched(self, name: str, fetched: Fetched, config_text: str | None) -> None:
        """Serves a directory in Triton's layout as one of a repository, everything else as an archive, which may hold
        such a directory. A failure removes what was fetched."""
        if await asyncio.to_thread(layout.is_model, fetched.path):
            await self._serve_directory(name, fetched, config_text)
            return
        try:
            await self._serve_archive(name, fetched, config_text)
        except BaseException:
            await self._administration.discard(fetched)
            raise

    async def _serve_directory(self, name: str, fetched: Fetched, config_text: str | None) -> None:
        """The same for a directory in Triton's layout."""
        try:
            _, directory = await asyncio.to_thread(_read, fetched.path, config_text, name)
            await self._serve(directory, fetched)
        except BaseException:
            await self._administration.discard(fetched)
            raise

    async def _serve_archive(self, name: str, fetched: Fetched, config_text: str | None) -> None:
        requested = Requested(model_name=name, initial_workers=max(self._gpus, 1))
        archive = await self._administration.opened(fetched, requested)
        if fetched.folder is not None and archive.owned:
            await self._administration.discard(fetched)  # what was unpacked is enough
        unpacked = Fetched(archive.dir, fetched.url, archive.owned, archive.dir if archive.owned else None)
        if not archive.handler and await asyncio.to_thread(layout.is_model, archive.dir):
            await self._serve_fetched(name, unpacked, config_text)
        elif config_text is not None:
            await self._administration.discard(unpacked)
            raise InvalidArgument(f"load parameter 'config': {fetched.url} is an archive, which has its own settings")
        else:
            await self._administration.replace(fetched, archive, requested)

    async def _load_mlservers(self, name: str, known: Sequence[Known], config_text: str | None) -> None:
        """All versions of a model of MLServer's, and no others; what was there before goes on where one can't be
        started."""
        async with self._alone(name):
            for one in known:
                await self._serve_fetched(name, await self._administration.fetch_apart(one.path), config_text)
            for model in self._administration.registry.versions(name):
                if model.version not in {one.version for one in known}:
                    self._administration.background(self._administration.take_out(model))


def _read(path: Path, config_text: str | None, name: str = "") -> tuple[object, ModelDirectory]:
    """Its stamp and what it is. InvalidArgument, also when files can't be read. Blocking."""
    try:
        return layout.stamp(path), layout.read(path, config_text, name)
    except OSError as error:
        raise InvalidArgument(f"model {path.name!r} can't be read: {error}") from error
