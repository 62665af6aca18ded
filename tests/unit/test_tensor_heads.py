"""Heads of tensor requests, with the full parsers as the oracles, and how long they hold the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from ts.protocol import open_inference_pb2 as pb
from ts_frontend.errors import InvalidArgument
from ts_frontend.grpc.call import Call
from ts_frontend.grpc.open_inference import StreamDialect, dialect_of
from ts_frontend.open_inference import requests as tensor_heads
from ts_frontend.open_inference import requests as tensor_requests
from ts_frontend.open_inference.requests import FIELDS_MAX as MOST
from ts_frontend.open_inference.requests import head_of_message, items_of_json, items_of_message, mention

NAMES = ("timeout", "priority", "sequence_id", "sequence_start")
TENSORS = ("inputs", "outputs", "raw_input_contents")
LARGE_BYTES = 6_000_000


@pytest.fixture(scope="module")
def all_large() -> Iterator[None]:
    """Every request is read as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_heads, "WHOLE_BYTES_MAX", 0)
        yield


pytestmark = pytest.mark.usefixtures("all_large")

# --- protobuf

texts = st.text(max_size=8)
contents = st.builds(
    pb.InferTensorContents,
    int_contents=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
    fp32_contents=st.lists(st.sampled_from([0.0, 1.5]), max_size=4),
    bytes_contents=st.lists(st.binary(max_size=6), max_size=3),
)
parameters = st.one_of(
    st.builds(pb.InferParameter, int64_param=st.integers(-(2**63), 2**63 - 1)),
    st.builds(pb.InferParameter, string_param=texts),
    st.builds(pb.InferParameter, bool_param=st.booleans()),
)
tensors = st.builds(
    pb.ModelInferRequest.InferInputTensor,
    name=texts,
    datatype=st.sampled_from(["", "BYTES", "INT32"]),
    shape=st.lists(st.integers(0, 2**40), max_size=3),
    parameters=st.dictionaries(texts, parameters, max_size=2),
    contents=st.one_of(st.none(), contents),
)
raw = st.one_of(st.binary(max_size=12), st.just(b"\x02\x00\x00\x00ab"))
messages = st.builds(
    pb.ModelInferRequest,
    model_name=texts,
    model_version=texts,
    id=texts,
    parameters=st.dictionaries(st.one_of(texts, st.sampled_from(NAMES)), parameters, max_size=3),
    inputs=st.lists(tensors, max_size=3),
    outputs=st.lists(st.builds(pb.ModelInferRequest.InferRequestedOutputTensor, name=texts), max_size=2),
    raw_input_contents=st.lists(raw, max_size=3),
)


def without_tensors(message: pb.ModelInferRequest) -> pb.ModelInferRequest:
    found = pb.ModelInferRequest()
    found.CopyFrom(message)
    for name in TENSORS:
        found.ClearField(name)
    return found


@given(messages, messages)
def test_a_head_is_the_message_without_its_tensors(first: pb.ModelInferRequest, second: pb.ModelInferRequest) -> None:
    """Also of two encodings one after the other, which are one message."""
    data = first.SerializeToString() + second.SerializeToString()
    whole = pb.ModelInferRequest.FromString(data)
    assert head_of_message(data) == without_tensors(whole)
    forms = head_of_message(data, forms=True)
    assert [(one.name, one.datatype, one.HasField("contents")) for one in forms.inputs] == [
        (one.name, one.datatype, one.HasField("contents")) for one in whole.inputs
    ]
    assert dialect_of(Call("/p"), forms, StreamDialect.AUTO) == dialect_of(Call("/p"), whole, StreamDialect.AUTO)


