"""From an item of a batch to what a handler gets (as in TorchServe 0.12: one dict per request)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from ts.protocol import forms
from ts.protocol.frames import Buffer, Input, Item


class Headers(dict[str, Any]):
    """A request's headers, under lower-case names as in HTTP/2 and gRPC; they are found in any case."""

    def __missing__(self, name: str) -> Any:
        lower = name.lower()
        if lower == name:
            raise KeyError(name)
        return self[lower]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and super().__contains__(name.lower()))

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


def is_tensor_request(item: Item | None) -> bool:
    """Whether its one input is marked as a tensor protocol's request (ts/tensors/forms.py)."""
    return item is not None and bool(item.inputs) and item.inputs[0].content_type[:1] == "\0"


def fields(item: Item) -> Sequence[Input]:
    """A request's inputs; a form is as many as it has fields."""
    found = item.inputs
    for part in found:
        if part.content_type and forms.is_form(part.content_type):
            break
    else:
        return found
    expanded: list[Input] = []
    for part in found:
        expanded.extend(_expanded(part) if forms.is_form(part.content_type) else (part,))
    return expanded


def _expanded(part: Input) -> Sequence[Input]:
    try:
        return [Input(*one) for one in forms.parts(part.content_type, bytes(part.data))]
    except forms.MalformedForm as error:
        print(f"input declared as {part.content_type} isn't: {error}; the handler gets its bytes", file=sys.stderr)
        return [part]


def _decoded(content_type: str, data: Buffer) -> Any:
    """JSON and text as values; anything else, and what doesn't parse, as a bytearray. Types compare with their case."""
    base = content_type.partition(";")[0].strip()
    try:
        if base == "application/json":
            return json.loads(str(data, "utf-8"))
        if base.startswith("text"):
            return str(data, "utf-8")
    except (ValueError, RecursionError) as error:
        print(f"input declared as {content_type} isn't: {error}; the handler gets its bytes", file=sys.stderr)
    return bytearray(data)


def row(inputs: Sequence[Input], decode: bool) -> dict[str, Any]:
    """A request's inputs by name; of inputs with one name the last stays."""
    if not decode:
        return {name: bytearray(data) for name, _, data in inputs}
    return {
        name: _decoded(content_type, data) if content_type else bytearray(data) for name, content_type, data in inputs
    }


def headers(item: Item, inputs: Sequence[Input]) -> Headers:
    """A request's headers, and for each input its name with `{"content-type": TYPE}`."""
    found = Headers(item.headers)
    for name, content_type, _ in inputs:
        found[name] = {"content-type": content_type}
    return found
