"""Serving a model in the place of what has its name: from a repository, from elsewhere, or as it came with a request.

What is there goes on until the new one is ready, and for good when that fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from ts_frontend.errors import InvalidArgument
from ts_frontend.models.administration import Administration
from ts_frontend.models.model import Model
from ts_frontend.models.settings import Requested
from ts_frontend.models.store import Fetched
from ts_frontend.repository import layout
from ts_frontend.repository.layout import ModelDirectory


class Loading:
    """One load at a time of each name. `config_text` stands for a directory's config.pbtxt. All raise ServeError."""

    def __init__(self, administration: Administration, gpus: int) -> None:
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
