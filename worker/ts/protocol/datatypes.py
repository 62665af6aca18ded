"""The datatypes of the Open Inference Protocol: one table, for the server, its workers, the client and the adapters.

A new datatype is a row here. Importing this module imports no numpy: the frontend reads it, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, eq=False)
class Datatype:
    """`number`: in TRITONSERVER_DataType and in the enumeration of config.pbtxt, where its name is `config_type`.
    `size_bytes`: of an element; 0 when each element has a length of its own.
    `array_type`: the name of the type in numpy and torch.
    `element`: the Python type of an element, and so its kind in JSON.
    `field`: the field of InferTensorContents for the elements, "" for none.
    `as_bits`: numpy lacks the type; arrays hold the elements' bits, which are the upper bits of a float32.
    `extension`: defined by Triton; MLServer and aiSSEMBLE lack it."""

    number: int
    name: str
    size_bytes: int
    array_type: str
    element: type
    field: str
    config_type: str
    as_bits: bool = False
    extension: bool = False

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its arrays in numpy: on little-endian machines the object that all such arrays have."""
        import numpy as np

        found = np.dtype(f"uint{8 * self.size_bytes}" if self.as_bits else self.array_type).newbyteorder("<")
        return np.dtype(found.str)


DATATYPES = {
    row.name: row
    for row in (
        Datatype(1, "BOOL", 1, "bool", bool, "bool_contents", "TYPE_BOOL"),
        Datatype(2, "UINT8", 1, "uint8", int, "uint_contents", "TYPE_UINT8"),
        Datatype(3, "UINT16", 2, "uint16", int, "uint_contents", "TYPE_UINT16"),
        Datatype(4, "UINT32", 4, "uint32", int, "uint_contents", "TYPE_UINT32"),
        Datatype(5, "UINT64", 8, "uint64", int, "uint64_contents", "TYPE_UINT64"),
        Datatype(6, "INT8", 1, "int8", int, "int_contents", "TYPE_INT8"),
        Datatype(7, "INT16", 2, "int16", int, "int_contents", "TYPE_INT16"),
        Datatype(8, "INT32", 4, "int32", int, "int_contents", "TYPE_INT32"),
        Datatype(9, "INT64", 8, "int64", int, "int64_contents", "TYPE_INT64"),
        Datatype(10, "FP16", 2, "float16", float, "", "TYPE_FP16"),
        Datatype(11, "FP32", 4, "float32", float, "fp32_contents", "TYPE_FP32"),
        Datatype(12, "FP64", 8, "float64", float, "fp64_contents", "TYPE_FP64"),
        Datatype(13, "BYTES", 0, "object", bytes, "bytes_contents", "TYPE_STRING"),
        Datatype(14, "BF16", 2, "bfloat16", float, "", "TYPE_BF16", as_bits=True, extension=True),
    )
}
#: The datatypes for plain Python values.
OF_PYTHON: dict[type, str] = {bool: "BOOL", int: "INT64", float: "FP64", str: "BYTES"}

OF_NUMBER = {row.number: row for row in DATATYPES.values()}
OF_CONFIG_TYPE = {row.config_type: row for row in DATATYPES.values()}
OF_ARRAY_TYPE = {row.array_type: row for row in DATATYPES.values()}
#: The datatype of elements that name none, by their field: the widest that the field holds.
OF_FIELD = {row.field: row for row in sorted(DATATYPES.values(), key=lambda row: row.size_bytes) if row.field}
_OF_ONNX = {"float32": "float", "float64": "double", "object": "string"}
#: By ONNX's names of the types, but for those that numpy lacks.
OF_ONNX_TYPE = {
    f"tensor({_OF_ONNX.get(row.array_type, row.array_type)})": row for row in DATATYPES.values() if not row.as_bits
}
#: The datatypes of the protocol itself.
STANDARD = tuple(row for row in DATATYPES.values() if not row.extension)
