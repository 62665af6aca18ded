"""KServe's V1 bodies as tensors, and answers in its form."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from ts.tensors import v1_form
from ts.tensors.datatypes import BadTensor
from ts.tensors.forms import Model
from ts.tensors.types import InferenceResponse, Tensor

MODEL = Model("m", "1.0", {}, {})


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


def test_the_only_input_of_the_model_gives_its_name():
    model = Model("m", "1.0", {"x": {"datatype": "INT64", "shape": [-1]}}, {})
    assert opened({"inputs": [1]}, model).request.inputs[0].name == "x"


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
