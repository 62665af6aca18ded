"""The short ways of usual tensor requests give what the long ones give, which are their oracles."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ts.compat.triton_backend.edges import Edges
from ts.compat.triton_backend.messages import TritonModelException
from ts.protocol.datatypes import DATATYPES
from ts.protocol.frames import Input, Item
from ts.protocol.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from ts.tensors import forms, grpc_form, json_form
from ts.tensors.forms import ModelSpec
from ts.tensors.json_form import data_text, dumped, list_text, loaded, to_json
from ts.tensors.types import BadTensor, InferenceRequest, InferenceResponse, RequestedOutput, Tensor

MODEL = ModelSpec("m", "1", {}, {})
#: Its BYTES may have another number of elements than their shape.
LOOSE = ModelSpec("m", "1", {}, {}, loose=True)

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
    """The result of reading, as text in which nan is nan and 1 isn't 1.0, or the error."""
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


def test_a_models_own_environment_without_msgspec_imports_the_forms() -> None:
    code = "import sys; sys.modules['msgspec'] = None; import ts.runtime.tensor_running, ts.tensors.json_form"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_models_own_environment_without_msgspec_reads_and_writes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> list[Any]:
        written = [dumped(one) for one in MESSAGES]
        return [*written, *(repr(loaded(one)) for one in written), *(list_text(one) for one in LISTS)]

    with_msgspec = made()
    monkeypatch.setattr(json_form, "_decode_any", None)
    monkeypatch.setattr(json_form, "_encode_any", None)
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


floats = st.floats() | st.floats(width=32) | st.floats(1e-7, 1e-3) | st.floats(1e14, 1e18) | st.just(10.00001)


@example([0.00002])
@given(st.lists(floats, max_size=20) | st.lists(st.integers(-(1 << 63), (1 << 64) - 1)) | st.lists(st.booleans()))
def test_lists_are_written_as_json_writes_them(elements: list[Any]) -> None:
    finite = [None if isinstance(one, float) and not math.isfinite(one) else one for one in elements]
    assert list_text(elements) == json.dumps(finite, separators=(",", ":")).encode()


@given(st.lists(floats, max_size=20), st.sampled_from(["f2", "f4", "f8"]))
def test_elements_are_written_as_their_values(elements: list[float], dtype: str) -> None:
    with np.errstate(over="ignore"):
        tensor = Tensor("x", {"f2": "FP16", "f4": "FP32", "f8": "FP64"}[dtype], np.array(elements, dtype))
    assert data_text(tensor, {}) == json.dumps(to_json(tensor, {}), separators=(",", ":")).encode()


#: A request in JSON: mostly usual ones.
elements_of = {
    "FP32": st.floats(width=32) | st.floats() | st.integers(),
    "FP16": st.floats(width=16) | st.sampled_from([65504.0, 65519.0, 65520.0, -1e5]),
    "FP64": st.floats() | st.integers(),
    "INT8": st.integers(-128, 127) | st.integers(-130, 130),
    "INT64": st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(),
    "UINT64": st.integers(0, (1 << 64) - 1) | st.integers(-1, 1 << 64),
    "BOOL": st.booleans(),
    "BYTES": st.text(max_size=3),
    "BF16": st.floats(width=16),
}
anything: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=2) | st.just([1]) | st.just({})
)
some_parameters = st.sampled_from(
    [None, {}, {"a": 1}, {"content_type": "base64"}, {"binary_data_size": 4}, {"timeout": -1}, {"triton_x": 1}]
)


@st.composite
def json_inputs(draw: st.DrawFn) -> Any:
    datatype = draw(st.sampled_from([*elements_of, "FP32", "FP32"]))
    count = draw(st.integers(0, 4))
    elements: list[Any] = draw(st.lists(elements_of[datatype], min_size=count, max_size=count))
    if elements and not draw(st.integers(0, 5)):
        elements[draw(st.integers(0, count - 1))] = draw(anything)
    given: dict[str, Any] = {"name": draw(st.sampled_from("xyé")), "datatype": datatype, "shape": [count]}
    given["shape"] = draw(st.sampled_from([[count]] * 8 + [[1, count], [], [-1], ["1"], None, [count + 1]]))
    given["data"] = draw(st.sampled_from([elements] * 8 + [[elements], None, elements[:1], 3]))
    if not draw(st.integers(0, 3)):
        given["parameters"] = draw(some_parameters)
    if not draw(st.integers(0, 9)):
        given[draw(st.sampled_from(["more", "name", "datatype"]))] = draw(anything)
    return given


