"""`log_config`: a file of log4j2, or of Python's `logging`, made into handlers and levels of `logging`.

A log4j2 file is first read into appenders and loggers, without opening any file; warnings name unsupported parts.
"""

from __future__ import annotations

import json
import logging
import logging.config
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from xml.etree import ElementTree

import yaml

from ts_frontend.config.files import read_file, read_text
from ts_frontend.config.kinds import ConfigError
from ts_frontend.telemetry.logging.formats import JsonFormatter, PatternFormatter, TextFormatter, java_date
from ts_frontend.telemetry.logging.writer import Complaints, Console, RotatedFile, Rotation

ROOT = ""
_LOOKUP_DEPTH_MAX = 10
#: The limit of text that lookups insert into values, as each may contain others.
_LOOKUP_CHARACTERS_MAX = 1 << 20
_FILES = {"file", "randomaccessfile", "rollingfile", "rollingrandomaccessfile"}
_CONSOLES, _ASYNC, _SILENT = {"console"}, {"async"}, {"null"}
_JSON_LAYOUTS = {"jsonlayout", "jsonpatternlayout", "jsontemplatelayout", "qloglayout"}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{0,15})?|\.\d{1,15})\s*([KMGT]?)B?", re.IGNORECASE | re.ASCII)
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(slots=True)
class Appender:
    """A destination of lines. `pattern` None: JSON lines. `file_pattern` "": the file isn't rolled. Sizes in bytes."""

    name: str
    path: str = ""
    stderr: bool = False
    pattern: str | None = "%m%n"
    level: str = ""
    append: bool = True
    file_pattern: str = ""
    bytes_max: int | None = None
    by_time: bool = False
    kept_max: int = 7
    references: list[str] = field(default_factory=list)


@dataclass(slots=True)
class LoggerPlan:
    """A logger: its level ("": the parent's), its appenders (name, level or ""), and whether the appenders of its
    parents get its lines too. `name` ROOT is the root logger."""

    name: str
    level: str
    appenders: list[tuple[str, str]]
    additive: bool


@dataclass(slots=True)
class LogPlan:
    """The contents of a log4j2 file. `warnings` name its unsupported parts."""

    appenders: dict[str, Appender] = field(default_factory=dict)
    loggers: list[LoggerPlan] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_plan(path: Path, lookups: Mapping[str, Mapping[str, str]]) -> LogPlan:
    """The plan in a file. `lookups`: values of `${env:NAME}` and `${sys:NAME}`, by these prefixes.

    :raises ConfigError: the file can't be read, isn't XML, or its lookups expand to too much text.
    """
    try:
        root = ElementTree.fromstring(read_file(path))
    except (OSError, ElementTree.ParseError, LookupError, ValueError) as error:  # unknown encodings
        raise ConfigError(f"log_config {path}: not a log4j2 XML file, YAML or JSON: {error}") from None
    return _Reader(lookups).read(root)


def _tag(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2].lower()


