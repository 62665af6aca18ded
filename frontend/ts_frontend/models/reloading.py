"""Hot reload for `torchserve dev`: the model is loaded again when its files are saved."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ts_frontend.errors import ServeError
from ts_frontend.models.archive import CONFIG_FILE, WEIGHTS
from ts_frontend.models.manager import ModelManager
from ts_frontend.models.model import Model
from ts_frontend.models.settings import Requested
from ts_frontend.models.startup import load_written, open_written, packed
from ts_frontend.workers.failures import StartFailed

log = logging.getLogger(__name__)

#: Seconds between two scans; in a large folder a multiple of the time that one scan takes.
LOOK_S, SHARE = 0.1, 10
FILES_MAX = 5000
DEPTH_MAX = 8
#: Watched files: Python, the configuration, weights. The handler may write other files itself.
WATCHED = frozenset({".py", ".yaml", ".yml"}) | WEIGHTS
MANIFEST = "MANIFEST.json"
UNWATCHED = frozenset({"__pycache__", "node_modules", "venv", "site-packages", "logs"})

#: Files with their times and sizes.
Seen = Mapping[str, tuple[int, int]]


def look(path: Path) -> Seen:
    """The watched files of a folder, or the one file. Blocking."""
    if path.is_file():
        return dict(_known([str(path)]))
    found: list[str] = []
    for folder, folders, files in os.walk(path):
        depth = len(Path(folder).relative_to(path).parts)
        folders[:] = sorted(one for one in folders if _looked_into(one) and depth < DEPTH_MAX)
        found += [os.path.join(folder, one) for one in files if Path(one).suffix in WATCHED or one == MANIFEST]
        if len(found) > FILES_MAX:
            break
    return dict(_known(found[:FILES_MAX]))


def _looked_into(folder: str) -> bool:
    return not folder.startswith(".") and folder not in UNWATCHED


def _known(paths: Iterable[str]) -> Iterable[tuple[str, tuple[int, int]]]:
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:  # deleted and written again by an editor that saves
            continue
        yield path, (found.st_mtime_ns, found.st_size)


def changes(before: Seen, now: Seen) -> list[str]:
    return sorted(path for path in {*before, *now} if before.get(path) != now.get(path))


class Reloading:
    """Reloads the model at `path` after a save. `addresses`: the server's, by name; `console`: it has one."""

    def __init__(
        self, manager: ModelManager, path: Path, addresses: Callable[[], Mapping[str, str]], *, console: bool
    ) -> None:
        self._manager, self._path, self._addresses, self._console = manager, path, addresses, console

    def _place(self) -> Path:
        path = self._path
        return path.parent if path.is_file() and path.suffix == ".py" else path

    async def watch(self) -> None:
        place = self._place()
        seen = await asyncio.to_thread(look, place)
        self._tell_where()
        pause_s = LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            begun_s = time.monotonic()
            now = await asyncio.to_thread(look, place)
            pause_s = max(LOOK_S, SHARE * (time.monotonic() - begun_s))
            if now == seen:
                continue
            while (later := await asyncio.to_thread(look, place)) != now:  # an editor is still writing
                now = later
                await asyncio.sleep(LOOK_S)
            changed, seen = changes(seen, now), now
            await self._saved(changed)

    def _names(self) -> str:
        return ", ".join(f"{model.name} {model.version}" for model in self._manager.registry)

    def _tell_where(self) -> None:
        addresses, model = self._addresses(), next(iter(self._manager.registry), None)
        if self._console and "http_management" in addresses:
            log.info("console and playground: %s/", addresses["http_management"])
        if model is None:
            log.info("%s is not served yet: it is loaded when its files are saved. Ctrl-C ends it.", self._path)
            return
        if "http_inference" in addresses:
            log.info("try it: curl -T FILE %s/predictions/%s", addresses["http_inference"], model.name)
        log.info("%s is served as %s and reloaded when its files are saved. Ctrl-C ends it.", self._path, self._names())

    async def _saved(self, changed: list[str]) -> None:
        names, begun_s = self._named(changed), time.monotonic()
        try:
            how = await self._served_anew(changed)
        except StartFailed as error:
            log.error("%s saved: the model can't be loaded: %s", names, error.cause)
        except ServeError as error:
            log.error("%s saved: the model can't be served: %s", names, error.message)
        else:
            log.info("%s saved: reloaded after %.2f s, %s.", names, time.monotonic() - begun_s, how)

    def _named(self, changed: list[str]) -> str:
        names = ", ".join(os.path.relpath(path, self._place().parent) for path in changed[:3])
        return names + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")

    async def _served_anew(self, changed: list[str]) -> str:
        models = [model for model in self._manager.registry if not model.workflow]
        if not models:
            return await self._served_first()
        opened = [path for path in changed if Path(path).name in (CONFIG_FILE, MANIFEST)]
        if packed(self._path) or opened:
            await self._opened_anew(models)
            return "with the model opened again"
        weights = [path for path in changed if Path(path).suffix in WEIGHTS]
        anew = f"{Path(weights[0]).name} has changed" if weights else ""
        reasons = [await model.pool.reload(anew) for model in models]
        reason = next(filter(None, reasons), "")
        return f"and loaded again: {reason}" if reason else "with the weights that were loaded"

    async def _served_first(self) -> str:
        model = await self._manager.add(await load_written(self._path, self._manager, Requested()))
        await self._manager.start_workers(model)
        return f"and served as {self._names()}"

    async def _opened_anew(self, models: list[Model]) -> None:
        """Serves the archive in place of the previous one, which stays if the new one can't be loaded."""
        loader = self._manager.loader
        for model in models:
            archive = await open_written(self._path, loader)
            await self._manager.start_and_replace(loader.fetched(model), archive, model.requested)
