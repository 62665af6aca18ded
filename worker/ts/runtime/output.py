"""Standard output and error of a worker whose lines name the requests they belong to (the setting `mark_lines`)."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any, TextIO

from ts.protocol.marks import marked
from ts.runtime.jobs import Batch

_request_ids: ContextVar[str] = ContextVar("request_ids", default="")


def turn_to(batch: Batch) -> None:
    """What this thread or task prints from now on belongs to the requests of `batch`."""
    _request_ids.set(",".join(batch.request_ids().values()))


def mark_lines() -> None:
    """From now on; threads that a handler starts are in no request."""
    sys.stdout, sys.stderr = MarkedStream(sys.stdout), MarkedStream(sys.stderr)


class MarkedStream:
    """A text stream whose lines begin with the mark of the request they were printed in."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begins = True  # a new line

    def write(self, text: str) -> int:
        ids = _request_ids.get()
        if ids and text:
            lines = text.splitlines(keepends=True)
            first = 0 if self._begins else 1
            lines[first:] = [marked(line, ids) for line in lines[first:]]
            self._stream.write("".join(lines))
        else:
            self._stream.write(text)
        if text:
            self._begins = text.endswith("\n")
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
