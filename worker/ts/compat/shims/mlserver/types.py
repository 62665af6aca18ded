"""`mlserver.types`: requests, answers and metadata."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any, ClassVar

import numpy as np

from ts.protocol.datatypes import STANDARD

from ._fields import Fields


class TensorData:
    """A tensor's elements, flat or nested. `root` is the list; one that was given as an array becomes it when asked
    for."""

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


class Parameters(Fields):
    keeps_others: ClassVar[bool] = True
    content_type: str | None = None
    headers: dict[str, Any] | None = None


class RequestInput(Fields):
    name: str
    shape: list[int]
    datatype: Datatype
    parameters: Parameters | None = None
    data: TensorData


class ResponseOutput(Fields):
    name: str
    shape: list[int]
    datatype: Datatype
    parameters: Parameters | None = None
    data: TensorData


class RequestOutput(Fields):
    name: str
    parameters: Parameters | None = None


class InferenceRequest(Fields):
    id: str | None = None
    parameters: Parameters | None = None
    inputs: list[RequestInput]
    outputs: list[RequestOutput] | None = None


class InferenceResponse(Fields):
    model_name: str
    model_version: str | None = None
    id: str | None = None
    parameters: Parameters | None = None
    outputs: list[ResponseOutput]


class InferenceErrorResponse(Fields):
    error: str | None = None


class MetadataTensor(Fields):
    name: str
    datatype: Datatype
    shape: list[int]
    parameters: Parameters | None = None


class MetadataModelResponse(Fields):
    name: str
    versions: list[str] | None = None
    platform: str
    inputs: list[MetadataTensor] | None = None
    outputs: list[MetadataTensor] | None = None
    parameters: Parameters | None = None


class MetadataModelErrorResponse(Fields):
    error: str


class MetadataServerResponse(Fields):
    name: str
    version: str
    extensions: list[str]


class MetadataServerErrorResponse(Fields):
    error: str


class State(Enum):
    UNKNOWN = "UNKNOWN"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"


class RepositoryIndexRequest(Fields):
    ready: bool | None = None


class RepositoryIndexResponseItem(Fields):
    name: str
    version: str | None = None
    state: State
    reason: str


class RepositoryLoadErrorResponse(Fields):
    error: str | None = None


class RepositoryUnloadErrorResponse(Fields):
    error: str | None = None
