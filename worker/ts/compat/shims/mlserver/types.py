"""`mlserver.types`: requests, answers and metadata."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any

import numpy as np
import pydantic
from pydantic_core import core_schema

from ts.protocol.datatypes import STANDARD


class BaseModel(pydantic.BaseModel):
    """Dumps leave out what nobody has set, and None."""

    model_config = pydantic.ConfigDict(use_enum_values=True, validate_assignment=True, protected_namespaces=())

    def model_dump(self, *, exclude_unset: bool = True, exclude_none: bool = True, **options: Any) -> dict[str, Any]:
        return super().model_dump(exclude_unset=exclude_unset, exclude_none=exclude_none, **options)

    def model_dump_json(self, *, exclude_unset: bool = True, exclude_none: bool = True, **options: Any) -> str:
        return super().model_dump_json(exclude_unset=exclude_unset, exclude_none=exclude_none, **options)

    def dict(self, **options: Any) -> dict[str, Any]:
        return self.model_dump(**options)

    def json(self, **options: Any) -> str:
        return self.model_dump_json(**options)


class TensorData:
    """A tensor's elements, flat or nested. `root`: the list, made of an array when it is asked for."""

    __slots__ = ("_array", "_list")

    def __init__(self, root: Any) -> None:
        self._array: np.ndarray[Any, Any] | None = root if isinstance(root, np.ndarray) else None
        self._list: Any = None if self._array is not None else root

    @property
    def root(self) -> Any:
        if self._list is None and self._array is not None:
            values = self._array.ravel()
            self._list = values.tolist()
            if values.dtype.kind == "f" and np.isnan(values).any():
                self._list = [None if value != value else value for value in self._list]
        return self._list

    @property
    def __root__(self) -> Any:
        return self.root

    def array(self) -> np.ndarray[Any, Any] | None:
        """The array it was made of, None for a list."""
        return self._array

    @classmethod
    def model_validate(cls, value: Any) -> TensorData:
        return value if isinstance(value, TensorData) else cls(value)

    parse_obj = model_validate

    def model_dump(self, **_: Any) -> Any:
        return self.root

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        dumped = core_schema.plain_serializer_function_ser_schema(cls.model_dump)
        return core_schema.no_info_plain_validator_function(cls.model_validate, serialization=dumped)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.root)

    def __getitem__(self, index: Any) -> Any:
        return self.root[index]

    def __len__(self) -> int:
        return len(self.root) if self._array is None else self._array.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorData) and self.root == other.root

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TensorData(root={self.root!r})"


#: The package's own enumeration of the protocol's datatypes.
Datatype: Any = Enum("Datatype", {row.name: row.name for row in STANDARD})  # type: ignore[misc]
DatatypeName = Annotated[str, pydantic.BeforeValidator(lambda given: Datatype(given).value)]


class Parameters(BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    content_type: str | None = None
    headers: dict[str, Any] | None = None


class RequestInput(BaseModel):
    name: str
    shape: list[int]
    datatype: DatatypeName
    parameters: Parameters | None = None
    data: TensorData


class ResponseOutput(BaseModel):
    name: str
    shape: list[int]
    datatype: DatatypeName
    parameters: Parameters | None = None
    data: TensorData


class RequestOutput(BaseModel):
    name: str
    parameters: Parameters | None = None


class InferenceRequest(BaseModel):
    id: str | None = None
    parameters: Parameters | None = None
    inputs: list[RequestInput]
    outputs: list[RequestOutput] | None = None


class InferenceResponse(BaseModel):
    model_name: str
    model_version: str | None = None
    id: str | None = None
    parameters: Parameters | None = None
    outputs: list[ResponseOutput]


class InferenceErrorResponse(BaseModel):
    error: str | None = None


class MetadataTensor(BaseModel):
    name: str
    datatype: DatatypeName
    shape: list[int]
    parameters: Parameters | None = None


class MetadataModelResponse(BaseModel):
    name: str
    versions: list[str] | None = None
    platform: str
    inputs: list[MetadataTensor] | None = None
    outputs: list[MetadataTensor] | None = None
    parameters: Parameters | None = None


class MetadataModelErrorResponse(BaseModel):
    error: str


class MetadataServerResponse(BaseModel):
    name: str
    version: str
    extensions: list[str]


class MetadataServerErrorResponse(BaseModel):
    error: str


class State(Enum):
    UNKNOWN = "UNKNOWN"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"


class RepositoryIndexRequest(BaseModel):
    ready: bool | None = None


class RepositoryIndexResponseItem(BaseModel):
    name: str
    version: str | None = None
    state: State
    reason: str


class RepositoryLoadErrorResponse(BaseModel):
    error: str | None = None


class RepositoryUnloadErrorResponse(BaseModel):
    error: str | None = None
