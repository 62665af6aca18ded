"""The labels of a metric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Dimension(NamedTuple):
    """A label name and its value, written `name:value`."""

    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"

    def to_dict(self) -> dict[str, str]:
        return {"Name": self.name, "Value": self.value}


#: The dimensions of an error.
ERROR_LABELS = (Dimension("Level", "Error"),)


def model_labels(model_name: str | None) -> tuple[Dimension, ...]:
    return Dimension("ModelName", model_name or ""), Dimension("Level", "Model")


def completed(dimensions: Sequence[Dimension], defaults: Sequence[Dimension]) -> list[Dimension]:
    """`dimensions`, and the `defaults` with other names."""
    given = {dimension.name for dimension in dimensions}
    return [*dimensions, *(label for label in defaults if label.name not in given)]
