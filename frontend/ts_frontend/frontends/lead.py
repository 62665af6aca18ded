"""The lead: the frontend that was started, with the management. It starts its siblings and tells them of changes."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ts_frontend.authorization.authorization import Authorization
from ts_frontend.config.kinds import ConfigError
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import Draining, InvalidArgument, ServeError, WorkerStartFailed
from ts_frontend.frontends.keeper import Keeper
from ts_frontend.frontends.lending import Borrowing, Lending, connected
from ts_frontend.frontends.line import Line, summed
from ts_frontend.models.manager import ModelManager
from ts_frontend.models.model import Model
from ts_frontend.models.repository import Repository
from ts_frontend.models.startup import state_of
from ts_frontend.tasks import kept, owned, watched
from ts_frontend.telemetry.metrics.families import Definition, Family, MetricKind
from ts_frontend.workers.process import Backoff

log = logging.getLogger(__name__)

#: Seconds until a sibling that keeps ending is started again, at most; and those for a sibling to end with the lead.
RESTART_S_MAX = 30.0
#: Seconds until siblings are told again what one of them could not follow, and until an ended connection is made again.
AGAIN_S = 5.0
#: The most seconds for what siblings tell of themselves; one that is late is left out.
TOLD_S_MAX = 5.0
ENDS_S_MAX = 10.0
MESSAGE_OVERHEAD_BYTES = 1 << 20


class Neighbours:
    """What lead and siblings share: each lends its workers at a socket in `place`, and borrows from the others."""

    def __init__(self, config: ServerConfig, manager: ModelManager, number: int, place: Path) -> None:
        self._number, self._place, self._manager = number, place, manager
        self._folder = os.open(place, os.O_RDONLY)
        self._size_max = max(config.max_request_size, config.max_response_size) + MESSAGE_OVERHEAD_BYTES
        path = self._path(number)
        path.unlink(missing_ok=True)
        try:
            self._lending = Lending(manager.registry, path, self._size_max, config.stream_credit_bytes)
        except OSError as error:
            os.close(self._folder)
            raise ConfigError(
                f"temp_dir {place} can't have the frontends' sockets: {error}; name a shorter one"
            ) from None
        self._borrowing: dict[int, Borrowing] = {}
        self._handed_before = 0
        self._turn = asyncio.Lock()
        self._numbers: Sequence[int] = ()
        self._again: asyncio.TimerHandle | None = None
        self._ended = False

    async def meet(self, numbers: Sequence[int]) -> None:
        """Borrows from these frontends, for the models of now."""
        self._numbers = numbers
        async with self._turn:
            for number in numbers:
                if number != self._number and number not in self._borrowing:
                    try:
                        sock = await connected(self._path(number))
                    except OSError as error:
                        log.warning("Frontend %d lends nothing: %s", number, error)
                        continue
                    self._borrowing[number] = Borrowing(number, sock, self._size_max, self._forget)
            models = list(self._manager.registry)
            for one in list(self._borrowing.values()):
                one.follow(models)

    def families(self) -> list[Family]:
        """The number of requests that this frontend has handed over."""
        return [_one("ts_handed_over_requests_total", "Requests that one frontend handed to another", self._handed())]

    def _handed(self) -> float:
        return float(self._handed_before + sum(one.handed for one in self._borrowing.values()))

    def _forget(self, borrowing: Borrowing) -> None:
        if self._borrowing.get(borrowing.number) is borrowing:
            del self._borrowing[borrowing.number]
            self._handed_before += borrowing.handed
            if self._again is None and not self._ended:  # the frontend itself may live on
                self._again = asyncio.get_running_loop().call_later(AGAIN_S, self._meet_again)

    def _meet_again(self) -> None:
        self._again = None
        if not self._ended:
            watched(self.meet(self._numbers), "The new connection to a frontend")

    async def close(self) -> None:
        self._ended = True
        for one in list(self._borrowing.values()):
            one.close()
        await self._lending.close()
        os.close(self._folder)

    def _path(self, number: int) -> Path:
        """The socket of a frontend. Linux knows the directory by its descriptor, too, since a socket's path may have
        107 bytes, and a directory for temporary files more."""
        short = Path(f"/proc/self/fd/{self._folder}")
        return (short if short.exists() else self._place) / f"f{number}"


def _one(name: str, text: str, value: float) -> Family:
    kind = MetricKind.COUNTER if name.endswith("_total") else MetricKind.GAUGE
    family = Family(Definition(name, kind, "Count", ()), text)
    family.sample(()).add(value)
    return family


class Lead:
    """Siblings 1 to `config.frontends` - 1 of this frontend, made by `keeper`. `sockets`: makes the sockets of another
    one, by the listeners' `where`; `ports`: those of the listeners that only the lead has."""

    def __init__(
        self,
        config: ServerConfig,
        keeper: Keeper,
        manager: ModelManager,
        repository: Repository,
        authorization: Authorization | None,
        place: Path,
    ) -> None:
        self._config, self._keeper, self._place = config, keeper, place
        self._manager, self._repository, self._authorization = manager, repository, authorization
        self._neighbours = Neighbours(config, manager, 0, place)
        self._lines: dict[int, Line] = {}
        self._changes = 0
        self._changed = asyncio.Event()
        self._again: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._sockets: Callable[[], Mapping[str, Sequence[socket.socket]]] = dict
        self._ports: Mapping[str, int] = {}
        self._drains: asyncio.Task[None] | None = None
        self._ending = False
        self._restarts = 0
        self._figures: list[Any] = []
        manager.tell, manager.elsewhere = self.tell, self._described
        repository.loads = {}
        if authorization is not None:
            authorization.on_renewed = lambda: self.tell(False)

    async def start(
        self, sockets: Callable[[], Mapping[str, Sequence[socket.socket]]], ports: Mapping[str, int]
    ) -> None:
        """Starts the siblings, once this frontend listens. Raises ServeError if one can't start."""
        self._sockets, self._ports = sockets, ports
        lines = await asyncio.gather(*(self._started(one) for one in range(1, self._config.frontends)))
        self._tasks = [
            watched(self._keep(number, line), f"The supervision of frontend {number}")
            for number, line in enumerate(lines, 1)
        ]
        self._tasks.append(kept(self._follow, "The telling of changes to other frontends"))
        await self.tell(False)

    # --- siblings

    def _forked(self, number: int) -> socket.socket:
        """Forks a sibling; returns this end of its line. Raises OSError."""
        sockets = self._sockets()
        opened = [one for some in sockets.values() for one in some]
        try:
            ours, theirs = socket.socketpair()
            opened.append(theirs)
            try:
                self._keeper.fork(number, theirs, sockets)
            except OSError:
                ours.close()
                raise
        finally:
            for one in opened:
                one.close()
        return ours

    async def _started(self, number: int) -> Line:
        try:
            line = Line(self._forked(number), self._asked)
        except OSError as error:  # its keeper has ended, or no more files can be opened
            raise ServeError(f"Frontend {number} can't be started: {error}") from error
        await line.open()
        running = watched(line.run(), f"The line to frontend {number}")
        try:
            pid = await line.call("begin", {**self._state(), "place": str(self._place), "ports": dict(self._ports)})
        except ServeError as error:
            line.close()
            await asyncio.wait({running})
            raise ServeError(f"Frontend {number} did not start: {error.message}") from error
        except BaseException:
            line.close()
            raise
        self._lines[number] = line
        log.info("Frontend %d serves (pid %s).", number, pid)
        return line

    async def _keep(self, number: int, line: Line) -> None:
        """Starts the sibling again when it ends, after growing pauses if it keeps ending."""
        backoff = Backoff(float("inf"), RESTART_S_MAX)
        while True:
            begun_s = time.monotonic()
            await line.ended.wait()
            self._lines.pop(number, None)
            if self._ending:
                return
            if time.monotonic() - begun_s > RESTART_S_MAX:
                backoff.worked()
            while not self._ending:
                backoff.failed(time.monotonic())
                pause_s = backoff.delay_s(0.5)
                self._restarts += 1
                log.warning("Frontend %d has ended, and is started again in %.1f s.", number, pause_s)
                await asyncio.sleep(pause_s)
                try:
                    line = await self._started(number)
                    break
                except ServeError as error:
                    log.error("%s", error.message)
            self.changed()

    async def _asked(self, name: str, value: Any) -> Any:
        """Answers a sibling: it hands on the calls of repositories that it gets."""
        if name == "load":
            return await self._repository.load(**value)
        if name == "unload":
            return await self._repository.unload(value["name"], dependents=value["dependents"])
        raise InvalidArgument(f"A frontend asked for {name!r}, which the lead doesn't know")

    # --- changes

    def changed(self) -> None:
        """To be called after a change of the models that nobody waits for."""
        self._again = None
        self._changed.set()

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self.tell(False)
            except ServeError as error:
                log.error("%s", error.message)

    async def tell(self, wait: bool) -> None:
        """As of `ModelManager.tell`."""
        if not self._lines or self._ending:
            return
        state = {**self._state(), "wait": wait}
        lines = list(self._lines.items())
        ends = await asyncio.gather(*(line.call("follow", state) for _, line in lines), return_exceptions=True)
        await self._neighbours.meet([*self._lines])
        for (number, line), end in zip(lines, ends, strict=True):
            if isinstance(end, Draining) and not line.up:
                continue  # its successor gets the state of then
            if isinstance(end, ServeError):
                if self._again is None:
                    self._again = asyncio.get_running_loop().call_later(AGAIN_S, self.changed)
                raise WorkerStartFailed(f"Frontend {number}: {end.message}")
            if isinstance(end, BaseException):
                raise end

    def _state(self) -> dict[str, Any]:
        """What the siblings follow: the models, in the order of their registration, and the keys."""
        self._changes += 1
        registry, loads = self._manager.registry, self._repository.loads or {}
        models = [
            {
                "stamp": model.created_s,
                "name": model.name,
                "version": model.version,
                "default": registry.is_default(model),
                "stored": model.archive.remembered,
                "state": asdict(state_of(model, self._manager)),
                "load": loads.get(model.name, {}),
            }
            for model in registry
            if not model.workflow and model not in self._manager.entering
        ]
        keys = {} if self._authorization is None else self._authorization.made
        return {
            "number": self._changes,
            "models": models,
            "keys": {kind.value: [(one.secret, one.expires_s) for one in some] for kind, some in keys.items()},
            "frontends": [0, *self._lines],
        }

    # --- one description of all

    async def _described(self, model: Model) -> list[dict[str, Any]]:
        return [one for one in await self._of_all("describe", [model.name, model.version], TOLD_S_MAX) if one]

    async def gather(self) -> None:
        self._figures = await self._of_all("figures", None, TOLD_S_MAX)

    def join(self, own: Iterable[Family]) -> Iterable[Family]:
        """The metrics of this frontend with those of its siblings, as they were gathered."""
        return summed(own, self._figures)

    async def _of_all(self, name: str, value: Any, limit_s: float | None = None) -> list[Any]:
        """The answers of the siblings, without those that fail or come too late."""
        lines = list(self._lines.items())
        calls = [asyncio.wait_for(line.call(name, value), limit_s) for _, line in lines]
        found = []
        for (number, _), one in zip(lines, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(one, TimeoutError):
                log.warning("Frontend %d gives no answer to %r within %g s", number, name, limit_s)
            elif isinstance(one, BaseException) and not isinstance(one, ServeError):
                raise one
            elif not isinstance(one, BaseException):
                found.append(one)
        return found

    def families(self) -> list[Family]:
        return [
            _one("ts_frontends", "Frontends that serve", 1.0 + len(self._lines)),
            _one("ts_frontend_restarts_total", "Frontends that ended and were started again", float(self._restarts)),
            *self._neighbours.families(),
        ]

    # --- the end

    def drain(self) -> None:
        """Has the siblings drain like this frontend; `drained` waits for them."""
        self._ending = True
        self._drains = owned(self._drain())

    async def _drain(self) -> None:
        await self._of_all("drain", None)

    async def drained(self) -> None:
        """Returns when all frontends have answered their requests: until then they need each other's workers."""
        if self._drains is not None:
            await self._drains

    async def close(self) -> None:
        self._ending = True
        if self._again is not None:
            self._again.cancel()
        lines = list(self._lines.values())
        await self._of_all("end", None)
        if lines:
            await asyncio.wait([owned(line.ended.wait()) for line in lines], timeout=ENDS_S_MAX)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._neighbours.close()
        for line in lines:
            line.close()
        self._keeper.close()
