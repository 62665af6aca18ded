"""Compares a running server's answers with each dialect's promises: `promises.json`, one table of exchanges.

For each dialect the table has calls with the recorded answers of its own server, reduced to the parts that clients
may rely on. The first calls of a dialect have `sign` set: a server that fails one of them doesn't speak the dialect.
In a pattern, a word in `<…>` stands for any value of a kind, a list of one pattern for any list of such values, and an
object for any object with these members; `<json>` stands for a JSON text, `<one of>` for a choice, `<begins>` for a
text that begins so.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from conformance.asking import Asker, Call, Places, Unreachable
from ts.protocol.datatypes import DATATYPES
from ts_frontend.diagnosis.report import Report, Section

_VARIABLE = re.compile(r"\$\{([A-Z0-9]+)\}")
_JSON, _ONE_OF, _BEGINS = "<json>", "<one of>", "<begins>"
_KINDS: Mapping[str, tuple[type, ...]] = {
    "<text>": (str,),
    "<number>": (int, float),
    "<boolean>": (bool,),
    "<list>": (list,),
    "<object>": (dict,),
}
#: The most characters shown of an answer that differs.
SHOWN_CHARS_MAX = 160
#: The most differences named for one answer.
DIFFERENCES_MAX = 4
PLACES = {
    "inference": "URL",
    "management": "--management URL",
    "metrics": "--metrics URL",
    "grpc": "--grpc HOST:PORT",
    "grpc_management": "--grpc-management HOST:PORT",
}


class Support(Enum):
    FULL = "supported"
    PART = "partly"
    ABSENT = "not there"
    UNKNOWN = "not asked"


@dataclass(frozen=True, slots=True)
class Promise:
    """One call of a dialect. `call`: with variables; `answer`: the pattern of the answer. `keep`: variables
    taken from the answer, with their paths in it. `recorded`: the recording that the call comes from."""

    name: str
    place: str
    call: Call
    answer: Mapping[str, Any]
    sign: bool
    change: bool
    keep: Mapping[str, Sequence[str | int]]
    recorded: str


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    title: str
    place: str
    exchanges: tuple[Promise, ...]


@cache
def dialects() -> tuple[Dialect, ...]:
    """The dialects of the table, with their calls."""
    rows = json.loads(resources.files(__package__).joinpath("promises.json").read_text())
    return tuple(
        Dialect(
            row["name"], row["title"], row["place"], tuple(_exchange(one, row["place"]) for one in row["exchanges"])
        )
        for row in rows
    )


def _exchange(row: Mapping[str, Any], place: str) -> Promise:
    own = {"name", "place", "answer", "sign", "change", "keep", "recorded"}
    return Promise(
        row["name"],
        row.get("place", place),
        {key: value for key, value in row.items() if key not in own},
        row["answer"],
        row.get("sign", False),
        row.get("change", False),
        row.get("keep", {}),
        row.get("recorded", ""),
    )


# --- variables


def variables_of(model: str | None, inputs: Sequence[Path]) -> dict[str, Any]:
    """The values for the table's variables. The first input is the body of predictions; the first input of each
    form (tensors, instances, a text) goes to the APIs that take that form.

    :raises OSError: an input can't be read.
    """
    found: dict[str, Any] = {"MISSING": f"conform-{uuid.uuid4().hex[:12]}"}
    if model:
        found["MODEL"] = model
    for path in inputs:
        data = path.read_bytes()
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        for name, value in (("BODY", base64.b64encode(data).decode()), ("TYPE", kind), *_forms(data)):
            found.setdefault(name, value)
    return found


def _forms(data: bytes) -> Iterator[tuple[str, Any]]:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        yield "TEXT", text
        return
    if isinstance(value, dict) and isinstance(value.get("inputs"), list):
        yield "OIP", value
        yield "TENSORS", [_typed(tensor) for tensor in value["inputs"]]
    if isinstance(value, dict) and isinstance(value.get("instances"), list):
        yield "V1", value


def _typed(tensor: Mapping[str, Any]) -> dict[str, Any]:
    """The tensor of a JSON request as a gRPC tensor, with its elements in the field of its datatype."""
    row = DATATYPES.get(tensor.get("datatype", ""))
    elements: list[Any] = list(_flat(tensor.get("data", [])))
    if row is not None and row.element is bytes:
        elements = [base64.b64encode(str(one).encode()).decode() for one in elements]
    head = {key: tensor[key] for key in ("name", "datatype", "shape") if key in tensor}
    return head | ({"contents": {row.field: elements}} if row is not None and row.field else {})


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for one in value:
            yield from _flat(one)
    else:
        yield value


def filled(value: Any, variables: Mapping[str, Any]) -> Any:
    """The value with its variables replaced. A text that is only a variable becomes that variable's value, of any type.

    :raises KeyError: a variable has no value; the error has its name.
    """
    if isinstance(value, str):
        whole = _VARIABLE.fullmatch(value)
        return variables[whole[1]] if whole else _VARIABLE.sub(lambda match: str(variables[match[1]]), value)
    if isinstance(value, list):
        return [filled(one, variables) for one in value]
    if isinstance(value, Mapping):
        return {key: filled(one, variables) for key, one in value.items()}
    return value


# --- answers


def differences(wanted: Any, found: Any, where: str = "") -> Iterator[str]:
    """The differences between an answer and its pattern, in words."""
    what = where or "the answer"
    if isinstance(wanted, Mapping) and _JSON in wanted:
        try:
            value = json.loads(found)
        except (TypeError, ValueError):
            yield f"{what} is no JSON: {_shown(found)}"
            return
        yield from differences(wanted[_JSON], value, where)
    elif isinstance(wanted, Mapping) and _ONE_OF in wanted:
        if found not in wanted[_ONE_OF]:
            yield f"{what} is {_shown(found)}, not {' or '.join(map(_shown, wanted[_ONE_OF]))}"
    elif isinstance(wanted, Mapping) and _BEGINS in wanted:
        if not isinstance(found, str) or not found.startswith(wanted[_BEGINS]):
            yield f"{what} is {_shown(found)}, which doesn't begin with {_shown(wanted[_BEGINS])}"
    elif isinstance(wanted, Mapping):
        if not isinstance(found, Mapping):
            yield f"{what} is not an object: {_shown(found)}"
            return
        for key, pattern in wanted.items():
            inner = f"{where}.{key}" if where else str(key)
            if key not in found:
                yield f"{inner} is missing"
            elif inner.startswith("headers."):
                if not str(found[key]).startswith(pattern):
                    yield f"{inner} is {_shown(found[key])}, not {pattern}"
            else:
                yield from differences(pattern, found[key], inner)
    elif isinstance(wanted, list):
        yield from _list_differences(wanted, found, where)
    elif isinstance(wanted, str) and wanted in _KINDS:
        if not isinstance(found, _KINDS[wanted]) or (wanted == "<number>" and isinstance(found, bool)):
            yield f"{what} is no {wanted.strip('<>')}: {_shown(found)}"
    elif found != wanted:
        yield f"{what} is {_shown(found)}, not {_shown(wanted)}"


def _list_differences(wanted: list[Any], found: Any, where: str) -> Iterator[str]:
    """The differences in a list, whose one pattern applies to each element; an empty list has none."""
    if not isinstance(found, list):
        yield f"{where or 'the answer'} is not a list: {_shown(found)}"
        return
    for number, one in enumerate(found):
        different = list(differences(wanted[0], one, f"{where}[{number}]"))
        if different:
            yield from different
            return


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[: SHOWN_CHARS_MAX - 1]}…"


# --- asking


def conform(
    places: Places, variables: Mapping[str, Any], *, change: bool = False, demanded: Sequence[str] = ()
) -> Report:
    """Makes the calls of each dialect, or of the demanded ones, to a server. `change`: also calls that register and
    scale, with the present values, so that they leave the server as it is.

    :raises Unreachable: no server answers at the first address.
    """
    report = Report("dialect")
    asker = Asker(places)
    try:
        asker.ask("inference", {"http": "GET /"})
        for dialect in dialects():
            if not demanded or dialect.name in demanded:
                _ask_dialect(asker, places, dialect, dict(variables), change, bool(demanded), report.section(""))
    finally:
        asker.close()
    return report


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call that was made. `call`: a short description."""

    exchange: Promise
    call: str
    different: tuple[str, ...]


