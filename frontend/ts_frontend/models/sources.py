"""One source of a model's settings: checked look-ups by TorchServe's keys, and which of several sources wins. Pure."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

INT_MAX = 2**31 - 1
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Source:
    """Settings by TorchServe's keys. A value of the wrong kind is as if it weren't there; `warnings` tells."""

    values: Mapping[str, Any]
    name: str
    warnings: list[str]

    def whole(self, key: str, least: int = 1) -> int | None:
        """A whole number from `least` on."""
        found: int | None = self._checked(
            key, lambda value: _is_whole(value, least), f"a whole number, at least {least}"
        )
        return found

    def flag(self, key: str) -> bool | None:
        found: bool | None = self._checked(key, lambda value: isinstance(value, bool), "true or false")
        return found

    def text(self, key: str) -> str | None:
        """Text that isn't empty."""
        found: str | None = self._checked(key, lambda value: isinstance(value, str) and value != "", "text")
        return found

    def choice(self, key: str, allowed: Iterable[str]) -> str | None:
        words = ", ".join(f'"{word}"' for word in allowed)
        found: str | None = self._checked(
            key, lambda value: isinstance(value, str) and value in allowed, f"one of {words}"
        )
        return found

    def indices(self, key: str) -> tuple[int, ...] | None:
        """A list of whole numbers from 0 on."""
        found: list[int] | None = self._checked(key, _is_indices, "a list of whole numbers, at least 0 each")
        return None if found is None else tuple(found)

    def section(self, key: str) -> Source:
        found: dict[str, Any] | None = self._checked(key, lambda value: isinstance(value, dict), "keys with values")
        return Source(found or {}, f"{self.name} {key}", self.warnings)

    def warn(self, key: str, problem: str) -> None:
        self.warnings.append(f"{self.name}: {key} is {reprlib.repr(self.values.get(key))}: {problem}")

    def _checked(self, key: str, good: Callable[[Any], bool], expected: str) -> Any:
        value = self.values.get(key)
        if value is None or good(value):
            return value
        self.warn(key, f"ignored, it must be {expected}")
        return None


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= INT_MAX


def _is_indices(value: object) -> bool:
    return isinstance(value, list) and all(_is_whole(item, 0) for item in value)


def first(*candidates: _Value | None | Callable[[], _Value | None]) -> _Value | None:
    """The first that isn't None; later sources are functions, so that what isn't needed isn't complained about."""
    for candidate in candidates:
        value = candidate() if callable(candidate) else candidate
        if value is not None:
            return value
    return None
