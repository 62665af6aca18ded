"""Model repositories: directories of models with versions, served from the start, by calls, or as files change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from ts_frontend.config.kinds import names_there
from ts_frontend.errors import Code, InvalidArchive, InvalidArgument, ModelNotFound, ServeError, UrlForbidden
from ts_frontend.graphs.graph import Ensemble
from ts_frontend.models.archive import GGUF, Archive, create_file, safe_parts
from ts_frontend.models.formats.format import ModelFiles
from ts_frontend.models.manager import ModelManager
from ts_frontend.models.model import Model
from ts_frontend.models.settings import Requested
from ts_frontend.models.store.store import Fetched
from ts_frontend.tasks import side_by_side, undone_on_failure
from ts_frontend.workers.memory import ResidentState

log = logging.getLogger(__name__)


class _RepositoryLoader:
    """Loads models with all of their versions; calls for the same name run one after another. `config_text` replaces
    the configuration in the model's directory; `workers`: the number for an archive without one. All methods raise
    ServeError."""

    def __init__(self, manager: ModelManager, workers: int) -> None:
        self._manager = manager
        self._store, self._formats = manager.loader.store, manager.loader.formats
        self._workers = workers

    async def versions(self, archives: Sequence[Archive], fetched: Fetched) -> None:
        """Serves these versions of a model and removes its others; if one can't be started, the former versions stay.
        `fetched`: their directory."""
        started: list[Model] = []
        async with undone_on_failure() as undo:
            for archive in archives:
                model = await self._manager.start(fetched, archive, Requested(model_name=archive.name))
                undo.push_async_callback(self._manager.loader.remove, model)
                started.append(model)
        for model in started:
            self._manager.replace(model)
        self._leave_only(started)

    async def files(self, name: str, config_text: str | None, files: Mapping[str, bytes]) -> None:
        try:
            fetched = await self._store.made_apart(name, partial(write_files, files))
        except OSError as error:
            raise ServeError(f"The files of {name} could not be written: {error.strerror or error}") from error
        await self._directory(name, fetched, config_text)

    async def url(self, name: str, url: str, config_text: str | None) -> None:
        """Loads from `url`, a name of the model store or an allowed URL: either a directory of versions, or an archive,
        which may hold such a directory."""
        try:
            fetched = await self._store.fetch_apart(url)
        except UrlForbidden as error:  # TorchServe's APIs have its status for this
            raise LoadRefused(f"load parameter 'model_path': {error.message}") from error
        folder = await asyncio.to_thread(self._formats.folder_of_versions, fetched.path)
        if folder is not None:
            await self._directory(name, fetched, config_text, folder)
            return
        async with undone_on_failure() as undo:
            undo.push_async_callback(self._manager.loader.discard, fetched)
            await self._archive(name, fetched, config_text)

    async def stored(self, name: str, paths: Sequence[str], config_text: str | None) -> None:
        """Serves the versions of a model in the model store, by their paths there, and no others."""
        if config_text is not None:
            raise _unused(name)
        requested = self._requested(name)
        loaded = []
        for path in paths:
            fetched = await self._store.fetch_apart(path)
            archive = await self._manager.loader.open(fetched, requested)
            loaded.append(await self._manager.start_and_replace(fetched, archive, requested))
        self._leave_only(loaded)

    def _requested(self, name: str) -> Requested:
        return Requested(model_name=name, initial_workers=self._workers)

    def _leave_only(self, models: Sequence[Model]) -> None:
        """Removes the other versions; the format of the remaining ones chooses their default."""
        self._manager.choose_default(models[0], models)
        for model in self._manager.registry.versions(models[0].name):
            if model not in models:
                self._manager.tasks.background(self._manager.retire(model))

    async def _directory(
        self, name: str, fetched: Fetched, config_text: str | None, folder: Path | None = None
    ) -> None:
        """A directory of versions, in `folder` of what was fetched; a failure removes it."""
        files = ModelFiles(fetched.path, folder or fetched.path, name=name, config_text=config_text)
        try:
            async with undone_on_failure() as undo:
                undo.push_async_callback(self._manager.loader.discard, fetched)
                await self.versions(await asyncio.to_thread(self._formats.open_versions, files), fetched)
        except OSError as error:
            raise InvalidArgument(f"model {name!r} can't be read: {error}") from error

    async def _archive(self, name: str, fetched: Fetched, config_text: str | None) -> None:
        requested = self._requested(name)
        loader = self._manager.loader
        archive = await loader.open(fetched, requested)
        if not archive.handler and await asyncio.to_thread(self._formats.versioned, archive.dir) is not None:
            await self._packed_directory(name, fetched, archive, config_text)
        elif config_text is not None:
            await asyncio.to_thread(archive.remove)
            raise _unused(fetched.url)
        else:
            await self._manager.start_and_replace(fetched, archive, requested)

    async def _packed_directory(self, name: str, fetched: Fetched, archive: Archive, config_text: str | None) -> None:
        """An archive with a directory of versions, which is served like a folder from then on."""
        owned = archive.packed is not None
        async with undone_on_failure() as undo:
            undo.push_async_callback(asyncio.to_thread, archive.remove)
            await self._manager.loader.unpack(archive)
        if fetched.folder is not None and owned:
            await self._manager.loader.discard(fetched)  # the unpacked files are enough
        unpacked = Fetched(archive.dir, fetched.url, owned, archive.dir if owned else None)
        await self._directory(name, unpacked, config_text)


def _unused(what: str) -> InvalidArgument:
    return InvalidArgument(f"load parameter 'config': {what} is an archive, which has its own settings")


ALL = "*"
#: The most files in one load request.
FILES_MAX = 1000
_NAME = re.compile(r"[^/\\\0]+")
#: The reason in the index for a model that a call has unloaded.
UNLOADED = "unloaded"
#: The index yields to other tasks after this number of models.
INDEX_STEP = 100


class ControlRefused(ServeError):
    """The control mode doesn't let clients load and unload."""

    remedy = "Start with `--model-control-mode explicit`, or change the files instead."
    code, http_status, type_name = Code.FAILED_PRECONDITION, 400, "BadRequestException"

    def __init__(self, verb: str) -> None:
        super().__init__(
            f"explicit model {verb} is not allowed: start the server with --model-control-mode explicit for it"
        )