def _ask_dialect(
    asker: Asker,
    places: Places,
    dialect: Dialect,
    variables: dict[str, Any],
    change: bool,
    demanded: bool,
    section: Section,
) -> None:
    asked: list[_Asked] = []
    left: set[str] = set()
    for exchange in dialect.exchanges:
        if exchange.place not in places.addresses:
            left.add(PLACES[exchange.place])
        elif exchange.change and not change:
            left.add("--change")
        else:
            try:
                asked.append(_ask(asker, exchange, variables))
            except KeyError as error:
                left.add("--model" if error.args[0] in ("MODEL", "VERSION", "WORKERS", "URL") else "--input")
        if exchange is _last_sign(dialect) and not _speaks(asked):
            break
    _tell(section, dialect, asked, left, demanded)


def _last_sign(dialect: Dialect) -> Promise:
    return [exchange for exchange in dialect.exchanges if exchange.sign][-1]


def _speaks(asked: Sequence[_Asked]) -> bool:
    return not any(one.exchange.sign and one.different for one in asked)


def _ask(asker: Asker, exchange: Promise, variables: dict[str, Any]) -> _Asked:
    """Makes a call. The values of its answer for `keep` become variables.

    :raises KeyError: a variable has no value.
    """
    call, wanted = filled(exchange.call, variables), filled(exchange.answer, variables)
    words = str(call["http"] if "http" in call else call["grpc"].rpartition(".")[2])
    try:
        reply = asker.ask(exchange.place, call)
    except Unreachable as error:
        return _Asked(exchange, words, (str(error),))
    different = tuple(differences(wanted, reply))
    if not different:
        for name, way in exchange.keep.items():
            variables[name] = _at(reply.get("json", reply.get("message")), way)
    return _Asked(exchange, words, different)


