"""Requests over TorchServe's own APIs for models that are a graph of tensors."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest

from ts.protocol.frames import Input
from ts.tensors.forms import ModelSpec
from ts.tensors.types import BadTensor
from ts.tensors.v1_form import request_of

FREE = ModelSpec("m", "1.0", {}, {}, values=True)
DECLARED = ModelSpec("m", "1.0", {"x": {"datatype": "FP32", "shape": [-1, 2]}}, {}, values=True)
TWO = ModelSpec("m", "1.0", {name: {"datatype": "FP32", "shape": [-1]} for name in "ab"}, {}, values=True)
JSON, FORM = "application/json", "application/x-www-form-urlencoded"


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def taken(model: ModelSpec, *inputs: Input) -> dict[str, Any]:
    return {one.name: (one.datatype, one.array.tolist()) for one in request_of(inputs, (), model).inputs}


def body(data: bytes, content_type: str = "") -> Input:
    return Input("body", content_type, data)


V2 = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}


@pytest.mark.parametrize(
    "given",
    [
        body(b"[[1,2]]"),
        body(b'{"inputs": [[1,2]]}', JSON),
        body(b'{"instances": [[1,2]]}', JSON),
        body(b'{"instances": [{"x": [1,2]}]}', JSON),
        body(b'{"inputs": {"x": [[1,2]]}}', JSON),
        body(b'{"x": [[1, 2]]}', JSON),
        body(json.dumps(V2).encode(), JSON),
        body(b"1,2\n", "text/csv"),
        body(b"1, 2"),
        body(npy(np.array([[1.0, 2.0]]))),
        body(npy(np.array([[1, 2]], ">i4")), "application/octet-stream"),
        body(npy(np.asfortranarray([[1.0, 2.0]]))),
        Input("x", "", npy(np.array([[1, 2]], np.float32))),
        Input("[[1,2]]", FORM, b""),
    ],
)
def test_what_a_request_may_be(given: Input) -> None:
    assert taken(DECLARED, given) == {"x": ("FP32", [[1.0, 2.0]])}


def test_several_inputs_are_a_tensor_each() -> None:
    expected = {"a": ("FP32", [1.0]), "b": ("FP32", [2.0, 3.0])}
    assert taken(TWO, Input("a", "", npy(np.array([1.0]))), Input("b", "", b"[2, 3]")) == expected
    assert taken(TWO, body(b'{"a": 1, "b": [2, 3]}')) == expected


def test_a_model_that_declares_nothing_takes_numbers_as_they_look_and_texts() -> None:
    assert taken(FREE, body(b"1,2\n3,4", "text/csv")) == {"body": ("INT64", [[1, 2], [3, 4]])}
    assert taken(FREE, body(b"1.5,2", "text/csv")) == {"body": ("FP64", [[1.5, 2.0]])}
    for text in (b"a word", b"[CLS] a word", b"1984"):
        assert taken(FREE, body(text)) == {"body": ("BYTES", [text])}
    assert taken(FREE, body(b"[1, 2]", "text/plain"))["body"][0] == "INT64"


HEADER = npy(np.zeros(1)).replace(b"(1,)", b"(9" + b"9" * 15 + b",)", 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (body(b"[[1,2]", JSON), r"not valid JSON: .*line 1 column 7"),
        (body(b"[[1,2]"), r"not valid JSON: .*line 1 column 7"),
        (body(b"[" * 100_000, JSON), "not valid JSON"),
        (body(b"a,b\n1,2", "text/csv"), "not CSV of numbers without a header"),
        (body(b"\xff,1", "text/csv"), "not CSV"),
        (body(HEADER), "not a usable .npy file"),
        (body(npy(np.zeros((1, 2)))[:-1]), "not a usable .npy file"),
        (body(b"\x93NUMPY\x01\x00\x00"), "not a usable .npy file"),
        (body(npy(np.array(["a"]))), "it has elements of"),
        (body(npy(np.array([[1 + 2j]]))), "it has elements of complex"),
        (body(b"a word"), "neither JSON, CSV nor .npy; the model takes FP32: send JSON"),
        (body(b"[1, 2, 3]"), r"has shape \[3\]; the model takes \[-1, 2\]"),
        (body(b'{"y": [[1, 2]]}'), "is missing; the model takes: x"),
        (body(b"null", JSON), "input 'x'"),
    ],
)
def test_what_is_refused_with_the_reason(given: Input, message: str) -> None:
    with pytest.raises(BadTensor, match=message):
        request_of([given], (), DECLARED)
