"""One label of a metric."""

from __future__ import annotations

from typing import NamedTuple


class Dimension(NamedTuple):
    """A label name and its value, written `name:value`."""

    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"
