"""Formatters of records: TorchServe's two patterns, log4j2's patterns, JSON, and the access log as in asgi-logger
(KServe's `--access_log_format`): `%(h)s "%(r)s" %(s)s`."""

from __future__ import annotations

import functools
import http
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, tzinfo
from typing import Any, NamedTuple, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from ts.protocol.text import printable
from ts_frontend.telemetry.logging.writer import MAIN, Access, Lines, LogEntry, folded, iso_time

_LEVEL_NAMES = {"WARNING": "WARN", "CRITICAL": "FATAL"}


def level_name(record: logging.LogRecord) -> str:
    return _LEVEL_NAMES.get(record.levelname, record.levelname)


def thread_name(record: logging.LogRecord) -> str:
    """The record's `source` (W-9000-model_1.0-stdout) if it has one, else the thread's name."""
    name = str(getattr(record, "source", None) or record.threadName)
    return MAIN if name == "MainThread" else printable(name)


class TextFormatter(logging.Formatter):
    """TorchServe's patterns: `TIME [LEVEL] THREAD LOGGER - TEXT`, or (`bare`) `TIME - TEXT`."""

    def __init__(self, *, bare: bool = False) -> None:
        super().__init__()
        self._bare = bare

    def format(self, record: logging.LogRecord) -> str:
        origin = "" if self._bare else f" [{level_name(record):<5}] {thread_name(record)} {record.name}"
        lines: Lines | None = getattr(record, "entry_lines", None)
        if lines is not None:
            return "\n".join([f"{moment}{origin} - {text}" for _, moment, text in lines.parts])
        text = f"{iso_time(record.created)}{origin} - {record.getMessage()}"
        return f"{text}\n{folded(record.exc_text)}" if record.exc_text else text


class TerminalFormatter(logging.Formatter):
    """Lines for a handler's author: its output; requests with status and time; messages without time and thread."""

    def format(self, record: logging.LogRecord) -> str:
        entries: Sequence[LogEntry] = getattr(record, "entries", ())
        if entries:
            return "\n".join([self._line(one) for one in entries])
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        text = f"{level}{record.getMessage()}"
        return f"{text}\n{folded(record.exc_text)}" if record.exc_text else text

    def _line(self, entry: LogEntry) -> str:
        if isinstance(entry, Access):
            words = entry.request.rpartition(" HTTP/")[0] or entry.request
            return printable(f"{words}  {entry.status}  {entry.duration_ms:.1f} ms")
        return entry.text()


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, thread, logger, message or a request's parts, request_id where known."""

    def format(self, record: logging.LogRecord) -> str:
        entries: Sequence[LogEntry] = getattr(record, "entries", ())
        if entries:
            return "\n".join([json.dumps(self._object(record, one.seconds) | one.parts()) for one in entries])
        tree = self._object(record, record.created) | {"message": record.getMessage()}
        request_id = getattr(record, "request_id", None)
        if request_id:
            tree["request_id"] = str(request_id)
        return json.dumps(tree | ({"exception": record.exc_text} if record.exc_text else {}))

    def _object(self, record: logging.LogRecord, seconds: float) -> dict[str, Any]:
        return {
            "time": iso_time(seconds),
            "level": record.levelname,
            "thread": thread_name(record),
            "logger": record.name,
        }


class Event(NamedTuple):
    """One line to format."""

    record: logging.LogRecord
    seconds: float
    text: str
    request_id: str = ""


Part: TypeAlias = "Callable[[Event], str]"

