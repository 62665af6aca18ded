"""Loading models when the server starts: the named models, then those of the snapshot; and the one of `torchserve dev`
again when its files are saved.

Models are loaded concurrently and registered in the order in which they were named: the first version of a name is its
default, and the first model with a name and version keeps it. A model that can't be loaded doesn't stop the others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ts_frontend.config.kinds import ProgramLine
from ts_frontend.config.snapshot import Snapshot, SnapshotFiles, SnapshotKind, VersionState, WorkflowState
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import ServeError
from ts_frontend.models.archive import CONFIG_FILE, GGUF, WEIGHTS, Archive, is_gguf
from ts_frontend.models.loader import ModelLoader
from ts_frontend.models.manager import ModelManager
from ts_frontend.models.model import Model, Registry
from ts_frontend.models.settings import Requested
from ts_frontend.models.store.store import Fetched, ModelStore
from ts_frontend.tasks import side_by_side, watched
from ts_frontend.telemetry.logging.logs import AUTHORS
from ts_frontend.workers.pool import Clock
from ts_frontend.workers.process import StartFailed

log = logging.getLogger(__name__)


#: Seconds until a snapshot that couldn't be written is tried again.
RETRY_S = 30.0

States = Mapping[str, Mapping[str, VersionState]]


class Unrestored:
    """Models and workflows of a snapshot that couldn't be loaded at the start. Later snapshots still list them, until
    others are registered under their names."""

    def __init__(
        self,
        models: States | None = None,
        workflows: Mapping[str, WorkflowState] | None = None,
        served: States | None = None,
    ) -> None:
        self._models = {name: dict(versions) for name, versions in (models or {}).items()}
        self._workflows = dict(workflows or {})
        #: Served defaults of the names whose default in the snapshot couldn't be loaded.
        self._instead = {name: _default((served or {}).get(name, {})) for name in self._models}

    @staticmethod
    def of(snapshot: Snapshot, models: States, workflows: Mapping[str, WorkflowState]) -> Unrestored:
        missing = {
            name: {version: state for version, state in versions.items() if version not in models.get(name, {})}
            for name, versions in snapshot.models.items()
        }
        lost = {name: state for name, state in snapshot.workflows.items() if name not in workflows}
        return Unrestored({name: versions for name, versions in missing.items() if versions}, lost, models)

    def added(
        self, models: States, workflows: Mapping[str, WorkflowState]
    ) -> tuple[States, Mapping[str, WorkflowState]]:
        """The served models and workflows with those set aside. A default that was set aside stays the default, unless
        another was chosen since."""
        both = {name: dict(versions) for name, versions in models.items()}
        for name, versions in self._models.items():
            for version in [version for version in versions if version in models.get(name, {})]:
                del versions[version]
            if name in models and _default(models[name]) != self._instead[name]:
                versions.update({version: replace(state, default=False) for version, state in versions.items()})
            if _default(versions):
                both[name] = {version: replace(state, default=False) for version, state in both.get(name, {}).items()}
            if versions:
                both[name] = {**both.get(name, {}), **versions}
        for name in [name for name in self._workflows if name in workflows]:
            del self._workflows[name]
        return both, {**workflows, **self._workflows}


def _default(versions: Mapping[str, VersionState]) -> str:
    return next((version for version, state in versions.items() if state.default), "")


class SnapshotRecorder:
    """Writes a snapshot soon after `changed()`, in a thread, one at a time. One that can't be written, on a full disk
    for example, is tried again every RETRY_S. `files` None: writes nothing."""

    def __init__(self, files: SnapshotFiles | None, settings: Mapping[str, str], clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._files = files
        self._settings = settings
        self._manager: ModelManager | None = None
        self._workflows: Callable[[], Mapping[str, WorkflowState]] = dict
        self._rollouts: Callable[[], Mapping[str, Any]] = dict
        self._unrestored = Unrestored()
        self._pending = False
        self._failing = False
        self._closing = False
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()

    def attach(
        self,
        manager: ModelManager,
        workflows: Callable[[], Mapping[str, WorkflowState]] = dict,
        restored: Snapshot | None = None,
        rollouts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Writes the models of `manager`, the `workflows` and the `rollouts` from now on; earlier changes are those of
        the start.
        Models and workflows of `restored` that couldn't be loaded are written too, until others have their names."""
        self._manager = manager
        self._workflows, self._rollouts = workflows, rollouts
        if restored is not None:
            self._unrestored = Unrestored.of(restored, states_of(manager), workflows())

    def changed(self) -> None:
        if self._files is None or self._manager is None:
            return
        self._pending = True
        self._hurry.set()
        if self._task is None or self._task.done():
            self._task = watched(self._write_pending(), "The writing of a snapshot")

    async def _write_pending(self) -> None:
        while self._pending:
            self._pending = False
            self._hurry.clear()
            await self.write(SnapshotKind.SNAPSHOT)
            if self._failing and not self._closing:
                await self._clock.pause(RETRY_S, self._hurry)
                self._pending = not self._closing

    async def write(self, kind: SnapshotKind) -> None:
        """Writes a snapshot, after the one being written. Failures don't raise; the first of a series is logged."""
        if self._files is None:
            return
        async with self._writing:
            if self._manager is None:
                return
            try:
                states, workflows = self._unrestored.added(states_of(self._manager), self._workflows())
                await asyncio.to_thread(
                    self._files.write, kind, states, self._settings, workflows=workflows, rollouts=self._rollouts()
                )
            except Exception as error:
                self._failed(error, self._files.directory)
                if kind is SnapshotKind.STARTUP:
                    self.changed()
            else:
                if self._failing:
                    log.info("Snapshots can be written to %s again.", self._files.directory)
                self._failing = False

    def _failed(self, error: Exception, directory: Path) -> None:
        if not self._failing:
            unexpected = None if isinstance(error, OSError) else error  # such as a value that isn't JSON
            text = "Snapshot could not be written to %s: %s. A restart forgets what has changed since the last one."
            log.error(text, directory, error, exc_info=unexpected)
        self._failing = True

    async def close(self) -> None:
        """Finishes a pending write and writes the snapshot of the shutdown; later changes are not remembered."""
        self._closing = True
        self._hurry.set()
        if self._task is not None:
            await self._task
        await self.write(SnapshotKind.SHUTDOWN)
        self._manager = None


