"""Path templates of models' custom HTTP routes, in Starlette's form: `/greet/{name}`, `/files/{rest:path}`.

A match always takes time in proportion to the path's length times the template's parts, since the server matches in its
event loop. Starlette's regular expressions take exponential time for some templates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_PARAMETER = re.compile(r"\{([a-zA-Z_][a-zA-Z0-9_]*)(:[a-zA-Z_][a-zA-Z0-9_]*)?\}")
CONVERTERS = ("str", "path", "int", "float", "uuid")
_DIGITS, _HEX = frozenset("0123456789"), frozenset("0123456789abcdefABCDEF")
_UUID_GROUPS = (8, 4, 4, 4, 12)


class BadTemplate(ValueError):
    """An invalid template; the message names it."""


class _Parameter(NamedTuple):
    name: str
    converter: str


class PathTemplate:
    """The template `text`. Raises BadTemplate for one without a leading slash, with an unknown converter, or with
    two parameters of the same name. Braces around anything but a parameter are plain text."""

    def __init__(self, text: str) -> None:
        self.text = text
        if not text.startswith("/"):
            raise BadTemplate(f"The path {text!r} does not begin with a slash")
        self._parts = tuple(_parts(text))
        names = [part.name for part in self._parts if isinstance(part, _Parameter)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise BadTemplate(f"The path {text!r} names the parameter {twice[0]!r} twice")

    def fits(self, path: str) -> bool:
        reached: Sequence[int] = (0,)  # the positions before the next part, ascending
        for part in self._parts:
            reached = sorted(_ends(part, path, reached))
            if not reached:
                return False
        return reached[-1] == len(path)


def _parts(text: str) -> Iterator[str | _Parameter]:
    at = 0
    for match in _PARAMETER.finditer(text):
        name, converter = match[1], (match[2] or ":str")[1:]
        if converter not in CONVERTERS:
            known = ", ".join(CONVERTERS)
            raise BadTemplate(f"The path {text!r} has the unknown converter {converter!r}; there are {known}")
        if match.start() > at:
            yield text[at : match.start()]
        yield _Parameter(name, converter)
        at = match.end()
    if at < len(text):
        yield text[at:]


def _ends(part: str | _Parameter, path: str, starts: Sequence[int]) -> set[int]:
    """The positions at which the part may end that begins at one of the `starts`, ascending."""
    if isinstance(part, str):
        return {start + len(part) for start in starts if path.startswith(part, start)}
    if part.converter == "uuid":
        return {end for start in starts for end in _uuid_ends(path, start)}
    found: set[int] = set()
    run_end = -1  # of the run that the last start was in: every run is walked once, since later starts have fewer ends
    for start in starts:
        if start <= run_end:
            continue
        run_end = _run_end(part.converter, path, start)
        ends = range(start if part.converter == "path" else start + 1, run_end + 1)
        found.update(ends)
        if part.converter == "float" and ends and path.startswith(".", run_end):
            found.update(range(run_end + 2, _run_end("int", path, run_end + 1) + 1))
    return found


def _run_end(converter: str, path: str, start: int) -> int:
    """The end of the characters that the converter accepts."""
    if converter in ("str", "path"):
        end = path.find("/" if converter == "str" else "\n", start)
        return len(path) if end < 0 else end
    while start < len(path) and path[start] in _DIGITS:
        start += 1
    return start


def _uuid_ends(path: str, start: int) -> Iterator[int]:
    at = start
    for number, size in enumerate(_UUID_GROUPS):
        if number and path.startswith("-", at):
            at += 1
        group = path[at : at + size]
        if len(group) < size or not _HEX.issuperset(group):
            return
        at += size
    yield at
