"""Parameters of a request that have a meaning of their own in the Open Inference Protocol's extensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ts.tensors.datatypes import BadTensor

EMPTY_FINAL = "triton_enable_empty_final_response"
_RESERVED = "triton_"
_WHOLE = ("priority", "timeout")
_FLAGS = ("sequence_start", "sequence_end")


def check(parameters: Mapping[str, Any]) -> None:
    """BadTensor for a value of another type, and for names that Triton keeps to itself."""
    for name, value in parameters.items():
        if name.startswith(_RESERVED) and name != EMPTY_FINAL:
            raise BadTensor(f"parameter {name!r}: names that begin with {_RESERVED} are reserved")
        if name in _WHOLE and (type(value) is not int or value < 0):
            raise BadTensor(f"parameter {name!r} is a number, at least 0, not {value!r}")
        if name in (*_FLAGS, EMPTY_FINAL) and type(value) is not bool:
            raise BadTensor(f"parameter {name!r} is true or false, not {value!r}")
        if name == "sequence_id" and (isinstance(value, bool) or not isinstance(value, (int, str))):
            raise BadTensor(f"parameter {name!r} is a number or a text, not {value!r}")