@given(messages, st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=3), st.integers(0, 300))
@example(pb.ModelInferRequest(), [], 0)
def test_what_the_parser_takes_has_a_head(
    message: pb.ModelInferRequest, changes: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(message.SerializeToString())
    for at, value in changes:
        if at < len(data):
            data[at] = value
    given = bytes(data[: len(data) - cut % 3])
    try:
        whole = pb.ModelInferRequest.FromString(given)
    except DecodeError:
        whole = None
    try:
        head = head_of_message(given)
    except InvalidArgument as error:
        assert "are not a ModelInferRequest" in error.message
        assert whole is None
    else:
        # A message is taken whose tensors alone are broken; the worker refuses it.
        assert whole is None or head.SerializeToString(deterministic=True) == without_tensors(whole).SerializeToString(
            deterministic=True
        )


GROUP = b"\x4b\x08\x01\x13\x14\x4c"  # field 9, with a field 1 and a group 2 in it


@pytest.mark.parametrize(
    "data", [GROUP, GROUP + b"\x0a\x01m", b"\x50\x01\x0a\x01m", b"\x0a\x81\x00m", b"\x51" + bytes(8)]
)
def test_unknown_fields_are_passed_over(data: bytes) -> None:
    assert head_of_message(data) == without_tensors(pb.ModelInferRequest.FromString(data))


@pytest.mark.parametrize(
    "data",
    [b"\x0a", b"\x0a\x05m", b"\x00", b"\x4b", b"\x4c", b"\x4b\x54", b"\x0f", b"\x0a" + b"\xff" * 11, b"\x55\x01"],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        pb.ModelInferRequest.FromString(data)
    with pytest.raises(InvalidArgument, match="are not a ModelInferRequest"):
        head_of_message(data)


def test_so_many_fields_and_no_more() -> None:
    assert head_of_message(b"\x3a\x00" * tensor_heads.FIELDS_MAX) == pb.ModelInferRequest()
    with pytest.raises(InvalidArgument, match="more than 16384 fields"):
        head_of_message(b"\x3a\x00" * (tensor_heads.FIELDS_MAX + 1))


# --- JSON


def parameters_of_json(data: bytes) -> dict[str, Any]:
    return tensor_heads.parameters_of_json(data, NAMES, [b""])


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text('a"\\[]{}:, é\n')),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text('a"\\]', max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
keys = st.one_of(st.sampled_from([*NAMES, "parameters", "inputs"]), st.text('a"\\]', max_size=3))
pairs = st.lists(st.tuples(keys, values), max_size=4)
blanks = st.text(" \t\r\n", max_size=2)


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """An object as text: names may be there twice, blanks anywhere, and `parameters` is often an object itself."""

    def written(members: list[tuple[str, str]]) -> str:
        blank = draw(blanks)
        return (
            "{"
            + blank
            + f"{blank},{blank}".join(f"{key}{blank}:{blank}{value}" for key, value in members)
            + blank
            + "}"
        )

    ascii_only = draw(st.booleans())

    def dumped(members: list[tuple[str, Any]]) -> list[tuple[str, str]]:
        return [(json.dumps(key), json.dumps(value, ensure_ascii=ascii_only)) for key, value in members]

    inside = written(dumped(draw(pairs)))
    at = draw(st.integers(0, 4))
    top = dumped(draw(pairs))
    name = draw(st.sampled_from(['"parameters"', '"p\\u0061rameters"', '"other"']))
    text = written([*top[:at], (name, inside), *top[at:]])
    return draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + (draw(blanks) + text + draw(blanks)).encode()


def oracle(data: bytes) -> dict[str, Any]:
    found = json.loads(data).get("parameters")
    found = found if isinstance(found, dict) else {}
    return {
        name: type(found[name])() if isinstance(found[name], (list, dict)) else found[name]
        for name in NAMES
        if name in found
    }


@given(documents())
def test_parameters_are_those_of_the_whole_document(data: bytes) -> None:
    assert parameters_of_json(data) == oracle(data)


@given(documents(), st.integers(0, 400), st.binary(max_size=2))
def test_damaged_documents_raise_nothing(data: bytes, at: int, new: bytes) -> None:
    damaged = data[:at] + new + data[at + 1 :]
    found = parameters_of_json(damaged)
    try:
        expected = oracle(damaged)
    except (ValueError, AttributeError):
        return
    assert found == expected


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"a": ' + b"[" * 5000,
        b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b', "parameters": {"timeout": 1}}',
        b'{"parameters": {"timeout": "' + b"x" * 200_000,
        b'{"parameters": [1]}',
        b'{"parameters"',
    ],
)
def test_what_has_no_parameters(data: bytes) -> None:
    assert parameters_of_json(data) == {}


