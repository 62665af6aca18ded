"""What is loaded when the server starts: the models that were named, then those of the snapshot."""

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
from ts_frontend.models.persistence import restore
from ts_frontend.models.settings import Requested
from ts_frontend.models.snapshot import Snapshot
from ts_frontend.models.store import Store

log = logging.getLogger(__name__)


async def load_at_startup(
    config: ServerConfig,
    administration: Administration,
    store: Store,
    restore_workflows: Callable[[Snapshot], Awaitable[None]],
    gpus: int,
    progress: Callable[[str], None],
) -> list[str]:
    """Registers everything; workers start in the background. A named model that can't be loaded is logged, as in
    TorchServe, and told in the result; one of the snapshot that can't be raises RestoreFailed. `progress` is told what
    is being done."""
    workers = config.default_workers_per_model or gpus or os.cpu_count() or 1
    failures: list[str] = []
    lines: list[ProgramLine | str] = [*config.program.lines, *_entries(config, store)]
    for line in lines:
        entry = str(line)
        progress(f"loading {entry}")
        try:
            if isinstance(line, ProgramLine):
                await _load_program(line, workers, administration)
            else:
                await _load(line, workers, administration, store, one=config.model_dir is not None)
        except ServeError as error:
            failures.append(f"Failed to load model: {entry}: {error.message}")
            log.error("%s", failures[-1])
    if config.snapshot is not None:
        progress("loading the models of the last run")
        await restore_workflows(config.snapshot)
        await restore(config.snapshot, administration, store)
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


def _entries(config: ServerConfig, store: Store) -> list[str]:
    entries: list[str] = []
    for word in config.load_models:
        entries += store.names() if word.lower() == "all" else [word]
    return entries


async def _load(entry: str, workers: int, administration: Administration, store: Store, *, one: bool) -> None:
    """`one`: the store is, or has, the one model that is meant."""
    name, separator, url = entry.partition("=")
    if not separator or "/" in name or ":" in name:
        name, url = "", entry
    url = _archive(url, store)
    if one and url not in store.names():
        name, url = name or entry, store.only()
    for given in [name] if name else await administration.installation.names_in(url) or [""]:
        requested = Requested(model_name=given or None, initial_workers=workers)
        await administration.add(url, requested, loaded_at_startup=True)


async def _load_program(line: ProgramLine, workers: int, administration: Administration) -> None:
    found = await asyncio.to_thread(archive.open_program, Path(line.words[0]), line.words[1:], Path.cwd())
    await administration.add_program(found, line.words[0], workers)


def _archive(url: str, store: Store) -> str:
    """The name of an archive, which may be given without its ending."""
    names = store.names() if "/" not in url else []
    return f"{url}.mar" if url not in names and f"{url}.mar" in names else url
