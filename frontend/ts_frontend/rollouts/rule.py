"""The rule of a rollout, read from its settings, and how a new version is judged by it: the comparison of two versions'
answers to one request (tensors by their datatypes, JSON by its numbers, else bytes), and that of the versions by their
requests, which may be looked at at any time.

Numbers are compared with a tolerance, all else exactly. The names of the versions and what differs in each answer by
itself (ids, times) don't count. Blocking: larger answers take milliseconds.

Each criterion is a share of requests: those that failed, those that took longer than a quantile of the old version's,
those whose answers differ. The bounds of a share hold at all times together with the chosen certainty (a mixture of
likelihood ratios, Robbins 1970), so that looking every second doesn't make a verdict by chance. Pure: no clock, no I/O.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from ts.protocol import open_inference_pb2 as pb
from ts.protocol.datatypes import DATATYPES
from ts.protocol.frames import Buffer, Pairs
from ts_frontend.caching.tensors import LENGTH_HEADER, values_of
from ts_frontend.errors import InvalidArgument, MessageTooLarge

#: The datatypes that are compared with a tolerance unless the rule says otherwise, and the name of JSON's numbers.
FLOATS, NUMBERS = frozenset({"FP16", "BF16", "FP32", "FP64", "JSON"}), "JSON"
#: The members of a JSON answer that say when and by what it was made.
_ITS_OWN = frozenset({"id", "created", "model", "model_name", "model_version", "system_fingerprint"})
#: The characters of a shown answer.
SHOWN_MAX = 200


class Measure(NamedTuple):
    """How the numbers of an output are compared. `kind`: exact, close (`rtol`, `atol`), cosine (at least `least`), top1
    (the index of the largest number)."""

    kind: str = "exact"
    rtol: float = 1e-3
    atol: float = 1e-5
    least: float = 0.999

    def differ(self, old: Sequence[Any], new: Sequence[Any]) -> str:
        """Why the numbers differ, "" if they don't. The lengths are the same."""
        if self.kind == "top1":
            one, other = (max(range(len(values)), key=values.__getitem__, default=0) for values in (old, new))
            return f"the largest number is at {other} instead of {one}" if one != other else ""
        if self.kind == "cosine":
            found = _cosine(old, new)
            return f"the cosine is {found:.6f}" if not found >= self.least else ""
        for at, (one, other) in enumerate(zip(old, new, strict=True)):
            if not self._same(one, other):
                return f"element {at} is {other!r:.40} instead of {one!r:.40}"
        return ""

    def _same(self, one: Any, other: Any) -> bool:
        if one == other or (one != one and other != other):
            return True
        close = self.kind == "close" and math.isfinite(one) and math.isfinite(other)
        return close and abs(one - other) <= self.atol + self.rtol * abs(one)


CLOSE, EXACT = Measure("close"), Measure()


def read_measures(given: Mapping[str, Any]) -> dict[str, Measure]:
    """The measures by datatype, or "*" for all numbers, in a rule's `compare`. Raises InvalidArgument."""
    for name in given:
        if name != NUMBERS and name != "*" and name not in DATATYPES:
            raise InvalidArgument(f"compare: {name!r:.80} is no datatype; there are {', '.join(DATATYPES)}, {NUMBERS}")
    return {name: _read(value) for name, value in given.items()}