def _at(value: Any, way: Sequence[str | int]) -> Any:
    for step in way:
        value = json.loads(value) if step == _JSON else value[step]
    return value


def _tell(section: Section, dialect: Dialect, asked: Sequence[_Asked], left: set[str], demanded: bool) -> None:
    differing = [one for one in asked if one.different]
    if not asked:
        support = Support.UNKNOWN
    elif not _speaks(asked):
        support = Support.ABSENT
    else:
        support = Support.PART if differing else Support.FULL
    section.title = f"{dialect.title}: {support.value}"
    section.facts = {
        "dialect": dialect.name,
        "support": support.value,
        "asked": len(asked),
        "agreed": len(asked) - len(differing),
        "left_out": len(dialect.exchanges) - len(asked),
    }
    more = f" ({', '.join(sorted(left))} for more)" if left else ""
    if support is Support.UNKNOWN:
        section.warn("address", f"where it would be isn't known: give {', '.join(sorted(left))}")
    elif support is Support.ABSENT:
        first = next(one for one in asked if one.exchange.sign and one.different)
        text = f"{first.call}: {first.different[0]}"
        (section.error if demanded else section.ok)("not there", text)
    else:
        section.ok("exchanges", f"{len(asked) - len(differing)} of {len(asked)} as promised{more}")
        for one in differing:
            words = "; ".join(one.different[:DIFFERENCES_MAX])
            section.error(one.exchange.name, f"{one.call}: {words}")