@st.composite
def json_requests(draw: st.DrawFn) -> bytes:
    message: dict[str, Any] = {"inputs": draw(st.lists(json_inputs(), max_size=2))}
    if draw(st.booleans()):
        message["id"] = draw(st.sampled_from(["1", "", "é", None, 3]))
    if not draw(st.integers(0, 3)):
        message["outputs"] = draw(
            st.sampled_from([None, [], [{"name": "y"}], [{"name": 1}], [{"name": "y", "parameters": {"a": 1}}], {}])
        )
    if not draw(st.integers(0, 9)):
        message[draw(st.sampled_from(["parameters", "more", "inputs"]))] = draw(some_parameters)
    text = json.dumps(message, ensure_ascii=draw(st.booleans()))
    at = draw(st.integers(0, len(text)))
    changed = draw(st.sampled_from([text] * 4 + [text[:at], text[:at] + " " + text[at:], text[:at] + text[at + 1 :]]))
    if draw(st.booleans()):
        changed = changed.replace('"shape"', '"datatype": "INT8", "shape"', draw(st.integers(0, 1)))
    return changed.encode("utf-8", "surrogatepass")


def json_described(data: bytes | bytearray, short: bool, model: ModelSpec = MODEL) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if not short:
            patch.setattr(json_form, "usual_request", lambda *_: None)
        try:
            request = json_form.opened(data, {}, frozenset(), model).request
        except BadTensor as error:
            return str(error)
    return request_told(request)


def request_told(request: InferenceRequest) -> str:
    inputs = [
        (one.name, one.datatype, one.array.dtype, one.array.shape, one.shape, one.array.tolist(), one.parameters)
        for one in request.inputs
    ]
    writeable = all(one.array.flags.writeable for one in request.inputs)
    return repr((inputs, request.id, request.model_name, request.outputs, request.parameters, writeable))


@given(json_requests(), st.sampled_from([MODEL, LOOSE]))
def test_a_usual_json_request_is_read_as_any_other(data: bytes, model: ModelSpec) -> None:
    assert json_described(bytearray(data), True, model) == json_described(data, False, model)


@given(json_requests(), json_requests(), st.data(), st.booleans())
def test_a_json_request_that_comes_again_is_read_as_before(
    data: bytes, other: bytes, chosen: st.DataObject, declared: bool
) -> None:
    model = ModelSpec("m", "1", {"x": {"datatype": "FP32", "shape": [-1]}} if declared else {}, {})
    for _ in range(3):
        assert json_told(data, True, model) == json_told(data, False, model)
    at, end = chosen.draw(st.tuples(st.integers(0, len(data)), st.integers(0, len(data))))
    inserted = chosen.draw(
        st.sampled_from([b"1", b"\0", b",2", b'"', b"\x0b", b'"data":[1]', b"[", b"null"]) | st.just(other)
    )
    elements = chosen.draw(st.lists(elements_of["FP32"] | elements_of["INT8"] | st.booleans(), max_size=4))
    again = b'"data": ' + json.dumps(elements).encode()
    lists = [again if chosen.draw(st.booleans()) else found[0] for found in json_form._LIST.finditer(data)]
    changed = chosen.draw(
        st.sampled_from(
            [
                replaced(data, lists),
                replaced(data, lists) * 2,
                data[:at] + inserted + data[at:],
                data[:at] + data[end:],
                data[:at] + inserted[:1] + data[at + 1 :],
            ]
        )
    )
    for _ in range(3):
        assert json_told(changed, True, model) == json_told(changed, False, model)


def replaced(data: bytes, lists: list[bytes]) -> bytes:
    """The request with other lists in place of its own."""
    following = iter(lists)
    return json_form._LIST.sub(lambda _: next(following), data)


