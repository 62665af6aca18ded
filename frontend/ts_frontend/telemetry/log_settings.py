"""`log_config`: what users may write to change the logs."""

from __future__ import annotations

import json
import logging
import logging.config
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import yaml

from ts_frontend.config_kinds import ConfigError

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
_SAME_NAME = ("ACCESS_LOG", "MODEL_LOG", "TS_METRICS", "MODEL_METRICS")


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


def read_log4j2(path: Path) -> list[tuple[str, str]]:
    """(logger, level) of a log4j2 XML file, in its words; the logger of all is `Root`.

    :raises ConfigError: the file isn't XML.
    """
    try:
        return list(_levels(ElementTree.parse(path)))
    except (OSError, ElementTree.ParseError) as error:
        raise ConfigError(f"log_config {path}: not a log4j2 XML file, YAML or JSON: {error}") from None


def apply_log4j2(path: Path, levels: Iterable[tuple[str, str]]) -> list[str]:
    """Give the loggers that this server has their levels; warnings say what of the file isn't applied."""
    warnings = [f"log_config {path}: levels are taken from it; appenders and patterns of log4j2 are not"]
    for name, level in levels:
        logger = _logger(name)
        if logger is None or level.upper() not in _LEVELS:
            warnings.append(f"log_config {path}: level {level} of logger {name} is not applied")
        else:
            logger.setLevel(_LEVELS[level.upper()])
    return warnings


def _levels(tree: ElementTree.ElementTree[ElementTree.Element]) -> Iterator[tuple[str, str]]:
    for element in tree.iter():
        tag = element.tag.rpartition("}")[2].lower()
        if tag in ("root", "asyncroot") and "level" in element.attrib:
            yield "Root", element.attrib["level"]
        elif tag in ("logger", "asynclogger") and "level" in element.attrib:
            yield element.attrib.get("name", ""), element.attrib["level"]


def _logger(name: str) -> logging.Logger | None:
    """Ours for one of TorchServe's; None for a Java class that has no counterpart here."""
    if name == "Root":
        return logging.getLogger()
    if name == "org.pytorch.serve":
        return logging.getLogger("ts_frontend")
    return logging.getLogger(name) if name in _SAME_NAME else None
