"""What serves listeners, and the choice between the engines."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import math
from collections.abc import Sequence
from typing import Protocol

from ts_frontend.errors import InvalidArgument
from ts_frontend.ingress.call import Listener

logger = logging.getLogger(__name__)

KINDS = ("auto", "h2corn", "grpcio")


class Engine(Protocol):
    """Serves several listeners in the running event loop; started and drained once."""

    async def start(self) -> None:
        """Listens. All listeners or none: raises OSError that names the address that can't be had."""

    def port(self, name: str) -> int:
        """The port of the listener `name`, which the system chose if it asked for 0."""

    async def drain(self, grace_s: float) -> None:
        """Takes no more calls, waits up to `grace_s` seconds for those running, and ends the rest UNAVAILABLE."""

    async def wait(self) -> None:
        """Returns after a drain; raises when the engine stopped for another reason."""


class Joined:
    """Two engines as one, each with listeners of its own: gRPC's, and those that only h2corn can serve."""

    def __init__(self, first: Engine, second: Engine) -> None:
        self._engines = (first, second)

    async def start(self) -> None:
        first, second = self._engines
        await first.start()
        try:
            await second.start()
        except BaseException:
            await first.drain(0)
            raise

    def port(self, name: str) -> int:
        first, second = self._engines
        with contextlib.suppress(KeyError):
            return first.port(name)
        return second.port(name)

    async def drain(self, grace_s: float) -> None:
        await asyncio.gather(*(engine.drain(grace_s) for engine in self._engines))

    async def wait(self) -> None:
        await asyncio.gather(*(engine.wait() for engine in self._engines))


def serves_http() -> bool:
    """Whether listeners with an HTTP application can be served here: h2corn is installed (it needs Python 3.11)."""
    return importlib.util.find_spec("h2corn") is not None


def make_engine(kind: str, listeners: Sequence[Listener]) -> Engine:
    """An engine that isn't started yet. `kind`: one of KINDS; "auto" is h2corn wherever it can do what is asked.

    Raises ValueError for an unknown kind or two listeners of one name, InvalidArgument for h2corn where it isn't
    installed.
    """
    if kind not in KINDS:
        raise ValueError(f"grpc_engine is {kind!r}; use one of {', '.join(KINDS)}")
    if len({listener.name for listener in listeners}) != len(listeners):
        raise ValueError("two listeners have one name")
    if kind == "auto":
        kind = _best_kind(listeners)
    http = [listener for listener in listeners if listener.http_app is not None and not listener.routes]
    if kind == "grpcio" and http:
        return Joined(make_engine("grpcio", [one for one in listeners if one not in http]), make_engine("h2corn", http))
    if kind == "h2corn":
        if not serves_http():
            raise InvalidArgument("grpc_engine=h2corn: h2corn is not installed; it needs Python 3.11 or later")
        from ts_frontend.ingress.h2corn_engine import H2cornEngine

        return H2cornEngine(listeners)
    from ts_frontend.ingress.grpcio_engine import GrpcioEngine

    return GrpcioEngine(listeners)


def _best_kind(listeners: Sequence[Listener]) -> str:
    if not serves_http():
        return "grpcio"
    if any(math.isfinite(listener.limits.connection_age_s_max) for listener in listeners):
        logger.warning("A maximal connection age is set: gRPC is served by grpcio, as h2corn has no such limit")
        return "grpcio"
    return "h2corn"