def json_told(data: bytes, short: bool, model: ModelSpec) -> Any:
    """As `json_described`, through all of `forms.opened`; the long way with nothing known of earlier requests."""
    with pytest.MonkeyPatch.context() as patch:
        if not short:
            patch.setattr(json_form, "usual_request", lambda *_: None)
            model = dataclasses.replace(model, accepted=set(), layouts={})
        try:
            return request_told(forms.opened(Item(1, "r", math.inf, (), [Input("", "\0json", data)]), model).request)
        except BadTensor as error:
            return str(error)


@pytest.mark.parametrize("datatype", elements_of)
def test_json_requests_like_earlier_ones_are_read_by_their_elements(datatype: str) -> None:
    model = ModelSpec("m", "1", {}, {})

    def body(*elements: Any) -> bytes:
        tensors = [
            {"name": name, "datatype": datatype, "shape": [1, 1], "data": [one]}
            for name, one in zip("xy", elements, strict=True)
        ]
        return json.dumps({"inputs": tensors, "outputs": [{"name": "z"}]}).encode()

    for elements in ((1, 0), (0, 1), (1, 1)):
        json_described(body(*elements), True, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_form, "_whole", lambda *_: None)
        found = json_form.usual_request(body(0, 0), {}, model)
    usual = datatype not in ("BYTES", "BF16", "BOOL")  # a truth value is no number
    assert (found is not None) is usual
    if found is not None:
        assert (
            found[0].outputs == [RequestedOutput("z")]
            and [one.array.tolist() for one in found[0].inputs] == [[[0]]] * 2
        )


def test_json_requests_like_the_last_one_are_read_without_a_search_for_their_list() -> None:
    model = ModelSpec("m", "1", {}, {})

    def body(text: str) -> bytes:
        return b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": %b}], "id": "a"}' % text.encode()

    for number in range(3):
        json_described(body(f"[{number}, 1.5]"), True, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_form, "_LIST", None)
        found = json_form.usual_request(body(" [-1e3, 2.25]"), {}, model)
    assert found is not None and found[0].inputs[0].array.tolist() == [-1000.0, 2.25]
    for text in (
        "[1]",
        "[[1, 2]]",
        '["1", 2]',
        "[1, 2], 3",
        "[1, 2",
        "",
        "[1, 2]]",
        "[1e99, 1]",
        '[1, 2], "data": [3, 4]',
    ):
        assert json_told(body(text), True, model) == json_told(body(text), False, model)
    shorter = body("[1, 2]")[: -len(', "id": "a"}')] + b"}"
    for data in (shorter, body("[1, 2]").replace(b"FP32", b"INT8"), body("[1, 2]")[:75]):
        assert json_told(data, True, model) == json_told(data, False, model)


def test_layouts_of_json_requests_that_all_differ_are_few() -> None:
    model = ModelSpec("m", "1", {}, {})
    for number in range(3 * json_form.LAYOUTS_MAX):
        tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}
        data = json.dumps({"id": str(number), "inputs": [tensor]}).encode()
        assert json_described(data, True, model) == json_described(data, False, model)
        assert len(model.layouts) <= json_form.LAYOUTS_MAX
    model.layouts.clear()
    json_described(json.dumps({"id": "x" * json_form.LAYOUT_BYTES_MAX, "inputs": [tensor]}).encode(), True, model)
    assert not model.layouts


#: What readers of JSON take differently.
TELLING = [
    *(b"-0", b"-0.0", b"1.0", b"1e0", b"1E400", b"NaN", b"null", b"true", b"01", b"0.1e1", b"-1", b"1" * 400),
    *(b"18446744073709551615", b"18446744073709551616", b"-9223372036854775808", b"-9223372036854775809"),
    *(b"3.4028235e38", b"3.4028236e38", b"65504", b"65519.99", b"9007199254740993", b"2e-324", b"1.7e308"),
    *(
        b'"\xed\xa0\xbd"',
        b'"\\ud83d"',
        b'"\xff"',
        b'"\x01"',
        b'"\\u0000"',
        b'1],"data":["\xff"',
        b'"\xff"],"data":[1',
    ),
]


@pytest.mark.parametrize("datatype", ["FP64", "FP32", "FP16", "INT64", "UINT64", "INT8", "BOOL", "BYTES"])
def test_elements_that_readers_take_differently_are_read_alike(datatype: str) -> None:
    for elements, shape in itertools.product(TELLING, (b"[1]", b"[1.0]", b"[true]")):
        fields = b'{"name":"x","datatype":"%b","shape":%b,"data":[%b]}' % (datatype.encode(), shape, elements)
        data = b'{"inputs":[%b]}' % fields
        assert json_described(data, short=True) == json_described(data, short=False), data


