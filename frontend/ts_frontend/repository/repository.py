"""What of Triton's model repositories is served: at start, by calls, or as the files change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ts_frontend.errors import Code, ModelNotFound, ServeError
from ts_frontend.models.administration import Administration
from ts_frontend.models.archive import Archive
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
        self._poll_s = poll_s
        self._gpus = gpus
        self._known: dict[str, _Known] = {}
        self._busy = asyncio.Lock()

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
        """In poll mode: follows the files, until cancelled."""
        while self._mode == "poll":
            await asyncio.sleep(self._poll_s)
            await self._follow()

    async def _follow(self) -> None:
        names = set(await self._names())
        for name in [name for name in self._known if name not in names]:
            log.info("Model %s is gone from its repository", name)
            await self._unload(name)
        for name in sorted(names):
            path = layout.find(self._directories, name)
            stamp = await asyncio.to_thread(layout.stamp, path)
            known = self._known.get(name)
            if known is None or known.stamp != stamp:
                try:
                    await self._load(name)
                except ServeError as error:
                    log.error("Model %s could not be loaded: %s", name, error.message)

    async def _names(self) -> list[str]:
        found = [await asyncio.to_thread(layout.names, path) for path in self._directories]
        return sorted({name for names in found for name in names})

    # --- calls

    async def load(self, name: str, config_text: str | None = None, url: str | None = None) -> None:
        """Loads or reloads a model, and returns when it is ready: of a repository, or an archive of the model store, or
        one from `url` (a path or an allowed URL). The old one serves until the new one can, and goes on if that fails.
        Raises ServeError."""
        self._check("load")
        if url is not None:
            await self._administration.detached(self._load_archive(name, url))
        elif self._is_here(name):
            await self._administration.detached(self._load(name, config_text))
        else:
            await self._administration.detached(self._load_archive(name, self._archive_of(name)))

    async def unload(self, name: str) -> None:
        """Takes all versions out; returns at once, what they accepted is answered."""
        self._check("unload")
        self._administration.registry.versions(name)
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

    def index(self, only_ready: bool) -> list[Entry]:
        """Every version that is or should be served, and the models that were never loaded."""
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
        for directory in self._directories:
            found += [Entry(name, "", "", "") for name in layout.names(directory) if name not in known_names]
        return sorted((one for one in found if one.state == "READY" or not only_ready), key=lambda one: one.name)

    # --- models of a repository

    async def _load(self, name: str, config_text: str | None = None) -> None:
        async with self._busy:
            known = self._known.setdefault(name, _Known())
            try:
                path = layout.find(self._directories, name)
                known.stamp = await asyncio.to_thread(layout.stamp, path)
                directory = await asyncio.to_thread(layout.read, path, config_text)
                await self._serve(directory)
                known.reason = ""
            except ServeError as error:
                known.reason = error.message
                raise

    async def _serve(self, directory: ModelDirectory) -> None:
        """The directory's versions, and no others; the highest is the default."""
        registry, started = self._administration.registry, []
        for version in directory.versions:
            archive = directory.archive(version, self._gpus)
            started.append(await self._place(directory.name, str(directory.path), archive))
        registry.set_default(directory.name, str(directory.versions[-1]))
        for model in registry.versions(directory.name):
            if model not in started:
                self._administration.background(self._administration.take_out(model))

    async def _place(self, name: str, url: str, archive: Archive) -> Model:
        fetched = Fetched(archive.dir, url, downloaded=False)
        return await self._administration.replace(fetched, archive, Requested(model_name=name))

    async def _unload(self, name: str) -> None:
        async with self._busy:
            self._known.pop(name, None)
            try:
                models = self._administration.registry.versions(name)
            except ModelNotFound:
                return
            for model in models:
                self._administration.background(self._administration.take_out(model))

    # --- archives

    async def _load_archive(self, name: str, url: str) -> None:
        async with self._busy:
            requested = Requested(model_name=name, initial_workers=max(self._gpus, 1))
            await self._administration.replace_by_url(url, requested)
