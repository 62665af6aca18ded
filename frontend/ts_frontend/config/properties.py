"""The text format of java.util.Properties, read and written. Pure.

Syntax (docs of java.util.Properties.load): `=`, `:` or blanks separate key and value; `#` and `!` start a comment line;
a line that ends in an odd number of backslashes continues in the next one, whose leading blanks don't count;
`\\t \\n \\r \\f \\uXXXX` are characters, a backslash before any other character is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_BLANKS = " \t\f"
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_ESCAPED = {text: "\\" + letter for letter, text in _ESCAPES.items()} | {c: "\\" + c for c in "\\=:#!"}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|u|.)", re.DOTALL)
_LINE_END = re.compile(r"\r\n|\r|\n")


class PropertiesError(ValueError):
    """Invalid properties text, also for java.util.Properties; the message names the line."""


@dataclass(frozen=True, slots=True)
class Property:
    """One setting and the number of the line where it begins (from 1)."""

    key: str
    value: str
    line: int


def parse(text: str) -> list[Property]:
    """All entries in order; of equal keys, the last counts.

    :raises PropertiesError: a `\\u` without four hexadecimal digits.
    """
    return [_entry(line, number) for number, line in _logical_lines(text)]


def render(pairs: Iterable[tuple[str, str]], comments: Iterable[str] = ()) -> str:
    """ASCII text from which `parse` and java.util.Properties read the same pairs."""
    lines = [f"#{comment}" for comment in comments]
    lines += [f"{_escaped(key, blanks=True)}={_escaped(value, blanks=False)}" for key, value in pairs]
    return "".join(line + "\n" for line in lines)


def decode(data: bytes) -> str:
    """The text of a file: UTF-8, or else Latin-1, the encoding that Java reads."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number of the first natural line, joined text), without comments and empty lines."""
    joined, first = "", 0
    for number, natural in enumerate(_LINE_END.split(text), 1):
        line = natural.lstrip(_BLANKS)
        if not first:
            if not line or line[0] in "#!":
                continue
            first = number
        joined += line
        if _continues(line):
            joined = joined[:-1]
            continue
        if joined:
            yield first, joined
        joined, first = "", 0
    if joined:
        yield first, joined


def _continues(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _entry(line: str, number: int) -> Property:
    end = _key_end(line)
    rest = line[end:].lstrip(_BLANKS)
    if rest[:1] in ("=", ":"):
        rest = rest[1:].lstrip(_BLANKS)
    return Property(_unescaped(line[:end], number), _unescaped(rest, number), number)


def _key_end(line: str) -> int:
    at = 0
    while at < len(line) and line[at] not in "=:" + _BLANKS:
        at += 2 if line[at] == "\\" else 1
    return min(at, len(line))


def _unescaped(text: str, number: int) -> str:
    if "\\" not in text:
        return text

    def character(match: re.Match[str]) -> str:
        name = match[1]
        if name == "u":
            raise PropertiesError(f"line {number}: \\u needs four hexadecimal digits")
        return chr(int(name[1:], 16)) if len(name) == 5 else _ESCAPES.get(name, name)

    plain = _ESCAPE.sub(character, text)
    # Java writes a character beyond U+FFFF as two escapes, a UTF-16 pair.
    return plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def _escaped(text: str, *, blanks: bool) -> str:
    escaped = "".join(_ESCAPED.get(character) or _ascii(character) for character in text)
    if blanks:
        return escaped.replace(" ", "\\ ")
    return "\\" + escaped if escaped.startswith(" ") else escaped


def _ascii(character: str) -> str:
    if " " <= character <= "~":
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04X}" for at in range(0, len(units), 2))
