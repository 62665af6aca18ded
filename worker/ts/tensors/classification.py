"""An output as its largest elements, as Triton's clients may ask for it: texts `value:index[:label]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ts.protocol.datatypes import DATATYPES
from ts.tensors.datatypes import Array, BadTensor, bytes_array
from ts.tensors.types import Tensor


def classified(tensor: Tensor, count: Any, declared: Mapping[str, Any]) -> Tensor:
    """BYTES of shape [n], or [batch, n], largest first. `declared`: `batched` tells whether the first dimension is a
    batch (without it: when there are several), `labels` has a text by index. BadTensor for what can't be classified."""
    if type(count) is not int or count < 1:
        raise BadTensor(f"output {tensor.name!r}: classification is a number of classes, at least 1, not {count!r}")
    kind = DATATYPES[tensor.datatype]
    if kind.element is bytes or kind.as_bits:
        raise BadTensor(f"output {tensor.name!r} of {tensor.datatype} can't be classified")
    array = tensor.array
    if not declared.get("batched", array.ndim > 1):
        texts = _largest(array.ravel(), count, declared.get("labels") or ())
        return Tensor(tensor.name, "BYTES", bytes_array(texts, [len(texts)]))
    rows = [_largest(row.ravel(), count, declared.get("labels") or ()) for row in array]
    flat = [text for row in rows for text in row]
    return Tensor(tensor.name, "BYTES", bytes_array(flat, [len(rows), len(rows[0]) if rows else 0]))


def _largest(values: Array, count: int, labels: Sequence[str]) -> list[bytes]:
    """Of equal ones the first."""
    order = np.argsort(-values.astype(np.float64), kind="stable")[:count]
    return [_text(values[index], int(index), labels) for index in order]


def _text(value: Any, index: int, labels: Sequence[str]) -> bytes:
    shown = f"{value:f}" if np.issubdtype(type(value), np.floating) else str(int(value))
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{shown}:{index}{label}".encode()
