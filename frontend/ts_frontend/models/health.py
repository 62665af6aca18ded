"""Whether the server, or a model, can serve: the one answer behind ping, readiness and gRPC health."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from ts_frontend.errors import Draining, ModelNotFound, ModelVersionNotFound
from ts_frontend.models.model import Model, Registry
from ts_frontend.workers.cluster.resources import ClusterState

#: The most sentences of an answer to a ping.
TROUBLES_SHOWN_MAX = 10


@dataclass(eq=False)
class Health:
    """The health of the server and its models, derived from the workers at each call. Services of gRPC health: "" and
    the names in `services` are the server's; `NAME` and `NAME/VERSION` are a model's readiness. Not `strict`: the
    models don't affect the server's health. `troubles`: versions that differ from the shared snapshot; they don't
    affect the health. `cluster`: Ray's cluster, None when all workers run on this machine; while it can't be reached,
    running workers go on and the answer to a ping says so."""

    registry: Registry
    services: frozenset[str]
    _: KW_ONLY
    strict: bool = True
    troubles: Callable[[], Sequence[str]] = tuple
    cluster: ClusterState | None = None
    _draining: bool = field(default=False, init=False)

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def healthy(self) -> bool:
        """False while the server drains or, if `strict`, while a model's default version has lost its workers; a
        version that is still loading is healthy."""
        return not self._draining and not (self.strict and any(_failing(one) for one in self.registry.defaults()))

    @property
    def ready(self) -> bool:
        """Healthy, and every model of the start has begun to serve: ready in the Open Inference Protocol's sense."""
        return self.healthy and not (self.strict and self._starting())

    def serves(self, model: Model) -> bool:
        """Whether requests should be sent to the model: it is ready, and the server doesn't shut down."""
        return not self._draining and model.ready

    def _starting(self) -> bool:
        """True while the default version of a model that is loaded at the start loads for the first time."""
        models = self.registry.defaults()
        return any(one.loaded_at_startup and one.loading and one.resident is None for one in models)

    async def health(self) -> tuple[bool, dict[str, Any]]:
        """The answer to a ping: the health, and TorchServe's JSON with the problems that don't affect it."""
        healthy, troubles = self.healthy, list(self.troubles()[:TROUBLES_SHOWN_MAX])
        away = self.cluster.away(time.monotonic()) if self.cluster is not None else ""
        more: dict[str, Any] = {"sharedSnapshot": troubles} if troubles else {}
        if away:
            more["ray"] = f"away: {away}"
        return healthy, {"status": "Healthy" if healthy else "Unhealthy", **more}

    def drain(self) -> None:
        """Marks the server as shutting down: nothing is ready from now on."""
        self._draining = True
        self.registry.changes.notify()

    def status(self, service: str) -> bool | None:
        """Whether the service can serve; None for an unknown service."""
        if service == "" or service in self.services:
            return self.healthy
        name, _, version = service.partition("/")
        try:
            return self.serves(self.registry.find(name, version))
        except (ModelNotFound, ModelVersionNotFound):
            return None

    async def changed(self) -> None:
        """Returns after the next change of any model; raises Draining once the server shuts down."""
        if self._draining:
            raise Draining("The server is shutting down")
        await self.registry.changes.wait()


def _failing(model: Model) -> bool:
    """Whether the model makes the server unhealthy: it has lost its workers, and isn't loaded on demand."""
    return model.resident is None and model.failing
