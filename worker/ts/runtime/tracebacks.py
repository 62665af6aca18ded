"""Tracebacks of handlers' exceptions, whatever they are made of: bounded, and never an exception themselves."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from ts.protocol.text import NAME_CHARS_MAX, TEXT_CHARS_MAX, name_of, said, text_of

#: The characters that are kept of a traceback, from its end, and of each of its lines.
TRACEBACK_CHARS_MAX = 64 * 1024
LINE_CHARS_MAX = 1000
#: The exceptions of a traceback, with causes and the members of groups; the calls of each, from the last; its notes.
EXCEPTIONS_MAX, FRAMES_MAX, NOTES_MAX = 20, 500, 20
#: The largest file whose lines are shown.
SOURCE_BYTES_MAX = 8 << 20

_RUNTIME_DIR = os.path.dirname(__file__)
#: The folders of the runtime: this one, and the name that mypyc was given for it.
_RUNTIME_DIRS = (_RUNTIME_DIR, "ts/runtime")
#: The folders of code that isn't the handler's own.
_LIBRARIES = (
    os.path.dirname(_RUNTIME_DIR) + os.sep,
    *("ts/runtime/", "ts/protocol/"),
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
_SYNTAX: Any = SyntaxError.__dict__["text"].__get__
_CAUSED = "\nThe above exception was the direct cause of the following exception:\n\n"
_DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"

# A class may have attributes of its own by these names.
_TRACEBACK: Any = BaseException.__dict__["__traceback__"].__get__
_CAUSE: Any = BaseException.__dict__["__cause__"].__get__
_CONTEXT: Any = BaseException.__dict__["__context__"].__get__
_IS_SUPPRESSED: Any = BaseException.__dict__["__suppress_context__"].__get__


def say(text: str) -> None:
    """Writes to standard output, as TorchServe's worker does: in order with the handler's output. A handler may have
    replaced or closed it; then the descriptor is used."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BaseException:
        try:
            os.write(1, text.encode("utf-8", "backslashreplace") + b"\n")
        except OSError:
            pass  # closed too: there is no place left to report to


def without_runtime(error: BaseException) -> TracebackType | None:
    """The traceback from the handler's own frame on, if it has one."""
    whole: TracebackType | None = _TRACEBACK(error)
    here = whole
    while here is not None and os.path.dirname(_file_of(here)) in _RUNTIME_DIRS:
        here = here.tb_next
    return here or whole


def _file_of(here: TracebackType) -> str:
    return text_of(here.tb_frame.f_code.co_filename)


def place_of(error: BaseException) -> str:
    """The file and line of the handler's own code that an exception came from, in brackets; "" where it has none."""
    last = own = None
    here = without_runtime(error)
    while here is not None:
        last = here
        if not _file_of(here).startswith(_LIBRARIES):
            own = here
        here = here.tb_next
    found = own or last
    if found is None or os.path.dirname(_file_of(found)) in _RUNTIME_DIRS:
        return ""
    name = text_of(found.tb_frame.f_code.co_name, NAME_CHARS_MAX)
    file = text_of(os.path.basename(_file_of(found)), NAME_CHARS_MAX)
    return f" ({file}, line {found.tb_lineno}, in {name})"


def traceback_of(error: BaseException, *, runtime: bool = True) -> str:
    """The traceback with the causes, as Python prints it, without the frames of the import system and of the runtime.
    `runtime`: an exception that has no other frames keeps them."""
    try:
        text = "".join(_chain(error, runtime, [EXCEPTIONS_MAX])).rstrip()
    except BaseException as second:
        text = f"{said(error)}\n(its traceback can't be shown: {name_of(second)})"
    return text if len(text) <= TRACEBACK_CHARS_MAX else f"…{text[-TRACEBACK_CHARS_MAX:]}"


def last_lines(error: BaseException) -> str:
    """The exception's own lines, which end its traceback."""
    return _own_lines(error, _captured(error))


def _chain(error: BaseException, runtime: bool, left: list[int]) -> list[str]:
    """The parts of a traceback, the first cause first. `left`: how many more exceptions are shown."""
    parts: list[str] = []
    seen: set[int] = set()
    here: BaseException | None = error
    while here is not None and id(here) not in seen and left[0] > 0:
        seen.add(id(here))
        left[0] -= 1
        parts[:0] = [*_frames(here, runtime), *_members(here, runtime, left)]
        cause = _CAUSE(here)
        here = cause if cause is not None or _IS_SUPPRESSED(here) else _CONTEXT(here)
        if here is not None:
            parts.insert(0, _CAUSED if cause is not None else _DURING)
    if here is not None:
        parts.insert(0, "… (further causes)\n")
    return parts


