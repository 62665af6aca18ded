"""Managing what is served while it runs: register, scale, describe, set default, unregister.

Every door of the management API comes here; answers carry TorchServe's HTTP status and its sentence.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ts_frontend.errors import (
    InvalidArgument,
    ModelApiDisabled,
    NoWorker,
    ServeError,
    UnregisterTimeout,
    WorkerStartFailed,
)
from ts_frontend.models import mlserver_model
from ts_frontend.models.archive import Archive, ExtractLimits, open_archive
from ts_frontend.models.description import describe
from ts_frontend.models.environment import Environment, Environments
from ts_frontend.models.launchpad import Launchpad
from ts_frontend.models.mlserver_model import Defaults
from ts_frontend.models.model import Model
from ts_frontend.models.program_model import is_program
from ts_frontend.models.programs import Programs
from ts_frontend.models.registry import Registry
from ts_frontend.models.settings import WORKERS_MAX, ModelSettings, Requested, check_range, model_name_for
from ts_frontend.models.store import Fetched, Store
from ts_frontend.workers.life import StartFailed
from ts_frontend.workers.supervisor import Supervisor

log = logging.getLogger(__name__)

LIST_LIMIT_MAX = 100
PROCESSING = "Processing worker updates..."
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a management call did: the HTTP status and sentence TorchServe answers."""

    http_status: int
    status: str


Resolve = Callable[[Requested, Archive, str, str], ModelSettings]


