"""Lines of the access log in the words of asgi-logger, as KServe's `--access_log_format`: `%(h)s "%(r)s" %(s)s`."""

from __future__ import annotations

import http
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence

from ts_frontend.telemetry.logging.writer import Access, printable

_ATOM = re.compile(r"%\(([^)]*)\)[sdf]|%%")
#: Headers and variables: the access log doesn't have them.
_UNKNOWN = re.compile(r"\{[^{}]+\}[ioe]")


def _nothing(entry: Access) -> str:
    return "-"


def _part(index: int) -> Callable[[Access], str]:
    """A part of the request line."""
    return lambda entry: (entry.request.split(" ") + ["-"] * 3)[index]


def _path(entry: Access) -> str:
    return _part(1)(entry).partition("?")[0]


def _line(entry: Access) -> str:
    method, _, protocol = (entry.request.split(" ") + ["-"] * 3)[:3]
    return f"{method} {_path(entry)} {protocol}"


def _phrase(entry: Access) -> str:
    try:
        return http.HTTPStatus(entry.status).phrase
    except ValueError:
        return "-"


def _host(entry: Access) -> str:
    return entry.peer.rpartition(":")[0] or entry.peer


ATOMS: Mapping[str, Callable[[Access], str]] = {
    "h": _host,
    "client_addr": lambda entry: entry.peer,
    "l": _nothing,
    "u": _nothing,
    "t": lambda entry: time.strftime("[%d/%b/%Y:%H:%M:%S %z]", time.localtime(entry.seconds)),
    "r": _line,
    "R": lambda entry: entry.request,
    "request_line": lambda entry: entry.request,
    "m": _part(0),
    "U": _path,
    "q": lambda entry: _part(1)(entry).partition("?")[2],
    "H": _part(2),
    "s": lambda entry: str(entry.status),
    "status_code": lambda entry: str(entry.status),
    "st": _phrase,
    "b": _nothing,
    "B": _nothing,
    "f": _nothing,
    "a": _nothing,
    "T": lambda entry: str(int(entry.duration_ms / 1000)),
    "M": lambda entry: str(int(entry.duration_ms)),
    "D": lambda entry: str(int(entry.duration_ms * 1000)),
    "L": lambda entry: f"{entry.duration_ms / 1000:.6f}",
    "p": lambda entry: f"<{os.getpid()}>",
}


def check(text: str) -> str:
    """The format itself. ValueError for one with a name that doesn't exist."""
    for match in _ATOM.finditer(text):
        name = match[1]
        if name is not None and name not in ATOMS and not _UNKNOWN.fullmatch(name):
            raise ValueError(f"%({name})s is unknown; there are {', '.join(ATOMS)}")
    return text


class AccessFormatter(logging.Formatter):
    """Writes the requests of a record, a line each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = check(text)

    def format(self, record: logging.LogRecord) -> str:
        entries: Sequence[Access] = getattr(record, "entries", ())
        return "\n".join(self._line(entry) for entry in entries) if entries else record.getMessage()

    def _line(self, entry: Access) -> str:
        def atom(match: re.Match[str]) -> str:
            name = match[1]
            return "%" if name is None else ATOMS.get(name, _nothing)(entry)

        return printable(_ATOM.sub(atom, self._text))