class _Reader:
    def __init__(self, lookups: Mapping[str, Mapping[str, str]]) -> None:
        self._lookups = lookups
        self._properties: dict[str, str] = {}
        self._plan = LogPlan()
        self._looked_up_characters = 0

    def read(self, root: ElementTree.Element) -> LogPlan:
        if _get(root, "monitorInterval"):
            self._warn("monitorInterval isn't honoured: the file is read once")
        readers = {"properties": self._read_properties, "appenders": self._read_appenders}
        readers |= {"loggers": self._read_loggers}
        for element in root:
            read = readers.get(_tag(element))
            if read is None:
                self._warn(f"<{element.tag}> isn't understood")
            else:
                read(element)
        return self._plan

    def _warn(self, text: str) -> None:
        self._plan.warnings.append(text)

    # --- values

    def _value(self, element: ElementTree.Element, name: str, default: str = "") -> str:
        return self._resolved(_get(element, name, default))

    def _resolved(self, text: str, depth: int = 0) -> str:
        """The text with its lookups replaced, inner ones first; unknown ones stay."""
        if depth > _LOOKUP_DEPTH_MAX:
            return text
        found = re.sub(r"\$\{([^${}]*)\}", lambda match: self._counted(self._looked_up(match[1])), text)
        return self._resolved(found, depth + 1) if found != text else found.replace("$\0", "${").replace("\1", "}")

    def _counted(self, text: str) -> str:
        self._looked_up_characters += len(text)
        if self._looked_up_characters > _LOOKUP_CHARACTERS_MAX:
            raise ConfigError(f"log_config: its lookups come to more than {_LOOKUP_CHARACTERS_MAX} characters")
        return text

    def _looked_up(self, words: str) -> str:
        key, default_given, default = words.partition(":-")
        prefix, colon, name = key.partition(":")
        values = self._lookups.get(prefix.lower()) if colon else self._properties
        if values is not None and (name if colon else key) in values:
            return values[name if colon else key]
        if default_given:
            return default
        self._warn(f"${{{words}}} isn't known" + ("" if values is not None else f": there is no lookup {prefix!r}"))
        return f"$\0{words}\1"

    def _flag(self, element: ElementTree.Element, name: str, default: bool) -> bool:
        return self._value(element, name, str(default)).strip().lower() != "false"

    # --- sections

    def _read_properties(self, section: ElementTree.Element) -> None:
        for element in section:
            value = _get(element, "value") or (element.text or "").strip()
            self._properties[_get(element, "name")] = self._resolved(value)

    def _read_appenders(self, section: ElementTree.Element) -> None:
        for element in section:
            tag = _tag(element)
            if tag == "appender":
                tag = _get(element, "type").lower()
            appender = Appender(self._value(element, "name"))
            if tag in _FILES:
                self._read_file(appender, element, rolled=tag.startswith("rolling"))
            elif tag in _CONSOLES:
                appender.stderr = self._value(element, "target").upper() == "SYSTEM_ERR"
            elif tag not in _ASYNC | _SILENT:
                self._warn(f"appender {appender.name}: <{element.tag}> isn't understood, it writes nothing")
                tag = "null"
            for inner in element:
                self._read_inner(appender, inner)
            if tag in _SILENT:
                appender.level = "OFF"
            self._plan.appenders[appender.name] = appender

    def _read_file(self, appender: Appender, element: ElementTree.Element, rolled: bool) -> None:
        appender.path = self._value(element, "fileName")
        appender.append = self._flag(element, "append", True)
        appender.file_pattern = self._value(element, "filePattern") if rolled else ""
        if not appender.path:
            self._warn(f"appender {appender.name}: without fileName it writes nothing")
            appender.level = "OFF"
        if rolled and not appender.file_pattern:
            self._warn(f"appender {appender.name}: without filePattern its file isn't rolled")

    def _read_inner(self, appender: Appender, element: ElementTree.Element) -> None:
        tag = _tag(element)
        if tag == "layout":
            tag = _get(element, "type", _get(element, "class")).rpartition(".")[2].lower()
        if tag == "patternlayout":
            appender.pattern = self._pattern(element)
        elif tag in _JSON_LAYOUTS:
            appender.pattern = None
        elif tag == "thresholdfilter":
            appender.level = self._value(element, "level")
        elif tag == "appenderref":
            appender.references.append(self._value(element, "ref"))
        elif tag in ("defaultrolloverstrategy", "directwriterolloverstrategy"):
            appender.kept_max = self._number(element, "max", 7)
        elif tag == "policies":
            for policy in element:
                self._read_policy(appender, policy)
        elif not self._read_policy(appender, element):
            self._warn(f"appender {appender.name}: <{element.tag}> isn't understood")

    def _pattern(self, element: ElementTree.Element) -> str:
        inner = [one.text or "" for one in element if _tag(one) == "pattern"]
        # Its own lookups use $${…} too, which mean the same here.
        return self._resolved(_get(element, "pattern") or "".join(inner)) or "%m%n"

    def _read_policy(self, appender: Appender, element: ElementTree.Element) -> bool:
        tag = _tag(element)
        if tag == "sizebasedtriggeringpolicy":
            appender.bytes_max = self._size(self._value(element, "size", "10 MB"))
        elif tag == "timebasedtriggeringpolicy":
            appender.by_time = True
            if self._number(element, "interval", 1) != 1:
                self._warn(f"appender {appender.name}: its interval is taken for 1, the unit of filePattern's date")
        elif tag.endswith("policy"):
            self._warn(f"appender {appender.name}: <{element.tag}> isn't understood")
        else:
            return False
        return True

    def _number(self, element: ElementTree.Element, name: str, default: int) -> int:
        text = self._value(element, name, str(default)).strip()
        if _NUMBER.fullmatch(text):
            return int(text)
        self._warn(f"<{element.tag}>: {name} must be a number, not {text!r}; it is taken for {default}")
        return default

    def _size(self, text: str) -> int | None:
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            self._warn(f"size {text!r} isn't understood: write for example 100 MB")
            return None
        return int(float(match[1]) * _UNITS[match[2].upper()])

    def _read_loggers(self, section: ElementTree.Element) -> None:
        for element in section:
            tag = _tag(element)
            if tag in ("root", "asyncroot"):
                self._plan.loggers.append(self._logger(element, ROOT))
            elif tag in ("logger", "asynclogger"):
                self._plan.loggers.append(self._logger(element, self._value(element, "name")))
            else:
                self._warn(f"<{element.tag}> isn't understood")

    def _logger(self, element: ElementTree.Element, name: str) -> LoggerPlan:
        references = list(self._references(element, name or "Root"))
        level = self._value(element, "level")
        return LoggerPlan(name, level, references, self._flag(element, "additivity", True))

    def _references(self, element: ElementTree.Element, name: str) -> Iterator[tuple[str, str]]:
        for inner in element:
            if _tag(inner) == "appenderref":
                yield self._value(inner, "ref"), self._value(inner, "level")
            else:
                self._warn(f"logger {name}: <{inner.tag}> isn't understood")


