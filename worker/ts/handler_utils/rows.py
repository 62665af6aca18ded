"""The value of a row, the dict that a handler gets for one request."""

from __future__ import annotations

from typing import Any


def row_value(row: Any) -> Any:
    """A request's `data` or `body`; a row that an envelope already took apart is the value itself."""
    if not isinstance(row, dict):
        return row
    data = row.get("data")
    return row.get("body") if data is None else data


def is_asked(context: Any, header: str) -> bool:
    """Whether the batch's first request has the header with the value "True" (describe, explain)."""
    return bool(context.get_request_header(0, header) == "True")