class Administration:
    """`on_change` is called after each change that a restart should remember."""

    def __init__(
        self,
        registry: Registry,
        store: Store,
        launchpad: Launchpad,
        supervisor: Supervisor,
        resolve: Resolve,
        environments: Environments,
        programs: Programs,
        *,
        work_dir: Path,
        extract_limits: ExtractLimits,
        model_api: bool,
        unregister_timeout_s: float,
        on_change: Callable[[], None],
        mlserver: Defaults = Defaults(),  # noqa: B008 (frozen)
    ) -> None:
        self.registry = registry
        self._store = store
        self._launchpad = launchpad
        self._supervisor = supervisor
        self._resolve = resolve
        self._environments = environments
        self._programs = programs
        self._work_dir = work_dir
        self._extract_limits = extract_limits
        self._model_api = model_api
        self._unregister_timeout_s = unregister_timeout_s
        self._on_change = on_change
        self._mlserver = mlserver
        self._fetched: dict[Model, Fetched] = {}
        self._environment_of: dict[Model, Environment] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # --- register

    async def register(
        self,
        url: str,
        *,
        model_name: str | None = None,
        handler: str | None = None,
        runtime: str | None = None,
        batch_size: int | None = None,
        max_batch_delay: int | None = None,
        initial_workers: int | None = None,
        response_timeout: int | None = None,
        startup_timeout: int | None = None,
        synchronous: bool = True,
        s3_sse_kms: bool = False,
    ) -> Outcome:
        """Adds a model version. A caller who leaves doesn't stop it: it is added whole or not at all. `s3_sse_kms`: an
        http(s) `url` is one of S3 and asked for with the server's AWS credentials."""
        self.check_model_api()
        requested = Requested(
            model_name=model_name,
            handler=handler,
            runtime=runtime,
            batch_size=batch_size,
            max_batch_delay_ms=max_batch_delay,
            initial_workers=initial_workers,
            response_timeout_s=response_timeout,
            startup_timeout_s=startup_timeout,
        )
        return await self.detached(self._register(url, requested, synchronous, s3_sse_kms))

    async def _register(self, url: str, requested: Requested, synchronous: bool, signed: bool) -> Outcome:
        fetched = await self._store.fetch(url, signed=signed)
        model = await self.add_fetched(fetched, requested, loaded_at_startup=False)
        count = model.minimum
        title = f'Model "{model.name}" Version: {model.version} registered with'
        if not count:
            self._on_change()
            return Outcome(200, f"{title} 0 initial workers. Use scale workers API to add workers for the model.")
        if not synchronous:
            self.background(self._scale(model, count, None))
            return Outcome(202, PROCESSING)
        try:
            await model.pool.scale(count)
        except StartFailed as error:
            await self._withdraw(model)
            raise _start_error(model, error) from error
        self._on_change()
        return Outcome(200, f"{title} {count} initial workers")

    async def add(self, url: str, requested: Requested, *, loaded_at_startup: bool) -> Model:
        """Fetches, unpacks and registers an archive; no worker is started yet."""
        return await self.add_fetched(await self._store.fetch(url), requested, loaded_at_startup=loaded_at_startup)

    async def add_fetched(self, fetched: Fetched, requested: Requested, *, loaded_at_startup: bool) -> Model:
        """The same for an archive that is at hand."""
        try:
            archive = await self.opened(fetched, requested)
            return await self.add_opened(fetched, archive, requested, loaded_at_startup=loaded_at_startup)
        except BaseException:
            await asyncio.to_thread(self._store.discard, fetched)
            raise

    async def opened(self, fetched: Fetched, requested: Requested) -> Archive:
        """The archive at hand; a program that nobody named has its own name."""
        archive = await asyncio.to_thread(
            open_archive, fetched.path, self._work_dir, self._extract_limits, self._mlserver
        )
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
        return await self._programs.names(await asyncio.to_thread(open_archive, fetched.path, self._work_dir))

    async def add_program(self, archive: Archive, url: str, workers: int) -> None:
        """Registers all models of an archive that lies outside the store: a program's own, or the one it names. No
        worker is started yet."""
        fetched = Fetched(archive.dir, url, downloaded=False)
        names: list[str | None] = [*await self._programs.names(archive)]
        for name in names or [None]:
            requested = Requested(model_name=name, initial_workers=workers)
            await self.add_opened(fetched, archive, requested, loaded_at_startup=True)

    async def add_opened(
        self, fetched: Fetched, archive: Archive, requested: Requested, *, loaded_at_startup: bool
    ) -> Model:
        """The same for one that is unpacked; a failure removes what was."""
        self.registry.check_free(model_name_for(requested, archive, fetched.path), archive.version)
        model = await self._prepared(fetched, archive, requested, loaded_at_startup)
        try:
            self.registry.add(model)
        except BaseException:
            await self._release(model)
            raise
        self._choose_default(model)
        log.info("Model %s added.", model)
        return model

    async def _prepared(
        self, fetched: Fetched, archive: Archive, requested: Requested, loaded_at_startup: bool
    ) -> Model:
        """The model, not yet registered; a failure removes what was unpacked."""
        try:
            model = await self._model(fetched, archive, requested, loaded_at_startup)
        except BaseException:
            await asyncio.to_thread(archive.remove)
            raise
        self._fetched[model] = fetched
        return model

    async def replace(self, fetched: Fetched, archive: Archive, requested: Requested) -> Model:
        """Serves what is unpacked, once its workers are ready, in place of what has its name and version. If it can't
        be started, that goes on. Raises ServeError."""
        model = await self.started(fetched, archive, requested)
        self.place(model)
        return model

    async def started(self, fetched: Fetched, archive: Archive, requested: Requested) -> Model:
        """What is unpacked, with its workers ready, for `place` or `give_up`; a failure removes it. Raises
        ServeError."""
        try:
            model = await self._prepared(fetched, archive, requested, loaded_at_startup=False)
        except BaseException:
            await asyncio.to_thread(self._store.discard, fetched)
            raise
        try:
            await model.pool.scale(model.minimum)
        except BaseException as error:
            await self._release(model)
            if isinstance(error, StartFailed):
                raise _start_error(model, error) from error
            raise
        return model

    def place(self, model: Model) -> None:
        """Serves it in place of what has its name and version, which answers what it has accepted."""
        old = self.registry.put(model)
        self._choose_default(model)
        self._on_change()
        log.info("Model %s %s.", model, "added" if old is None else "replaced")
        if old is not None:
            self.background(self.take_out(old))

    async def give_up(self, model: Model) -> None:
        """Ends what was `started` and isn't served."""
        await self._release(model)

    async def fetch_apart(self, url: str) -> Fetched:
        """The archive or directory at `url`, a name of the model store or an allowed URL, for `started`, `replace` or
        `discard`. Raises ServeError."""
        return await self._store.fetch_apart(url)

    async def made_apart(self, url: str, fill: Callable[[Path], None]) -> Fetched:
        """A directory that `fill` fills, for the same. Raises ServeError."""
        try:
            return await self._store.made_apart(url, fill)
        except OSError as error:
            raise ServeError(f"The files of {url} could not be written: {error.strerror or error}") from error

    async def discard(self, fetched: Fetched) -> None:
        """Deletes the copy that was made of it, if one was."""
        await asyncio.to_thread(self._store.discard, fetched)

    async def mlserver_models(self) -> list[mlserver_model.Known]:
        """Those of the model store that MLServer would serve."""
        return await asyncio.to_thread(self._store.mlserver_models)

    def _choose_default(self, model: Model) -> None:
        """Of MLServer's models the newest version is the default, whichever came first."""
        if model.archive.adapter == mlserver_model.ADAPTER:
            versions = [
                (one.version, bool(one.archive.adapter_settings.get("versioned")))
                for one in self.registry.versions(model.name)
            ]
            self.registry.set_default(model.name, mlserver_model.newest(versions))

    def archives(self) -> list[str]:
        """What lies in the model store."""
        return self._store.names()

    def check_model_api(self) -> None:
        """ModelApiDisabled unless models may be registered and unregistered while the server runs."""
        if not self._model_api:
            raise ModelApiDisabled

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

    async def _withdraw(self, model: Model) -> None:
        self.registry.discard(model)
        model.fail_rest(f'Model "{model.name}" could not be started')
        await self._release(model)

    async def _release(self, model: Model) -> None:
        """Ends a model's workers and removes its files."""
        await self._supervisor.dismiss(model.pool, 0.0)
        await asyncio.to_thread(model.archive.remove)
        await self._environments.release(self._environment_of.pop(model))
        fetched = self._fetched.pop(model, None)
        if fetched is None:
            return
        heir = next((other for other, one in self._fetched.items() if one.path == fetched.path), None)
        if heir is None:
            await asyncio.to_thread(self._store.discard, fetched)
        elif fetched.downloaded:  # whoever is the last to use it removes it
            self._fetched[heir] = replace(self._fetched[heir], downloaded=True)

    def fetched(self, model: Model) -> Fetched:
        """Where the model's archive lies."""
        return self._fetched[model]

    # --- unregister

    async def unregister(self, name: str, version: str | None = None) -> Outcome:
        """Removes a version; what it has accepted is answered first (up to unregister_model_timeout)."""
        self.check_model_api()
        model = self.registry.remove(name, version)
        self._on_change()
        return await self.detached(self._unregister(model))

    async def _unregister(self, model: Model) -> Outcome:
        if not await self.retire(model, self._unregister_timeout_s):
            raise UnregisterTimeout(model.name)
        return Outcome(200, f'Model "{model.name}" unregistered')

    async def take_out(self, model: Model) -> bool:
        """`retire`, with the time that unregistering has."""
        return await self.retire(model, self._unregister_timeout_s)

    async def retire(self, model: Model, drain_s: float) -> bool:
        """Takes a version out, default or not, and ends it; False when not all it had accepted was answered in time."""
        self.registry.discard(model)
        self._on_change()
        in_time = await model.drain(drain_s)
        model.fail_rest(f'Model "{model.name}" version {model.version} was unregistered')
        await self._release(model)
        log.info("Model %s unregistered.", model)
        return in_time

    # --- scale, default

    async def scale(
        self,
        name: str,
        version: str | None = None,
        *,
        min_worker: int = 1,
        max_worker: int | None = None,
        synchronous: bool = False,
        timeout: int = -1,
    ) -> Outcome:
        """Sets the number of workers. `timeout`: seconds a surplus worker may take to finish what it has (-1: as long
        as it needs; 0: it is ended at once and its requests run elsewhere)."""
        maximum = min_worker if max_worker is None else max_worker
        if min_worker < 0:
            raise InvalidArgument(f"min_worker cannot be negative: {min_worker}")
        if maximum < min_worker:
            raise InvalidArgument("max_worker cannot be less than min_worker.")
        check_range("max_worker" if max_worker is not None else "min_worker", maximum, 0, WORKERS_MAX)
        model = self.registry.find(name, version)
        model.minimum, model.maximum = min_worker, maximum
        work = self._scale(model, min_worker, None if timeout < 0 else float(timeout))
        if not synchronous:
            self.background(work)
            return Outcome(202, PROCESSING)
        await self.detached(work)
        suffix = f", version: {version}" if version else ""
        return Outcome(200, f"Workers scaled to {min_worker} for model: {name}{suffix}")

    async def _scale(self, model: Model, count: int, drain_s: float | None) -> None:
        try:
            await model.pool.scale(count, drain_s)
        except StartFailed as error:
            raise _start_error(model, error) from error
        finally:
            self._on_change()

    async def start_workers(self, model: Model) -> None:
        """Starts what the model's settings ask for; used at start-up."""
        await self._scale(model, model.minimum, None)

    async def set_default(self, name: str, version: str) -> Outcome:
        self.registry.set_default(name, version)
        self._on_change()
        return Outcome(200, f'Default version successfully updated for model "{name}" to "{version}"')

    # --- list, describe, health

    def list_models(self, limit: int = LIST_LIMIT_MAX, next_page_token: int = 0) -> dict[str, Any]:
        """One page of default versions, as TorchServe lists them: not the functions of workflows, which have no URL."""
        limit = LIST_LIMIT_MAX if limit < 0 or limit > LIST_LIMIT_MAX else limit
        first = max(0, next_page_token)
        models = [model for model in self.registry.defaults() if model.url]
        page = models[first : first + limit]
        out: dict[str, Any] = {}
        if first + limit <= len(models):
            out["nextPageToken"] = str(first + limit)
        out["models"] = [{"modelName": model.name, "modelUrl": model.url} for model in page]
        return out

    async def describe(self, name: str, version: str | None = None, customized: bool = False) -> list[dict[str, Any]]:
        """Descriptions of a version, or of all for version "all"."""
        if version == "all":
            return [describe(model) for model in self.registry.versions(name)]
        model = self.registry.find(name, version)
        description = describe(model)
        if customized:
            description["customizedMetadata"] = await self._customized(model)
        return [description]

    async def _customized(self, model: Model) -> dict[str, Any]:
        """What the handler says of itself: it is called with one empty row and header `describe`."""
        if not model.ready:
            raise NoWorker(
                f'Model "{model.name}" has no worker to serve describe request. '
                "Please use scale workers API to add workers."
            )
        job = model.submit([], headers=[("describe", "True")], alone=True, counted=False)
        try:
            value = json.loads(bytes(await job.result()))
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def health(self) -> bool:
        """False when the default version of some model has lost its workers; a model that still loads is no failure."""
        return not any(model.failing for model in self.registry.defaults())

    # --- tasks

    def background(self, work: Awaitable[Any]) -> None:
        """Runs on; what fails is logged (and visible in describe)."""
        self._task(work).add_done_callback(_log_failure)

    def _task(self, work: Awaitable[T]) -> asyncio.Task[T]:
        async def run() -> T:
            return await work

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def detached(self, work: Awaitable[T]) -> T:
        """Waits for `work`, which goes on when the caller leaves."""
        task = self._task(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_failure)
            raise

    async def close(self, drain_s: float) -> None:
        """Ends all models; what they have accepted is answered first, up to `drain_s`."""
        models = list(self.registry)
        await asyncio.gather(*(model.drain(drain_s) for model in models))
        for task in list(self._tasks):
            task.cancel()
        for model in models:
            model.fail_rest("The server is shutting down")
            await self._supervisor.dismiss(model.pool, 1.0)
            await asyncio.to_thread(model.archive.remove)


def _start_error(model: Model, error: StartFailed) -> ServeError:
    failed = WorkerStartFailed(
        f"Failed to start workers for model {model.name} version: {model.version}. {error.message}"
    )
    failed.http_status = error.code
    return failed


def _log_failure(task: asyncio.Task[Any]) -> None:
    if task.cancelled():
        return
    error = task.exception()
    if isinstance(error, ServeError):
        log.error("%s", error.message)
    elif error is not None:
        log.error("background work failed", exc_info=error)