def _captured(error: BaseException) -> traceback.TracebackException | None:
    """The frames and lines of the exception alone, as Python has them; None where its parts make that fail."""
    try:
        found = traceback.TracebackException(
            type(error), error, _TRACEBACK(error), limit=-FRAMES_MAX, lookup_lines=False, _seen=set()
        )
        vars(found)["exceptions"] = None  # from Python 3.13 on its lines need it
        return found
    except BaseException:
        return None


def _frames(error: BaseException, runtime: bool) -> Iterator[str]:
    captured = _captured(error)
    stack = captured.stack if captured is not None else _bare_stack(error)
    kept = [frame for frame in stack if not _is_ours(frame.filename)] or (list(stack) if runtime else [])
    if _TRACEBACK(error) is not None:
        yield "Traceback (most recent call last):\n"
    for line in _formatted(kept):
        yield line if len(line) <= LINE_CHARS_MAX else f"{line[:LINE_CHARS_MAX]}…\n"
    yield _own_lines(error, captured)


def _bare_stack(error: BaseException) -> traceback.StackSummary:
    return traceback.StackSummary.extract(traceback.walk_tb(_TRACEBACK(error)), limit=-FRAMES_MAX, lookup_lines=False)


def _formatted(frames: list[traceback.FrameSummary]) -> list[str]:
    shown = [frame if _is_readable(frame.filename) else _without_line(frame) for frame in frames]
    try:
        found = traceback.StackSummary.from_list(shown).format()
    except BaseException:  # of a loader that gives the source of its modules
        found = traceback.StackSummary.from_list([_without_line(frame) for frame in frames]).format()
    return [text_of(line, TRACEBACK_CHARS_MAX) for line in found]


def _without_line(frame: traceback.FrameSummary) -> traceback.FrameSummary:
    return traceback.FrameSummary(frame.filename, frame.lineno, frame.name, lookup_line=False, line="")


def _is_readable(filename: str) -> bool:
    """Whether the lines of a file may be read: code can name a device or a pipe as its file."""
    try:
        return not os.path.exists(filename) or (
            os.path.isfile(filename) and os.path.getsize(filename) <= SOURCE_BYTES_MAX
        )
    except (OSError, ValueError):
        return False


def _is_ours(filename: str) -> bool:
    return (
        filename.startswith("<frozen importlib")
        or os.path.dirname(filename) in _RUNTIME_DIRS
        or filename.endswith("/importlib/__init__.py")
    )


def _own_lines(error: BaseException, captured: traceback.TracebackException | None) -> str:
    """The name, text and notes of an exception. Python's own lines, which have a suggestion for a misspelt name and the
    line of a syntax error, are used for a short text without notes."""
    text = text_of(error)
    notes: Any = getattr(captured, "__notes__", None)
    if captured is not None and notes is None and len(text) < TEXT_CHARS_MAX and not _has_long_line(error):
        try:
            return text_of("".join(captured.format_exception_only()), 2 * TEXT_CHARS_MAX)
        except BaseException:
            pass  # of parts that the text hasn't shown
    name = _full_name(type(error))
    shown: list[Any] = list.__getitem__(notes, slice(NOTES_MAX)) if issubclass(type(notes), list) else []
    return "".join((f"{name}: {text}\n" if text else f"{name}\n", *(f"{text_of(note)}\n" for note in shown)))


def _has_long_line(error: BaseException) -> bool:
    return issubclass(type(error), SyntaxError) and len(text_of(_SYNTAX(error))) > LINE_CHARS_MAX


def _full_name(kind: type) -> str:
    """The name of an exception's class with its module's, as in tracebacks."""
    module, name = (text_of(type.__dict__[one].__get__(kind), NAME_CHARS_MAX) for one in ("__module__", "__qualname__"))
    return name if module in ("builtins", "__main__") else f"{module}.{name}"


def _members(error: BaseException, runtime: bool, left: list[int]) -> list[str]:
    """The exceptions of a group, indented."""
    if not issubclass(type(error), BaseExceptionGroup):
        return []
    members = BaseExceptionGroup.exceptions.__get__(error)
    parts = []
    for number, member in enumerate(members, 1):
        if left[0] <= 0:
            parts.append(f"  | … ({len(members) - number + 1} more)\n")
            break
        inner = "".join(_chain(member, runtime, left))
        parts += [f"  +-+---------------- {number} ----------------\n"]
        parts += [f"  | {line}\n" for line in inner.splitlines()]
    return parts