def states_of(manager: ModelManager) -> States:
    states: dict[str, dict[str, VersionState]] = {}
    for model in manager.registry:
        if not model.workflow and model.archive.remembered:
            states.setdefault(model.name, {})[model.version] = state_of(model, manager)
    return states


def state_of(model: Model, manager: ModelManager) -> VersionState:
    registry: Registry = manager.registry
    settings = model.settings
    fetched = manager.loader.fetched(model)
    return VersionState(
        archive=fetched.recorded,
        default=registry.is_default(model),
        min_workers=model.minimum,
        max_workers=model.maximum,
        batch_size=settings.batch_size,
        max_batch_delay_ms=settings.max_batch_delay_ms,
        max_batch_delay_set=settings.max_batch_delay_set,
        response_timeout_s=settings.response_timeout_s,
        startup_timeout_s=settings.startup_timeout_s,
        runtime=settings.runtime,
        parallel_level=settings.parallel_level,
        url=model.url,
        requested=asdict(model.requested),
        named=fetched.named,
    )


async def restore(snapshot: Snapshot, manager: ModelManager, store: ModelStore, at_once_max: int) -> list[str]:
    """Loads every model of `snapshot` that isn't served yet, concurrently, and sets its defaults. Returns a sentence
    for each model that can't be loaded; the next start tries these again."""
    registry = manager.registry
    served = {(model.name, model.version) for model in registry}
    missing: list[tuple[str, str, VersionState]] = []
    for name, versions in snapshot.models.items():
        for version, state in versions.items():
            if (name, version) in served:
                log.info(
                    "Model %s %s: the one to load at the start (load_models) wins over the snapshot's.", name, version
                )
            else:
                missing.append((name, version, state))
    made = await side_by_side([_made(*one, manager, store) for one in missing], at_once_max)
    failures = [await _enter(state, one, manager) for (_, _, state), one in zip(missing, made, strict=True)]
    for name, versions in snapshot.models.items():
        default = next((version for version, state in versions.items() if state.default), None)
        if default is not None and any((model.name, model.version) == (name, default) for model in registry):
            registry.set_default(name, default)
    return [failure for failure in failures if failure]


