"""`mlserver.register` and `mlserver.log`: a runtime's own metrics, among the server's."""

from __future__ import annotations

from collections.abc import Callable

_descriptions: dict[str, str] = {}
_sinks: list[Callable[[str, float], None]] = []


def register(name: str, description: str) -> None:
    _descriptions.setdefault(name, description)


def log(**metrics: float) -> None:
    """One value of each metric; one that isn't registered is, without a description."""
    for name, value in metrics.items():
        register(name, name)
        for sink in _sinks:
            sink(name, float(value))


def send_to(sink: Callable[[str, float], None]) -> None:
    """Sets the receiver of values; called once, by the adapter that runs the model."""
    _sinks[:] = [sink]
