"""Path templates of models' custom HTTP routes, in Starlette's form: `/greet/{name}`, `/files/{rest:path}`.

A match always takes time in proportion to the path's length times the template's parts, since the server matches in its
event loop. Starlette's regular expressions take exponential time for some templates.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

_PARAMETER = re.compile(r"\{([a-zA-Z_][a-zA-Z0-9_]*)(:[a-zA-Z_][a-zA-Z0-9_]*)?\}")
CONVERTERS = ("str", "path", "int", "float", "uuid")
_DIGITS, _HEX = frozenset("0123456789"), frozenset("0123456789abcdefABCDEF")
_UUID_GROUPS = (8, 4, 4, 4, 12)


class BadTemplate(ValueError):
    """An invalid template; the message names it."""


class _Parameter(NamedTuple):
    name: str
    converter: str


#: Where a parameter that begins somewhere may end: from the first position to the second, both included.
_Ends: TypeAlias = "Sequence[tuple[int, int]]"


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
        return bool(self._reached(path))

    def match(self, path: str) -> dict[str, str] | None:
        """The texts of the parameters, None for another path. Of several splits, earlier parameters are longest."""
        stages = self._reached(path)
        if not stages:
            return None
        good = [len(path)]  # from these positions the rest of the template reaches the end of the path
        longest: list[dict[int, int]] = []
        for part, starts in zip(reversed(self._parts), reversed(stages[:-1]), strict=True):
            ends = {start: end for start, allowed in _ends(part, path, starts) for end in _last(good, allowed)}
            longest.append(ends)
            good = list(ends)
        found = {}
        at = 0
        for part, ends in zip(self._parts, reversed(longest), strict=True):
            if isinstance(part, _Parameter):
                found[part.name] = path[at : ends[at]]
            at = ends[at]
        return found

    def _reached(self, path: str) -> list[Sequence[int]]:
        """The reachable positions before each part and after the last, ascending; [] if the end can't be reached."""
        stages: list[Sequence[int]] = [(0,)]
        for part in self._parts:
            if isinstance(part, str):
                reached: Sequence[int] = [at + len(part) for at in _found(part, path, stages[-1])]
            else:
                reached = _union(_ends(part, path, stages[-1], every=False))
            if not reached:
                return []
            stages.append(reached)
        return stages if stages[-1][-1] == len(path) else []


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


def _ends(
    part: str | _Parameter, path: str, starts: Sequence[int], *, every: bool = True
) -> Iterator[tuple[int, _Ends]]:
    """Each of the `starts`, ascending, at which the part fits, with its ends. Without `every`, starts with the same
    ends as an earlier one may be left out."""
    if isinstance(part, str):
        yield from ((start, [(start + len(part),) * 2]) for start in _found(part, path, starts))
    elif part.converter == "uuid":
        yield from ((start, [(end, end)]) for start in starts for end in _uuid_ends(path, start))
    else:
        yield from _ends_of_runs(part.converter, path, starts, every=every)


def _found(text: str, path: str, starts: Sequence[int]) -> Iterator[int]:
    """Yields those of the `starts` at which the text occurs."""
    among = starts if isinstance(starts, range) else frozenset(starts)
    at, last = path.find(text, starts[0]), starts[-1]
    while 0 <= at <= last:
        if at in among:
            yield at
        at = path.find(text, at + 1)


def _ends_of_runs(converter: str, path: str, starts: Sequence[int], *, every: bool) -> Iterator[tuple[int, _Ends]]:
    run_end = fraction_end = -1  # of the run that the last start was in: every run is walked once
    index = 0
    while index < len(starts):
        start = starts[index]
        if start > run_end:
            run_end = _run_end(converter, path, start)
            fraction_end = -1
            if converter == "float" and path.startswith(".", run_end):
                fraction_end = _run_end("int", path, run_end + 1)
        first = start if converter == "path" else start + 1
        ends = [(first, run_end)] if first <= run_end else []
        if ends and fraction_end > run_end + 1:
            ends.append((run_end + 2, fraction_end))
        if ends:
            yield start, ends
        index = index + 1 if every else bisect_right(starts, run_end, index + 1)


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


def _union(found: Iterator[tuple[int, _Ends]]) -> Sequence[int]:
    """All positions in the ranges, ascending and once each."""
    ranges = sorted(one for _, ends in found for one in ends)
    if len(ranges) == 1:
        return range(ranges[0][0], ranges[0][1] + 1)
    positions: list[int] = []
    after = 0
    for first, last in ranges:
        positions.extend(range(max(first, after), last + 1))
        after = max(after, last + 1)
    return positions


def _last(good: Sequence[int], ends: _Ends) -> Iterator[int]:
    """The last of the `good` positions (ascending) that is among the ends; None without one."""
    best = -1
    for first, last in ends:
        index = bisect_right(good, last)
        if index and good[index - 1] >= first:
            best = max(best, good[index - 1])
    if best >= 0:
        yield best
