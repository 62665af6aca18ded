"""What is loaded when the server starts: the models that were named, then those of the snapshot."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable

from ts_frontend.config import ServerConfig
from ts_frontend.errors import ServeError
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
    for entry in _entries(config, store):
        progress(f"loading {entry}")
        try:
            await _load(entry, workers, administration, store)
        except ServeError as error:
            failures.append(f"Failed to load model: {entry}: {error.message}")
            log.error("%s", failures[-1])
    if config.snapshot is not None:
        progress("loading the models of the last run")
        await restore_workflows(config.snapshot)
        await restore(config.snapshot, administration, store)
    for model in administration.registry:
        administration.background(administration.start_workers(model))
    return failures


def _entries(config: ServerConfig, store: Store) -> list[str]:
    entries: list[str] = []
    for word in config.load_models:
        entries += store.names() if word.lower() == "all" else [word]
    return entries


async def _load(entry: str, workers: int, administration: Administration, store: Store) -> None:
    name, separator, url = entry.partition("=")
    if not separator or "/" in name or ":" in name:
        name, url = "", entry
    requested = Requested(model_name=name or None, initial_workers=workers)
    await administration.add(_archive(url, store), requested, loaded_at_startup=True)


def _archive(url: str, store: Store) -> str:
    """The name of an archive, which may be given without its ending."""
    names = store.names() if "/" not in url else []
    return f"{url}.mar" if url not in names and f"{url}.mar" in names else url