def _read(value: Any) -> Measure:
    if value in ("exact", "top1", "cosine"):
        return Measure(value)
    if isinstance(value, Mapping) and value and all(_is_number(each) for each in value.values()):
        if value.keys() <= {"rtol", "atol"}:
            return Measure("close", rtol=float(value.get("rtol", 0.0)), atol=float(value.get("atol", 0.0)))
        if value.keys() == {"cosine"}:
            return Measure("cosine", least=float(value["cosine"]))
    raise InvalidArgument(
        f"compare: {value!r:.80} is not exact, top1, cosine, {{rtol, atol}}, {{cosine: LEAST}} or FILE:FUNCTION"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cosine(old: Sequence[float], new: Sequence[float]) -> float:
    lengths = math.hypot(*old) * math.hypot(*new)
    if not lengths:
        return 1.0 if list(old) == list(new) else 0.0
    return math.fsum(one * other for one, other in zip(old, new, strict=True)) / lengths


class Answered(NamedTuple):
    """An answer: its status, its pieces, and the headers that its handler set."""

    status: int
    pieces: Sequence[Buffer]
    headers: Pairs = ()

    @property
    def whole(self) -> bytes:
        return b"".join(bytes(piece) for piece in self.pieces)

    @property
    def json_length(self) -> str:
        """The length of the JSON before binary tensors, "" without any."""
        length = next((value for name, value in self.headers if name.lower() == LENGTH_HEADER), "")
        return length if length.isdecimal() else ""

    @property
    def shown(self) -> str:
        return b" ".join(bytes(piece[:SHOWN_MAX]) for piece in self.pieces)[:SHOWN_MAX].decode("utf-8", "replace")


class _Output(NamedTuple):
    """`frame`: what is compared exactly; `numbers`: by the measure of the datatype."""

    datatype: str
    frame: Any
    numbers: Sequence[Any]


def difference(form: str, old: Answered, new: Answered, measures: Mapping[str, Measure]) -> str:
    """Why two answers differ, "" if they don't. `form`: the content type of the request's first input."""
    if old.status != new.status:
        return f"the status is {new.status} instead of {old.status}"
    if len(old.pieces) != len(new.pieces):
        return f"it has {len(new.pieces)} pieces instead of {len(old.pieces)}"
    for one, other in zip(old.pieces, new.pieces, strict=True):
        if bytes(one) == bytes(other):
            continue
        was, is_now = _outputs(form, bytes(one), old.json_length), _outputs(form, bytes(other), new.json_length)
        if was.keys() != is_now.keys():
            return f"it has the outputs {', '.join(is_now)} instead of {', '.join(was)}"
        for name, output in was.items():
            why = _differ(output, is_now[name], measures)
            if why:
                return f"{name}: {why}" if name else why
    return ""


def _differ(old: _Output, new: _Output, measures: Mapping[str, Measure]) -> str:
    if old.datatype != new.datatype:
        return f"it is {new.datatype} instead of {old.datatype}"
    if old.frame != new.frame or len(old.numbers) != len(new.numbers):
        return f"it is {new.frame!r:.80} instead of {old.frame!r:.80}"
    usual = measures.get("*", CLOSE if old.datatype in FLOATS else EXACT)
    measure = measures.get(old.datatype, usual)
    return measure.differ(old.numbers, new.numbers)


def _outputs(form: str, data: bytes, json_length: str) -> dict[str, _Output]:
    try:
        if form.startswith("\0grpc"):
            return _of_message(data)
        return _of_json(data, int(json_length or len(data)))
    except (DecodeError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {"": _Output("BYTES", data, ())}


def _of_message(data: bytes) -> dict[str, _Output]:
    message = pb.ModelInferResponse.FromString(data)
    raw = list(message.raw_output_contents)
    found = {}
    for index, one in enumerate(message.outputs):
        field = DATATYPES[one.datatype].field
        values = values_of(one.datatype, raw[index]) if raw else list(getattr(one.contents, field))
        found[one.name] = _tensor(one.datatype, list(one.shape), values)
    return found


def _of_json(data: bytes, length: int) -> dict[str, _Output]:
    tree = json.loads(data[:length])
    if not isinstance(tree, dict) or not isinstance(tree.get("outputs"), list):
        return {"": _plain(tree)}
    found, at = {}, length
    for one in tree["outputs"]:
        size = (one.get("parameters") or {}).get("binary_data_size")
        if size is None:
            frame, values = _parted(one.get("data"))
            found[one["name"]] = _Output(one["datatype"], (one["shape"], frame), values)
        else:
            values = values_of(one["datatype"], data[at : at + size])
            found[one["name"]] = _tensor(one["datatype"], one["shape"], values)
            at += size
    return found


def _tensor(datatype: str, shape: list[int], values: list[Any]) -> _Output:
    if datatype == "BYTES":
        return _Output(datatype, (shape, values), ())
    return _Output(datatype, (shape, len(values)), values)


def _plain(tree: Any) -> _Output:
    if isinstance(tree, dict):
        tree = {name: value for name, value in tree.items() if name not in _ITS_OWN}
    frame, numbers = _parted(tree)
    return _Output(NUMBERS, frame, numbers)


def _parted(tree: Any) -> tuple[Any, list[float]]:
    """A JSON value with its numbers taken out, and the numbers in their order."""
    numbers: list[float] = []

    def part(value: Any) -> Any:
        if _is_number(value):
            numbers.append(value)
            return 0
        if isinstance(value, list):
            return [part(each) for each in value]
        if isinstance(value, dict):
            return {name: part(value[name]) for name in sorted(value)}
        return value

    return part(tree), numbers


#: The most rollouts of a good version that may go back, and of a bad one that may be promoted.
FALSE_SHARE_MAX = 0.01
#: The criteria that are judged anew at each step, and all of them.
STEP_CRITERIA, CRITERIA = 3, 4
#: Requests of a version that end in this time count once: a stalled worker ends many together, which says little more.
APART_S = 0.02
#: The old version's latencies of which the quantiles are taken, and the number of requests between two looks at them.
RECENT, RENEWED = 500, 100
QUANTILES = {"p50": 0.5, "p99": 0.99}
#: How much larger the new version's share of requests above the median may be. It may be a third of that at random.
MEDIAN_RISE_MAX = 0.15
#: A rise of less than this part of the limit isn't held against a version.
TOLERATED = 0.25
#: The prior weights of the mixture, which suit small shares.
_PRIOR = 0.5
_STEPS_OF_BISECTION = 40


@dataclass(slots=True)
class Tally:
    """The number of observations, and how many of them are bad."""

    count: int = 0
    bad: int = 0

    def add(self, bad: bool) -> None:
        self.count += 1
        self.bad += bad

    def bounds(self, doubt: float) -> tuple[float, float]:
        """The bounds of the share of bad ones, which are both right at all times but for the probability `doubt`."""
        count, bad = self.count, self.bad
        if not count:
            return 0.0, 1.0
        evidence = _log_beta(bad + _PRIOR, count - bad + _PRIOR) - _log_beta(_PRIOR, _PRIOR)
        limit, share = math.log(1 / doubt), bad / count

        def excluded(guess: float) -> bool:
            return evidence - _log_likelihood(count, bad, guess) >= limit

        return _edge(excluded, 0.0, share), _edge(excluded, 1.0, share)


def _log_beta(one: float, other: float) -> float:
    return math.lgamma(one) + math.lgamma(other) - math.lgamma(one + other)


def _log_likelihood(count: int, bad: int, share: float) -> float:
    found = 0.0
    for times, each in ((bad, share), (count - bad, 1 - share)):
        if times:
            found += times * (math.log(each) if each > 0 else -math.inf)
    return found


def _edge(excluded: Any, outside: float, inside: float) -> float:
    """The share next to `inside` that is excluded, between it and `outside`."""
    if not excluded(outside):
        return outside
    for _ in range(_STEPS_OF_BISECTION):
        middle = (outside + inside) / 2
        if excluded(middle):
            outside = middle
        else:
            inside = middle
    return outside


class Word(Enum):
    """What to do: stay at the step, go to the next one, go back."""

    WAIT = "wait"
    GO_ON = "go on"
    GO_BACK = "go back"


class Verdict(NamedTuple):
    word: Word
    reason: str


class Limits(NamedTuple):
    """What a new version may be worse by. `errors`, `differences`: shares of requests; `p50`, `p99`: ratios of
    latencies. 0: not judged."""

    errors: float = 0.02
    p50: float = 1.2
    p99: float = 1.5
    differences: float = 0.02


class Criterion(NamedTuple):
    """`what`: the requests that are counted; `rise_max`: the rise of their share that is too much."""

    what: str
    rise_max: float
    new: Tally
    old: Tally | None = None

    def __str__(self) -> str:
        beside = "" if self.old is None else f", {self.old.bad} of {self.old.count} of the old version"
        return f"{self.new.bad} of {self.new.count} requests {self.what}{beside}"

    def verdict(self, doubt: float) -> Verdict:
        """`doubt`: the probability of going back by chance, which is that of both versions' bounds together. That of
        going on by chance is for each criterion: a bad version must pass all of them."""
        versions = 1 if self.old is None else 2
        low, _ = self.new.bounds(doubt / versions)
        high_of_old = 0.0 if self.old is None else self.old.bounds(doubt / versions)[1]
        if low > high_of_old + TOLERATED * self.rise_max:
            return Verdict(Word.GO_BACK, str(self))
        _, high = self.new.bounds(FALSE_SHARE_MAX / versions)
        low_of_old = 0.0 if self.old is None else self.old.bounds(FALSE_SHARE_MAX / versions)[0]
        if high < low_of_old + self.rise_max:
            return Verdict(Word.GO_ON, str(self))
        return Verdict(Word.WAIT, f"{self}: not yet enough to tell")


@dataclass(slots=True)
class _Version:
    """The observations of one version at a step. `ended_s`: the time of the last one that counted."""

    errors: Tally = field(default_factory=Tally)
    above: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in QUANTILES})
    ended_s: float = -math.inf


