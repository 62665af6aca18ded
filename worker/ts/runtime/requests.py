"""From an item of a batch to what a handler gets (facts of TorchServe 0.12: one dict per request)."""

from __future__ import annotations

import json
import sys
from typing import Any

from ts.protocol.frames import Buffer, Item


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


def row(item: Item, decode: bool) -> dict[str, Any]:
    """A request's inputs by name; of inputs with one name the last stays."""
    if not decode:
        return {name: bytearray(data) for name, _, data in item.inputs}
    return {
        name: _decoded(content_type, data) if content_type else bytearray(data)
        for name, content_type, data in item.inputs
    }


def headers(item: Item) -> dict[str, Any]:
    """A request's headers as sent, and for each input its name with `{"content-type": TYPE}`."""
    found: dict[str, Any] = dict(item.headers)
    for name, content_type, _ in item.inputs:
        found[name] = {"content-type": content_type}
    return found
