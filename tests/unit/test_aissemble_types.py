"""The types and classes that aiSSEMBLE's handlers import. Promises 003-03, 003-04, 003-08."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ts.compat.aissemble_api import handlers, types
from ts.compat.aissemble_api.types import Datatype, InferenceRequest, InferenceResponse, RequestInput, ResponseOutput


def tensor(data, shape, datatype="FP32", kind=RequestInput):
    return kind(name="x", shape=shape, datatype=datatype, data=data)


@pytest.mark.parametrize(
    ("data", "shape", "datatype"),
    [
        ([1.0, 2.0], [2], "FP32"),
        ([[1.0, 2.0], [3.0, 4.0]], [2, 2], "FP64"),
        ([1, 2, 3, 4], [2, 2], "INT8"),
        ([[1, 2]], [-1, 2], "INT64"),
        (["a", b"b"], [2], "BYTES"),
        ([True], [1], "BOOL"),
        (3.0, [], "FP16"),
        (np.ones((2, 2), "f4"), [2, 2], "FP32"),
    ],
)
def test_tensors_that_are_what_they_say(data, shape, datatype):
    InferenceRequest(inputs=[tensor(data, shape, datatype)]).validate_oip()


@pytest.mark.parametrize(
    ("data", "shape", "datatype", "error", "text"),
    [
        ([1.0], [2], "FP32", ValueError, r"input \('x'\): Shape mismatch - declared \[2\] , but got \[1\]"),
        ([[1, 2], [3]], [3, 1], "INT8", ValueError, "Malformed tensor - nested lists are not rectangular"),
        ([[1, 2]], [2, 1], "INT8", ValueError, r"nested representation - expected \[2, 1\], but got \[1, 2\]"),
        ([1], [-1, 1], "INT8", ValueError, "Shape mismatch - declared"),
        ([1], [1], "FP32", TypeError, r"input \('x'\): Datatype mismatch - element at index 0 is of type int, but exp"),
        (["1"], [1], "INT32", TypeError, "element at index 0 is of type str"),
        ([], [1], "INT32", ValueError, r"but got \[0\]"),
    ],
)
def test_tensors_that_are_not(data, shape, datatype, error, text):
    with pytest.raises(error, match=text):
        InferenceRequest(inputs=[tensor(data, shape, datatype)]).validate_oip()


def test_answers_and_empty_requests_are_checked():
    with pytest.raises(ValueError, match=r"^output \('x'\): Shape mismatch"):
        InferenceResponse(model_name="m", outputs=[tensor([1.0], [2], kind=ResponseOutput)]).validate_oip()
    with pytest.raises(ValueError, match="^InferenceRequest does not contain any inputs$"):
        InferenceRequest(inputs=[]).validate_oip()
    InferenceResponse(model_name="m", outputs=[]).validate_oip()


def test_values_are_read_and_bad_ones_named():
    found = InferenceRequest.model_validate(
        {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0], "parameters": {"a": 1}}], "more": 1}
    )
    one: Any = found.inputs[0]
    datatypes: Any = Datatype
    assert (one.datatype, list(one.data), one.data[0], len(one.data)) == (datatypes.FP32, [1.0], 1.0, 1)
    assert one.parameters.a == 1 and one.parameters.content_type is None
    assert found.model_dump(exclude_none=True)["inputs"][0]["datatype"] == "FP32"
    assert InferenceRequest.model_validate_json(found.model_dump_json()) == found
    for values, text in (
        ({"shape": ["x"]}, "RequestInput.shape"),
        ({"datatype": "FP99"}, "RequestInput.datatype: 'FP99' is not a valid Datatype"),
        ({"name": 3}, "RequestInput.name: a text is needed"),
    ):
        with pytest.raises(ValueError, match=text):
            RequestInput(**{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]} | values)


class Doubling(handlers.ModelHandler):
    def infer(self, payload, model_name, model_version=None):
        outputs = [tensor([2 * one for one in payload.inputs[0].data], payload.inputs[0].shape, kind=ResponseOutput)]
        return InferenceResponse(model_name=model_name, model_version=model_version, outputs=outputs)

    def model_metadata(self, model_name, model_version=None):
        return types.ModelMetadataResponse(name=model_name, platform="python", inputs=[], outputs=[])

    def model_load(self, model_name):
        return model_name == "m"


def test_a_handler_behind_its_dataplane():
    dataplane = handlers.DataplaneHandler(Doubling())
    answer: Any = dataplane.infer(InferenceRequest(inputs=[tensor([1.0, 2.0], [2])]), "m")
    assert (answer.outputs[0].data, answer.model_name) == ([2.0, 4.0], "m")
    assert dataplane.model_ready("m") == types.ModelReadyResponse(name="m", ready=True)
    assert (dataplane.model_load("m"), dataplane.model_load("n")) == (True, False)
    assert dataplane.server_metadata().model_dump() == {"name": "Inference Server", "version": "1.0", "extensions": []}
    assert dataplane.server_live().live and dataplane.server_ready().live
    with pytest.raises(NotImplementedError):
        handlers.DataplaneHandler().model_load("m")


def test_a_handler_without_its_methods_cannot_be_made():
    class Half(handlers.ModelHandler):
        def infer(self, payload, model_name, model_version=None):
            return None

    with pytest.raises(TypeError, match="model_load"):
        Half()  # type: ignore[abstract]
