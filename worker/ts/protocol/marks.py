"""Marks in printed lines that name their requests: ids between two control characters before a line."""

from __future__ import annotations

BEGIN, END = "\x1e", "\x1f"


def marked(line: str, request_ids: str) -> str:
    """`request_ids`: joined by commas."""
    return f"{BEGIN}{request_ids}{END}{line}"


def unmarked(line: str) -> tuple[str, str]:
    """The request ids of a line ("" for none), and the line without them."""
    if not line.startswith(BEGIN):
        return "", line
    ids, end, rest = line[1:].partition(END)
    return (ids, rest) if end else ("", line)
