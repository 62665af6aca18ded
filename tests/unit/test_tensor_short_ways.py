"""The short ways of usual tensor requests give what the long ones give, which are their oracles."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts.protocol.datatypes import DATATYPES
from ts.protocol.open_inference_pb2 import ModelInferRequest
from ts.tensors import grpc_form, json_text
from ts.tensors.forms import ModelSpec
from ts.tensors.json_form import data_text, to_json
from ts.tensors.json_text import dumped, list_text, loaded
from ts.tensors.types import BadTensor, InferenceResponse, RequestedOutput, Tensor

MODEL = ModelSpec("m", "1", {}, {})

# --- JSON

texts = st.text(st.characters(codec="utf-8"), max_size=5)
leaves = st.none() | st.booleans() | st.integers() | st.integers(-(1 << 70), 1 << 70) | st.floats() | texts
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
#: What JSON's grammar leaves to its readers.
ODD = [
    *("NaN", "-Infinity", "[Infinity]", "1e400", "-1e400", "-0", "-0.0", "1E5", "0.1e1", "01", "1.", "[1,]", "[]x"),
    *("18446744073709551615", "18446744073709551616", "-9223372036854775809", "1" * 400, "9007199254740993.0"),
    *('"\\ud83d"', '"\\ud83d\\ude00"', '{"a":1,"a":2}', '"\x00"', "\ufeff[1]", "", " ", "[" * 100_000, "nul", "'a'"),
    *("1.7976931348623159e308", "2.2250738585072011e-308", "5e-324", "2e-324", "123456789012345678901234567890.5"),
]  # fmt: skip


def told(read: Callable[[bytes], Any], data: bytes) -> str:
    """What reading gives, as text in which nan is nan and 1 isn't 1.0, or the error."""
    try:
        return repr(read(data))
    except (ValueError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"


@given(values | st.sampled_from(ODD).map(lambda text: (text,)), st.sampled_from(["utf-8", "utf-16", "utf-32"]))
def test_json_is_read_as_json_reads_it(value: Any, encoding: str) -> None:
    data = (value[0] if isinstance(value, tuple) else json.dumps(value, ensure_ascii=False)).encode(encoding)
    assert told(loaded, data) == told(json.loads, data)


@given(st.binary(max_size=20) | st.text('[]{}",:0123456789.eE+-\\unltrfas \t\n', max_size=20).map(str.encode))
def test_any_bytes_are_read_as_json_reads_them(data: bytes) -> None:
    assert told(loaded, data) == told(json.loads, data)


MESSAGES: list[Any] = [
    {"a": [1, 2.5, None, True, "é"], "b": {"c": 1 << 70}},
    [1e300, -1e-9],
    "text",
    [],
    {"n": math.nan},
]
LISTS: list[list[Any]] = [[1.0, 1e-9, math.inf, math.nan], [1, -(1 << 63)], [True, False], ["é", '"'], []]


def test_a_models_own_environment_without_msgspec_reads_and_writes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> list[Any]:
        written = [dumped(one) for one in MESSAGES]
        return [*written, *(repr(loaded(one)) for one in written), *(list_text(one) for one in LISTS)]

    with_msgspec = made()
    monkeypatch.setattr(json_text, "_decode", None)
    monkeypatch.setattr(json_text, "_encode", None)
    assert made() == with_msgspec


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_read_to_the_last_bit(value: float) -> None:
    for text in (repr(value), f"{value:.25e}", f"{value:.17g}", f"{value:.16g}"):
        data = f"[{text}]".encode()
        assert told(loaded, data) == told(json.loads, data)


class Text(str):
    """A text of a type of its own."""


odd_values = st.sampled_from(
    [{1, 2}, b"ab", Text("x"), np.float32(1.5), np.int64(3), object, 1j, {1: 2}, (1, 2), "\ud83d"]
)


@given(values | st.lists(values | odd_values, max_size=80) | st.dictionaries(texts, odd_values, max_size=3))
def test_json_is_written_as_json_writes_it(value: Any) -> None:
    try:
        wanted = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str).encode()
    except UnicodeEncodeError:
        wanted = json.dumps(value, separators=(",", ":"), default=str).encode()
    assert dumped(value) == wanted