@pytest.mark.parametrize("step_bytes", [1, 2, 7])
def test_pieces_of_any_size(step_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_heads, "_STEP_BYTES", step_bytes)
    data = b'{"x": [[1, "]\\"}]", {}], ["a\\\\"]], "parameters": {"a": [{}], "timeout": 5, "priority": [2]}, "y": {}}'
    assert parameters_of_json(data) == {"timeout": 5, "priority": []}
    assert mention(data, [b"nothing", b'"priority"'])
    assert not mention(data, [b"nothing", b'"sequence_id"'])


@pytest.mark.parametrize("where", ["before", "after"])
def test_the_loop_goes_on_while_a_large_document_is_read(where: str) -> None:
    """Python's parser holds the interpreter's lock from the first byte to the last, in a thread as well."""
    rows = b",".join([b"[1.5, 2.5, 3.5]"] * (LARGE_BYTES // 16))
    inputs = b'"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [' + rows + b"]}]"
    given = b'"parameters": {"timeout": 7, "other": "sequence_id"}'
    body = b"{" + b", ".join([given, inputs] if where == "before" else [inputs, given]) + b"}"

    async def beats_while_read() -> int:
        reading = asyncio.create_task(tensor_requests.of_large_json(body))
        beats = 0
        while not reading.done():
            beats += 1
            await asyncio.sleep(0.001)
        assert await reading == {"timeout": 7}
        return beats

    assert asyncio.run(beats_while_read()) >= 5


# --- items


def of_shapes(*shapes: list[int], size: int = 0) -> pb.ModelInferRequest:
    inputs = [pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=shape) for shape in shapes]
    return pb.ModelInferRequest(model_name="m", inputs=inputs, raw_input_contents=[bytes(size)])


@pytest.mark.parametrize("size", [0, 200_000])
@pytest.mark.parametrize(
    "shapes, items",
    [([[64, 3]], 64), ([[1], [300, 2], [7]], 300), ([[]], 1), ([], 1), ([[-5]], 1), ([[0, 3]], 1), ([[1 << 62]], MOST)],
)
def test_items_are_the_first_dimension(shapes: list[list[int]], items: int, size: int) -> None:
    assert items_of_message(of_shapes(*shapes, size=size).SerializeToString()) == items
    inputs = [{"name": "x", "data": [']"', [size] * size], "shape": shape} for shape in shapes]
    text = json.dumps({"parameters": {"shape": [9]}, "inputs": inputs}).replace('"shape"', '"sh\\u0061pe"')
    assert items_of_json(text.encode()) == items


def test_items_of_a_shape_whose_numbers_are_not_packed() -> None:
    tensor = b"\x1a\x00" + b"\x18\xac\x02" + b"\x18\x03"  # an empty part of the shape, 300, 3
    assert items_of_message(b"\x2a" + bytes([len(tensor)]) + tensor) == 300


@pytest.mark.parametrize(
    "text",
    [b"", b"[1]", b"{", b'{"instances": 3}', b'{"inputs": "text"}', b'{"inputs": [{"shape": 3}]}', b'{"instances": [1'],
)
def test_broken_requests_have_one_item(text: bytes) -> None:
    assert items_of_json(text) == 1
    assert items_of_message(text + b"\x2a\x05\x1a") == 1
