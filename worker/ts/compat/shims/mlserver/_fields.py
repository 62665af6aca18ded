"""The base of this package's types: classes whose annotations are their fields, with the calls that users of pydantic
know (of version 2, and those of version 1 that old runtimes use)."""

from __future__ import annotations

import copy
import json
import types
import typing
from collections.abc import Callable
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

_S = TypeVar("_S", bound="Fields")
_REQUIRED: Any = object()
_SCALARS = (str, int, float, bool)
#: Gives a value as a field has it; the second argument is the field's name in errors. Raises ValidationError.
_Take: TypeAlias = "Callable[[Any, str], Any]"


class ValidationError(ValueError):
    """A value that doesn't fit its field; the message names the field."""


class _Field(NamedTuple):
    """`label`: its name in errors. `shared`: the default is the same object for all."""

    take: _Take
    default: Any
    label: str
    shared: bool


class Fields:
    """Values are checked and taken over when an object is made: mappings become objects, where the field is one.
    `keeps_others`: values with other names are kept, not left out. `dumps_unset`: fields that nobody gave are
    in a dump, too."""

    keeps_others: ClassVar[bool] = False
    dumps_unset: ClassVar[bool] = False
    _cached: ClassVar[Any] = None  # `dict` is a method here
    #: The values of all fields in an object that got none, and the fields of which that isn't all: required ones, and
    #: those with a default for each object.
    _unset: ClassVar[Any]
    _uncertain: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls._cached = None

    def __init__(self, **values: Any) -> None:
        own, given, fields = self.__dict__, set[str](), self._fields()
        own["model_fields_set"] = given
        own.update(self._unset)
        for name, value in values.items():
            field = fields.get(name)
            if field is not None:
                own[name] = field.take(value, field.label)
                given.add(name)
            elif self.keeps_others:
                own[name] = value
                given.add(name)
        for name in self._uncertain:
            if name not in given:
                default = fields[name].default
                if default is _REQUIRED:
                    raise ValidationError(f"{type(self).__name__} needs a value for {name}")
                own[name] = copy.deepcopy(default)

    @classmethod
    def _fields(cls) -> dict[str, _Field]:
        if cls._cached is None:
            hints = typing.get_type_hints(cls)
            cls._cached = {
                name: cls._field(name, hint)
                for name, hint in hints.items()
                if typing.get_origin(hint) is not ClassVar and not name.startswith("_") and name != "model_fields_set"
            }
            cls._unset = {name: field.default for name, field in cls._cached.items()}
            cls._uncertain = tuple(name for name, field in cls._cached.items() if not field.shared)
        found: dict[str, _Field] = cls._cached
        return found

    @classmethod
    def _field(cls, name: str, hint: Any) -> _Field:
        default = getattr(cls, name, _REQUIRED)
        shared = default is None or isinstance(default, _SCALARS)
        return _Field(_take(hint), default, f"{cls.__name__}.{name}", shared)

    model_fields_set: set[str]

    def __setattr__(self, name: str, value: Any) -> None:
        found = self._fields().get(name)
        own = getattr(type(self), name, None)
        if isinstance(own, property):
            own.__set__(self, value)
            return
        self.__dict__[name] = value if found is None else found.take(value, found.label)
        if not name.startswith("_"):
            self.model_fields_set.add(name)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._values() == other._values()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._values().items())
        return f"{type(self).__name__}({shown})"

    def _values(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self.__dict__.items()
            if not name.startswith("_") and name != "model_fields_set"
        }

    # --- as pydantic has it

    def model_dump(
        self,
        *,
        exclude_unset: bool | None = None,
        exclude_none: bool | None = None,
        include: Any = None,
        exclude: Any = None,
        **_: Any,
    ) -> dict[str, Any]:
        unset_too = self.dumps_unset if exclude_unset is None else not exclude_unset
        none_too = self.dumps_unset if exclude_none is None else not exclude_none
        found = {}
        for name, value in self._values().items():
            skipped = (include is not None and name not in include) or (exclude is not None and name in exclude)
            if skipped or (value is None and not none_too) or (name not in self.model_fields_set and not unset_too):
                continue
            found[name] = _dumped(value, {"exclude_unset": not unset_too, "exclude_none": not none_too})
        return found

    def model_dump_json(self, *, indent: int | None = None, **options: Any) -> str:
        separators = None if indent else (",", ":")
        return json.dumps(self.model_dump(**options), indent=indent, separators=separators, default=_plain)

    @classmethod
    def model_validate(cls: type[_S], obj: Any, **_: Any) -> _S:
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, dict):
            raise ValidationError(f"{cls.__name__} is made of a mapping, not of {type(obj).__name__}")
        return cls(**obj)

    @classmethod
    def model_validate_json(cls: type[_S], json_data: str | bytes, **_: Any) -> _S:
        try:
            return cls.model_validate(json.loads(json_data))
        except json.JSONDecodeError as error:
            raise ValidationError(f"{cls.__name__}: invalid JSON: {error}") from None

    def model_copy(self: _S, *, update: dict[str, Any] | None = None, deep: bool = False) -> _S:
        found: _S = object.__new__(type(self))
        found.__dict__.update(copy.deepcopy(self.__dict__) if deep else self.__dict__)
        found.__dict__["model_fields_set"] = {*self.model_fields_set, *(update or ())}
        found.__dict__.update(update or {})
        return found

    @classmethod
    def model_construct(cls: type[_S], **values: Any) -> _S:
        return cls(**values)

    # --- as pydantic had it

    def dict(self, **options: Any) -> dict[str, Any]:
        return self.model_dump(**options)

    def json(self, **options: Any) -> str:
        return self.model_dump_json(**options)

    def copy(self: _S, **options: Any) -> _S:
        return self.model_copy(**options)

    @classmethod
    def parse_obj(cls: type[_S], obj: Any) -> _S:
        return cls.model_validate(obj)

    @classmethod
    def parse_raw(cls: type[_S], b: str | bytes, **_: Any) -> _S:
        return cls.model_validate_json(b)

    @classmethod
    def parse_file(cls: type[_S], path: Any, **_: Any) -> _S:
        return cls.model_validate_json(Path(path).read_bytes())