class Judge:
    """Compares two versions. `steps`: how often it begins anew, so that the certainty is that of all steps together."""

    def __init__(self, limits: Limits, steps: int) -> None:
        self.limits = limits
        self._doubt = FALSE_SHARE_MAX / (STEP_CRITERIA * max(1, steps) + 1)
        self.new, self.old = _Version(), _Version()
        self.differences = Tally()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._taken = 0
        self.quantiles_s: dict[str, float] = {}

    def begin_step(self) -> None:
        """Forgets both versions' requests, whose ratio changes with the step; the compared answers stay."""
        self.new, self.old = _Version(), _Version()

    def observe(self, new: bool, failed: bool, seconds: float, now_s: float) -> None:
        """A request of the `new` version or the old one has ended at `now_s`, `seconds` after it was accepted."""
        version = self.new if new else self.old
        if now_s - version.ended_s < APART_S:
            return
        version.ended_s = now_s
        version.errors.add(failed)
        if failed:
            return
        for name, limit_s in self.quantiles_s.items():
            ratio = getattr(self.limits, name) if new else 1.0
            version.above[name].add(seconds > ratio * limit_s)
        if not new:
            self._renew(seconds)

    def _renew(self, seconds: float) -> None:
        """Takes the quantiles from earlier requests, so that what is compared with them is not in them."""
        self._recent.append(seconds)
        self._taken += 1
        if self._taken % RENEWED == 0:
            ordered = sorted(self._recent)
            self.quantiles_s = {name: ordered[int(share * len(ordered))] for name, share in QUANTILES.items()}

    def compared(self, differs: bool) -> None:
        """An answer of the new version was compared with the old one's."""
        self.differences.add(differs)

    def criteria(self, shadow: bool) -> Iterator[Criterion]:
        """What is judged. `shadow`: the new version has copies only, whose answers are compared."""
        limits, new, old = self.limits, self.new, self.old
        if shadow:
            if limits.differences:
                yield Criterion("whose answers differ", limits.differences, self.differences)
            return
        if limits.errors:
            yield Criterion("that failed", limits.errors, new.errors, old.errors)
        for name in QUANTILES:
            ratio = getattr(limits, name)
            if ratio:
                more = f" times {ratio:g}" if ratio != 1 else ""
                rise = MEDIAN_RISE_MAX if name == "p50" else 0.02
                yield Criterion(f"above the old version's {name}{more}", rise, new.above[name], old.above[name])

    def verdict(self, shadow: bool = False) -> Verdict:
        """The first criterion's that says to go back, else the first one's that says to wait."""
        found = [one.verdict(self._doubt) for one in self.criteria(shadow)]
        for word in (Word.GO_BACK, Word.WAIT):
            for one in found:
                if one.word is word:
                    return one
        return Verdict(Word.GO_ON, "; ".join(one.reason for one in found) or "nothing is judged")

    def state(self) -> dict[str, Any]:
        """What a restart needs: the compared answers. The requests of a step are counted anew."""
        return {"compared": self.differences.count, "different": self.differences.bad}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.differences = Tally(int(state.get("compared", 0)), int(state.get("different", 0)))


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
