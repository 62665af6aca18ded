"""What stands behind each model: its archive, fetched and opened, its environment, its workers; gone when it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ts_frontend.config.foreign.mlserver import MLServerDefaults
from ts_frontend.errors import ServeError
from ts_frontend.models.archive import Archive, open_archive
from ts_frontend.models.environments import Environment, Environments
from ts_frontend.models.extraction import ExtractLimits
from ts_frontend.models.factory import ModelFactory
from ts_frontend.models.formats import mlserver as mlserver_model
from ts_frontend.models.formats.program import is_program
from ts_frontend.models.model import Model
from ts_frontend.models.programs import Programs
from ts_frontend.models.settings import ModelSettings, Requested, model_name_for
from ts_frontend.models.store.http import in_thread
from ts_frontend.models.store.store import Fetched, ModelStore
from ts_frontend.workers.supervisor import Supervisor

log = logging.getLogger(__name__)

Resolve = Callable[[Requested, Archive, str, str], ModelSettings]


class ModelLoader:
    """Makes models of archives, and removes what was made for them."""

    def __init__(
        self,
        store: ModelStore,
        launchpad: ModelFactory,
        supervisor: Supervisor,
        resolve: Resolve,
        environments: Environments,
        programs: Programs,
        *,
        work_dir: Path,
        extract_limits: ExtractLimits,
        mlserver: MLServerDefaults = MLServerDefaults(),  # noqa: B008 (frozen)
    ) -> None:
        self._store = store
        self._launchpad = launchpad
        self._supervisor = supervisor
        self._resolve = resolve
        self._environments = environments
        self._programs = programs
        self._work_dir = work_dir
        self._extract_limits = extract_limits
        self._mlserver = mlserver
        self._fetched: dict[Model, Fetched] = {}
        self._environment_of: dict[Model, Environment] = {}

    # --- archives

    def archives(self) -> list[str]:
        """What lies in the model store."""
        return self._store.names()

    async def mlserver_models(self) -> list[mlserver_model.Known]:
        """Those of the model store that MLServer would serve."""
        return await asyncio.to_thread(self._store.mlserver_models)

    async def fetch(self, url: str, *, signed: bool = False) -> Fetched:
        """The archive or directory at `url`, a name of the model store or an allowed URL. Raises ServeError."""
        return await self._store.fetch(url, signed=signed)

    async def fetch_apart(self, url: str) -> Fetched:
        """The same, as a copy outside of the store. Raises ServeError."""
        return await self._store.fetch_apart(url)

    async def folders(self, url: str) -> list[str]:
        """The names of the folders in one of S3. Raises ServeError."""
        return await self._store.folders(url)

    async def made_apart(self, url: str, fill: Callable[[Path], None]) -> Fetched:
        """A directory that `fill` fills, outside of the store. Raises ServeError."""
        try:
            return await self._store.made_apart(url, fill)
        except OSError as error:
            raise ServeError(f"The files of {url} could not be written: {error.strerror or error}") from error

    async def discard(self, fetched: Fetched) -> None:
        """Deletes the copy that was made of it, if one was."""
        await asyncio.to_thread(self._store.discard, fetched)

    async def opened(self, fetched: Fetched, requested: Requested) -> Archive:
        """The archive at hand; a program that nobody named has its own name."""
        opening = partial(open_archive, fetched.path, self._work_dir, self._extract_limits, self._mlserver)
        archive = await in_thread(opening, Archive.remove)
        try:
            return archive if requested.model_name else await self._programs.named(archive)
        except BaseException:
            await asyncio.to_thread(archive.remove)
            raise

    async def names_in(self, url: str) -> list[str]:
        """The models of a program of the store, by its path there: it is run for that. [] for everything else. Raises
        ServeError."""
        if "://" in url:
            return []
        fetched = await self._store.fetch(url)
        if not await asyncio.to_thread(is_program, fetched.path):
            return []
        return await self.names_of(await asyncio.to_thread(open_archive, fetched.path, self._work_dir))

    async def names_of(self, archive: Archive) -> list[str]:
        """The models of a program: it is run for that. [] where it names none. Raises ServeError."""
        return [*await self._programs.names(archive)]

    # --- models

    async def model(
        self, fetched: Fetched, archive: Archive, requested: Requested, *, loaded_at_startup: bool
    ) -> Model:
        """A model of what was opened; a failure removes what was unpacked. No worker is started yet."""
        try:
            model = await self._model(fetched, archive, requested, loaded_at_startup)
        except BaseException:
            await asyncio.to_thread(archive.remove)
            raise
        self._fetched[model] = fetched
        return model

    async def _model(self, fetched: Fetched, archive: Archive, requested: Requested, loaded_at_startup: bool) -> Model:
        name = model_name_for(requested, archive, fetched.path)
        archive = self._programs.completed(archive)
        settings = self._resolve(requested, archive, name, archive.version)
        environment = await self._environments.of(name, archive, settings.use_venv)
        try:
            model = self._launchpad.model(
                name,
                archive.version,
                fetched.url,
                archive,
                settings,
                requested,
                python=environment.python,
                loaded_at_startup=loaded_at_startup,
            )
        except BaseException:
            await self._environments.release(environment)
            raise
        self._environment_of[model] = environment
        if archive.completed is not None:
            model.pool.on_ready = partial(self._complete, model)
        return model

    def _complete(self, model: Model, info: Mapping[str, Any]) -> None:
        """A worker is ready: what its handler has added to the model's configuration counts from now on."""
        archive, found = model.archive, info.get("completed")
        if archive.completed is None or found is None:
            return
        try:
            archive = archive.completed(archive, found)
            settings = self._resolve(model.requested, archive, model.name, model.version)
        except ServeError as error:
            log.error("Model %s: %s", model, error.message)
            return
        self._launchpad.reschedule(model, settings)
        model.adopt(archive, settings)

    def fetched(self, model: Model) -> Fetched:
        """Where the model's archive lies."""
        return self._fetched[model]

    def own(self, model: Model, fetched: Fetched) -> None:
        """From now on the model's files are those: a copy in the store goes with it."""
        self._fetched[model] = fetched

    async def remove(self, model: Model) -> None:
        """Ends a model's workers and removes its files, unless somebody already does: who replaces a model that still
        starts, and who started it."""
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
            await asyncio.to_thread(self._store.discard, fetched)
        elif fetched.downloaded:  # whoever is the last to use it removes it
            self._fetched[heir] = replace(self._fetched[heir], downloaded=True)

    async def end(self, model: Model, drain_s: float) -> None:
        """Ends a model's workers with the server, and removes what was unpacked; what was downloaded stays."""
        await self._supervisor.dismiss(model.pool, drain_s)
        await asyncio.to_thread(model.archive.remove)