_NAMED_DATES = {
    "": "yyyy-MM-dd HH:mm:ss,SSS",
    "DEFAULT": "yyyy-MM-dd HH:mm:ss,SSS",
    "DEFAULT_PERIOD": "yyyy-MM-dd HH:mm:ss.SSS",
    "ISO8601": "yyyy-MM-dd'T'HH:mm:ss,SSS",
    "ISO8601_BASIC": "yyyyMMdd'T'HHmmss,SSS",
    "ISO8601_PERIOD": "yyyy-MM-dd'T'HH:mm:ss.SSS",
    "ISO8601_OFFSET_DATE_TIME_HHMM": "yyyy-MM-dd'T'HH:mm:ss,SSSXX",
    "ISO8601_OFFSET_DATE_TIME_HHCMM": "yyyy-MM-dd'T'HH:mm:ss,SSSXXX",
    "ABSOLUTE": "HH:mm:ss,SSS",
    "ABSOLUTE_PERIOD": "HH:mm:ss.SSS",
    "COMPACT": "yyyyMMddHHmmssSSS",
    "DATE": "dd MMM yyyy HH:mm:ss,SSS",
}
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_AUTUMN = ("October", "November", "December")
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", *_AUTUMN)
_DATE_PIECE = re.compile(
    r"'(?P<quoted>(?:[^']|'')*)'|(?P<letters>(?P<letter>[A-Za-z])(?P=letter)*)|(?P<other>[^A-Za-z']+)"
)


def _offset(moment: datetime, colon: bool) -> str:
    text = moment.strftime("%z")
    return f"{text[:3]}:{text[3:5]}" if colon else text[:5]


_LETTERS: dict[str, Callable[[datetime, int], str]] = {
    "y": lambda moment, count: f"{moment.year % 100:02d}" if count == 2 else f"{moment.year:04d}",
    "M": lambda moment, count: (
        f"{moment.month:0{count}d}" if count < 3 else _MONTHS[moment.month - 1][: 3 if count == 3 else None]
    ),
    "d": lambda moment, count: f"{moment.day:0{count}d}",
    "D": lambda moment, count: f"{moment.timetuple().tm_yday:0{count}d}",
    "E": lambda moment, count: _DAYS[moment.weekday()][: 3 if count < 4 else None],
    "H": lambda moment, count: f"{moment.hour:0{count}d}",
    "h": lambda moment, count: f"{moment.hour % 12 or 12:0{count}d}",
    "a": lambda moment, _: "AM" if moment.hour < 12 else "PM",
    "m": lambda moment, count: f"{moment.minute:0{count}d}",
    "s": lambda moment, count: f"{moment.second:0{count}d}",
    "S": lambda moment, count: f"{moment.microsecond:06d}".ljust(9, "0")[:count],
    "n": lambda moment, count: f"{moment.microsecond:06d}".ljust(9, "0")[:count],
    "Z": lambda moment, _: _offset(moment.astimezone(), False),
    "X": lambda moment, count: _offset(moment.astimezone(), count == 3),
    "z": lambda moment, _: moment.astimezone().tzname() or "",
    "w": lambda moment, count: f"{moment.isocalendar()[1]:0{count}d}",
}


def java_date(pattern: str) -> Callable[[datetime], str]:
    """The formatter for a date pattern of Java, or for one of log4j2's named patterns. Raises ValueError."""
    pieces: list[Callable[[datetime], str]] = []
    text = _NAMED_DATES.get(pattern, pattern)
    at = 0
    while at < len(text):
        match = _DATE_PIECE.match(text, at)
        if match is None:
            raise ValueError(f"a quote isn't closed in the date pattern {pattern!r}")
        pieces.append(_date_piece(match, pattern))
        at = match.end()
    return lambda moment: "".join([piece(moment) for piece in pieces])


def _date_piece(match: re.Match[str], pattern: str) -> Callable[[datetime], str]:
    if match["letters"] is None:
        fixed = match["other"] if match["other"] is not None else match["quoted"].replace("''", "'") or "'"
        return lambda _: fixed
    write, count = _LETTERS.get({"u": "y"}.get(match["letter"], match["letter"])), len(match["letters"])
    if write is None:
        raise ValueError(f"{match['letter']} in the date pattern {pattern!r} isn't known")
    found = write
    return lambda moment: found(moment, count)


# --- patterns of lines

_CONVERSION = re.compile(r"%(?:(?P<percent>%)|(?P<minus>-)?(?P<least>\d+)?(?:\.(?P<most>-?\d+))?(?P<name>[A-Za-z]+))")


