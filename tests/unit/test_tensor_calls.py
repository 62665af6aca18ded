"""Requests of this server's own to other models and servers, and the answers: the short way of usual ones gives what
the long one gives, which is its oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts.protocol.datatypes import DATATYPES
from ts.protocol.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from ts.tensors import grpc_form
from ts.tensors.types import BadTensor, InferenceRequest, RequestedOutput, Tensor

names = st.sampled_from(["x", "y", "é", ""])


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """Mostly usual ones; each may have something that the usual ones haven't."""
    message = ModelInferResponse(model_name=draw(names), model_version=draw(names), id=draw(names))
    typed = draw(st.booleans())
    for name in draw(st.lists(names, max_size=3)):
        kind = DATATYPES[draw(st.sampled_from([*DATATYPES, "FP32", "FP32", "FP64"]))]
        shape = draw(st.lists(st.integers(0, 40), max_size=2))
        tensor = message.outputs.add(name=name, datatype=draw(st.sampled_from([kind.name] * 9 + ["NONE"])), shape=shape)
        count = math.prod(shape) + draw(st.sampled_from([0] * 9 + [1]))
        if typed and kind.field:
            field = getattr(tensor.contents, kind.field)
            field.extend([b"a" if kind.field == "bytes_contents" else 1] * count)
        elif draw(st.integers(0, 9)):
            message.raw_output_contents.append(bytes(count * kind.size_bytes))
        if not draw(st.integers(0, 9)):
            tensor.parameters["p"].int64_param = 1
    if not draw(st.integers(0, 9)):
        message.parameters["p"].bool_param = True
    return message.SerializeToString()


def told(read: Callable[[Any], Any], data: bytes | memoryview) -> str:
    try:
        found = read(data)
    except BadTensor as error:
        return str(error)
    outputs = [
        (one.name, one.datatype, one.array.dtype, one.shape, one.array.tolist(), one.array.flags.writeable)
        for one in found.outputs
    ]
    parameters = [one.parameters for one in found.outputs]
    return repr((outputs, parameters, found.id, found.model_name, found.model_version, found.parameters))


@given(answers())
def test_a_usual_answer_is_read_as_any_other(data: bytes) -> None:
    for given_as in (data, memoryview(data)):
        assert told(grpc_form.response_from, given_as) == told(grpc_form._response_from, data)


@given(answers(), answers(), st.data())
def test_bytes_that_are_nearly_a_usual_answer_are_read_as_any_others(
    data: bytes, other: bytes, chosen: st.DataObject
) -> None:
    at, end = chosen.draw(st.tuples(st.integers(0, len(data)), st.integers(0, len(data))))
    inserted = chosen.draw(st.binary(max_size=3) | st.just(other))
    told(grpc_form.response_from, data)  # its layout is known
    near = [data[:at] + inserted[:1] + data[at + 1 :], data[:at] + inserted + data[at:], data[:at] + data[end:]]
    changed = chosen.draw(st.sampled_from([*near, data + inserted]))
    assert told(grpc_form.response_from, changed) == told(grpc_form._response_from, changed)


@st.composite
def requests(draw: st.DrawFn) -> InferenceRequest:
    tensors = []
    for name in draw(st.lists(names, max_size=3)):
        kind = DATATYPES[draw(st.sampled_from([*DATATYPES, "FP32", "INT64"]))]
        array = np.zeros(draw(st.lists(st.integers(0, 200), max_size=2)), kind.dtype)
        if kind.name == "BYTES":
            array.fill(b"ab")
        elif draw(st.booleans()):
            array = array.astype(array.dtype.newbyteorder(">"))
        tensors.append(Tensor(name, kind.name, array.T, draw(st.sampled_from([{}, {}, {"a": 1}]))))
    outputs = [RequestedOutput(name) for name in draw(st.lists(names, max_size=1))]
    parameters = draw(st.sampled_from([{}, {}, {}, {"a": "b"}]))
    return InferenceRequest(tensors, draw(names), draw(names), draw(names), parameters, outputs)


@given(requests())
def test_a_usual_request_is_written_as_any_other(request: InferenceRequest) -> None:
    assert grpc_form.request_bytes(request) == grpc_form._request_bytes(request)


def test_usual_calls_go_the_short_way() -> None:
    values = np.arange(40, dtype=np.float32).reshape(1, 40)
    request = InferenceRequest([Tensor("x", "FP32", values)], "1", "m")
    with pytest.MonkeyPatch.context() as patch:
        for long_way in ("_request_bytes", "_response_from"):
            patch.setattr(grpc_form, long_way, None)
        sent = ModelInferRequest.FromString(grpc_form.request_bytes(request))
        assert (sent.model_name, sent.id, sent.raw_input_contents[0]) == ("m", "1", values.tobytes())
        for number in range(3 * grpc_form.LAYOUTS_MAX):
            answer = ModelInferResponse(model_name="m", id="1" * number)
            answer.outputs.add(name="y", datatype="FP32", shape=[1, 40])
            answer.raw_output_contents.append(values.tobytes())
            found = grpc_form.response_from(answer.SerializeToString())
            assert found.outputs[0].array.tolist() == values.tolist()
            assert len(grpc_form._ANSWERS) <= grpc_form.LAYOUTS_MAX
