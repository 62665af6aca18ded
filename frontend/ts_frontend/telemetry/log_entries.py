"""What is written together instead of record by record: requests, workers' lines, metrics; and how text is made fit for
a log, whose lines nobody outside may forge."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

#: The thread that entries are said to come from, where no worker wrote them.
MAIN = "main"

#: Of one request: seconds since 1970 at its end, `ip:port`, request line, status, milliseconds, request id.
AccessFields: TypeAlias = "tuple[float, str, str, int, float, str]"

#: Control characters, and what some terminals and editors take for the end of a line; tabs stay.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != 9}
_ESCAPES |= {10: "\\n", 13: "\\r", 0x2028: "\\u2028", 0x2029: "\\u2029"}
#: What follows a line's end within a record: no line of a log begins like that.
_CONTINUED = "\n    "


class Entry(Protocol):
    """One of the lines that are written together. `seconds`: since 1970; `source`: the thread it names."""

    @property
    def seconds(self) -> float: ...
    @property
    def source(self) -> str: ...
    @property
    def level(self) -> int: ...

    def text(self) -> str: ...

    def parts(self) -> dict[str, object]:
        """What a JSON line has of it."""


#: Gives what is to be written now, as (name of the logger, its lines). Called by the writing thread.
Source: TypeAlias = Callable[[], "Iterable[tuple[str, Sequence[Entry]]]"]


class Access(NamedTuple):
    """One request answered. `peer`: `ip:port`; `request`: method, path, protocol; `seconds`: since 1970, at its end."""

    seconds: float
    peer: str
    request: str
    status: int
    duration_ms: float
    request_id: str = ""

    @property
    def source(self) -> str:
        return MAIN

    @property
    def level(self) -> int:
        return logging.INFO

    def text(self) -> str:
        request = self.request
        if '"' in request or not request.isprintable():
            request = printable(request).replace('"', "%22")
        return f'/{self.peer} "{request}" {self.status} {self.duration_ms:.0f}'

    def parts(self) -> dict[str, object]:
        shown = {
            "peer": self.peer,
            "request": self.request,
            "status": self.status,
            "duration_ms": round(self.duration_ms, 3),
        }
        return {**shown, "request_id": self.request_id} if self.request_id else shown


class ModelLine(NamedTuple):
    """A line that a worker wrote. `source`: W-<id>-<model>_<version>-stdout or -stderr."""

    seconds: float
    source: str
    level: int
    line: str
    request_id: str = ""

    def text(self) -> str:
        return printable(self.line)

    def parts(self) -> dict[str, object]:
        return {"message": self.line, **({"request_id": self.request_id} if self.request_id else {})}


class Lines:
    """Entries as text, made once for all handlers: `parts` are (seconds, time, text)."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.parts = [(one.seconds, iso_time(one.seconds), one.text()) for one in entries]

    def __str__(self) -> str:
        return "\n".join([text for _, _, text in self.parts])


def printable(text: str) -> str:
    """The text on one line, without characters that move a terminal's cursor."""
    return text if text.isprintable() else text.translate(_ESCAPES)


def folded(text: str) -> str:
    """The same for a text of several lines: all but the first are indented."""
    if text.isprintable():
        return text
    return _CONTINUED.join(printable(line) for line in text.split("\n"))


def iso_time(seconds: float) -> str:
    """Local time as TorchServe's logs have it: 2026-11-20T23:33:13,083."""
    whole = int(seconds)
    return f"{_iso_second(whole)},{int((seconds - whole) * 1000):03d}"


@functools.lru_cache(maxsize=16)
def _iso_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))
