"""Two requests have one key only if the worker decodes them alike, and the cache writes answers as the worker does.

The worker's own forms are the oracles.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts.protocol.datatypes import DATATYPES
from ts.protocol.frames import Input, Item, PackedPairs, Pairs, packed
from ts.protocol.open_inference_pb2 import ModelInferRequest
from ts.runtime.running import fields_of, row_of
from ts.tensors import forms
from ts.tensors.forms import ModelSpec
from ts.tensors.types import BadTensor, InferenceResponse, Tensor, encode_raw
from ts_frontend.caching.cache import Asker, Question
from ts_frontend.caching.tensors import LENGTH_HEADER, written

ASKER = Asker("m", "1", frozenset({"x-tenant"}))
MODEL = ModelSpec("m", "1", {}, {})
NUMBERS = ("BOOL", "UINT8", "INT8", "INT16", "INT32", "INT64", "UINT64", "FP16", "FP32", "FP64")
#: A request: its inputs, and a parameter.
Given = tuple[list[tuple[str, str, list[int], bytes]], dict[str, Any]]
Request = tuple[list[Input], Pairs]

names = st.sampled_from(["a", "ab", "b", "abc", ""])
parameters = st.dictionaries(
    st.sampled_from(["p", "q"]), st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "1", "true"]), max_size=2
)


@st.composite
def tensors(draw: st.DrawFn) -> Given:
    made = []
    for name in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
        kind = draw(st.sampled_from([*NUMBERS, "BYTES"]))
        shape = draw(st.sampled_from([[1], [2], [1, 2], [2, 1], [0], []]))
        count = int(np.prod(shape))
        if kind == "BYTES":
            values = draw(st.lists(st.sampled_from([b"", b"x", b"xy", b"\xff"]), min_size=count, max_size=count))
            data = b"".join(struct.pack("<I", len(value)) + value for value in values)
        else:
            small = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
            data = np.array(small, DATATYPES[kind].dtype).tobytes()
        made.append((name, kind, shape, data))
    return made, draw(parameters)


def as_message(given_: Given, request_id: str, typed: bool) -> Request:
    message = ModelInferRequest(model_name="m", id=request_id)
    inputs, more = given_
    for name, kind, shape, data in inputs:
        one = message.inputs.add(name=name, datatype=kind, shape=shape)
        if typed:
            getattr(one.contents, DATATYPES[kind].field).extend(elements(kind, data))
        else:
            message.raw_input_contents.append(data)
    for name, value in more.items():
        setattr(
            message.parameters[name], {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)], value
        )
    return [Input("", "\0grpc", message.SerializeToString())], [("x-request-id", request_id)]


def elements(kind: str, data: bytes) -> list[Any]:
    if kind == "BYTES":
        found, at = [], 0
        while at < len(data):
            size = struct.unpack_from("<I", data, at)[0]
            found.append(data[at + 4 : at + 4 + size])
            at += 4 + size
        return found
    return list(np.frombuffer(data, DATATYPES[kind].dtype).tolist())


def as_json(given_: Given, request_id: str, binary: bool) -> Request:
    inputs, more = given_
    rest, made = b"", []
    for name, kind, shape, data in inputs:
        one: dict[str, Any] = {"name": name, "datatype": kind, "shape": shape}
        if binary:
            one["parameters"] = {"binary_data_size": len(data)}
            rest += data
        else:
            one["data"] = [each.decode() if kind == "BYTES" else each for each in elements(kind, data)]
        made.append(one)
    head = json.dumps({"id": request_id, "inputs": made, **({"parameters": more} if more else {})}).encode()
    headers = [(LENGTH_HEADER, str(len(head)))] if binary else []
    return [Input("", "\0json", head + rest)], headers


def dialects(given_: Given) -> list[Request]:
    """The same request in every dialect that can say it."""
    kinds = {kind for _, kind, _, _ in given_[0]}
    found = [as_message(given_, "1", False), as_json(given_, "2", True)]
    if all(DATATYPES[kind].field for kind in kinds):
        found.append(as_message(given_, "3", True))
    if not any(b"\xff" in data for _, kind, _, data in given_[0] if kind == "BYTES"):
        found.append(as_json(given_, "4", False))
    return found


def decoded(request: Request) -> Any:
    """What the worker makes of a tensor request, without its id."""
    inputs, headers = request
    found = forms.opened(Item(1, "r", 0.0, headers, inputs), MODEL).request
    raw = [(one.name, one.datatype, one.shape, encode_raw(one.datatype, one.array)) for one in found.inputs]
    return repr((raw, sorted(found.parameters.items()), [(one.name, one.parameters) for one in found.outputs]))


def asked(request: Request, asker: Asker = ASKER) -> Question:
    inputs, headers = request
    return asker.question(inputs, headers, asker.said(headers))


@given(tensors())
def test_a_tensor_request_has_one_key_in_all_dialects(given_: Given) -> None:
    found = dialects(given_)
    assert len({asked(one).digest for one in found}) == 1
    for one in found:
        question = asked(one)
        assert question.wish is not None
        assert decoded((list(question.inputs), [])) == decoded((found[0][0], []))


@given(tensors(), tensors(), st.integers(0, 3), st.integers(0, 3))
def test_tensor_requests_with_one_key_are_decoded_alike(one: Given, other: Given, first: int, second: int) -> None:
    """The strategy makes requests that differ in one name, type, shape, byte or parameter."""
    left, right = dialects(one), dialects(other)
    left_one, right_one = left[first % len(left)], right[second % len(right)]
    assert (asked(left_one).digest == asked(right_one).digest) == (decoded(left_one) == decoded(right_one))


@given(st.data())
def test_a_changed_byte_of_a_message_is_never_another_messages_key(data: st.DataObject) -> None:
    inputs, headers = data.draw(st.sampled_from(dialects(data.draw(tensors()))))
    body = bytearray(inputs[0].data)
    at, bit = data.draw(st.integers(0, len(body) - 1)), data.draw(st.integers(0, 7))
    body[at] ^= 1 << bit
    changed: Request = ([inputs[0]._replace(data=bytes(body))], headers)
    if asked(changed).digest != asked((inputs, headers)).digest:
        return
    assert decoded(changed) == decoded((inputs, headers))


# --- TorchServe's APIs

contents = st.sampled_from([b"", b"1", b"11", b'{"a":1}', b'{"a": 1}', b'{"b":1}', b"a=1&b=2", b"a=1&b=3"])
types = st.sampled_from(
    ["", "application/octet-stream", "application/json", "text/plain", "application/x-www-form-urlencoded"]
)
raw_inputs = st.lists(st.tuples(names, types, contents), max_size=3, unique_by=lambda one: one[0])


def rows(inputs: list[Input]) -> str:
    return repr(row_of(fields_of(Item(1, "r", 0.0, (), inputs)), True))


@given(raw_inputs, raw_inputs)
def test_predictions_with_one_key_are_decoded_alike(
    one: list[tuple[str, str, bytes]], other: list[tuple[str, str, bytes]]
) -> None:
    left, right = [Input(*each) for each in one], [Input(*each) for each in other]
    if asked((left, ())).digest == asked((right, ())).digest:
        assert rows(left) == rows(right)


def multipart(boundary: str) -> list[Input]:
    part = f'--{boundary}\r\nContent-Disposition: form-data; name="data"; filename="k"\r\n\r\nX\r\n--{boundary}--\r\n'
    return [Input("body", f"multipart/form-data; boundary={boundary}", part.encode())]


def test_a_prediction_has_one_key_over_http_and_grpc() -> None:
    http = [("host", "h"), ("x-request-id", "7"), ("explain", "False"), ("url_path", "")]
    over_grpc = asked(([Input("data", "", b"X")], ())).digest
    assert asked((multipart("abc"), http)).digest == asked((multipart("xyz"), http)).digest == over_grpc
    body = [Input("body", "application/octet-stream", b"X")]
    assert asked((body, http)).digest == asked(([Input("body", "", b"X")], ())).digest != over_grpc
    blanks = [Input("body", "application/json", text) for text in (b'{"a": 1}', b'{"a":1}\n')]
    assert len({asked(([one], http)).digest for one in blanks}) == 1
    as_bytes = ASKER._replace(decodes=False)
    assert len({asked(([one], http), as_bytes).digest for one in blanks}) == 2


@pytest.mark.parametrize(
    "value, expected",
    [("", (True, True)), ("no-cache", (False, True)), ("max-age=0", (False, True)), ("No-Store, x", (False, False))],
)
def test_the_clients_wishes(value: str, expected: tuple[bool, bool]) -> None:
    given_ = [("Cache-Control", value)] if value else []
    assert ASKER.said(given_).control == expected
    for more in (), [("x-tenant", "t" * 2000)]:  # as bytes that are remembered, and as ones that are too many
        block = PackedPairs(packed([*given_, *more]))
        assert ASKER.said(block) == ASKER.said([*given_, *more]) == ASKER.said(PackedPairs(block.block))


# --- answers

results = st.sampled_from([
    ("FP32", [0.1, -0.0, 1e-7, 1e30, float("nan"), float("inf")]), ("FP64", [0.1, 5e-324]), ("FP16", [0.5, 65504.0]),
    ("INT64", [-(1 << 63), 7]), ("UINT8", [0, 255]), ("BOOL", [True, False]), ("FP32", []),
])  # fmt: skip
texts = st.lists(st.sampled_from([b"", b"x", "ß🐈".encode(), b"\xff", b'"\\']), max_size=3)


@given(results | texts.map(lambda values: ("BYTES", values)), st.booleans(), st.sampled_from(["", "7", "ü"]))
def test_an_answer_is_written_as_the_worker_writes_it(
    result: tuple[str, list[Any]], has_parameter: bool, request_id: str
) -> None:
    kind, values = result
    array = np.array(values, object if kind == "BYTES" else DATATYPES[kind].dtype)
    response = InferenceResponse([Tensor("y", kind, array, {"scale": 2} if has_parameter else {})])
    given_: Given = ([("a", "FP32", [1], struct.pack("<f", 1))], {})
    common = asked(as_message(given_, "other", False))
    answer = forms.opened(Item(1, "r", 0.0, (), common.inputs), MODEL).answer(response, True)
    ways = [as_message(given_, request_id, typed) for typed in (False, True)]
    plain, binary = (json.loads(bytes(as_json(given_, request_id, False)[0][0].data)) for _ in range(2))
    binary["parameters"] = {"binary_data_output": True}
    named = {**plain, "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
    ways += [([Input("", "\0json", json.dumps(body).encode())], ()) for body in (plain, binary, named)]
    for request in ways:
        form = forms.opened(Item(1, "r", 0.0, request[1], request[0]), MODEL)
        question = asked(request)
        assert question.wish is not None
        data, headers = written(answer, question.wish)
        expected = form.answer(response, True)
        assert list(headers) == list(form.headers)
        if question.wish.json:
            assert data == expected
        else:
            assert message_of(data) == message_of(expected)


def message_of(data: bytes) -> bytes:
    from ts.protocol.open_inference_pb2 import ModelInferResponse

    return ModelInferResponse.FromString(data).SerializeToString(deterministic=True)


def test_faulty_requests_keep_their_own_form() -> None:
    good = as_json(([("a", "INT8", [2], b"\1\2")], {}), "", False)
    message = json.loads(bytes(good[0][0].data))
    changes: list[dict[str, Any]] = [
        {"data": [1, 300]}, {"data": [1]}, {"data": [1, "2"]}, {"data": [1, True]}, {"data": None}, {"data": [[1], 2]},
        {"datatype": "INT7"}, {"shape": [-2]}, {"shape": [2.0]}, {"parameters": []}, {"parameters": {"p": [1]}},
        {"parameters": {"shared_memory_region": "r"}}, {"name": None},
    ]  # fmt: skip
    for change in changes:
        body = json.dumps({**message, "inputs": [{**message["inputs"][0], **change}]}).encode()
        question = asked(([Input("", "\0json", body)], ()))
        assert question.wish is None and question.inputs[0].data == body, change
        if change.get("parameters") != {"p": [1]}:  # only JSON can say it
            with pytest.raises(BadTensor):
                decoded(([Input("", "\0json", body)], ()))
