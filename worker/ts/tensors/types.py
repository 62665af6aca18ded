"""Tensors, requests and answers of handlers and adapters, and the encoding of tensors."""

from __future__ import annotations

import math
import struct
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ts.protocol.datatypes import DATATYPES, OF_ARRAY_TYPE, Datatype
from ts.protocol.frames import Buffer, Pairs

Array: TypeAlias = "npt.NDArray[Any]"
#: Headers as they came, or by name.
Headers: TypeAlias = "Pairs | dict[str, str]"

#: The limits of numpy, also for tensors without elements (a dimension of 0).
DIMENSIONS_MAX, ELEMENTS_MAX = 64, 1 << 59
#: The rows of a tensor without elements, each of which is an empty list where a handler gets lists.
EMPTY_ROWS_MAX = 1 << 16
#: The longest value from a client in a message: values may be of any size, and messages go into headers, too.
MESSAGE_CHARS_MAX = 1000
_LENGTH = struct.Struct("<I")


class BadTensor(ValueError):
    """A tensor whose data doesn't fit its declaration. The message names the tensor and the reason; a long one is
    shortened in the middle. Callers answer 400."""

    def __init__(self, message: str) -> None:
        half = MESSAGE_CHARS_MAX // 2
        long = len(message) > MESSAGE_CHARS_MAX
        super().__init__(f"{message[:half]} … {message[-half:]}" if long else message)


class NoSuchRegion(BadTensor):
    """A tensor in a region of shared memory that is not registered. Callers answer 404."""


OF_DTYPE = {row.dtype: row.name for row in DATATYPES.values() if row.name != "BYTES" and not row.as_bits}


def datatype(name: str, label: str) -> Datatype:
    """The datatype of that name. Raises BadTensor, naming `label` ("input 'x'"), for an unknown one."""
    try:
        return DATATYPES[name]
    except KeyError:
        raise BadTensor(f"{label}: unknown datatype {name!r}; one of {', '.join(DATATYPES)}") from None


def datatype_of(array: Array) -> str:
    """The name of the datatype of an array; strings and objects are BYTES. Raises BadTensor for a type without one."""
    found = OF_DTYPE.get(array.dtype.newbyteorder("<") if array.dtype.byteorder == ">" else array.dtype)
    if found is not None:
        return found
    if array.dtype.kind in "OSU":
        return "BYTES"
    raise BadTensor(f"an array of numpy's {array.dtype} has no datatype in the Open Inference Protocol")


def elements(shape: Sequence[int], label: str) -> int:
    """The number of elements of a shape. Raises BadTensor for negative dimensions, for too many elements, and for too
    many rows without any."""
    if len(shape) > DIMENSIONS_MAX:
        raise BadTensor(f"{label}: the shape has {len(shape)} dimensions; at most {DIMENSIONS_MAX} are possible")
    addressed = 1
    for size in shape:
        if size < 0:
            raise BadTensor(f"{label}: shape {list(shape)} has a negative dimension")
        addressed *= size or 1
    if addressed > ELEMENTS_MAX:
        raise BadTensor(f"{label}: shape {list(shape)} has more elements than can be addressed")
    if 0 in shape:
        rows = math.prod(shape[: [*shape].index(0)])
        if rows > EMPTY_ROWS_MAX:
            raise BadTensor(
                f"{label}: shape {list(shape)} has {rows} rows without elements; at most {EMPTY_ROWS_MAX} are possible"
            )
    return math.prod(shape)


def decode_raw(kind: Datatype, shape: Sequence[int], data: Buffer, label: str) -> Array:
    """Little-endian elements as a writable array of `shape`, in `data` itself where it is writable and aligned. Raises
    BadTensor if size and shape don't agree."""
    count = elements(shape, label)
    if kind.name == "BYTES":
        return bytes_array(split_bytes(data, count, label), shape)
    if len(data) != count * kind.size_bytes:
        size = count * kind.size_bytes
        raise BadTensor(f"{label}: {len(data)} bytes of data, but shape {list(shape)} of {kind.name} takes {size}")
    if kind.name == "BOOL":
        flags: Array = np.not_equal(np.frombuffer(data, "u1"), 0)
        return flags.reshape(tuple(shape))
    array = np.frombuffer(data, kind.dtype).reshape(tuple(shape))
    return array if array.flags.behaved else array.copy()


def split_bytes(data: Buffer, count: int, label: str) -> list[bytes]:
    """The elements of BYTES, each after its length (u32, little-endian). BadTensor unless they are `count`."""
    view, found, at, end = memoryview(data), [], 0, len(data)
    if count * _LENGTH.size > end:
        raise BadTensor(f"{label}: {end} bytes of data can't hold {count} BYTES elements with their lengths")
    for index in range(count):
        start = at + _LENGTH.size
        size = _LENGTH.unpack_from(view, at)[0] if start <= end else end
        if start + size > end:
            raise BadTensor(f"{label}: incomplete data: element {index} of {count} ends after the {end} bytes given")
        found.append(bytes(view[start : start + size]))
        at = start + size
    if at != end:
        raise BadTensor(f"{label}: {end - at} bytes of data are left over after {count} BYTES elements")
    return found


def join_bytes(values: Iterable[bytes]) -> bytes:
    """BYTES elements, each preceded by its length."""
    return b"".join(part for value in values for part in (_LENGTH.pack(len(value)), value))


def bytes_array(values: Sequence[bytes], shape: Sequence[int]) -> Array:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array.reshape(tuple(shape))


