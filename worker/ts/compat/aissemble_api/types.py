"""Requests, answers and metadata as aiSSEMBLE's handlers get and give them, with their checks.

Errors of `validate_oip` have the words of aiSSEMBLE 1.1.0: programs look at them.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from types import UnionType
from typing import Annotated, Any, Self, get_args, get_origin, get_type_hints

from ts.protocol.datatypes import STANDARD


@dataclass(kw_only=True)
class JsonRecord:
    """A record, whose values become what its annotations say. Raises ValueError, naming the field, for others."""

    def __post_init__(self) -> None:
        own: Any = type(self)
        for name, kind in _kinds(own).items():
            try:
                setattr(self, name, _read(getattr(self, name), kind))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{own.__name__}.{name}: {error}") from error

    @classmethod
    def model_validate(cls, value: Any) -> Self:
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
    def model_validate_json(cls, text: str | bytes) -> Self:
        return cls.model_validate(json.loads(text))

    def model_dump(self, *, exclude_none: bool = False) -> dict[str, Any]:
        return {name: plain(value) for name, value in vars(self).items() if not (exclude_none and value is None)}

    def model_dump_json(self, *, exclude_none: bool = False) -> str:
        return json.dumps(self.model_dump(exclude_none=exclude_none))


def plain(value: Any) -> Any:
    """The value as JSON has it."""
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, Enum):
        return value.value
    return [plain(one) for one in value] if isinstance(value, list) else value


@cache
def _kinds(record: type) -> dict[str, Any]:
    return get_type_hints(record, include_extras=True)


def _read(value: Any, kind: Any) -> Any:
    """The value as one of the annotated kind. Raises TypeError, ValueError."""
    form, parts = get_origin(kind), get_args(kind)
    if form is UnionType:  # with None
        return None if value is None else _read(value, parts[0])
    if form is list:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"a list is needed, not {value!r}")
        return [_read(one, parts[0]) for one in value]
    if form is Annotated:
        return parts[1](value)
    if kind is str and not isinstance(value, str):
        raise ValueError(f"a text is needed, not {value!r}")
    if kind is int and (isinstance(value, bool) or int(value) != value):
        raise ValueError(f"a whole number is needed, not {value!r}")
    read: Callable[[Any], Any] = getattr(kind, "model_validate", kind)
    return read(value)


log = logging.getLogger(__name__)

ANY_SIZE = -1


#: aiSSEMBLE's own enumeration, whose members are texts, too.
Datatype: Any = Enum("Datatype", {row.name: row.name for row in STANDARD}, type=str)  # type: ignore[misc]
DatatypeName = Annotated[str, Datatype]
#: The Python types of each datatype's elements.
ELEMENTS: Mapping[str, type | tuple[type, ...]] = {
    row.name: (bytes, str) if row.element is bytes else row.element for row in STANDARD
}


class Parameters:
    """`content_type`, and any other parameters by name."""

    def __init__(self, *, content_type: str | None = None, **more: Any) -> None:
        self.content_type = content_type
        self.__dict__.update(more)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Parameters) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"Parameters({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    @classmethod
    def model_validate(cls, value: Any) -> Parameters:
        return value if isinstance(value, Parameters) else cls(**value)

    def model_dump(self) -> dict[str, Any]:
        return dict(vars(self))


class TensorData:
    """A tensor's elements, flat or nested: `root`. Arrays become lists."""

    def __init__(self, root: Any) -> None:
        self.root = root.tolist() if hasattr(root, "tolist") else root

    @classmethod
    def model_validate(cls, value: Any) -> TensorData:
        return value if isinstance(value, TensorData) else cls(value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.root)

    def __getitem__(self, index: Any) -> Any:
        return self.root[index]

    def __len__(self) -> int:
        return len(self.root)

    def __eq__(self, other: object) -> bool:
        return bool(self.root == (other.root if isinstance(other, TensorData) else other))

    def __repr__(self) -> str:
        return f"TensorData(root={self.root!r})"

    def model_dump(self) -> Any:
        return self.root

    def validate_oip(self, shape: list[int], datatype: str) -> None:
        """Raises ValueError if the elements don't have that shape, TypeError if they aren't of that datatype."""
        _check_shape(shape, self.root)
        _check_elements(datatype, flatten(self.root))


@dataclass(kw_only=True)
class RequestOutput(JsonRecord):
    name: str
    parameters: Parameters | None = None


