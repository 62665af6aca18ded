"""Request envelopes: the handler's input and the answer, for one request and for a batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ts.context import Context
from ts.tensors.forms import row_of
from ts.tensors.types import InferenceRequest, InferenceResponse, Tensor, bytes_array
from ts.torch_handler.request_envelope.base import BaseEnvelope
from ts.torch_handler.request_envelope.body import BodyEnvelope
from ts.torch_handler.request_envelope.json import JSONEnvelope
from ts.torch_handler.request_envelope.kserve import KServeEnvelope
from ts.torch_handler.request_envelope.kservev2 import KServev2Envelope, shaped
from ts.utils.util import PredictionException

Answer = Callable[[list[Any]], Any]


class Handler:
    """A handler that remembers its input; `answer` makes results from it."""

    def __init__(self, answer: Answer = lambda rows: rows) -> None:
        self.seen: list[Any] = []
        self.answer = answer

    def handle(self, data: Any, context: Context) -> Any:
        self.seen.append(data)
        return self.answer(data)


def context_of(count: int, **headers: str) -> Context:
    manifest = {"model": {"modelName": "mnist", "modelVersion": "1.0"}}
    context = Context("mnist", "/nowhere", manifest, count, None)
    context.request_ids = {idx: f"id-{idx}" for idx in range(count)}
    context.request_processor = [dict(headers) for _ in range(count)]
    return context


def test_body_takes_rows_apart() -> None:
    handler = Handler()
    rows = [{"body": [1]}, {"data": b"x"}, {"other": 1}]
    assert BodyEnvelope(handler.handle).handle(rows, context_of(3)) == [[1], b"x", None]
    assert BodyEnvelope(handler.handle).handle(None, context_of(1)) == []


def test_json_joins_the_instances_of_all_requests() -> None:
    handler = Handler(lambda rows: [len(str(row)) for row in rows])
    rows = [
        {"body": {"instances": [1, 22]}},
        {"body": b'{"instances": [{"b64": "aGk="}]}'},
        {"data": {"instances": []}},
    ]
    answers = JSONEnvelope(handler.handle).handle(rows, context_of(3))
    assert handler.seen == [[1, 22, b"hi"]]
    assert [json.loads(answer) for answer in answers] == [
        {"predictions": [1, 2]},
        {"predictions": [5]},
        {"predictions": []},
    ]


def test_kserve_explanations() -> None:
    answers = KServeEnvelope(Handler().handle).handle([{"body": {"instances": [5]}}], context_of(1, explain="True"))
    assert answers == [{"explanations": [5]}]


def test_results_that_cannot_be_shared_out_fail() -> None:
    rows = [{"body": {"instances": [1, 2]}}, {"body": {"instances": [3]}}]
    with pytest.raises(ValueError, match="1 results for 3 inputs"):
        KServeEnvelope(Handler(lambda rows: ["all"]).handle).handle(rows, context_of(2))


@pytest.mark.parametrize("envelope", [JSONEnvelope, KServeEnvelope, KServev2Envelope])
@pytest.mark.parametrize("value", [b"{", "[]", 7, {}, {"instances": 3, "inputs": 3}, None])
def test_a_request_that_is_not_one_is_the_callers_error(envelope: type[BaseEnvelope], value: Any) -> None:
    handler = Handler()
    with pytest.raises(PredictionException) as caught:
        envelope(handler.handle).handle([{"body": value}], context_of(1))
    assert caught.value.error_code == 400
    assert handler.seen == []


def test_a_batch_of_broken_requests_never_reaches_the_handler() -> None:
    handler = Handler()
    context = context_of(2)
    answers = KServeEnvelope(handler.handle).handle([{"body": 1}, {"body": 2}], context)
    assert [answer["code"] for answer in answers] == [400, 400]
    assert handler.seen == []


def test_describe_passes_untouched() -> None:
    handler = Handler(lambda rows: [{"about": "me"}])
    answers = KServeEnvelope(handler.handle).handle([{}], context_of(1, describe="True"))
    assert (handler.seen, answers) == ([[{}]], [{"about": "me"}])


def tensor(name: str, data: list[Any], shape: Any = None, datatype: str = "FP32") -> dict[str, Any]:
    return {"name": name, "shape": [len(data)] if shape is None else shape, "datatype": datatype, "data": data}


def test_kservev2_as_recorded_from_torchserve() -> None:
    handler = Handler(lambda rows: [1])
    rows = [{"body": {"id": "d3b15cad", "inputs": [tensor("input-0", ["aGk="], -1, "BYTES")]}}]
    (answer,) = KServev2Envelope(handler.handle).handle(rows, context_of(1))
    assert handler.seen[0][0]["data"] == "aGk="
    assert answer == {
        "id": "d3b15cad",
        "model_name": "mnist",
        "model_version": "1.0",
        "outputs": [{"name": "input-0", "datatype": "INT64", "data": [1], "shape": [1]}],
    }


@pytest.mark.parametrize(
    ("values", "shape", "nested"),
    [
        ([1, 2, 3, 4, 5, 6], [2, 3], [[1, 2, 3], [4, 5, 6]]),
        ([1, 2, 3, 4], [1, 2, 2], [[[1, 2], [3, 4]]]),
        ([1, 2, 3, 4], [-1, 2], [[1, 2], [3, 4]]),
        ([1, 2], [-1], [1, 2]),
        ([7], [], 7),
        ([], [0], []),
    ],
)
def test_shapes(values: list[int], shape: list[int], nested: Any) -> None:
    assert shaped(values, shape, "x") == nested


@pytest.mark.parametrize("shape", [[2, 2], [-1, 2], [-1, -1], [-3], []])
def test_shapes_that_do_not_fit(shape: list[int]) -> None:
    with pytest.raises(PredictionException, match="input x: 3 values don't have the shape"):
        shaped([1, 2, 3], shape, "x")


@pytest.mark.parametrize(
    "wrong",
    [
        tensor("a", [1], datatype="FLOAT"),
        tensor("a", [1]) | {"datatype": ["FP32"]},
        tensor("a", [], datatype="BYTES"),
        tensor("a", [1], ["x"]),
        {"name": "a", "datatype": "FP32"},
        7,
    ],
)
def test_kservev2_inputs_that_are_none(wrong: Any) -> None:
    with pytest.raises(PredictionException) as caught:
        KServev2Envelope(Handler().handle).handle([{"body": {"inputs": [wrong]}}], context_of(1))
    assert caught.value.error_code == 400


def test_kservev2_takes_tensors_as_its_json_and_answers_with_tensors() -> None:
    """A request over gRPC, or with binary data, beside one in JSON and one that can't be opened."""
    handler = Handler(lambda rows: [rows[0]["data"], np.float32(0.5), rows[2]["data"], rows[3]["data"]])
    tensors = [
        Tensor("x", "INT64", np.array([[1, 2]])),
        Tensor("raw", "BYTES", bytes_array([b"\xff\x00"], [1])),
        Tensor("text", "BYTES", bytes_array(["größe".encode()], [1])),
    ]
    empty = InferenceRequest([Tensor("none", "BYTES", bytes_array([], [0]))])
    body = {"inputs": [{"name": "y", "shape": [1], "datatype": "FP32", "data": [2.5]}]}
    rows = [row_of(InferenceRequest(tensors, id="a")), {"body": body}, row_of(empty)]
    answers = KServev2Envelope(handler.handle).handle(rows, context_of(3))
    assert [row["data"] for row in handler.seen[0]] == [[[1, 2]], b"\xff\x00", "größe", [2.5]]
    first = answers[0]
    assert isinstance(first, InferenceResponse) and first.id == "a"
    assert [(one.name, one.datatype, one.array.tolist()) for one in first.outputs] == [
        ("x", "INT64", [1, 2]),
        ("raw", "FP32", [0.5]),
        ("text", "BYTES", ["größe".encode()]),
    ]
    assert answers[1]["outputs"] == [{"name": "y", "datatype": "FP64", "data": [2.5], "shape": [1]}]
    assert isinstance(answers[2], PredictionException) and answers[2].error_code == 400