async def _made(name: str, version: str, state: VersionState, manager: ModelManager, store: ModelStore) -> Model | str:
    try:
        fetched = await store.recall(state.url or state.archive, state.archive, named=state.named)
        model = await manager.build(kept_in_store(fetched), requested_of(name, state), loaded_at_startup=True)
    except Exception as error:
        return snapshot_failure(f"Model {name}, version {version}", state.archive, "model store", error)
    manager.loader.set_fetched(model, fetched)
    return model


async def _enter(state: VersionState, made: Model | str, manager: ModelManager) -> str:
    if isinstance(made, str):
        return made
    try:
        await manager.add(made)
    except Exception as error:
        return snapshot_failure(f"Model {made}", state.archive, "model store", error)
    made.scale_between(state.min_workers, state.max_workers)
    return ""


def restored(snapshot: Snapshot | None, manager: ModelManager) -> list[str]:
    if snapshot is None:
        return []
    kept = [
        f"{model.name} {model.version}"
        for model in manager.registry
        if model.version in snapshot.models.get(model.name, {})
    ]
    kept += [f"workflow {name}" for name in snapshot.workflows]
    return [f"Models of the last snapshot: {', '.join(kept)} (--ncs starts without)"] if kept else []


def kept_in_store(fetched: Fetched) -> Fetched:
    """The same without `downloaded`: files from before the start stay in the store if it fails."""
    return replace(fetched, downloaded=fetched.downloaded and fetched.folder is not None)


def snapshot_failure(what: str, archive: str, place: str, error: Exception) -> str:
    """Logs and returns the sentence about a model or workflow of the snapshot that can't be loaded."""
    text = error.message if isinstance(error, ServeError) else f"{type(error).__name__}: {error}"
    sentence = (
        f"{what} of the snapshot is set aside, it can't be loaded: {text}. Put {archive} back into the {place}: "
        "the next start tries it again. restore_snapshot=none starts without the snapshot and forgets it."
    )
    log.error("%s", sentence, exc_info=None if isinstance(error, ServeError) else error)
    return sentence


def requested_of(name: str, state: VersionState) -> Requested:
    """The settings of the register call; of a TorchServe snapshot, the settings that it lists."""
    if state.requested:
        return replace(Requested(**state.requested), model_name=name)
    return Requested(
        model_name=name,
        runtime=state.runtime,
        batch_size=state.batch_size,
        max_batch_delay_ms=state.max_batch_delay_ms if state.max_batch_delay_set else None,
        initial_workers=state.min_workers,
        response_timeout_s=state.response_timeout_s,
        startup_timeout_s=state.startup_timeout_s,
    )


async def load_at_startup(
    config: ServerConfig,
    manager: ModelManager,
    store: ModelStore,
    restore_workflows: Callable[[Snapshot], Awaitable[list[str]]],
    gpus: int,
    progress: Callable[[str], None],
) -> list[str]:
    """Registers all models of the start; their workers start in the background. Failures are logged, as in TorchServe,
    and returned. `progress` is called with a description of each step. Cancelling the caller cancels all of it."""
    workers = config.default_workers_per_model or gpus or os.cpu_count() or 1
    loader = _StartupLoader(config, manager, store, workers, progress)
    failures = await loader.load()
    if config.snapshot is not None:
        progress("loading the models of the last run")
        failures += await restore_workflows(config.snapshot)
        failures += await restore(config.snapshot, manager, store, config.loads_at_once_max)
    starts = [manager.start_workers(model) for model in manager.registry]
    if not config.exit_on_error:
        for start in starts:
            manager.tasks.background(start)
        return failures
    progress("starting the workers")
    ended = await asyncio.gather(*starts, return_exceptions=True)
    return [*failures, *(_message(one) for one in ended if isinstance(one, Exception))]


