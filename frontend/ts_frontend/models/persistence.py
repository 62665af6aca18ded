"""What is served survives a restart: a snapshot after every change, and the models of a snapshot loaded again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

from ts_frontend.errors import ServeError
from ts_frontend.models.administration import Administration
from ts_frontend.models.registry import Registry
from ts_frontend.models.settings import Requested
from ts_frontend.models.snapshot import Kind, Snapshot, SnapshotFiles, VersionState, WorkflowState
from ts_frontend.models.store import Store
from ts_frontend.tasks import watched

log = logging.getLogger(__name__)

States = Mapping[str, Mapping[str, VersionState]]


class RestoreFailed(Exception):
    """A model of the snapshot can't be loaded: the server would serve less than it was asked to."""


class Recorder:
    """Writes a snapshot soon after `changed()`, one at a time, in a thread. `files` None: writes nothing."""

    def __init__(self, files: SnapshotFiles | None, settings: Mapping[str, str]) -> None:
        self._files = files
        self._settings = settings
        self._administration: Administration | None = None
        self._workflows: Callable[[], Mapping[str, WorkflowState]] = dict
        self._pending = False
        self._task: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()

    def attach(
        self, administration: Administration, workflows: Callable[[], Mapping[str, WorkflowState]] = dict
    ) -> None:
        """From now on, what `administration` serves is written, and the `workflows`; before, changes are those of the
        start."""
        self._administration = administration
        self._workflows = workflows

    def changed(self) -> None:
        if self._files is None or self._administration is None:
            return
        self._pending = True
        if self._task is None or self._task.done():
            self._task = watched(self._write_pending(), "The writing of a snapshot")

    async def _write_pending(self) -> None:
        while self._pending:
            self._pending = False
            await self.write(Kind.SNAPSHOT)

    async def write(self, kind: Kind) -> None:
        """Writes now, after what is being written. A failure is logged: it must not take the server down."""
        if self._files is None:
            return
        async with self._writing:
            if self._administration is None:
                return
            try:
                states = states_of(self._administration)
                workflows = self._workflows()
                await asyncio.to_thread(self._files.write, kind, states, self._settings, workflows=workflows)
            except OSError as error:
                log.error("Snapshot could not be written to %s: %s", self._files.directory, error)
            except Exception:  # what can't be told in JSON, say
                log.exception("Snapshot could not be written to %s", self._files.directory)

    async def close(self) -> None:
        """Finishes what is pending and writes the snapshot of the shutdown; what ends after that is not remembered."""
        if self._task is not None:
            await self._task
        await self.write(Kind.SHUTDOWN)
        self._administration = None


def states_of(administration: Administration) -> States:
    """All models as a snapshot holds them; those of workflows come back with their workflows, those
    of model repositories from there."""
    registry: Registry = administration.registry
    states: dict[str, dict[str, VersionState]] = {}
    for model in registry:
        if model.workflow or not model.archive.remembered:
            continue
        settings = model.settings
        states.setdefault(model.name, {})[model.version] = VersionState(
            archive=administration.installation.fetched(model).recorded,
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
        )
    return states


async def restore(snapshot: Snapshot, administration: Administration, store: Store) -> None:
    """Loads every model of `snapshot` that isn't served yet, and its defaults; RestoreFailed when one can't be."""
    registry = administration.registry
    for name, versions in snapshot.models.items():
        for version, state in versions.items():
            if any((model.name, model.version) == (name, version) for model in registry):
                log.info(
                    "Model %s %s: the one to load at the start (load_models) wins over the snapshot's.", name, version
                )
                continue
            await _restore_one(name, version, state, administration, store)
        default = next((version for version, state in versions.items() if state.default), None)
        if default is not None:
            registry.set_default(name, default)


async def _restore_one(
    name: str, version: str, state: VersionState, administration: Administration, store: Store
) -> None:
    try:
        fetched = await store.recall(state.url or state.archive, state.archive)
        model = await administration.add_fetched(fetched, _requested(name, state), loaded_at_startup=True)
    except ServeError as error:
        raise RestoreFailed(
            f"Model {name}, version {version} of the snapshot can't be loaded: {error.message}. "
            f"Put {state.archive} back into the model store, or start with --ncs to forget the snapshot."
        ) from error
    model.minimum, model.maximum = state.min_workers, state.max_workers


def _requested(name: str, state: VersionState) -> Requested:
    """What the register call asked for; of TorchServe's own snapshots, what they hold."""
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