def _get(element: ElementTree.Element, name: str, default: str = "") -> str:
    """The value of an attribute; the case of its name doesn't matter."""
    return next((value for key, value in element.attrib.items() if key.lower() == name.lower()), default)


_LEVELS = {
    "ALL": logging.DEBUG,
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
    "OFF": logging.CRITICAL + 1,
}
THEIRS, OURS = "org.pytorch.serve", "ts_frontend"
#: The loggers of Java libraries that TorchServe's own file names: nothing here logs under them.
_JAVA = ("io.", "com.", "java", "org.apache", "org.slf4j", "software.amazon", "ai.djl")
#: TorchServe's two patterns, for which a quicker formatter exists.
_KNOWN = {"%d{ISO8601} - %m%n": True, "%d{ISO8601} [%-5p] %t %c - %m%n": False}
_DATE = re.compile(r"%d\{([^}]*)\}")
_INDEX = re.compile(r"%(\d{0,2})i")


def is_dict_config(path: Path) -> bool:
    """Whether it is a file for Python's logging (YAML or JSON), rather than for log4j2."""
    return path.suffix.lower() in (".yaml", ".yml", ".json")


def apply_dict_config(path: Path) -> None:
    """Set up `logging` from the file alone, with logging.config.dictConfig.

    :raises ConfigError: the file can't be read or used.
    """
    try:
        text = read_text(path)
        tree = json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, **tree})
    except (OSError, ValueError, TypeError, AttributeError, ImportError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"log_config {path}: {error} (cause: {error.__cause__})") from None


def apply_plan(plan: LogPlan, *, console: bool = True) -> list[str]:
    """Give `logging` the handlers and levels of a log4j2 file; returns warnings about the parts that aren't applied. A
    file without appenders changes levels only.

    `console` False: nothing is written to the console.
    """
    return _Application(plan, console).apply()


def plan_problems(plan: LogPlan) -> list[str]:
    """The warnings of `apply_plan`, without any change to `logging` and without opening a file."""
    return list(dict.fromkeys(_Application(plan, console=False, dry=True).apply()))