class LoadRefused(ServeError):
    """Clients may load models of the repository, but not from where this call wants to."""

    remedy = "Start the server with what the message names, or load the model from the repository."
    code, http_status, type_name = Code.FAILED_PRECONDITION, 400, "BadRequestException"


@dataclass(slots=True)
class _Known:
    """A model of a repository: its stamp and versions when it was last read, and the reason why it isn't served.
    `waits_for`: the model of an ensemble's step that couldn't be loaded before."""

    stamp: object = None
    reason: str = ""
    versions: tuple[str, ...] = ("",)
    waits_for: str = ""


_NEVER = _Known()


class _StepsFirst(Exception):
    """An ensemble's load has found models that have to be loaded before. `steps`: a step of each, by their names."""

    def __init__(self, steps: Mapping[str, str]) -> None:
        self.steps = steps


class IndexEntry(NamedTuple):
    """A line of the index. `state`: READY, UNAVAILABLE, or "" if never loaded. `version`: "" when none was found."""

    name: str
    version: str
    state: str
    reason: str


class Repository:
    """`mode`: none (all models, at the start), poll (also when their files change, checked every `poll_s` seconds),
    explicit (the named models at the start, others by load calls). Without directories, load calls name archives of the
    model store. `urls`: directories in S3, without a slash at the end; their models are downloaded when they are
    loaded. `workers`: the number for an archive that a load call names."""

    def __init__(
        self,
        manager: ModelManager,
        directories: Sequence[Path],
        mode: str,
        poll_s: float,
        workers: int,
        urls: Sequence[str] = (),
        *,
        loads_at_once_max: int = 4,
    ) -> None:
        self._manager = manager
        self._directories, self._urls = directories, urls
        self._mode = mode if directories or urls else "explicit"
        self._takes_files = mode == "explicit"
        self._poll_s = poll_s
        self._loads_at_once_max = loads_at_once_max
        self._loader = _RepositoryLoader(manager, workers)
        self._known: dict[str, _Known] = {}
        self._busy: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        #: The arguments of the last load call of each model, if siblings of this frontend need them; and what hands the
        #: calls of a sibling to the lead.
        self.loads: dict[str, dict[str, Any]] | None = None
        self.lead: Callable[[str, dict[str, Any]], Awaitable[Any]] | None = None

    async def start(self, wanted: Sequence[str]) -> list[str]:
        """Loads the models of the start (`wanted`: in explicit mode); returns a sentence for each that failed."""
        names = list(wanted) if self._mode == "explicit" and ALL not in wanted else await self._names()
        said = await side_by_side([self._start(name) for name in names], self._loads_at_once_max)
        return [failure for failure in said if failure]

    async def _start(self, name: str) -> str:
        try:
            url = None if self._is_here(name) else await self._url_of(name)
            if url is None:
                await self._load_with_steps(name, only_new=True)
            else:
                await self._one_at_a_time(name, self._load_remote(name, url, None))
        except ServeError as error:
            failure = f"Failed to load model: {name}: {error.message}"
            log.error("%s", failure)
        except Exception as error:
            failure = f"Failed to load model: {name}: {type(error).__name__}: {error}"
            self._known.setdefault(name, _Known()).reason = failure
            log.exception("%s", failure)
        else:
            return ""
        return failure

    async def watch(self) -> None:
        """In poll mode: reloads models whose files change, until cancelled; read errors wait for the next poll."""
        while self._mode == "poll":
            await asyncio.sleep(self._poll_s)
            try:
                names = set(await self._names())
                for name in [name for name in self._known if name not in names]:
                    log.info("Model %s was removed from its repository", name)
                    with contextlib.suppress(ModelNotFound):
                        await self._unload(name)
                await side_by_side([self._follow_one(name) for name in sorted(names)], self._loads_at_once_max)
            except (OSError, ServeError) as error:
                log.error("The model repositories can't be read: %s", error)

    async def _follow_one(self, name: str) -> None:
        """Reloads a model if its files have changed; a failure is logged."""
        known = self._known.get(name, _Known())
        before = known.reason
        step_is_there = bool(known.waits_for) and self._manager.registry.get(known.waits_for) is not None
        if known.stamp is not None and known.stamp == await self._stamp(name) and not step_is_there:
            return
        try:
            await self._load_with_steps(name)
        except ServeError as error:
            if error.message != before:
                log.error("Model %s could not be loaded: %s", name, error.message)
        except Exception:
            log.exception("Model %s could not be loaded", name)

    async def _stamp(self, name: str) -> object:
        try:
            return await asyncio.to_thread(stamp_of, find(self._directories, name))
        except (ServeError, OSError):
            return None

    async def _names(self) -> list[str]:
        found = [await asyncio.to_thread(names_in, path) for path in self._directories]
        found += [await self._manager.loader.store.folders(url) for url in self._urls]
        return sorted({name for names in found for name in names})

    # --- calls

    async def load(
        self,
        name: str,
        config_text: str | None = None,
        url: str | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Loads or reloads a model and returns when it is ready. Its source is a repository or an archive of the model
        store; or `url` (a path or an allowed URL) of an archive or a model's directory; or `files`, by their paths in
        the model's directory. The previous model serves until the new one is ready, and stays if that fails. Raises
        ServeError."""
        self._check("load")
        arguments: dict[str, Any] = {
            "config_text": config_text,
            "url": url,
            "files": None if files is None else dict(files),
        }
        if self.lead is not None:
            await self.lead("load", {"name": name, **arguments})
            return
        async with undone_on_failure() as undo:
            if self.loads is not None:  # before the load, which tells the siblings
                undo.callback(self._remember, name, self.loads.get(name))
                self._remember(name, arguments)
            await self.load_here(name, **arguments)
        await self._manager.tell(True)

    def _remember(self, name: str, arguments: dict[str, Any] | None) -> None:
        assert self.loads is not None
        if arguments is None:
            self.loads.pop(name, None)
        else:
            self.loads[name] = arguments

    async def load_here(
        self,
        name: str,
        config_text: str | None = None,
        url: str | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """`load` at this frontend alone, also if the server allows no calls."""
        if files is not None:
            if not self._takes_files:
                raise LoadRefused(
                    "load parameter 'file:' is not allowed: start the server with --model-control-mode explicit for "
                    "it, or use model_path"
                )
            work = self._loader.files(name, config_text, files)
        elif url is not None:
            work = self._loader.url(name, url, config_text)
        elif self._is_here(name):
            await self._manager.tasks.load(self._load_with_steps(name, config_text))
            return
        elif (remote := await self._url_of(name)) is not None:
            work = self._load_remote(name, remote, config_text)
        elif paths := [
            one.path for one in await asyncio.to_thread(self._manager.loader.store.models) if one.name == name
        ]:
            work = self._loader.stored(name, paths, config_text)
        else:
            work = self._loader.url(name, self._archive_of(name), config_text)
        await self._manager.tasks.load(self._one_at_a_time(name, work))

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Removes all versions and returns at once; their accepted requests are still answered. A model that could be
        loaded and isn't served is no error. `dependents`: also the models of an ensemble's steps that no other ensemble
        has. Raises ModelNotFound for any other."""
        self._check("unload")
        if self.lead is not None:
            await self.lead("unload", {"name": name, "dependents": dependents})
            return
        registry = self._manager.registry
        steps = {step for model in registry if model.name == name for step, _ in model.steps} if dependents else set()
        here = self._is_here(name)
        try:
            await self._manager.tasks.detached(self._unload(name, remembered=here))
        except ModelNotFound:
            if not here:
                raise
        if self.loads is not None:
            self._remember(name, None)
        for step in sorted(steps - {step for model in registry for step, _ in model.steps}):
            with contextlib.suppress(ModelNotFound):
                await self.unload(step, dependents=True)

    def _check(self, verb: str) -> None:
        if self._mode != "explicit":
            raise ControlRefused(verb)
        self._manager.check_model_api()

    def _is_here(self, name: str) -> bool:
        try:
            find(self._directories, name)
            return True
        except ModelNotFound:
            return False

    async def _url_of(self, name: str) -> str | None:
        names = [(url, await self._manager.loader.store.folders(url)) for url in self._urls]
        found = [f"{url}/{name}" for url, there in names if name in there]
        if len(found) > 1:
            raise InvalidArgument(f"model {name!r} is in several repositories: {', '.join(found)}")
        return found[0] if found else None

    def _archive_of(self, name: str) -> str:
        for archive in self._manager.loader.store.names():
            if name in (archive, *map(archive.removesuffix, (".mar", ".tar.gz", GGUF))):
                return archive
        raise ModelNotFound(name, lambda: names_there("Models to load", self._to_load(), name))

    def _to_load(self) -> list[str]:
        """The names that load calls find on this machine. Blocking."""
        found = {*self._manager.loader.store.names()}
        return sorted(found.union(*map(names_in, self._directories)))

    async def index(self, only_ready: bool) -> list[IndexEntry]:
        """Every version that is or should be served, and the models that were never loaded."""
        names: list[str] = []
        if not only_ready:
            with contextlib.suppress(OSError, ServeError):  # a directory that can't be read at the moment
                names = await self._names()
        registry, found = self._manager.registry, []
        for number, model in enumerate(list(registry), 1):
            if not number % INDEX_STEP:
                await asyncio.sleep(0)  # lets requests run
            if model.workflow:
                continue
            reason = _residence(model) if model.ready else self._known.get(model.name, _NEVER).reason or _unready(model)
            found.append(IndexEntry(model.name, model.version, "READY" if model.ready else "UNAVAILABLE", reason))
        if only_ready:
            return sorted((one for one in found if one.state == "READY"), key=lambda one: one.name)
        served = {(model.name, model.version) for model in registry}
        served_names = {name for name, _ in served}
        found += [
            IndexEntry(name, version, "UNAVAILABLE", known.reason)
            for name, known in self._known.items()
            if known.reason and name not in served_names
            for version in known.versions
        ]
        found += [IndexEntry(name, "", "", "") for name in names if name not in served_names | self._known.keys()]
        found += [
            IndexEntry(one.name, one.version, "UNAVAILABLE", "it is not loaded")
            for one in await asyncio.to_thread(self._manager.loader.store.models)
            if (one.name, one.version) not in served
        ]
        return sorted(found, key=lambda one: one.name)

    # --- models of a repository

    async def _load(self, name: str, config_text: str | None = None, has_steps: bool = False) -> None:
        """Raises _StepsFirst for an ensemble unless `has_steps`: the models of its steps had their chance."""
        known = self._known.setdefault(name, _Known())
        try:
            path = find(self._directories, name)
            known.stamp, archives = await asyncio.to_thread(self._read, path, config_text)
            known.versions, known.waits_for = tuple(archive.version for archive in archives), ""
            if not has_steps and (steps := self._steps_to_load(archives)):
                raise _StepsFirst(steps)
            await self._loader.versions(archives, Fetched(path, str(path), downloaded=False))
            known.reason = ""
        except ServeError as error:
            known.reason = error.message
            raise

    def _read(self, path: Path, config_text: str | None) -> tuple[object, list[Archive]]:
        """The directory's stamp and versions. Raises InvalidArgument, also when files can't be read. Blocking."""
        try:
            files = ModelFiles(path, path, config_text=config_text)
            return stamp_of(path), self._manager.loader.formats.open_versions(files)
        except OSError as error:
            raise InvalidArgument(f"model {path.name!r} can't be read: {error}") from error

    async def _load_remote(self, name: str, url: str, config_text: str | None) -> None:
        known = self._known.setdefault(name, _Known())
        try:
            await self._loader.url(name, f"{url}/", config_text)
            known.reason = ""
        except ServeError as error:
            known.reason = error.message
            raise

    async def _load_with_steps(
        self, name: str, config_text: str | None = None, above: tuple[str, ...] = (), *, only_new: bool = False
    ) -> None:
        """Loads a model of the repository, and before an ensemble the models of its steps that are there and aren't
        served yet. Two loads never wait for each other, since neither has its turn meanwhile."""
        try:
            await self._one_at_a_time(name, self._load(name, config_text), only_new=only_new)
            return
        except _StepsFirst as first:
            steps = first.steps
        for model, step in steps.items():
            if model in (*above, name):
                raise self._refused(name, f"{step} leads back to the ensemble itself")
            try:
                await self._load_with_steps(model, None, (*above, name), only_new=True)
            except ServeError as error:
                refused = self._refused(name, f"{step} can't be loaded: {error.message}")
                self._known[name].waits_for = model
                raise refused from error
        await self._one_at_a_time(name, self._load(name, config_text, True))

    def _steps_to_load(self, archives: Sequence[Archive]) -> dict[str, str]:
        """The models of an ensemble's steps that this repository has and that aren't served, with a step of each."""
        graphs = [archive.graph for archive in archives if isinstance(archive.graph, Ensemble)]
        found = {model: step for graph in graphs for step, model, _ in graph.models}
        registry = self._manager.registry
        return {model: step for model, step in found.items() if registry.get(model) is None and self._is_here(model)}

    def _refused(self, name: str, why: str) -> InvalidArgument:
        known = self._known.setdefault(name, _Known())
        known.reason = f"ensemble {name!r}: {why}"
        return InvalidArgument(known.reason)

    async def _one_at_a_time(self, name: str, work: Coroutine[Any, Any, None], *, only_new: bool = False) -> None:
        """Runs a load when no other of the model runs. `only_new`: not if that other one has loaded it."""
        try:
            async with self._alone(name):
                if not (only_new and self._has_loaded(name)):
                    await work
        finally:
            work.close()  # never awaited

    def _has_loaded(self, name: str) -> bool:
        known = self._known.get(name, _NEVER)
        return known.stamp is not None and not known.reason and self._manager.registry.get(name) is not None

    def _alone(self, name: str) -> asyncio.Lock:
        """Held while a model is loaded or unloaded; the others need not wait for it."""
        lock = self._busy.get(name)
        if lock is None:
            lock = self._busy[name] = asyncio.Lock()
        return lock

    async def _unload(self, name: str, remembered: bool = False) -> None:
        """Removes a model. Raises ModelNotFound when no version is served. `remembered`: the index still lists it."""
        async with self._alone(name):
            self._known.pop(name, None)
            models = self._manager.registry.versions(name)
            for model in models:
                self._manager.tasks.background(self._manager.retire(model))
            if remembered:
                self._known[name] = _Known(reason=UNLOADED, versions=tuple(model.version for model in models))


def _residence(model: Model) -> str:
    """The state of a model on demand that isn't loaded (known, loading, ...); "" for a loaded one."""
    resident = model.resident
    return "" if resident is None or resident.state is ResidentState.WARM else resident.status


def _unready(model: Model) -> str:
    if model.graph is not None:
        return model.graph.trouble()
    failure = model.pool.load_failure
    return "no worker is ready" if failure is None else failure.message


def names_in(repository: Path) -> list[str]:
    """The models of a repository: its directories, hidden ones left out."""
    return sorted(one.name for one in repository.iterdir() if one.is_dir() and not one.name.startswith("."))


def find(repositories: Sequence[Path], name: str) -> Path:
    """The model's directory. Raises ModelNotFound, InvalidArgument (bad name, or in several repositories)."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise InvalidArgument(f"{name!r} is not a valid model name")
    found = [path / name for path in repositories if (path / name).is_dir()]
    if not found:
        raise ModelNotFound(name)
    if len(found) > 1:
        raise InvalidArgument(f"model {name!r} is in several repositories: {', '.join(map(str, found))}")
    return found[0]


def write_files(files: Mapping[str, bytes], directory: Path) -> None:
    """Writes files into an empty directory; `files` are by relative path. Raises InvalidArgument, naming the path and
    the error; OSError. Blocking."""
    if len(files) > FILES_MAX:
        raise InvalidArgument(f"a model may have {FILES_MAX} files in a request, not {len(files)}")
    for name, content in files.items():
        try:
            parts = safe_parts(directory, name)
            with create_file(directory, directory, parts, name, 0) as file:
                file.write(content)
        except InvalidArchive as error:
            raise InvalidArgument(f"load parameter {f'file:{name}'!r}: {error.message.partition(': ')[2]}") from None


def stamp_of(path: Path) -> tuple[tuple[str, int, int], ...]:
    found = []
    for one in sorted(path.rglob("*")):
        if one.is_file() and "__pycache__" not in one.parts:
            status = one.stat()
            found.append((str(one.relative_to(path)), status.st_size, status.st_mtime_ns))
    return tuple(found)