@pytest.mark.parametrize(("datatype", "elements"), [("FP32", [0.5, 3]), ("INT64", [1, 2]), ("BYTES", ["a", "é"])])
def test_usual_json_requests_and_answers_go_the_short_way(datatype: str, elements: list[Any]) -> None:
    tensor = {"name": "x", "datatype": datatype, "shape": [1, 2], "data": elements, "parameters": {"a": 1}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_form.JsonForm, "_read", None)
        form = json_form.opened(json.dumps({"inputs": [tensor], "id": "1"}).encode(), {}, frozenset(), MODEL)
    assert form.request.inputs[0].array.shape == (1, 2) and form.request.inputs[0].parameters == {"a": 1}


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


@st.composite
def typed_requests(draw: st.DrawFn) -> ModelInferRequest:
    """With elements in the fields of their datatypes, most of which are as many as the shape says."""
    message = ModelInferRequest(model_name=draw(names), id=draw(names))
    for name in draw(st.lists(names, min_size=1, max_size=2)):
        kind = DATATYPES[draw(st.sampled_from(["FP32", "FP32", "FP64", "INT32", "BOOL", "BYTES"]))]
        shape = draw(st.lists(st.integers(1, 40), max_size=2))
        tensor = message.inputs.add(name=name, datatype=draw(st.sampled_from([kind.name] * 4 + [""])), shape=shape)
        count = math.prod(shape) + draw(st.sampled_from([0, 0, 0, 0, 1]))
        field_name = draw(st.sampled_from([kind.field] * 4 + ["fp64_contents"]))
        field = getattr(tensor.contents, field_name)
        field.extend([b"a" if field_name == "bytes_contents" else 1] * count)
    if not draw(st.integers(0, 9)):
        message.raw_input_contents.append(b"abcd")
    return message


def read(
    data: bytes | bytearray, short: bool, options: frozenset[str] = frozenset(), model: ModelSpec = MODEL
) -> grpc_form.GrpcForm:
    with pytest.MonkeyPatch.context() as patch:
        if not short:
            patch.setattr(grpc_form, "usual_request", lambda *_: None)
        return grpc_form.opened(data, {}, options, model)


def described(data: bytes | bytearray, short: bool, model: ModelSpec = MODEL) -> Any:
    try:
        form = read(data, short, model=model)
    except BadTensor as error:
        return str(error)
    request = form.request
    inputs = [
        (one.name, one.datatype, one.array.dtype, one.shape, one.array.tolist(), one.array.flags.writeable)
        for one in request.inputs
    ]
    return repr(
        (inputs, request.id, request.model_name, request.model_version, request.outputs, form._typed, form._bare)
    )


@given(requests() | typed_requests(), st.sampled_from([MODEL, LOOSE]))
def test_a_usual_grpc_request_is_read_as_any_other(message: ModelInferRequest, model: ModelSpec) -> None:
    data = message.SerializeToString()
    assert described(bytearray(data), True, model) == described(data, False, model)


@given(requests() | typed_requests(), requests() | typed_requests(), st.data())
def test_bytes_that_are_nearly_a_usual_grpc_request_are_read_as_any_others(
    message: ModelInferRequest, other: ModelInferRequest, chosen: st.DataObject
) -> None:
    data = message.SerializeToString()
    at, end = chosen.draw(st.tuples(st.integers(0, len(data)), st.integers(0, len(data))))
    inserted = chosen.draw(st.binary(max_size=3) | st.just(other.SerializeToString()))
    described(data, short=True)  # its layout is known
    changed = chosen.draw(
        st.sampled_from(
            [
                data[:at] + inserted[:1] + data[at + 1 :],
                data[:at] + inserted + data[at:],
                data[:at] + data[end:],
                data + inserted,
            ]
        )
    )
    assert described(changed, short=True) == described(changed, short=False)


