"""`log_config`: what users may write to change the logs, made into handlers and levels of `logging`."""

from __future__ import annotations

import json
import logging
import logging.config
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path

import yaml

from ts_frontend.config.kinds import ConfigError
from ts_frontend.telemetry.logging.files import Console, RotatedFile, Rotation
from ts_frontend.telemetry.logging.formats import JsonFormatter, PatternFormatter, TextFormatter, java_date
from ts_frontend.telemetry.logging.log4j2 import ROOT, Appender, LoggerPlan, LogPlan

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
#: Loggers of Java libraries, which TorchServe's own file names: nothing here could log under them.
_JAVA = ("io.", "com.", "java", "org.apache", "org.slf4j", "software.amazon", "ai.djl")
#: TorchServe's two patterns have a formatter of their own, which is quicker.
_KNOWN = {"%d{ISO8601} - %m%n": True, "%d{ISO8601} [%-5p] %t %c - %m%n": False}
_DATE = re.compile(r"%d\{([^}]*)\}")
_INDEX = re.compile(r"%(\d{0,2})i")


def is_dict_config(path: Path) -> bool:
    """A file for Python's logging (YAML or JSON), not one for log4j2?"""
    return path.suffix.lower() in (".yaml", ".yml", ".json")


def apply_dict_config(path: Path) -> None:
    """Set up `logging` with logging.config.dictConfig, and nothing else: the file says all.

    :raises ConfigError: the file can't be read or used.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, **tree})
    except (OSError, ValueError, TypeError, AttributeError, ImportError, yaml.YAMLError) as error:
        raise ConfigError(f"log_config {path}: {error} (cause: {error.__cause__})") from None


def apply_plan(plan: LogPlan, *, console: bool = True) -> list[str]:
    """Give `logging` the handlers and levels of a log4j2 file; warnings say what of it isn't applied. A file without
    appenders changes levels only.

    `console` False: what it would write there isn't written.
    """
    return _Application(plan, console).apply()


class _Application:
    def __init__(self, plan: LogPlan, console: bool) -> None:
        self._plan, self._console = plan, console
        self.warnings = list(plan.warnings)
        self._handlers: dict[tuple[str, str], logging.Handler | None] = {}

    def apply(self) -> list[str]:
        loggers = {name: one for one in self._plan.loggers if (name := self._python_name(one.name)) is not None}
        for name, one in loggers.items():
            if one.level:
                logging.getLogger(name).setLevel(self._level(one.level, name))
        if self._plan.appenders:
            self._apply_appenders(loggers)
        return self.warnings

    def _apply_appenders(self, loggers: dict[str, LoggerPlan]) -> None:
        loggers.setdefault(ROOT, LoggerPlan(ROOT, "", [], False))
        for name in loggers:
            logger = logging.getLogger(name)
            logger.propagate = False
            logger.handlers[:] = self._all_handlers(name, loggers)

    def _python_name(self, name: str) -> str | None:
        """Ours for one of TorchServe's; None for one that has no counterpart here."""
        if name == THEIRS:
            return OURS
        if name.startswith(f"{THEIRS}."):
            self.warnings.append(f"logger {name} isn't applied: it is a Java class; set the level of {THEIRS}")
            return None
        return None if name.startswith(_JAVA) else name

    def _level(self, word: str, name: str) -> int:
        """NOTSET, which is the level of the logger above, for one that isn't known."""
        found = _LEVELS.get(word.upper())
        if found is None:
            self.warnings.append(f"level {word} of logger {name or 'Root'} isn't known: one of {', '.join(_LEVELS)}")
        return logging.NOTSET if found is None else found

    def _all_handlers(self, name: str, loggers: Mapping[str, LoggerPlan]) -> list[logging.Handler]:
        """Its own and those it inherits, each once."""
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
            return Console(sys.stderr if appender.stderr else sys.stdout) if self._console else None
        path = Path(appender.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return RotatedFile(path, self._rotation(appender), append=appender.append)

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
    """By its filePattern (`logs/a.%d{dd-MMM}.%i.log.gz`). Raises ValueError."""
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
    """Where `.log.gz`, or another last suffix, begins."""
    match = re.search(r"(\.log)?(\.[^./]+)?$", path)
    return match.start() if match else len(path)


def _with_number(path: str, number: int) -> str:
    at = _ending(path)
    return f"{path[:at]}.{number}{path[at:]}"


def _with_star(file: str) -> str:
    at = _ending(file)
    return f"{file[:at].rstrip('*')}*{file[at:]}"
