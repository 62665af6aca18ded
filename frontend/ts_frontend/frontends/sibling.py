"""A sibling: a whole frontend without management, which follows the lead's models and ends with the lead."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from ts_frontend.authorization.authorization import Authorization, KeyFile, keys_outside
from ts_frontend.config.keys import Key, KeyKind, Keys, joined
from ts_frontend.config.snapshot import VersionState
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import InvalidArgument, ServeError
from ts_frontend.frontends.lead import Neighbours
from ts_frontend.frontends.line import Line, plain
from ts_frontend.models.manager import ModelManager
from ts_frontend.models.model import Model
from ts_frontend.models.repository import Repository
from ts_frontend.models.startup import kept_in_store, requested_of
from ts_frontend.tasks import watched
from ts_frontend.telemetry.metrics.registry import MetricsRegistry

log = logging.getLogger(__name__)


class Sibling:
    """The sibling's end of its line to the lead. `on_orphaned` is called when the lead has ended."""

    def __init__(self, config: ServerConfig, sock: socket.socket, on_orphaned: Callable[[], None]) -> None:
        self._config = config
        self._line = Line(sock, self._asked)
        self._state: dict[str, Any] = {}
        self._begun, self._joined = asyncio.Event(), asyncio.Event()
        self._serves: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._drained, self._ends = asyncio.Event(), asyncio.Event()
        self._stop: Callable[[], None] = lambda: None
        self._number = 0
        self._stamps: dict[Model, float] = {}
        self._turn = asyncio.Lock()
        self._manager: ModelManager | None = None
        self._repository: Repository | None = None
        self._metrics: MetricsRegistry | None = None
        self._neighbours: Neighbours | None = None
        self._authorization: Authorization | None = None
        self.running = watched(self._line.run(), "The line to the lead")
        self.running.add_done_callback(lambda _: on_orphaned())

    async def begun(self) -> None:
        """Returns when the lead has told its state."""
        await self._begun.wait()

    @property
    def ports(self) -> Mapping[str, int]:
        """The ports of the listeners that only the lead has."""
        found: Mapping[str, int] = self._state["ports"]
        return found

    def authorization(self) -> Authorization | None:
        """The keys: those given from outside, and those that the lead has made."""
        config = self._config
        if not config.token_authorization:
            return None
        outside = keys_outside(config)
        self._authorization = Authorization(
            lambda: joined({} if outside is None else outside(), self._keys()),
            KeyFile(config.key_dir),
            life_s=config.token_expiration_min * 60,
            overlap_s=config.token_overlap_s,
        )
        return self._authorization

    def _keys(self) -> Keys:
        told = self._state["keys"]
        return {KeyKind(kind): tuple(Key(secret, expires_s) for secret, expires_s in told[kind]) for kind in told}

    # --- life

    async def join(self, manager: ModelManager, repository: Repository, metrics: MetricsRegistry) -> None:
        """Takes the lead's models, besides those that the start has loaded, and meets the other frontends."""
        self._manager, self._repository, self._metrics = manager, repository, metrics
        repository.lead = self._line.call
        self._neighbours = Neighbours(self._config, manager, self._config.frontend, Path(self._state["place"]))
        metrics.gather(self._neighbours.families, always=True)
        await self._follow(self._state)

    def serves(self, stop: Callable[[], None]) -> None:
        """Tells the lead that this frontend listens. `stop` drains it."""
        self._stop = stop
        self._joined.set()
        self._serves.set_result(os.getpid())

    def failed(self, error: str) -> None:
        """Tells the lead why this frontend can't start."""
        if not self._serves.done():
            self._serves.set_exception(ServeError(error))

    async def flush(self) -> None:
        """Returns when the lead has read all answers, and closed the line."""
        await self._line.ended.wait()

    async def drained(self) -> None:
        """Tells the lead that all requests are answered, and returns once those of all frontends are."""
        self._drained.set()
        await self._ends.wait()

    async def close(self) -> None:
        if self._neighbours is not None:
            await self._neighbours.close()

    async def _asked(self, name: str, value: Any) -> Any:
        if name == "begin":
            self._state = value
            self._begun.set()
            return await self._serves
        await self._joined.wait()
        manager, metrics = self._manager, self._metrics
        assert manager is not None and metrics is not None
        if name == "follow":
            return await self._follow(value)
        if name == "describe":
            model = manager.registry.get(*value)
            return None if model is None else manager.described(model)
        if name == "figures":
            return plain(metrics.families())
        if name == "drain":
            self._stop()
            return await self._drained.wait()
        if name == "end":
            self._ends.set()
            return self._stop()
        raise InvalidArgument(f"The lead asked for {name!r}, which this frontend doesn't know")

    # --- following

    async def _follow(self, state: dict[str, Any]) -> None:
        """Serves the lead's models, and no others. Raises ServeError with what can't be served here."""
        manager = self._manager
        assert manager is not None and self._neighbours is not None
        failures: list[str] = []
        retired: list[Awaitable[Any]] = []
        work: list[Awaitable[Any]] = []
        async with self._turn:
            if state["number"] >= self._number:
                self._number = state["number"]
                self._state = {**self._state, **state}
                if self._authorization is not None:
                    await self._authorization.reload()
                wanted = {(one["name"], one["version"]): one for one in state["models"]}
                for model in [one for one in manager.registry if (one.name, one.version) not in wanted]:
                    manager.registry.discard(model)
                    retired.append(manager.retire(model))
                for one in state["models"]:
                    try:
                        work += await self._have(one, manager)
                    except Exception as error:  # of any kind: what is gone from the registry must still be retired
                        known = isinstance(error, ServeError)
                        said = error.message if isinstance(error, ServeError) else f"{type(error).__name__}: {error}"
                        failures.append(f"{one['name']} {one['version']}: {said}")
                        what = one["name"], one["version"], said
                        log.error("Model %s %s can't be served as at the lead: %s", *what, exc_info=not known)
                self._set_defaults(state, manager)
            await self._neighbours.meet(state["frontends"])
        if not state.get("wait"):
            for one_work in work:
                manager.tasks.background(one_work)
            work = []
        for end in await asyncio.gather(*retired, *work, return_exceptions=True):
            if isinstance(end, ServeError):
                failures.append(end.message)
            elif isinstance(end, BaseException):
                raise end
        if failures:
            raise ServeError("; ".join(failures))

    def _set_defaults(self, state: dict[str, Any], manager: ModelManager) -> None:
        registry = manager.registry
        for one in state["models"]:
            model = registry.get(one["name"], one["version"])
            if one["default"] and model is not None and not registry.is_default(model):
                registry.set_default(one["name"], one["version"])

    async def _have(self, one: dict[str, Any], manager: ModelManager) -> list[Awaitable[Any]]:
        """Serves one model as the lead does; returns the starts of its workers."""
        local, state = manager.registry.get(one["name"], one["version"]), VersionState(**one["state"])
        known = None
        if local is not None and (local in self._stamps or local.url == state.url):
            known = self._stamps.setdefault(local, one["stamp"])  # those of the start are the lead's, too
        if local is not None and known == one["stamp"]:
            if (local.minimum, local.maximum) == (state.min_workers, state.max_workers):
                return []
            local.scale_between(state.min_workers, state.max_workers)
            return [manager.start_workers(local)]
        if not one["stored"]:
            assert self._repository is not None
            await self._repository.load_here(one["name"], **one["load"])
            loaded = manager.registry.find(one["name"], one["version"])
            self._stamps[loaded] = one["stamp"]
            return []
        store = manager.loader.store
        fetched = await store.recall(state.url or state.archive, state.archive, named=state.named)
        requested, kept = requested_of(one["name"], state), kept_in_store(fetched)
        if local is None:
            model = await manager.add(await manager.build(kept, requested, loaded_at_startup=False))
        else:
            model = await manager.start_and_replace(kept, await manager.loader.open(kept, requested), requested)
        self._stamps = {each: stamp for each, stamp in self._stamps.items() if each in [*manager.registry]}
        self._stamps[model] = one["stamp"]
        model.scale_between(state.min_workers, state.max_workers)
        return [manager.start_workers(model)]