def encode_raw(name: str, array: Array) -> bytes:
    if name == "BYTES":
        return join_bytes(as_bytes(value) for value in array.ravel())
    return np.ascontiguousarray(array, DATATYPES[name].dtype).tobytes()


def raw_view(name: str, array: Array) -> Buffer:
    """The same bytes in the array's own memory, if they lie there so: to be used before it changes."""
    if name == "BYTES":
        return encode_raw(name, array)
    return np.ascontiguousarray(array, DATATYPES[name].dtype).reshape(-1).view(np.uint8).data


def as_bytes(value: Any) -> bytes:
    """An element of a BYTES array: text is UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    return str(value).encode()


def widened(kind: Datatype, array: Array) -> Array:
    """The elements as numpy's numbers: float32 for those whose bits the array holds, else the array itself."""
    if not kind.as_bits:
        return array
    wide: Array = (array.astype("<u4") << (32 - 8 * kind.size_bytes)).view("<f4")
    return wide


def narrowed(kind: Datatype, numbers: Array) -> Array:
    """The other way: the bits of float32's numbers, rounded to the nearest (ties to even); NaN stays NaN."""
    shift = 32 - 8 * kind.size_bytes
    bits = np.ascontiguousarray(numbers, "<f4").view("<u4").astype(np.uint64)
    rounded = (bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)) >> shift
    return np.where(np.isnan(numbers), 0x7FC00000 >> shift, rounded).astype(kind.dtype)


def loose_bytes(
    name: str, values: Sequence[bytes], shape: Sequence[int], parameters: dict[str, Any], label: str
) -> Tensor:
    """BYTES whose number of elements needn't be that of their shape. Raises BadTensor for a shape that can't be."""
    if len(values) == elements(shape, label):
        return Tensor(name, "BYTES", bytes_array(values, shape), parameters)
    return Tensor(name, "BYTES", bytes_array(values, [len(values)]), parameters, tuple(shape))


def check_names(names: Sequence[str]) -> None:
    """Raises BadTensor if a name is given twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise BadTensor(f"input {name!r} is given more than once")
        seen.add(name)


@dataclass(slots=True)
class Tensor:
    """`array` has the shape; BYTES are objects of type bytes, BF16 the 16 bits of each element as uint16 (`numbers`:
    as float32). `stated`: the shape that was said of BYTES with another number of elements, which only MLServer's
    models take and give; their array is flat."""

    name: str
    datatype: str
    array: Array
    parameters: dict[str, Any] = field(default_factory=dict)
    stated: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape if self.stated is None else self.stated

    def numbers(self) -> Array:
        """The elements as numpy's numbers, those of BF16 as float32."""
        kind = DATATYPES[self.datatype]
        return widened(kind, self.array) if kind.as_bits else self.array

    def as_torch(self) -> Any:
        """The elements as a tensor of torch's on the CPU, which may share their memory. Not for BYTES."""
        import torch

        kind, found = DATATYPES[self.datatype], torch.from_numpy(np.ascontiguousarray(self.array))
        return found.view(getattr(torch, kind.array_type)) if kind.as_bits else found

    @classmethod
    def of(cls, name: str, value: Any, **parameters: Any) -> Tensor:
        """A tensor of an array, a torch tensor, nested lists, text or bytes. Raises BadTensor for any other value."""
        if isinstance(value, (str, bytes, bytearray, memoryview)):
            array = np.empty(1, dtype=object)
            array[0] = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
            return cls(name, "BYTES", array, parameters)
        if hasattr(value, "detach"):
            return _of_torch(name, value, parameters)
        array = np.asarray(value)
        return cls(name, datatype_of(array), array, parameters)


def _of_torch(name: str, value: Any, parameters: dict[str, Any]) -> Tensor:
    tensor = value.detach().cpu()
    kind = OF_ARRAY_TYPE.get(str(tensor.dtype).removeprefix("torch."))
    if kind is not None and kind.as_bits:
        import torch

        bits = tensor.contiguous().view(getattr(torch, f"int{8 * kind.size_bytes}"))
        return Tensor(name, kind.name, bits.numpy().view(kind.dtype), parameters)
    array = tensor.numpy()
    return Tensor(name, datatype_of(array), array, parameters)


@dataclass(slots=True)
class RequestedOutput:
    """An output that the client named."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class InferenceRequest:
    """`id` is "" when the client gave none; `outputs` is empty when it wants all; `stream`: it takes any number of
    answers; `texts`: it came as JSON, in which the elements of BYTES are strings; `following`: the requests that come
    after it in its stream, when its handler takes streams; `pairs`: its headers, as long as nobody looks at them."""

    inputs: list[Tensor]
    id: str = ""
    model_name: str = ""
    model_version: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    outputs: list[RequestedOutput] = field(default_factory=list)
    pairs: Headers = ()
    stream: bool = False
    texts: bool = False
    following: AsyncIterator[InferenceRequest] | None = None

    @property
    def headers(self) -> dict[str, str]:
        found = self.pairs
        if not isinstance(found, dict):
            found = self.pairs = dict(found)
        return found

    @headers.setter
    def headers(self, headers: dict[str, str]) -> None:
        self.pairs = headers

    def input(self, name: str) -> Tensor | None:
        return next((tensor for tensor in self.inputs if tensor.name == name), None)


@dataclass(slots=True)
class InferenceResponse:
    """The answer of a handler. Name, version and id left "" are filled in from the model and the request."""

    outputs: list[Tensor]
    id: str = ""
    model_name: str = ""
    model_version: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
