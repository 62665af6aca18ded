"""Requests of the tensor protocols: encoded values are decoded again, and no bytes from a client do harm.

Promises 001-21, 001-22 (bad tensors are told apart), and no request fails another one's.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ts.protocol import open_inference_pb2 as pb
from ts.protocol.datatypes import DATATYPES
from ts.protocol.frames import Input, Item, PackedPairs, packed
from ts.tensors import forms
from ts.tensors.forms import Form, ModelSpec
from ts.tensors.types import MESSAGE_CHARS_MAX, BadTensor, InferenceResponse, Tensor

MODEL = ModelSpec("m", "1", {}, {})
LENGTH = "inference-header-content-length"
#: Far more than any request takes, and far less than one that grows with the square of its size.
GUARD_S = 20
FORMS = ("json", "json;stream", "grpc", "grpc;stream;triton", "generate", "openai", "openai;chat")


def opened(form: str, data: bytes, length: int | str | None = None, model: ModelSpec = MODEL) -> Form:
    pairs = [("host", "a"), *([(LENGTH, str(length))] if length is not None else ())]
    headers = PackedPairs(packed(pairs))  # as the frontend sends them
    return forms.opened(Item(1, "r", math.inf, headers, [Input("", f"\0{form}", data)]), model)


def body(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": inputs, **more}).encode()


def one(shape: list[int], data: list[Any] | None, datatype: str = "FP32", **parameters: Any) -> dict[str, Any]:
    found = {"name": "x", "shape": shape, "datatype": datatype, "parameters": parameters}
    return found if data is None else found | {"data": data}


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    name = draw(st.sampled_from(sorted(DATATYPES)))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    if name != "BYTES":
        return Tensor("x", name, draw(arrays.arrays(DATATYPES[name].dtype, shape)))
    array = np.empty(shape, dtype=object)
    for index in np.ndindex(*shape):
        array[index] = draw(st.binary(max_size=8))
    return Tensor("x", name, array)


def bits(tensor: Tensor) -> list[Any]:
    if tensor.datatype == "BYTES":
        return [bytes(value) for value in tensor.array.ravel()]
    return [tensor.array.tobytes()]


def message(tensor: Tensor) -> tuple[pb.ModelInferRequest, bytes]:
    from ts.tensors.types import encode_raw

    kind = pb.ModelInferRequest.InferInputTensor
    raw = encode_raw(tensor.datatype, tensor.array)
    return pb.ModelInferRequest(
        model_name="m",
        inputs=[kind(name="x", datatype=tensor.datatype, shape=tensor.shape)],
        raw_input_contents=[raw],
    ), raw


@given(tensors())
def test_grpc_gives_back_what_it_got(tensor: Tensor) -> None:
    request, raw = message(tensor)
    form = opened("grpc", request.SerializeToString())
    (read,) = form.request.inputs
    assert (read.shape, bits(read)) == (tensor.shape, bits(tensor))
    answer = pb.ModelInferResponse.FromString(form.answer(InferenceResponse([read]), True))
    assert list(answer.raw_output_contents) == [raw] and tuple(answer.outputs[0].shape) == tensor.shape


@given(tensors())
def test_binary_http_gives_back_what_it_got(tensor: Tensor) -> None:
    _, raw = message(tensor)
    head = body(
        one(list(tensor.shape), None, tensor.datatype, binary_data_size=len(raw)),
        parameters={"binary_data_output": True},
    )
    form = opened("json", head + raw, len(head))
    answer = form.answer(InferenceResponse(form.request.inputs), True)
    assert answer[int(dict(form.headers)[LENGTH]) :] == raw


@given(tensors().filter(lambda tensor: tensor.datatype != "BF16"))
def test_json_gives_back_what_it_got(tensor: Tensor) -> None:
    first = json.loads(opened("json", body(one([1], [1]))).answer(InferenceResponse([tensor]), True))
    again = opened("json", json.dumps({"inputs": first["outputs"]}).encode())
    (read,) = again.request.inputs
    assert read.shape == tensor.shape
    if tensor.array.dtype.kind == "f":
        finite = np.where(np.isfinite(tensor.array), tensor.array, np.nan)
        assert np.array_equal(read.array, finite, equal_nan=True)
    else:
        assert bits(read) == bits(tensor)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["x", "FP32", "BYTES", "str"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["inputs", "name", "datatype", "shape", "data", "parameters", "outputs", "id", "text_input", "prompt"]
                + ["messages", "role", "content", "content_type", "binary_data_size", "binary_data"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=100)
@given(
    st.sampled_from(FORMS),
    st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()),
    st.none() | st.integers(0, 80),
)
def test_any_bytes_are_a_request_or_a_bad_one(form: str, data: bytes, length: int | None) -> None:
    try:
        forms.row_of(opened(form, data, length).request)
    except BadTensor:
        pass


@settings(max_examples=100)
@given(
    st.lists(
        st.builds(
            dict,
            name=st.sampled_from(["x", "y", ""]),
            datatype=st.sampled_from(["", "FP32", "BYTES", "BF16", "UINT8", "NO"]),
            shape=st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-1, 3), max_size=5),
        ),
        max_size=3,
    ),
    st.lists(st.binary(max_size=16), max_size=3),
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=4),
)
def test_any_message_is_a_request_or_a_bad_one(inputs: list[dict[str, Any]], raw: list[bytes], ints: list[int]) -> None:
    request = pb.ModelInferRequest(model_name="m", inputs=inputs, raw_input_contents=raw)  # type: ignore[arg-type]
    for tensor in request.inputs:
        tensor.contents.int_contents.extend(ints)
    try:
        forms.row_of(opened("grpc", request.SerializeToString()).request)
    except BadTensor:
        pass


def shaped(shape: list[int], raw: bytes = b"", datatype: str = "UINT8") -> bytes:
    kind = pb.ModelInferRequest.InferInputTensor
    inputs = [kind(name="x", datatype=datatype, shape=shape)]
    return pb.ModelInferRequest(inputs=inputs, raw_input_contents=[raw]).SerializeToString()


HOSTILE: dict[str, Callable[[], object]] = {
    "more dimensions than arrays have": lambda: opened("json", body(one([1] * 65, [1]))),
    "no elements, in too large a shape": lambda: opened("json", body(one([0, 1 << 61], []))),
    "no elements, in a shape larger still": lambda: opened("grpc", shaped([0, 1 << 62, 1 << 62])),
    "a million dimensions": lambda: opened("json", body(one([2] * 1_000_000, [1]))),
    "a million dimensions in a message": lambda: opened("grpc", shaped([1 << 62] * 600_000)),
    "dimensions of thousands of digits": lambda: opened("json", body(one([10**4000] * 1000, [1]))),
    "base64 that is no ASCII": lambda: opened("json", body(one([1], ["é"], "BYTES", content_type="base64"))),
    "a length of thousands of digits": lambda: opened("json", body(one([1], [1])), "9" * 5000),
    "an element of megabytes": lambda: opened("json", body(one([1], ["x" * 5_000_000]))),
    "lists in lists in lists": lambda: opened("json", b'{"inputs":' + b"[" * 200_000),
    "text that is no UTF-8": lambda: forms.row_of(
        opened(
            "grpc",
            pb.ModelInferRequest(
                inputs=[
                    pb.ModelInferRequest.InferInputTensor(
                        name="x",
                        datatype="BYTES",
                        shape=[1],
                        parameters={"content_type": pb.InferParameter(string_param="str")},
                    )
                ],
                raw_input_contents=[b"\1\0\0\0\xff"],
            ).SerializeToString(),
        ).request
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_requests_are_refused_briefly_and_at_once(case: str) -> None:
    begun_s = time.thread_time()
    with pytest.raises(BadTensor) as caught:
        HOSTILE[case]()
    assert len(str(caught.value)) <= MESSAGE_CHARS_MAX + 3
    assert time.thread_time() - begun_s < GUARD_S


def test_half_a_character_in_a_prompt() -> None:
    with pytest.raises(BadTensor, match="half a character"):
        opened("openai", b'{"model":"m","prompt":"\\ud83d"}')
    with pytest.raises(BadTensor, match="half a character"):
        opened("generate", b'{"text_input":"\\ud83d"}')


def test_typed_and_raw_together_are_told_with_their_tensor() -> None:
    request = pb.ModelInferRequest(raw_input_contents=[b"1234"])
    request.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(1)
    with pytest.raises(BadTensor, match="input 'x': contents and raw_input_contents"):
        opened("grpc", request.SerializeToString())
    request.inputs[0].ClearField("contents")
    request.inputs.add(name="y", datatype="FP32", shape=[1])
    with pytest.raises(BadTensor, match="inputs 'x', 'y': 1 raw_input_contents for 2 inputs"):
        opened("grpc", request.SerializeToString())
    with pytest.raises(BadTensor, match="no input: 1 raw_input_contents"):
        opened("grpc", pb.ModelInferRequest(raw_input_contents=[b"1234"]).SerializeToString())


@pytest.mark.parametrize(("form", "key"), [("openai", "text"), ("generate;stream", "text_output")])
def test_a_character_may_come_in_pieces(form: str, key: str) -> None:
    """As from models that yield bytes."""
    request = b'{"model":"m","prompt":"x"}' if form == "openai" else b'{"text_input":"x"}'
    pieces = [bytes([byte]) for byte in "aé€".encode()]
    opened_form = opened(form, request)
    answers = [opened_form.answer(InferenceResponse([Tensor.of("output", piece)]), False) for piece in pieces]
    assert "".join(json.loads(answer)[key] for answer in answers) == "aé€" and opened_form.end() == b""
    opened_form.answer(InferenceResponse([Tensor.of("output", b"\xc3")]), False)
    assert json.loads(opened_form.end())[key] == "\ufffd"


def test_generated_bytes_that_are_no_text_stay_base64() -> None:
    form = opened("generate", b'{"text_input":"x"}')
    answer = form.answer(InferenceResponse([Tensor.of("output", b"\xff\xd8")]), False)
    assert json.loads(answer)["text_output"] == "/9g="


@pytest.mark.parametrize("form", ["json", "grpc"])
def test_headers_are_those_that_came_and_can_be_replaced(form: str) -> None:
    request = opened(form, body(one([1], [1])) if form == "json" else shaped([1], b"1")).request
    assert request.headers == {"host": "a"} and request.headers is request.headers
    request.headers = {**request.headers, "more": "b"}
    assert request.headers == {"host": "a", "more": "b"}


@pytest.mark.parametrize("shape", [[1 << 40, 0], [300, 300, 0, 1]])
def test_rows_without_elements_are_bounded(shape: list[int]) -> None:
    """Each is a list for a handler that gets lists: a request of a few bytes could take all of the memory."""
    message = pb.ModelInferRequest(inputs=[{"name": "x", "datatype": "FP32", "shape": shape}])  # type: ignore[list-item]
    text = {"inputs": [{"name": "x", "datatype": "FP32", "shape": shape, "data": []}]}
    for form, data in (("grpc", message.SerializeToString()), ("json", json.dumps(text).encode())):
        with pytest.raises(BadTensor, match="rows without elements; at most 65536 are possible"):
            opened(form, data)
    text["inputs"][0]["shape"] = [0, *shape]
    assert opened("json", json.dumps(text).encode()).request.inputs[0].shape == (0, *shape)