@pytest.mark.parametrize(("datatype", "field"), [("FP32", "fp32_contents"), ("FP64", "fp64_contents")])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("request_id", ["1", ""])
def test_usual_grpc_requests_and_answers_go_the_short_way(
    datatype: str, field: str, raw: bool, request_id: str
) -> None:
    kind = DATATYPES[datatype]
    message = ModelInferRequest(model_name="m", id=request_id)
    tensor = message.inputs.add(name="x", datatype=datatype, shape=[1, 40])
    values = np.arange(40, dtype=kind.dtype).reshape(1, 40)
    if raw:
        message.raw_input_contents.append(values.tobytes())
    else:
        getattr(tensor.contents, field).extend(values.ravel().tolist())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpc_form.GrpcForm, "_read", None)
        patch.setattr(grpc_form, "completed", None)
        if raw and not request_id:  # then the answer is a known head and its elements
            patch.setattr(grpc_form, "_written", None)
        form = grpc_form.opened(message.SerializeToString(), {}, frozenset(), MODEL)
        answered = form.answer(InferenceResponse([Tensor("y", datatype, form.request.inputs[0].array)]), True)
    answer = ModelInferResponse.FromString(answered)
    assert answer.id == request_id and list(answer.outputs[0].shape) == [1, 40]
    if raw:
        assert answer.raw_output_contents[0] == values.tobytes()
    else:
        assert list(getattr(answer.outputs[0].contents, field)) == values.ravel().tolist()


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
        stated = draw(st.sampled_from([None, None, (3,)])) if kind.name == "BYTES" and array.ndim == 1 else None
        tensors.append(Tensor(name, kind.name, array, draw(st.sampled_from([{}, {}, {"a": 1}])), stated))
    parameters = draw(st.sampled_from([{}, {}, {}, {"a": "b"}]))
    return InferenceResponse(tensors, draw(names), draw(names), draw(names), parameters)


asked_for = (requests() | typed_requests()).map(lambda message: message.SerializeToString())


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
                patch.setattr(grpc_form, "usual_response", lambda *_: None)
            try:
                return form.answer(response, last)
            except BadTensor as error:
                return str(error)

    assert written(True) == written(False)


# --- what was compared with the model's declaration before

DECLARED: dict[str, dict[str, Any]] = {
    "x": {"datatype": "FP32", "shape": [-1, 2], "batch_max": 2},
    "y": {"datatype": "INT64", "optional": True},
}
declared_tensors = st.lists(
    st.builds(
        lambda name, kind, shape: Tensor(name, kind, np.zeros(shape, DATATYPES[kind].dtype)),
        st.sampled_from("xxyz"),
        st.sampled_from(["FP32", "FP32", "INT64"]),
        st.sampled_from([(1, 2), (1, 2), (2, 2), (3, 2), (2,), (1, 3), ()]),
    ),
    max_size=2,
    unique_by=lambda tensor: tensor.name,
)


@given(st.lists(declared_tensors, max_size=6))
def test_inputs_are_compared_with_their_declarations_whatever_came_before(requested: list[list[Tensor]]) -> None:
    def told_of(inputs: list[Tensor], model: ModelSpec) -> str:
        try:
            forms.check_declared(InferenceRequest(inputs), model)
        except BadTensor as error:
            return str(error)
        return ""

    model = ModelSpec("m", "1", DECLARED, {})
    for inputs in requested:
        assert told_of(inputs, model) == told_of(inputs, ModelSpec("m", "1", DECLARED, {}))


CONFIGURED = {
    "max_batch_size": 4,
    "output": [
        {"name": "x", "data_type": "TYPE_FP32", "dims": [2]},
        {"name": "y", "data_type": "TYPE_INT64", "dims": [1, 2], "reshape": {"shape": [2]}},
    ],
}


@given(st.lists(declared_tensors, max_size=6), st.booleans())
def test_outputs_are_compared_with_their_declarations_whatever_came_before(
    answers: list[list[Tensor]], strict: bool
) -> None:
    def told_of(outputs: list[Tensor], edges: Edges) -> Any:
        try:
            given_out = edges.given(InferenceResponse(list(outputs))).outputs
        except TritonModelException as error:
            return str(error)
        return [(one.name, one.datatype, one.shape) for one in given_out]

    edges = Edges(CONFIGURED, strict=strict)
    for outputs in answers:
        assert told_of(outputs, edges) == told_of(outputs, Edges(CONFIGURED, strict=strict))
