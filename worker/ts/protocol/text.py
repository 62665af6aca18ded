"""Text of any value, for answers, logs and terminals: bounded, and with characters that every encoding has.

A handler's exception may have a text of megabytes, half of a surrogate pair in it, or a `__str__` that raises; the
code that reports a failure must not fail itself.
"""

from __future__ import annotations

import json
import reprlib
from typing import Any

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


#: The characters of a text that are kept, unless its use has a limit of its own.
TEXT_CHARS_MAX = 4000
NAME_CHARS_MAX = 200

#: The characters that move a terminal's cursor, that some editors take for line ends, that change the direction of
#: what follows, or that UTF-8 hasn't; tabs stay.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != 9} | {10: "\\n", 13: "\\r"}
_UNSEEN = (0x061C, *range(0x200E, 0x2010), *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF)
_ESCAPES |= {code: f"\\u{code:04x}" for code in (*_UNSEEN, *range(0xD800, 0xE000))}


def text_of(value: object, chars_max: int = TEXT_CHARS_MAX) -> str:
    """`str(value)`, at most `chars_max` characters of it and an ellipsis, halves of surrogate pairs escaped. Never
    raises: `str` may call code of a handler."""
    try:
        text = str(value)
        if type(text) is not str:
            text = str.__str__(text)  # of a subclass, whose own methods may do anything
    except BaseException as error:
        return f"<{name_of(value)}, whose text raised {name_of(error)}>"
    kept = text[: chars_max + 1]
    if not kept.isascii():
        kept = kept.encode("utf-8", "backslashreplace").decode()  # longer, if it has escapes
    return kept if len(kept) <= chars_max else f"{kept[:chars_max]}…"


def repr_of(value: object) -> str:
    """`repr(value)`, as much of it as fits a line, in the same way."""
    try:
        text = reprlib.repr(value)
    except BaseException as error:
        return f"<{name_of(value)}, whose repr raised {name_of(error)}>"
    return text_of(text)


def name_of(value: object) -> str:
    """The name of a value's type; a metaclass may have another idea of it."""
    return text_of(_NAME(type(value)), NAME_CHARS_MAX)


_NAME: Any = type.__dict__["__name__"].__get__


def said(error: object) -> str:
    return f"{name_of(error)}: {text_of(error)}"


def printable(text: str) -> str:
    """The text on one line, as a terminal shows it: without characters that move its cursor or turn its direction."""
    return text if text.isprintable() else text.translate(_ESCAPES)


def printable_lines(text: str) -> str:
    """`printable` for each line of a text."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def printable_json(value: object, indent: int | None = 2) -> str:
    """JSON for a terminal: in ASCII where it has characters that `printable` escapes."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return text if printable_lines(text) == text else json.dumps(value, indent=indent)
