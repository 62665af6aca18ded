"""Lists as TorchServe gives them, a page at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

LIST_LIMIT_MAX = 100
T = TypeVar("T")


def page(found: Sequence[T], limit: int, token: int) -> tuple[Sequence[T], dict[str, str]]:
    """At most `limit` from the place that `token` says, and what tells of the next page: its `nextPageToken`, if there
    is one."""
    limit = LIST_LIMIT_MAX if limit < 0 or limit > LIST_LIMIT_MAX else limit
    first = max(0, token)
    more = {"nextPageToken": str(first + limit)} if first + limit <= len(found) else {}
    return found[first : first + limit], more
