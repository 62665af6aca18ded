"""The settings of logs and traces that Triton's clients read and change on a running server.

The log level takes effect at once; the log's location and format are fixed at the start. Trace settings, of the server
and of each model, select the traced requests if there is a collector; without one they are only stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ts_frontend.errors import InvalidArgument
from ts_frontend.models.registry import Registry
from ts_frontend.telemetry.logging.logs import Logs
from ts_frontend.telemetry.tracing.settings import Sampling

_LEVELS = (("log_info", logging.INFO), ("log_warning", logging.WARNING), ("log_error", logging.ERROR))
_VERBOSE, _FILE, _FORMAT = "log_verbose_level", "log_file", "log_format"
_TRACE_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
_NUMBERS = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}
#: Raises if the caller may not change settings.
Check = Callable[[], None]


class LogSettings:
    """`check`: called before a change; may raise."""

    def __init__(self, log: Logs, check: Check) -> None:
        self._log, self._check = log, check

    def read(self) -> dict[str, Any]:
        level = self._log.level
        shown = {name: level <= least for name, least in _LEVELS}
        return {_FILE: "", **shown, _VERBOSE: int(level <= logging.DEBUG), _FORMAT: self._log.format}

    def change(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Changes settings and returns all of them. Raises InvalidArgument, naming the setting, for an invalid one;
        nothing changes then. Messages of one severity are shown only with all more severe ones."""
        if not given:
            return self.read()
        self._check()
        wanted = self.read()
        for name, value in given.items():
            if name not in wanted:
                raise InvalidArgument(f"unknown log setting {name!r}; one of {', '.join(wanted)}")
            if name in (_FILE, _FORMAT) and value != wanted[name]:
                raise InvalidArgument(
                    f"{name} can't be changed while the server runs; log_location and log_format set it at start"
                )
            wanted[name] = value if name in (_FILE, _FORMAT) else _whole(name, value)
        self._log.set_level(_level(wanted))
        return self.read()


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) if name != _VERBOSE else isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    raise InvalidArgument(f"{name} is {'a number' if name == _VERBOSE else 'true or false'}, not {value!r}")


def _level(wanted: Mapping[str, Any]) -> int:
    if wanted[_VERBOSE] > 0:
        return logging.DEBUG
    shown = [bool(wanted[name]) for name, _ in _LEVELS]
    if shown != sorted(shown):
        raise InvalidArgument(
            "more severe messages are always shown too: turn off log_info before log_warning before log_error"
        )
    return next((least for name, least in _LEVELS if wanted[name]), logging.CRITICAL)


class TraceSettings:
    """The trace settings of the server and of each model."""

    def __init__(self, models: Registry, sampling: Sampling, check: Check) -> None:
        self._models, self._sampling, self._check = models, sampling, check

    def read(self, model: str = "") -> dict[str, list[str]]:
        """Returns the trace settings of a model, or ("") of the server. Raises ModelNotFound."""
        if model:
            self._models.versions(model)
        return self._sampling.read(model)

    def change(self, given: Mapping[str, Sequence[str]], model: str = "") -> dict[str, list[str]]:
        """Changes trace settings and returns all; an empty list resets one to the server's, or to the default."""
        found = self.read(model)
        if not given:
            return found
        self._check()
        for name, values in given.items():
            _check_trace(name, values, self._sampling.names)
        self._sampling.change(given, model)
        return self.read(model)


def _check_trace(name: str, values: Sequence[str], names: Sequence[str]) -> None:
    if name not in names:
        raise InvalidArgument(f"unknown trace setting {name!r}; one of {', '.join(names)}")
    if not values:
        return
    if name in ("trace_file", "trace_mode"):
        raise InvalidArgument(f"{name} can't be changed while the server runs")
    if name == "trace_level":
        for value in values:
            if value not in _TRACE_LEVELS:
                raise InvalidArgument(f"trace_level is a list of {', '.join(_TRACE_LEVELS)}, not {value!r}")
    elif len(values) != 1 or not _is_whole(values[0], _NUMBERS[name]):
        raise InvalidArgument(f"{name} is one number, at least {_NUMBERS[name]}, not {', '.join(map(repr, values))}")


def _is_whole(text: str, least: int) -> bool:
    return text.removeprefix("-").isdecimal() and int(text) >= least


def trace_given(body: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns trace settings from JSON: each a text, a list of texts, or null. Raises InvalidArgument."""
    found = {}
    for name, value in body.items():
        values = [] if value is None else [value] if isinstance(value, (str, int)) else value
        if not isinstance(values, list) or not all(isinstance(one, (str, int)) for one in values):
            raise InvalidArgument(f"{name} is a text or a list of texts, not {value!r}")
        found[name] = [str(one) for one in values]
    return found
