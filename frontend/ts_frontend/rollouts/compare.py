"""The comparison of two versions' answers to one request: tensors by their datatypes, JSON by its numbers, else bytes.

Numbers are compared with a tolerance, all else exactly. The names of the versions and what differs in each answer by
itself (ids, times) don't count. Blocking: larger answers take milliseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from ts.protocol import open_inference_pb2 as pb
from ts.protocol.datatypes import DATATYPES
from ts.protocol.frames import Buffer, Pairs
from ts_frontend.caching.tensors import LENGTH_HEADER, values_of
from ts_frontend.errors import InvalidArgument

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
