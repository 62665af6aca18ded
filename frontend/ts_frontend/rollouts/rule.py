"""The settings of a rollout, as the management API, the command line and model-config.yaml give them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ts_frontend.errors import InvalidArgument, MessageTooLarge
from ts_frontend.rollouts.compare import Measure, read_measures
from ts_frontend.rollouts.judge import Limits

STEPS_MAX = 100
SETTINGS_BYTES_MAX = 64 * 1024
STEPS = (1.0, 10.0, 50.0, 100.0)
EVERY_S = 300.0
_UNITS_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(|ms|s|m|h|d)")
_FUNCTION = re.compile(r"(?:[\w-]+/)*[\w-]+(?:\.py)?:[^\W\d]\w*")
_HEADER = re.compile(r"[0-9A-Za-z_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class Rule:
    """`steps`: the new version's percentages of the calls; the last one stays unless it is 100. `every_s`: the least
    time of a step. `sticky`: the header by whose value a caller stays with a version, "" for the request's id.
    `shadow`: the new version first gets copies alone. `judged`: False if the time alone ends a step."""

    version: str
    steps: tuple[float, ...] = STEPS
    every_s: float = EVERY_S
    sticky: str = ""
    shadow: bool = False
    judged: bool = True
    limits: Limits = Limits()
    compare: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stages(self) -> tuple[tuple[float, bool], ...]:
        """The percentages, and whether the new version gets copies in place of calls."""
        return (*([(0.0, True)] if self.shadow else []), *((percent, False) for percent in self.steps))

    @property
    def measures(self) -> Mapping[str, Measure]:
        return {} if self.function else read_measures(self.compare)

    @property
    def function(self) -> str:
        """The author's comparison, `[folder/]file[.py]:function` in the new version's archive; "" without one."""
        named = self.compare.get("*")
        return named if isinstance(named, str) and len(self.compare) == 1 and _FUNCTION.fullmatch(named) else ""

    def as_json(self) -> dict[str, Any]:
        """The members from which `read_rule` makes the same rule."""
        return {
            "version": self.version,
            "steps": list(self.steps),
            "every": self.every_s,
            **({"sticky": self.sticky} if self.sticky else {}),
            "shadow": self.shadow,
            "judge": self.judged,
            **self.limits._asdict(),
            **({"compare": dict(self.compare)} if self.compare else {}),
        }


def read_settings(text: bytes) -> dict[str, Any]:
    """The settings in a call's JSON, {} in an empty one. Raises MessageTooLarge; InvalidArgument for anything else."""
    if len(text) > SETTINGS_BYTES_MAX:
        raise MessageTooLarge(f"A rollout's settings of {len(text)} bytes are over {SETTINGS_BYTES_MAX} bytes")
    try:
        found = json.loads(text.strip() or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"A rollout's settings are no valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgument(f"A rollout's settings are a JSON object, not {type(found).__name__}")
    return found


def read_rule(given: Mapping[str, Any], default: str) -> Rule:
    """The rule in a JSON object or a section of YAML. `default`: the model's default version. Raises InvalidArgument.

    `weights` ({"1.0": 90, "2.0": 10}) and `canaryTrafficPercent`, KServe's name, are a single step that isn't judged
    unless `judge` says so."""
    if unknown := given.keys() - _SETTINGS:
        raise InvalidArgument(f"A rollout has no setting {min(map(str, unknown))!r}")
    forms = [name for name in (*_OTHER_FORMS, "steps") if given.get(name) is not None]
    if len(forms) > 1:
        raise InvalidArgument(f"{forms[0]} and {forms[1]} exclude each other: give one of them")
    version = _text(given, "version")
    steps: tuple[float, ...] = STEPS
    if forms == ["steps"]:
        steps = _steps(given["steps"])
    elif forms == ["canaryTrafficPercent"]:
        steps = (_percent("canaryTrafficPercent", given["canaryTrafficPercent"]),)
    elif forms == ["weights"]:
        version, steps = _weights(given["weights"], version, default)
    if not version:
        raise InvalidArgument("A rollout needs the version to roll out: version")
    compare = given.get("compare") or {}
    rule = Rule(
        version,
        steps,
        _seconds(given.get("every", EVERY_S)),
        _header(_text(given, "sticky")),
        _flag(given, "shadow", False),
        _flag(given, "judge", not forms or forms == ["steps"]),
        Limits(**{name: _limit(name, given[name]) for name in Limits._fields if given.get(name) is not None}),
        compare if isinstance(compare, Mapping) else {"*": compare},
    )
    _ = rule.measures  # raises
    return rule


_OTHER_FORMS = ("weights", "canaryTrafficPercent")
_SETTINGS = {"version", "steps", "every", "sticky", "shadow", "judge", "compare", *_OTHER_FORMS, *Limits._fields}


def _steps(value: Any) -> tuple[float, ...]:
    """Percentages, as a list or as text: "1,10,50,100"."""
    parts = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not 0 < len(parts) <= STEPS_MAX:
        raise InvalidArgument(f"steps must be 1 to {STEPS_MAX} percentages, such as 1,10,50,100, not {value!r:.80}")
    steps = tuple(_percent("steps", part) for part in parts)
    if any(later <= earlier for earlier, later in zip(steps, steps[1:], strict=False)):
        raise InvalidArgument(f"steps must rise: {value!r:.80}")
    return steps


def _percent(name: str, value: Any) -> float:
    found = _number(name, value)
    if not 0 <= found <= 100:
        raise InvalidArgument(f"{name} must be a percentage from 0 to 100, not {value!r:.80}")
    return found


def _number(name: str, value: Any) -> float:
    if not isinstance(value, bool) and isinstance(value, (int, float, str)):
        try:
            return float(value)
        except ValueError:
            pass
    raise InvalidArgument(f"{name} must be a number, not {value!r:.80}")


def _weights(value: Any, version: str, default: str) -> tuple[str, tuple[float, ...]]:
    """The new version and its percentage, of weights that may have any sum."""
    if not isinstance(value, Mapping):
        raise InvalidArgument('weights must be numbers by version, such as {"1.0": 90, "2.0": 10}')
    weights = {str(name): _number("weights", weight) for name, weight in value.items()}
    others = weights.keys() - {default}
    total = sum(weights.values())
    if len(others) != 1 or version not in ("", *others) or min(weights.values()) < 0 or not 0 < total < float("inf"):
        raise InvalidArgument(f"weights must be those of two versions, of which {default}, the default, is one")
    (new,) = others
    return new, (100 * weights[new] / total if default in weights else _percent("weights", weights[new]),)


def _seconds(value: Any) -> float:
    """Seconds, as a number or as text with a unit: 30s, 5m, 1.5h."""
    found = _DURATION.fullmatch(str(value).strip().lower())
    if found is None or isinstance(value, bool):
        raise InvalidArgument(f"every must be a time such as 30s, 5m or 1h, not {value!r:.80}")
    return float(found[1]) * _UNITS_S[found[2]]


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if value is None:
        return ""
    if isinstance(value, (bool, Mapping, list)):
        raise InvalidArgument(f"{name} must be a text, not {value!r:.80}")
    return str(value)


def _header(name: str) -> str:
    if name and not _HEADER.fullmatch(name):
        raise InvalidArgument(f"sticky must be the name of a header, not {name!r:.80}")
    return name.lower()


def _flag(given: Mapping[str, Any], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} must be true or false, not {value!r:.80}")
    return value


def _limit(name: str, value: Any) -> float:
    """A share below 1 for errors and differences, a ratio of at least 1 for latencies; 0 for none."""
    found = _number(name, value)
    least, most = (1.0, 100.0) if name in ("p50", "p99") else (0.0, 1.0)
    if found and not least <= found <= most:
        raise InvalidArgument(f"{name} must be 0, or from {least:g} to {most:g}, not {value!r:.80}")
    return found