@cache
def _take(hint: Any) -> _Take:
    """How values of a type are taken."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Union or origin is types.UnionType:
        first = _take(next(one for one in arguments if one is not type(None)))
        return _optional(first) if type(None) in arguments else first
    if origin is list:
        return _list(_take(arguments[0]))
    if origin is dict or hint is dict:
        return _mapping
    return _take_alone(hint) if isinstance(hint, type) else _anything


def _take_alone(hint: type) -> _Take:
    if issubclass(hint, Enum):
        return _member(hint)
    if hasattr(hint, "model_validate"):
        return lambda value, label: value if type(value) is hint else hint.model_validate(value)
    return _scalar(hint) if hint in _SCALARS else _anything


def _anything(value: Any, label: str) -> Any:
    return value


def _optional(take: _Take) -> _Take:
    return lambda value, label: None if value is None else take(value, label)


def _list(take: _Take) -> _Take:
    def taken(value: Any, label: str) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise ValidationError(f"{label} is a list, not {value!r:.80}")
        try:
            return [take(one, label) for one in value]
        except ValidationError:
            return [take(one, f"{label}[{index}]") for index, one in enumerate(value)]  # says which one it is

    return taken


def _mapping(value: Any, label: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValidationError(f"{label} is a mapping, not {value!r:.80}")
    return value


def _member(hint: type[Enum]) -> _Take:
    """Members and their values are taken as values."""
    known = {key: one.value for one in hint for key in (one, one.value)}

    def taken(value: Any, label: str) -> Any:
        try:
            return known[value]
        except (KeyError, TypeError):
            raise ValidationError(f"{label} is one of {', '.join(one.value for one in hint)}, not {value!r}") from None

    return taken


def _scalar(hint: type) -> _Take:
    def taken(value: Any, label: str) -> Any:
        if isinstance(value, hint):
            return value
        if hint is float and isinstance(value, int):
            return float(value)
        raise ValidationError(f"{label} is of type {hint.__name__}, not {value!r:.80}")

    return taken


def _dumped(value: Any, options: dict[str, Any]) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(**options)
    if isinstance(value, list):
        return [_dumped(one, options) for one in value]
    if isinstance(value, dict):
        return {name: _dumped(one, options) for name, one in value.items()}
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    return value.tolist() if hasattr(value, "tolist") else str(value)
