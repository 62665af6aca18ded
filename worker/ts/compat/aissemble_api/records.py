"""Record types with keyword arguments, checked values, and conversion to plain values and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar, TypeVar

Kind = Callable[[Any], Any]
R = TypeVar("R", bound="JsonRecord")


@dataclass(kw_only=True)
class JsonRecord:
    """A record. `KINDS` converts the values of fields; its TypeErrors and ValueErrors become ValueErrors that name
    type and field."""

    KINDS: ClassVar[Mapping[str, Kind]] = {}

    def __post_init__(self) -> None:
        for name, kind in self.KINDS.items():
            value = getattr(self, name)
            try:
                setattr(self, name, kind(value))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{type(self).__name__}.{name}: {error}") from error

    @classmethod
    def model_validate(cls: type[R], value: Any) -> R:
        """A record from a mapping, or `value` itself if it is a record. Unknown keys are left out."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"{cls.__name__} is an object, not {value!r}")
        known = {one.name for one in fields(cls)}
        try:
            return cls(**{name: one for name, one in value.items() if name in known})
        except TypeError as error:
            raise ValueError(f"{cls.__name__}: {error}") from None

    @classmethod
    def model_validate_json(cls: type[R], text: str | bytes) -> R:
        return cls.model_validate(json.loads(text))

    def _pairs(self) -> Iterator[tuple[str, Any]]:
        return ((one.name, getattr(self, one.name)) for one in fields(self))

    def model_dump(self, *, exclude_none: bool = False) -> dict[str, Any]:
        return {name: plain(value) for name, value in self._pairs() if not (exclude_none and value is None)}

    def model_dump_json(self, *, exclude_none: bool = False) -> str:
        return json.dumps(self.model_dump(exclude_none=exclude_none))


def plain(value: Any) -> Any:
    """The value as JSON has it."""
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, Enum):
        return value.value
    return [plain(one) for one in value] if isinstance(value, list) else value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a text is needed, not {value!r}")
    return value


def optional(kind: Kind) -> Kind:
    return lambda value: None if value is None else kind(value)


def list_of(kind: Kind) -> Kind:
    def read(value: Any) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"a list is needed, not {value!r}")
        return [kind(one) for one in value]

    return read


def whole(value: Any) -> int:
    if isinstance(value, bool) or int(value) != value:
        raise ValueError(f"a whole number is needed, not {value!r}")
    return int(value)
