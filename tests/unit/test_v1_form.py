"""KServe's V1 bodies as tensors, and answers in its form."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from ts.tensors import v1_form
from ts.tensors.forms import ModelSpec
from ts.tensors.types import BadTensor, InferenceResponse, Tensor

MODEL = ModelSpec("m", "1.0", {}, {})


def opened(body, model=MODEL, **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return v1_form.opened(data, {name.replace("_", "-"): value for name, value in headers.items()}, frozenset(), model)


@pytest.mark.parametrize(
    ("instances", "found"),
    [
        ([[1, 2], [3, 4]], {"instances": ("INT64", [[1, 2], [3, 4]])}),
        ([1.5], {"instances": ("FP64", [1.5])}),
        (["a", "é"], {"instances": ("BYTES", [b"a", "é".encode()])}),
        ([{"a": 1, "b": "x"}, {"a": 2, "b": "y"}], {"a": ("INT64", [1, 2]), "b": ("BYTES", [b"x", b"y"])}),
        ([{"a": 1}, {"b": 1}], {"instances": ("BYTES", [b'{"a":1}', b'{"b":1}'])}),
        ([[1], [2, 3]], {"instances": ("BYTES", [b"[1]", b"[2,3]"])}),
        ([], {"instances": ("BYTES", [])}),
    ],
)
def test_instances(instances, found):
    tensors = opened({"instances": instances}).request.inputs
    assert {one.name: (one.datatype, one.array.tolist()) for one in tensors} == found


@pytest.mark.parametrize(
    ("datatype", "instances", "found"),
    [
        ("FP32", [1, 2.5, None], [1.0, 2.5, None]),
        ("FP16", [[1, 2], [3, 4]], [[1.0, 2.0], [3.0, 4.0]]),
        ("UINT8", [[[1]], [[255]]], [[[1]], [[255]]]),
        ("BYTES", [["a"], ["b"]], [[b"a"], [b"b"]]),
        ("BYTES", [{"a": 1}, {"b": 1}], [b'{"a":1}', b'{"b":1}']),
        ("FP32", [], []),
    ],
)
def test_instances_are_of_the_datatype_that_the_model_declares(datatype, instances, found):
    model = ModelSpec("m", "1.0", {"x": {"datatype": datatype}}, {})
    (tensor,) = opened({"instances": instances}, model).request.inputs
    values = [None if value != value else value for value in tensor.array.tolist()]
    assert (tensor.name, tensor.datatype, values) == ("x", datatype, found)


def test_answers_have_no_numbers_that_json_has_not():
    answer = opened({"instances": [1]}).answer(
        InferenceResponse([Tensor.of("y", np.array([1.0, np.nan, -np.inf]))]), True
    )
    assert answer == b'{"predictions":[1.0,null,null]}'


@pytest.mark.parametrize("body", [{}, {"instances": 3}, [1], b"{", b"\xff"])
def test_bodies_without_instances(body):
    with pytest.raises(BadTensor, match="instances|valid JSON"):
        opened(body)


def test_predictions():
    form = opened({"instances": [1]})
    one, two = Tensor.of("a", np.array([1, 2])), Tensor.of("b", np.array([[3.5], [4.5]]))
    rows = [{"a": 1, "b": [3.5]}, {"a": 2, "b": [4.5]}]
    for outputs, found in (
        ([one], [1, 2]),
        ([one, two], rows),
        ([one, Tensor.of("c", "text")], {"a": [1, 2], "c": ["text"]}),
        ([], []),
    ):
        assert json.loads(form.answer(InferenceResponse(outputs), True)) == {"predictions": found}
    assert json.loads(form.answer(v1_form.V1Response([], payload={"x": 1}), True)) == {"x": 1}


def test_cloud_events():
    event = {"specversion": "1.0", "id": "1", "type": "t", "source": "s"}
    structured = {"content_type": "application/cloudevents+json; charset=utf-8"}
    body = {"instances": [7]}
    forms = [
        opened(body, ce_id="1", ce_specversion="1.0"),
        opened(event | {"data": body}, **structured),
        opened(event | {"data_base64": base64.b64encode(json.dumps(body).encode()).decode()}, **structured),
    ]
    for form in forms:
        assert form.request.payload == body
        assert dict(form.headers)["ce-source"] == "io.kserve.inference.m"
    assert "ce-id" not in dict(opened(body).headers)
    for bad in ({"data": 3}, {"data_base64": "?"}, {}):
        with pytest.raises(BadTensor, match="CloudEvent"):
            opened(event | bad, **structured)
