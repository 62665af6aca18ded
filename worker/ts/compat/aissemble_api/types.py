"""Requests, answers and metadata as aiSSEMBLE's handlers get and give them, with their checks.

Errors of `validate_oip` have the words of aiSSEMBLE 1.1.0: programs look at them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, TypeVar

from ts.protocol.datatypes import STANDARD

Kind = Callable[[Any], Any]
R = TypeVar("R", bound="JsonRecord")


@dataclass(kw_only=True)
class JsonRecord:
    """A record. `KINDS` converts fields; its TypeErrors and ValueErrors become ValueErrors that name them."""

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


log = logging.getLogger(__name__)

ANY_SIZE = -1


#: aiSSEMBLE's own enumeration, whose members are texts, too.
Datatype: Any = Enum("Datatype", {row.name: row.name for row in STANDARD}, type=str)  # type: ignore[misc]
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
    KINDS: ClassVar[Mapping[str, Kind]] = {"name": text, "parameters": optional(Parameters.model_validate)}


@dataclass(kw_only=True)
class _Tensor(JsonRecord):
    name: str
    shape: list[int]
    datatype: str
    parameters: Parameters | None = None
    data: TensorData
    KINDS: ClassVar[Mapping[str, Kind]] = {
        "name": text,
        "shape": list_of(whole),
        "datatype": Datatype,
        "parameters": optional(Parameters.model_validate),
        "data": TensorData.model_validate,
    }

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
    KINDS: ClassVar[Mapping[str, Kind]] = {
        "id": optional(text),
        "parameters": optional(Parameters.model_validate),
        "inputs": list_of(RequestInput.model_validate),
        "outputs": optional(list_of(RequestOutput.model_validate)),
    }

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
    KINDS: ClassVar[Mapping[str, Kind]] = {
        "model_name": text,
        "model_version": optional(text),
        "id": optional(text),
        "parameters": optional(Parameters.model_validate),
        "outputs": list_of(ResponseOutput.model_validate),
    }

    def validate_oip(self) -> None:
        """Raises ValueError or TypeError that names an output whose data doesn't fit its declaration."""
        if not self.outputs:
            log.info("InferenceResponse for model '%s' contained no outputs.", self.model_name)
        _check_tensors(self.outputs, "output")


@dataclass(kw_only=True)
class MetadataTensor(JsonRecord):
    name: str
    datatype: str
    shape: list[int]
    KINDS: ClassVar[Mapping[str, Kind]] = {"name": text, "datatype": Datatype, "shape": list_of(whole)}


@dataclass(kw_only=True)
class ModelMetadataResponse(JsonRecord):
    name: str
    versions: list[str] | None = None
    platform: str
    inputs: list[MetadataTensor]
    outputs: list[MetadataTensor]
    KINDS: ClassVar[Mapping[str, Kind]] = {
        "name": text,
        "versions": optional(list_of(text)),
        "platform": text,
        "inputs": list_of(MetadataTensor.model_validate),
        "outputs": list_of(MetadataTensor.model_validate),
    }


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
    if not (_sizes_fit(declared, actual) if ANY_SIZE in declared else _count_fits(declared, data)):
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


def _count_fits(declared: list[int], data: Any) -> bool:
    count = 1
    for size in declared:
        count *= size
    return len(flatten(data)) == count


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