@pytest.mark.parametrize("depth", [7, 8, 9, 500])
def test_nested_json_is_written_however_deep(depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    assert dumped(value) == b"[" * depth + b"1" + b"]" * depth


floats = st.floats() | st.floats(width=32) | st.floats(1e-7, 1e-3) | st.floats(1e14, 1e18) | st.just(10.00001)


@given(st.lists(floats, max_size=20) | st.lists(st.integers(-(1 << 63), (1 << 64) - 1)) | st.lists(st.booleans()))
def test_lists_are_written_as_json_writes_them(elements: list[Any]) -> None:
    finite = [None if isinstance(one, float) and not math.isfinite(one) else one for one in elements]
    assert list_text(elements) == json.dumps(finite, separators=(",", ":")).encode()


@given(st.lists(floats, max_size=20), st.sampled_from(["f2", "f4", "f8"]))
def test_elements_are_written_as_their_values(elements: list[float], dtype: str) -> None:
    with np.errstate(over="ignore"):
        tensor = Tensor("x", {"f2": "FP16", "f4": "FP32", "f8": "FP64"}[dtype], np.array(elements, dtype))
    assert data_text(tensor, {}) == json.dumps(to_json(tensor, {}), separators=(",", ":")).encode()


# --- gRPC

names = st.sampled_from(["x", "y", "é", ""])
shapes = st.lists(st.integers(-1, 3), max_size=3)


@st.composite
def requests(draw: st.DrawFn) -> ModelInferRequest:
    """Mostly usual ones; each may have something that the usual ones haven't."""
    message = ModelInferRequest(model_name=draw(names), model_version=draw(names), id=draw(names))
    for name in draw(st.lists(names, max_size=3)):
        kind = draw(st.sampled_from([*DATATYPES, "FP32", "FP32", "INT64", "", "NONE"]))
        shape = draw(shapes | st.just([2]))
        tensor = message.inputs.add(name=name, datatype=kind, shape=shape)
        size = DATATYPES[kind].size_bytes * math.prod(shape) if kind in DATATYPES else 4
        if draw(st.integers(0, 9)):
            message.raw_input_contents.append(
                bytes(range(max(size, 0) % 250)) + draw(st.sampled_from([b"", b"", b"", b"x"]))
            )
        if not draw(st.integers(0, 9)):
            tensor.parameters["p"].int64_param = 1
        if not draw(st.integers(0, 9)):
            tensor.contents.fp32_contents.extend([1.0, 2.0])
        if not draw(st.integers(0, 9)):
            tensor.contents.SetInParent()
    for name in draw(st.lists(names, max_size=1)):
        message.outputs.add(name=name)
    return message


def read(data: bytes, short: bool, options: frozenset[str] = frozenset()) -> grpc_form.GrpcForm:
    with pytest.MonkeyPatch.context() as patch:
        if not short:
            patch.setattr(grpc_form, "plain_inputs", lambda message: None)
        return grpc_form.opened(data, {}, options, MODEL)


def described(data: bytes, short: bool) -> Any:
    try:
        form = read(data, short)
    except BadTensor as error:
        return str(error)
    request = form.request
    inputs = [
        (one.name, one.datatype, one.array.dtype, one.array.shape, one.array.tolist(), one.array.flags.writeable)
        for one in request.inputs
    ]
    return repr(
        (inputs, request.id, request.model_name, request.model_version, request.outputs, form._typed, form._bare)
    )


@given(requests())
def test_a_usual_grpc_request_is_read_as_any_other(message: ModelInferRequest) -> None:
    data = message.SerializeToString()
    assert described(data, short=True) == described(data, short=False)


@st.composite
def responses(draw: st.DrawFn) -> InferenceResponse:
    tensors = []
    for name in draw(st.lists(names, max_size=3)):
        kind = DATATYPES[draw(st.sampled_from([*DATATYPES, "FP32", "INT64"]))]
        array = np.zeros(draw(st.lists(st.integers(0, 200), max_size=2)), kind.dtype)
        if kind.name == "BYTES":
            array.fill(b"ab")
        if draw(st.booleans()) and array.ndim == 2:
            array = array.T
        tensors.append(Tensor(name, kind.name, array, draw(st.sampled_from([{}, {}, {"a": 1}]))))
    parameters = draw(st.sampled_from([{}, {}, {}, {"a": "b"}]))
    return InferenceResponse(tensors, draw(names), draw(names), draw(names), parameters)


asked_for = requests().map(lambda message: message.SerializeToString())
dialects = st.sampled_from([frozenset[str](), frozenset({"stream", "triton"})])


@given(asked_for, st.data(), responses(), dialects, st.booleans())
def test_a_usual_answer_is_written_as_any_other(
    data: bytes, chosen: st.DataObject, response: InferenceResponse, options: frozenset[str], last: bool
) -> None:
    try:
        form = read(data, True, options)
    except BadTensor:
        form = read(ModelInferRequest(id="1").SerializeToString(), True, options)
    if chosen.draw(st.booleans()):  # the client names what it gets
        form.request.outputs = [RequestedOutput(tensor.name) for tensor in response.outputs]

    def written(short: bool) -> bytes | str:
        with pytest.MonkeyPatch.context() as patch:
            if not short:
                patch.setattr(grpc_form, "plain_response", lambda *_: None)
            try:
                return form.answer(response, last)
            except BadTensor as error:
                return str(error)

    assert written(True) == written(False)