def _date(options: list[str]) -> Part:
    name = options[0] if options else ""
    if name in ("UNIX", "UNIX_MILLIS"):
        factor = 1 if name == "UNIX" else 1000
        return lambda event: str(int(event.seconds * factor))
    zone = _zone(options[1]) if len(options) > 1 else None
    write = java_date(name)

    @functools.lru_cache(maxsize=16)
    def text(milliseconds: int) -> str:
        return write(datetime.fromtimestamp(milliseconds / 1000, zone))

    return lambda event: text(int(event.seconds * 1000))


def _zone(name: str) -> tzinfo:
    try:
        return ZoneInfo({"GMT": "UTC", "Z": "UTC"}.get(name, name))
    except (ZoneInfoNotFoundError, ValueError):
        raise ValueError(f"no time zone {name!r}") from None


def _logger(options: list[str]) -> Part:
    """`{2}`: the last two parts of the name."""
    count = int(options[0]) if options and options[0].lstrip("-").isdigit() else 0
    if count <= 0:
        return lambda event: event.record.name
    return lambda event: ".".join(event.record.name.split(".")[-count:])


def _context(options: list[str]) -> Part:
    """`%X{request_id}`; other keys are empty."""
    known = bool(options) and options[0] in ("request_id", "requestId", "x-request-id")
    return lambda event: event.request_id if known else ""


def _exception(event: Event) -> str:
    text = event.record.exc_text
    return f"\n{folded(text)}" if text else ""


def _inner(options: list[str]) -> Part:
    """`%highlight{%p}{FATAL=red}`, `%style{%m}{red}`: without the colours."""
    return compile_pattern(options[0] if options else "", exception=False)


_SIMPLE: dict[str, Part] = {
    "p": lambda event: level_name(event.record),
    "t": lambda event: thread_name(event.record),
    "m": lambda event: event.text,
    "n": lambda _: "\n",
    "pid": lambda _: str(os.getpid()),
    "r": lambda event: str(int(event.record.relativeCreated)),
    "x": lambda _: "",
    "C": lambda event: event.record.module,
    "F": lambda event: event.record.filename,
    "L": lambda event: str(event.record.lineno),
    "M": lambda event: event.record.funcName or "",
}
_WITH_OPTIONS: dict[str, Callable[[list[str]], Part]] = {
    "d": _date,
    "c": _logger,
    "X": _context,
    "highlight": _inner,
    "style": _inner,
}
_ALIASES = {"level": "p", "thread": "t", "tn": "t", "threadName": "t", "msg": "m", "message": "m", "processId": "pid"}
_ALIASES |= {"date": "d", "logger": "c", "mdc": "X", "MDC": "X", "relative": "r", "NDC": "x", "line": "L"}
_ALIASES |= {"class": "C", "file": "F", "method": "M"}
_EXCEPTIONS = frozenset({"ex", "exception", "throwable", "rEx", "rException", "rThrowable", "xEx", "xException"})


def compile_pattern(pattern: str, *, exception: bool = True) -> Part:
    """The function that formats an event as a line. An exception goes to the end, unless the pattern places it.

    :raises ValueError: a conversion is unknown, or can't be used in this way.
    """
    parts: list[Part] = []
    at = 0
    for_exception = exception
    while at < len(pattern):
        match = _CONVERSION.match(pattern, at)
        if match is None:
            end = pattern.find("%", at + 1)
            text = pattern[at : end if end > 0 else len(pattern)]
            parts.append(_fixed(text.replace("\\n", "\n").replace("\\t", "\t")))
            at += len(text)
            continue
        at = match.end()
        if match["percent"]:
            parts.append(_fixed("%"))
            continue
        name, options, at = _named(match["name"], pattern, at)
        part = _conversion(name, options)
        if name in _EXCEPTIONS:
            for_exception = False
        parts.append(_padded(part, match))
    if for_exception:
        parts = _with_exception(parts)
    return lambda event: "".join([part(event) for part in parts])


