"""Loading models with their environments from fetched archives, and removing them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ts_frontend.errors import InvalidArchive, ServeError
from ts_frontend.models.archive import Archive
from ts_frontend.models.environments import Environment, Environments
from ts_frontend.models.extraction import ExtractLimits
from ts_frontend.models.factory import ModelFactory
from ts_frontend.models.formats.formats import Formats
from ts_frontend.models.model import Model
from ts_frontend.models.settings import ModelSettings, Requested, model_name_for
from ts_frontend.models.store.http import in_thread
from ts_frontend.models.store.store import Fetched, ModelStore
from ts_frontend.tasks import undone_on_failure
from ts_frontend.workers.supervisor import Supervisor

log = logging.getLogger(__name__)

_DIGEST_BYTES = 32

Resolve = Callable[[Requested, Archive, str, str], ModelSettings]


class ModelLoader:
    """Makes models of archives, and removes them with their files and environments. `store`: their source."""

    def __init__(
        self,
        store: ModelStore,
        formats: Formats,
        factory: ModelFactory,
        supervisor: Supervisor,
        resolve: Resolve,
        environments: Environments,
        *,
        work_dir: Path,
        extract_limits: ExtractLimits,
    ) -> None:
        self.store = store
        self.formats = formats
        self._factory = factory
        self._supervisor = supervisor
        self._resolve = resolve
        self._environments = environments
        self._work_dir = work_dir
        self._extract_limits = extract_limits
        self._fetched: dict[Model, Fetched] = {}
        self._environment_of: dict[Model, Environment] = {}

    # --- archives

    async def open(self, fetched: Fetched, requested: Requested) -> Archive:
        """Opens a fetched archive, of which only the outline is unpacked until `build`. One without a name that serves
        a single model gets the model's name. Raises ServeError."""
        place = fetched.path, self._work_dir, self._extract_limits
        name, hub = requested.model_name or "", fetched.hub
        opening = partial(self.formats.open, *place, outline=True, pin=fetched.pin, name=name, hub=hub)
        async with undone_on_failure() as undo:
            archive = await in_thread(opening, Archive.remove)
            undo.push_async_callback(asyncio.to_thread, archive.remove)
            if requested.model_name:
                return archive
            found = await self.each_model(archive)
            if len(found) > 1:
                raise InvalidArchive(
                    f"{archive.dir / (archive.handler or '')} serves {', '.join(str(one.name) for one in found)}: "
                    "choose one (model_name, or NAME=URL)"
                )
            return found[0]

    async def each_model(self, archive: Archive) -> list[Archive]:
        """The archive under each of its models' names if it has several and no name; else itself. Raises ServeError."""
        return await self.formats.running(archive.adapter).named(archive)

    async def each_model_at(self, url: str) -> list[Archive]:
        """The same for an entry of the store whose files may serve several models and are used where they lie, given by
        its path in the store. [] for any other, and for a URL."""
        if "://" in url:
            return []
        fetched = await self.store.fetch(url, named=True)
        found = await asyncio.to_thread(self.formats.of, fetched.path)
        if not found.several:
            return []
        return await self.each_model(await asyncio.to_thread(self.formats.open, fetched.path, self._work_dir))

    async def unpack(self, archive: Archive) -> None:
        """Has all files of an archive there. Raises ServeError."""
        if archive.packed is not None:
            await in_thread(archive.packed.unpack, lambda nothing: None)

    async def discard(self, fetched: Fetched) -> None:
        await asyncio.to_thread(self.store.discard, fetched)

    # --- models

    async def build(
        self,
        fetched: Fetched,
        requested: Requested,
        archive: Archive | None = None,
        *,
        loaded_at_startup: bool,
        check_free: Callable[[str, str], None] | None = None,
    ) -> Model:
        """Makes a model, with its environment, of a fetched archive, which `archive` has if it is open already. No
        worker is started yet. A failure removes everything but what was fetched. `check_free` raises ServeError for a
        name and version that are taken.

        The files of a model on demand are not there before its first worker starts; those of others stay, without the
        copy of their archive that lies outside the store. Raises ServeError.
        """
        async with undone_on_failure() as undo:
            if archive is None:
                archive = await self.open(fetched, requested)
            undo.push_async_callback(asyncio.to_thread, archive.remove)
            name, packed = model_name_for(requested, archive.name, archive.version, fetched.path), archive.packed
            if check_free is not None:
                check_free(name, archive.version)
            archive = self.formats.running(archive.adapter).prepared(archive)
            settings = self._resolve(requested, archive, name, archive.version)
            if settings.demand is None or self._environments.wanted(archive, settings.use_venv):
                await self.unpack(archive)
            with_torch = await asyncio.to_thread(self._factory.may_need_torch, archive, settings)
            environment = Environment()  # in a cluster Ray makes one on each node
            if settings.cluster is None:
                environment = await self._environments.of(name, archive, settings.use_venv)
            undo.push_async_callback(self._environments.release, environment)
            model = self._factory.model(
                name,
                archive.version,
                fetched.url,
                archive,
                settings,
                requested,
                python=environment.python,
                with_torch=with_torch,
                loaded_at_startup=loaded_at_startup,
                content=await self._content(fetched, archive, settings),
                by_dialect=self.formats.running(archive.adapter).by_dialect,
            )
            self._environment_of[model], self._fetched[model] = environment, fetched
            undo.pop_all()
            undo.push_async_callback(self.remove, model)
            if archive.completed is not None or model.cache is not None:
                model.pool.on_ready = partial(self._ready, model)
            if packed is not None and settings.demand is not None:
                await asyncio.to_thread(packed.put_away)
            elif packed is not None and fetched.folder is not None:
                await self.discard(fetched)
            return model

    async def _content(self, fetched: Fetched, archive: Archive, settings: ModelSettings) -> bytes:
        """The digest of all that the model's answers depend on, b"" if they aren't kept for other servers."""
        if settings.cache is None or not self._factory.shares_answers:
            return b""
        said = (archive.config, archive.adapter, archive.adapter_settings, archive.handler_settings)
        return await asyncio.to_thread(_digest, fetched.path, repr((*said, settings.handler, settings.envelope)))

    def _ready(self, model: Model, info: Mapping[str, Any]) -> None:
        self._complete(model, info)
        model.settle_cache(info)

    def _complete(self, model: Model, info: Mapping[str, Any]) -> None:
        """Applies the configuration that a ready worker's handler has completed, from now on."""
        archive, found = model.archive, info.get("completed")
        if archive.completed is None or found is None:
            return
        try:
            archive = archive.completed(archive, found)
            settings = self._resolve(model.requested, archive, model.name, model.version)
        except ServeError as error:
            log.error("Model %s: %s", model, error.message)
            return
        self._factory.reschedule(model, settings)
        model.adopt(archive, settings)

    def fetched(self, model: Model) -> Fetched:
        return self._fetched[model]

    def set_fetched(self, model: Model, fetched: Fetched) -> None:
        """Sets the model's files from now on; a copy in the store is deleted with the model."""
        self._fetched[model] = fetched

    async def remove(self, model: Model) -> None:
        """Ends a model's workers and removes its files. A second call at the same time does nothing: the replacement
        of a model that is still starting and the start itself may both call this."""
        environment = self._environment_of.pop(model, None)
        if environment is None:
            return
        await self._supervisor.dismiss(model.pool, 0.0)
        model.forget_metrics()
        await asyncio.to_thread(model.archive.remove)
        await self._environments.release(environment)
        fetched = self._fetched.pop(model, None)
        if fetched is None:
            return
        heir = next((other for other, one in self._fetched.items() if one.path == fetched.path), None)
        if heir is None:
            await asyncio.to_thread(self.store.discard, fetched)
        elif fetched.downloaded:  # the last model that uses it removes it
            self._fetched[heir] = replace(self._fetched[heir], downloaded=True)

    async def close(self, model: Model, drain_s: float) -> None:
        """Ends a model's workers with the server, and removes the unpacked files; downloads stay."""
        await self._supervisor.dismiss(model.pool, drain_s)
        await asyncio.to_thread(model.archive.remove)


def _digest(path: Path, said: str) -> bytes:
    """The SHA-256 of a file, or of a folder's files with their names, and of a text."""
    found = hashlib.sha256(said.encode("utf-8", "surrogatepass"))
    try:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                with file.open("rb") as data:
                    own = hashlib.file_digest(data, "sha256").digest()
                name = str(file.relative_to(path)).encode("utf-8", "surrogateescape")
                found.update(hashlib.sha256(name).digest() + own)
    except OSError as error:
        log.warning("%s can't be read, so that other servers don't share the answers of this load: %s", path, error)
        return os.urandom(_DIGEST_BYTES)
    return found.digest()