@dataclass(kw_only=True)
class _Tensor(JsonRecord):
    name: str
    shape: list[int]
    datatype: DatatypeName
    parameters: Parameters | None = None
    data: TensorData

    def validate_oip(self) -> None:
        self.data.validate_oip(self.shape, self.datatype)


class RequestInput(_Tensor):
    """A tensor of a request."""


class ResponseOutput(_Tensor):
    """A tensor of an answer."""


def _check_tensors(tensors: list[Any], kind: str) -> None:
    for tensor in tensors:
        try:
            tensor.validate_oip()
        except (TypeError, ValueError) as error:
            raise type(error)(f"{kind} ('{tensor.name}'): {error}") from error


@dataclass(kw_only=True)
class InferenceRequest(JsonRecord):
    id: str | None = None
    parameters: Parameters | None = None
    inputs: list[RequestInput]
    outputs: list[RequestOutput] | None = None

    def validate_oip(self) -> None:
        """Raises ValueError without inputs; that or TypeError, naming it, for one that doesn't fit its declaration."""
        if not self.inputs:
            raise ValueError("InferenceRequest does not contain any inputs")
        _check_tensors(self.inputs, "input")


@dataclass(kw_only=True)
class InferenceResponse(JsonRecord):
    model_name: str
    model_version: str | None = None
    id: str | None = None
    parameters: Parameters | None = None
    outputs: list[ResponseOutput]

    def validate_oip(self) -> None:
        """Raises ValueError or TypeError that names an output whose data doesn't fit its declaration."""
        if not self.outputs:
            log.info("InferenceResponse for model '%s' contained no outputs.", self.model_name)
        _check_tensors(self.outputs, "output")


@dataclass(kw_only=True)
class MetadataTensor(JsonRecord):
    name: str
    datatype: DatatypeName
    shape: list[int]


@dataclass(kw_only=True)
class ModelMetadataResponse(JsonRecord):
    name: str
    versions: list[str] | None = None
    platform: str
    inputs: list[MetadataTensor]
    outputs: list[MetadataTensor]


@dataclass(kw_only=True)
class ModelReadyResponse(JsonRecord):
    name: str
    ready: bool


@dataclass(kw_only=True)
class ServerReadyResponse(JsonRecord):
    live: bool


@dataclass(kw_only=True)
class ServerLiveResponse(JsonRecord):
    live: bool


@dataclass(kw_only=True)
class ServerMetadataResponse(JsonRecord):
    name: str
    version: str
    extensions: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class ModelMetadataErrorResponse(JsonRecord):
    error: str


@dataclass(kw_only=True)
class ServerMetadataErrorResponse(JsonRecord):
    error: str


# --- shapes and elements


def flatten(data: Any) -> list[Any]:
    """The elements of nested lists; a scalar is one element."""
    if not isinstance(data, list):
        return [data]
    return [element for one in data for element in flatten(one)]


def shape_of(data: Any) -> list[int]:
    """The sizes along the first elements."""
    shape = []
    while isinstance(data, list):
        shape.append(len(data))
        data = data[0] if data else None
    return shape


def _check_shape(declared: list[int], data: Any) -> None:
    actual = shape_of(data)
    if not (_sizes_fit(declared, actual) if ANY_SIZE in declared else math.prod(declared) == len(flatten(data))):
        raise ValueError(f"Shape mismatch - declared {declared} , but got {actual}")
    if ANY_SIZE in declared or len(declared) < 2 or len(actual) < 2:
        return
    if not _rectangular(data, actual):
        raise ValueError("Malformed tensor - nested lists are not rectangular")
    if declared != actual:
        raise ValueError(f"Shape mismatch in nested representation - expected {declared}, but got {actual}")


def _sizes_fit(declared: list[int], actual: list[int]) -> bool:
    return len(declared) == len(actual) and all(
        want in (have, ANY_SIZE) for want, have in zip(declared, actual, strict=True)
    )


def _rectangular(data: Any, shape: list[int]) -> bool:
    if not shape:
        return not isinstance(data, list)
    fits: Callable[[Any], bool] = lambda one: _rectangular(one, shape[1:])  # noqa: E731 (shorter than a def)
    return isinstance(data, list) and len(data) == shape[0] and all(map(fits, data))


def _check_elements(datatype: str, elements: list[Any]) -> None:
    kind = ELEMENTS.get(datatype)
    if kind is None:
        raise ValueError(f"Unsupported datatype - {datatype}")
    for index, value in enumerate(elements):
        if not isinstance(value, kind):
            raise TypeError(
                f"Datatype mismatch - element at index {index} is of type {type(value).__name__}, "
                f"but expected type compatible with {datatype}"
            )