def _named(letters: str, pattern: str, at: int) -> tuple[str, list[str], int]:
    """The longest known name that `letters` begin with (`%mx` is %m and an x), its options, and where they end."""
    for size in range(len(letters), 0, -1):
        name = _ALIASES.get(letters[:size], letters[:size])
        if name in _SIMPLE or name in _WITH_OPTIONS or name in _EXCEPTIONS:
            at -= len(letters) - size
            break
    else:
        raise ValueError(f"conversion %{letters} isn't known")
    options = []
    while pattern[at : at + 1] == "{":
        end = _closing(pattern, at)
        options.append(pattern[at + 1 : end])
        at = end + 1
    return name, options, at


def _closing(pattern: str, at: int) -> int:
    depth = 0
    for index in range(at, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[index], 0)
        if depth == 0:
            return index
        if depth > _DEPTH_MAX:
            raise ValueError(f"braces are more than {_DEPTH_MAX} deep in the pattern {pattern[:80]!r}")
    raise ValueError(f"a brace isn't closed in the pattern {pattern!r}")


def _conversion(name: str, options: list[str]) -> Part:
    if name in _EXCEPTIONS:
        return _fixed("") if options[:1] in (["none"], ["0"]) else _exception
    return _SIMPLE[name] if name in _SIMPLE else _WITH_OPTIONS[name](options)


def _fixed(text: str) -> Part:
    return lambda _: text


#: The most digits of a width: every line would be that wide.
_WIDTH_DIGITS_MAX = 4
_DEPTH_MAX = 10


def _padded(part: Part, match: re.Match[str]) -> Part:
    """`%-5p`: at least five characters, on the left; `%.3c`: the last three. Raises ValueError."""
    sizes = [match["least"] or "0", match["most"] or "0"]
    if max(map(len, sizes)) > _WIDTH_DIGITS_MAX:
        raise ValueError(f"{match[0][:80]} is wider than {_WIDTH_DIGITS_MAX} digits say")
    (least, most), left = map(int, sizes), bool(match["minus"])
    if not least and not most:
        return part

    def write(event: Event) -> str:
        text = part(event)
        if most and len(text) > abs(most):
            text = text[:-most] if most < 0 else text[-most:]
        return text.ljust(least) if left else text.rjust(least)

    return write


def _with_exception(parts: list[Part]) -> list[Part]:
    """The pattern with the exception before the line's end, if the line's end is its last part."""
    line_end = _SIMPLE["n"]
    return [*parts[:-1], _exception, line_end] if parts and parts[-1] is line_end else [*parts, _exception]


class PatternFormatter(logging.Formatter):
    """Records by a pattern of log4j2; the line's end is the handler's to write."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self._line = compile_pattern(pattern)

    def format(self, record: logging.LogRecord) -> str:
        return "".join([self._line(event) for event in _events(record)]).removesuffix("\n")


def _events(record: logging.LogRecord) -> list[Event]:
    entries: Sequence[LogEntry] = getattr(record, "entries", ())
    if not entries:
        request_id = str(getattr(record, "request_id", "") or "")
        return [Event(record, record.created, record.getMessage(), request_id)]
    return [Event(record, one.seconds, one.text(), getattr(one, "request_id", "")) for one in entries]


_ATOM = re.compile(r"%\(([^)]*)\)[sdf]|%%")
#: The headers and variables of the notation, which the access log doesn't have.
_UNKNOWN = re.compile(r"\{[^{}]+\}[ioe]")


def _nothing(entry: Access) -> str:
    return "-"


def _part(index: int) -> Callable[[Access], str]:
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
    "timing": lambda entry: entry.timing or "-",
}


def check(text: str) -> str:
    """The format itself. Raises ValueError if it contains an unknown name."""
    for match in _ATOM.finditer(text):
        name = match[1]
        if name is not None and name not in ATOMS and not _UNKNOWN.fullmatch(name):
            raise ValueError(f"%({name})s is unknown; there are {', '.join(ATOMS)}")
    return text


class AccessFormatter(logging.Formatter):
    """Writes the requests of a record, one line for each."""

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
