"""Units: the names that handlers write, and those in the metric's record."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

LONG_NAMES: Mapping[str | None, str] = MappingProxyType(
    {
        "ms": "Milliseconds",
        "s": "Seconds",
        "percent": "Percent",
        "count": "Count",
        "MB": "Megabytes",
        "GB": "Gigabytes",
        "kB": "Kilobytes",
        "B": "Bytes",
        "": "unit",
        None: "unit",
    }
)
TIME_UNITS = ("ms", "s")
SIZE_UNITS = ("MB", "kB", "GB", "B")


class Units:
    """`Units().units`: short name to long name, as TorchServe's handlers look it up."""

    def __init__(self) -> None:
        self.units = dict(LONG_NAMES)


def long_name(unit: str | None) -> str:
    """The unit's name in records: "ms" is "Milliseconds"; an unknown unit is unchanged."""
    return LONG_NAMES.get(unit) or str(unit)