def _message(error: Exception) -> str:
    if not isinstance(error, ServeError):
        raise error
    return error.message


@dataclass(eq=False)
class _StartupLoader:
    config: ServerConfig
    manager: ModelManager
    store: ModelStore
    workers: int
    progress: Callable[[str], None]
    _made: list[Model] = field(default_factory=list, init=False)
    #: The names in the store, if they are needed. They are listed once: there may be thousands, and folders below.
    _names: Sequence[str] = field(default=(), init=False)
    _alone: bool = field(default=False, init=False)

    async def load(self) -> list[str]:
        self._alone = await asyncio.to_thread(lambda: self.store.alone)
        if self._alone or self.config.model_dir is not None or not all(map(_whole, self.config.load_models)):
            self._names = await asyncio.to_thread(self.store.names)
        lines: list[ProgramLine | str | Path] = [*self.config.program.lines, *self._entries()]
        if self.config.dev_model is not None:
            lines.append(self.config.dev_model)
        failures: list[str] = []
        try:
            made = await side_by_side([self._line(line) for line in lines], self.config.loads_at_once_max)
            for line, (models, failure) in zip(lines, made, strict=True):
                for model in models:
                    failure = await self._enter(line, model) or failure
                failures += [failure] if failure else []
            if failures:
                were = "was" if len(failures) == 1 else "were"
                failures.append(f"{len(failures)} of {len(lines)} {were} not loaded; --exit-on-error ends such a start")
        finally:
            for model in self._made:  # after a cancelled start: models that aren't served yet
                await self.manager.loader.remove(model)
        return failures

    def _entries(self) -> list[str]:
        entries: list[str] = []
        for word in self.config.load_models or (["."] if self._alone else []):
            entries += self._names if word.lower() == "all" else [word]
        return entries

    async def _line(self, line: ProgramLine | str | Path) -> tuple[list[Model], str]:
        """The models made of a line, and the failure that left some out, or ""."""
        self.progress(f"loading {line}")
        models: list[Model] = []
        try:
            if isinstance(line, Path):
                await self._written(line, models)
            elif isinstance(line, ProgramLine):
                await self._program(line, models)
            else:
                await self._entry(line, models)
        except Exception as error:
            return models, load_failure(f"Failed to load model: {line}", error)
        return models, ""

    async def _enter(self, line: ProgramLine | str | Path, model: Model) -> str:
        self._made.remove(model)
        try:
            await self.manager.add(model)
        except Exception as error:
            return load_failure(f"Failed to load model: {line}", error)
        return ""

    async def _entry(self, entry: str, models: list[Model]) -> None:
        name, separator, url = entry.partition("=")
        if not separator or "/" in name or ":" in name:
            name, url = "", entry
        url = await asyncio.to_thread(self.store.on_hub, self._archive(url))
        whole = self.config.model_dir is not None or self._alone
        known = url in self._names or is_gguf(url) or "://" in url
        if whole and not known and await asyncio.to_thread(self.store.directory, url) is None:
            name, url = name or entry, self.store.only()  # the store is itself the model, or has only one
        named = [] if name else await self.manager.loader.each_model_at(url)
        for archive in named:
            fetched, requested = await self.store.fetch(url, named=True), self._requested(archive.name or "")
            made = self.manager.build(fetched, requested, archive, loaded_at_startup=True)
            models.append(self._kept(await made))
        if not named:
            fetched = await self.store.fetch(url, named=True)
            made = self.manager.build(fetched, self._requested(name), loaded_at_startup=True)
            models.append(self._kept(await made))

    async def _program(self, line: ProgramLine, models: list[Model]) -> None:
        """Loads models from outside the store: all those of a program, or the one of an archive's folder."""
        loader = self.manager.loader
        found = await asyncio.to_thread(loader.formats.open_in_place, Path(line.words[0]), line.words[1:], Path.cwd())
        fetched = Fetched(found.dir, line.words[0], downloaded=False)
        for archive in await loader.each_model(found):
            requested = self._requested(archive.name if found.name is None and archive.name else "")
            made = self.manager.build(fetched, requested, archive, loaded_at_startup=True)
            models.append(self._kept(await made))

    async def _written(self, path: Path, models: list[Model]) -> None:
        """Loads the model of `torchserve dev`: an archive, or a folder in place."""
        models.append(self._kept(await load_written(path, self.manager, self._requested(""))))

    def _archive(self, url: str) -> str:
        """The name of an archive, which may be given without its ending."""
        ended = (f"{url}{suffix}" for suffix in ("", ".mar", GGUF))
        return url if "/" in url else next((one for one in ended if one in self._names), url)

    def _requested(self, name: str) -> Requested:
        return Requested(model_name=name or None, initial_workers=self.workers)

    def _kept(self, model: Model) -> Model:
        self._made.append(model)
        return model


