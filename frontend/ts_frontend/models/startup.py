"""What is loaded when the server starts: the models that were named, then those of the snapshot.

Models are made ready side by side and registered in the order in which they were named: the first version of a name is
its default, and the first to have a name and version keeps it, however long each takes. One that can't be loaded stops
no other.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from ts_frontend.config import ServerConfig
from ts_frontend.config_kinds import ProgramLine
from ts_frontend.errors import ServeError
from ts_frontend.models import archive
from ts_frontend.models.administration import Administration
from ts_frontend.models.model import Model
from ts_frontend.models.persistence import restore
from ts_frontend.models.settings import Requested
from ts_frontend.models.snapshot import Snapshot
from ts_frontend.models.store import Fetched, Store
from ts_frontend.tasks import side_by_side

log = logging.getLogger(__name__)


async def load_at_startup(
    config: ServerConfig,
    administration: Administration,
    store: Store,
    restore_workflows: Callable[[Snapshot], Awaitable[list[str]]],
    gpus: int,
    progress: Callable[[str], None],
) -> list[str]:
    """Registers everything; workers start in the background. What can't be loaded is logged, as in TorchServe, and told
    in the result. `progress` is told what is being done. A caller who is cancelled ends all of it."""
    workers = config.default_workers_per_model or gpus or os.cpu_count() or 1
    loader = _Loader(config, administration, store, workers, progress)
    failures = await loader.load()
    if config.snapshot is not None:
        progress("loading the models of the last run")
        failures += await restore_workflows(config.snapshot)
        failures += await restore(config.snapshot, administration, store, config.loads_at_once_max)
    starts = [administration.start_workers(model) for model in administration.registry]
    if not config.exit_on_error:
        for start in starts:
            administration.tasks.background(start)
        return failures
    progress("starting the workers")
    ended = await asyncio.gather(*starts, return_exceptions=True)
    return [*failures, *(_message(one) for one in ended if isinstance(one, Exception))]


def _message(error: Exception) -> str:
    if not isinstance(error, ServeError):
        raise error
    return error.message


class _Loader:
    """The models that were named, by lines of `program` and `load_models`."""

    def __init__(
        self,
        config: ServerConfig,
        administration: Administration,
        store: Store,
        workers: int,
        progress: Callable[[str], None],
    ) -> None:
        self._config, self._administration, self._store = config, administration, store
        self._workers, self._progress = workers, progress
        self._made: list[Model] = []

    async def load(self) -> list[str]:
        """Registers them; a sentence for each that can't be."""
        lines: list[ProgramLine | str] = [*self._config.program.lines, *self._entries()]
        failures: list[str] = []
        try:
            made = await side_by_side([self._line(line) for line in lines], self._config.loads_at_once_max)
            for line, (models, failure) in zip(lines, made, strict=True):
                for model in models:
                    failure = await self._enter(line, model) or failure
                failures += [failure] if failure else []
        finally:
            for model in self._made:  # the start is given up: those that nobody will ask
                await self._administration.installation.remove(model)
        return failures

    def _entries(self) -> list[str]:
        entries: list[str] = []
        for word in self._config.load_models:
            entries += self._store.names() if word.lower() == "all" else [word]
        return entries

    async def _line(self, line: ProgramLine | str) -> tuple[list[Model], str]:
        """What was made of it, and why that isn't all, or ""."""
        self._progress(f"loading {line}")
        models: list[Model] = []
        try:
            if isinstance(line, ProgramLine):
                await self._program(line, models)
            else:
                await self._entry(line, models)
        except Exception as error:
            return models, said(f"Failed to load model: {line}", error)
        return models, ""

    async def _enter(self, line: ProgramLine | str, model: Model) -> str:
        self._made.remove(model)
        try:
            await self._administration.enter(model)
        except Exception as error:
            return said(f"Failed to load model: {line}", error)
        return ""

    async def _entry(self, entry: str, models: list[Model]) -> None:
        """Each of them has a copy of its own."""
        name, separator, url = entry.partition("=")
        if not separator or "/" in name or ":" in name:
            name, url = "", entry
        url = _archive(url, self._store)
        if self._config.model_dir is not None and url not in self._store.names():
            name, url = name or entry, self._store.only()  # the store is, or has, the one model that is meant
        installation = self._administration.installation
        for given in [name] if name else await installation.names_in(url) or [""]:
            fetched = await installation.fetch(url)
            made = self._administration.made(fetched, self._requested(given), loaded_at_startup=True)
            models.append(self._kept(await made))

    async def _program(self, line: ProgramLine, models: list[Model]) -> None:
        """All models of what lies outside the store: a program's own, or the one that an archive's folder names."""
        found = await asyncio.to_thread(archive.open_program, Path(line.words[0]), line.words[1:], Path.cwd())
        fetched = Fetched(found.dir, line.words[0], downloaded=False)
        for given in await self._administration.installation.names_of(found) or [""]:
            made = self._administration.made_of(fetched, found, self._requested(given), loaded_at_startup=True)
            models.append(self._kept(await made))

    def _requested(self, name: str) -> Requested:
        return Requested(model_name=name or None, initial_workers=self._workers)

    def _kept(self, model: Model) -> Model:
        self._made.append(model)
        return model


def said(what: str, error: Exception) -> str:
    """The sentence for what couldn't be loaded, which is logged; with a traceback when it is none of our errors."""
    ours = isinstance(error, ServeError)
    sentence = f"{what}: {error.message if isinstance(error, ServeError) else f'{type(error).__name__}: {error}'}"
    log.error("%s", sentence, exc_info=None if ours else error)
    return sentence


def _archive(url: str, store: Store) -> str:
    """The name of an archive, which may be given without its ending."""
    names = store.names() if "/" not in url else []
    return f"{url}.mar" if url not in names and f"{url}.mar" in names else url