class _Application:
    def __init__(self, plan: LogPlan, console: bool, dry: bool = False) -> None:
        self._plan, self._console, self._dry = plan, console, dry
        self.warnings = list(plan.warnings)
        self._handlers: dict[tuple[str, str], logging.Handler | None] = {}
        self._complaints = Complaints()

    def apply(self) -> list[str]:
        loggers = {name: one for one in self._plan.loggers if (name := self._python_name(one.name)) is not None}
        for name, one in loggers.items():
            level = self._level(one.level, name) if one.level else None
            if level is not None and not self._dry:
                logging.getLogger(name).setLevel(level)
        if self._plan.appenders:
            self._apply_appenders(loggers)
        return self.warnings

    def _apply_appenders(self, loggers: dict[str, LoggerPlan]) -> None:
        loggers.setdefault(ROOT, LoggerPlan(ROOT, "", [], False))
        for name in loggers:
            handlers = self._all_handlers(name, loggers)
            if not self._dry:
                logger = logging.getLogger(name)
                logger.propagate = False
                logger.handlers[:] = handlers
        if self._dry:  # those that no logger names, too
            list(self._named((name, "") for name in self._plan.appenders))

    def _python_name(self, name: str) -> str | None:
        """Our name for one of TorchServe's loggers; None for one without a counterpart here."""
        if name == THEIRS:
            return OURS
        if name.startswith(f"{THEIRS}."):
            self.warnings.append(f"logger {name} isn't applied: it is a Java class; set the level of {THEIRS}")
            return None
        return None if name.startswith(_JAVA) else name

    def _level(self, word: str, name: str) -> int:
        """The level's number; NOTSET, the parent logger's level, for an unknown word."""
        found = _LEVELS.get(word.upper())
        if found is None:
            self.warnings.append(f"level {word} of logger {name or 'Root'} isn't known: one of {', '.join(_LEVELS)}")
        return logging.NOTSET if found is None else found

    def _all_handlers(self, name: str, loggers: Mapping[str, LoggerPlan]) -> list[logging.Handler]:
        """The logger's own handlers and those it inherits, each once."""
        found: list[logging.Handler] = []
        while True:
            one = loggers.get(name)
            if one is not None:
                found += [handler for handler in self._named(one.appenders) if handler not in found]
            if name == ROOT or (one is not None and not one.additive):
                return found
            name = name.rpartition(".")[0]

    def _named(self, references: Iterable[tuple[str, str]]) -> Iterator[logging.Handler]:
        for name, level in references:
            appender = self._plan.appenders.get(name)
            if appender is None:
                self.warnings.append(f"there is no appender {name}")
            elif appender.references:
                yield from self._named((inner, level) for inner in appender.references if inner != name)
            else:
                handler = self._handler(appender, level)
                if handler is not None:
                    yield handler

    def _handler(self, appender: Appender, level: str) -> logging.Handler | None:
        key = appender.name, level
        if key not in self._handlers:
            handler = self._open(appender)
            if handler is not None:
                handler.setFormatter(self._formatter(appender))
                levels = [self._level(word, appender.name) for word in (appender.level, level) if word]
                handler.setLevel(max(levels, default=logging.NOTSET))
            self._handlers[key] = handler
        return self._handlers[key]

    def _open(self, appender: Appender) -> logging.Handler | None:
        if appender.level.upper() == "OFF":
            return None
        if not appender.path:
            console = Console(sys.stderr if appender.stderr else sys.stdout) if self._console else None
            return logging.NullHandler() if self._dry else console
        rotation, complaints = self._rotation(appender), self._complaints
        if self._dry:
            return logging.NullHandler()
        return RotatedFile(Path(appender.path), rotation, append=appender.append, complaints=complaints)

    def _rotation(self, appender: Appender) -> Rotation | None:
        if not appender.file_pattern or (appender.bytes_max is None and not appender.by_time):
            return None
        try:
            return rotation(appender)
        except ValueError as error:
            self.warnings.append(f"appender {appender.name}: its file isn't rolled: {error}")
            return None

    def _formatter(self, appender: Appender) -> logging.Formatter:
        if appender.pattern is None:
            return JsonFormatter()
        if appender.pattern in _KNOWN:
            return TextFormatter(bare=_KNOWN[appender.pattern])
        try:
            return PatternFormatter(appender.pattern)
        except ValueError as error:
            self.warnings.append(f"appender {appender.name}: TorchServe's pattern is used instead of its own: {error}")
            return TextFormatter()


def rotation(appender: Appender) -> Rotation:
    """The rotation by the appender's filePattern (`logs/a.%d{dd-MMM}.%i.log.gz`). Raises ValueError."""
    pattern = appender.file_pattern
    dates = [java_date(text) for text in _DATE.findall(pattern)]
    pieces = _DATE.split(pattern)[::2]

    def name(moment: datetime, number: int) -> Path:
        texts = [date(moment) for date in dates]
        text = "".join(part for pair in zip(pieces, [*texts, ""], strict=True) for part in pair)
        numbered, found = _INDEX.subn(lambda match: f"{number + 1:0{match[1] or 1}d}", text)
        return Path(numbered if found or not number else _with_number(text, number))

    file = Path(_INDEX.sub("*", _DATE.sub("*", pattern))).name
    bytes_max = sys.maxsize if appender.bytes_max is None else appender.bytes_max
    found = file if "%i" in pattern else _with_star(file)
    return Rotation(name, found, bytes_max, appender.kept_max, appender.by_time)


def _ending(path: str) -> int:
    """The index where `.log.gz`, or another last suffix, begins."""
    match = re.search(r"(\.log)?(\.[^./]+)?$", path)
    return match.start() if match else len(path)


def _with_number(path: str, number: int) -> str:
    at = _ending(path)
    return f"{path[:at]}.{number}{path[at:]}"


def _with_star(file: str) -> str:
    at = _ending(file)
    return f"{file[:at].rstrip('*')}*{file[at:]}"