def _whole(entry: str) -> bool:
    """Whether an entry of load_models names an archive's file in full, so that the store needn't be searched."""
    return entry.endswith((".mar", ".tar.gz", GGUF))


def packed(path: Path) -> bool:
    """Whether the model of `torchserve dev` is an archive file."""
    return path.is_file() and path.suffix != ".py"


async def open_written(path: Path, loader: ModelLoader) -> Archive:
    """Opens the model of `torchserve dev`. Raises ServeError."""
    if packed(path):
        return await loader.open(Fetched(path, str(path), downloaded=False), Requested())
    return await asyncio.to_thread(loader.formats.open_unpacked, path)


async def load_written(path: Path, manager: ModelManager, requested: Requested) -> Model:
    """Loads the model of `torchserve dev`, which isn't served yet. Raises ServeError."""
    found = await open_written(path, manager.loader)
    fetched = Fetched(path if found.packed is not None else found.dir, str(path), downloaded=False)
    return await manager.build(fetched, requested, found, loaded_at_startup=True)


def load_failure(what: str, error: Exception) -> str:
    """Logs and returns the sentence about a failed load; with a traceback unless it is a ServeError."""
    ours = isinstance(error, ServeError)
    sentence = f"{what}: {error.message if isinstance(error, ServeError) else f'{type(error).__name__}: {error}'}"
    log.error("%s", sentence, exc_info=None if ours else error)
    return sentence


#: What the author of a handler sees.
authors_log = logging.getLogger(AUTHORS)
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
            authors_log.info("console and playground: %s/", addresses["http_management"])
        if model is None:
            authors_log.info("%s is not served yet: it is loaded when its files are saved. Ctrl-C ends it.", self._path)
            return
        if "http_inference" in addresses:
            authors_log.info("try it: curl -T FILE %s/predictions/%s", addresses["http_inference"], model.name)
        authors_log.info(
            "%s is served as %s and reloaded when its files are saved. Ctrl-C ends it.", self._path, self._names()
        )

    async def _saved(self, changed: list[str]) -> None:
        names, begun_s = self._named(changed), time.monotonic()
        try:
            how = await self._served_anew(changed)
        except StartFailed as error:
            authors_log.error("%s saved: the model can't be loaded: %s", names, error.cause)
        except ServeError as error:
            authors_log.error("%s saved: the model can't be served: %s", names, error.message)
        else:
            authors_log.info("%s saved: reloaded after %.2f s, %s.", names, time.monotonic() - begun_s, how)

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
