"""Triton's trace settings, and which requests they let be traced: its level, one of so many, and so many in all. Pure.

They come after OpenTelemetry's sampler: what that leaves out stays out. A model without settings of its own is counted
together with all others that have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LEVEL, RATE, COUNT = "trace_level", "trace_rate", "trace_count"
OFF, UNLIMITED = "OFF", -1
#: What there is when nobody has set anything, with and without a collector.
_ON: Mapping[str, tuple[str, ...]] = {
    LEVEL: ("TIMESTAMPS",),
    RATE: ("1",),
    COUNT: ("-1",),
    "log_frequency": ("0",),
    "trace_file": ("",),
    "trace_mode": ("opentelemetry",),
}
_NONE: Mapping[str, tuple[str, ...]] = {**_ON, LEVEL: (OFF,), RATE: ("1000",), "trace_mode": ("triton",)}


class Scope:
    """Settings of the server or of a model, and what has come under them."""

    __slots__ = ("own", "seen", "traced")

    def __init__(self, own: Mapping[str, tuple[str, ...]]) -> None:
        self.own = dict(own)
        self.seen = self.traced = 0

    def restart(self) -> None:
        self.seen = self.traced = 0


class Sampling:
    """`on`: whether there is a collector; `given`: the server's settings at its start."""

    def __init__(self, on: bool, given: Mapping[str, tuple[str, ...]]) -> None:
        self._defaults = _ON if on else _NONE
        self._server = Scope(given)
        self._models: dict[str, Scope] = {}

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._defaults)

    def read(self, model: str = "") -> dict[str, list[str]]:
        """Those of a model, or ("") of the server; the count is what is left."""
        scope = self._models.get(model, self._server)
        found = {**self._defaults, **self._server.own, **scope.own}
        count = int(found[COUNT][0])
        left = count if count == UNLIMITED else max(0, count - scope.traced)
        return {name: list(values) for name, values in (found | {COUNT: (str(left),)}).items()}

    def change(self, given: Mapping[str, Sequence[str]], model: str = "") -> None:
        """An empty list takes a setting back to the server's, or to the default. Counting begins again."""
        scope = self._models.setdefault(model, Scope({})) if model else self._server
        for name, values in given.items():
            if values:
                scope.own[name] = tuple(values)
            else:
                scope.own.pop(name, None)
        if model and not scope.own:
            del self._models[model]
        for one in (scope,) if model else (scope, *self._models.values()):
            one.restart()

    def wanted(self, model: str, continued: bool) -> bool:
        """Whether the next request to this model is traced. One that continues a client's trace isn't left out by the
        rate, and doesn't count for it."""
        scope = self._models.get(model, self._server)
        found = {**self._defaults, **self._server.own, **scope.own}
        if OFF in found[LEVEL]:
            return False
        if not continued:
            scope.seen += 1
            if scope.seen % max(1, int(found[RATE][0])):
                return False
        count = int(found[COUNT][0])
        if UNLIMITED < count <= scope.traced:
            return False
        scope.traced += 1
        return True
