"""`TritonPythonModel`s in a real worker: unchanged model files, one response each or decoupled, their errors."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ts.protocol.frames import Cancel, Credit, Failed, Input, LoadFailed, Pieces
from ts.protocol.open_inference_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse

TENSORS = {
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": ["-1"]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": ["-1"]}],
}
ADD = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.config = json.loads(args["model_config"])
        output = pb_utils.get_output_config_by_name(self.config, "y")
        self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])
        self.name = args["model_name"]

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if x.size and x.flat[0] < 0:
                error = pb_utils.TritonError("negative: %s" % x.tolist(), pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            if x.size and x.flat[0] == 99:
                raise pb_utils.TritonModelException("ninety-nine")
            tensor = pb_utils.Tensor("y", (x + len(requests)).astype(self.dtype))
            responses.append(pb_utils.InferenceResponse(output_tensors=[tensor]))
        return responses
"""
REPEAT = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "text", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "out", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(0)
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request, request.get_response_sender())).start()

    def answer(self, request, sender):
        text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[0].decode()
        if text == "endless":
            while not sender.is_cancelled():
                sender.send(self.response("more"))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        if text == "bad":
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("bad text")), 1)
            return
        for word in text.split():
            error = pb_utils.TritonError("no word") if word == "!" else None
            sender.send(pb_utils.InferenceResponse(error=error) if error else self.response(word))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def response(self, word):
        return pb_utils.InferenceResponse([pb_utils.Tensor("out", np.array([word], dtype=object))])
"""
ASYNC = """
import asyncio
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.sleep(0)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy() * 2)]) for r in requests]
"""


@pytest.fixture
def start_model(start_worker: Any, tmp_path: Path) -> Any:
    def start(source: str, config: dict[str, Any], **settings: Any) -> Any:
        """A worker, and its answer to Load."""
        version = tmp_path / "repository" / "m" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(source)
        adapted = {"config": config, "model_file": str(version / "model.py"), "model_repository": str(tmp_path)}
        worker = start_worker(load=False)
        return worker, worker.load("", adapter="triton", adapter_settings=adapted, model_dir=str(version), **settings)

    return start


def numbers(*values: float, options: str = "") -> list[Input]:
    tensor = ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[len(values)])
    data = np.array(values, "<f4").tobytes()
    message = ModelInferRequest(model_name="m", id="7", inputs=[tensor], raw_input_contents=[data])
    return [Input("", f"\0grpc{options}", message.SerializeToString())]


def text(value: str) -> list[Input]:
    tensor = ModelInferRequest.InferInputTensor(name="text", datatype="BYTES", shape=[1])
    data = struct.pack("<I", len(value)) + value.encode()
    message = ModelInferRequest(model_name="m", inputs=[tensor], raw_input_contents=[data])
    return [Input("", "\0grpc;stream;triton", message.SerializeToString())]


def values(answer: Any) -> list[float]:
    assert isinstance(answer, bytes), answer
    found: list[float] = np.frombuffer(ModelInferResponse.FromString(answer).raw_output_contents[0], "<f4").tolist()
    return found


def test_each_request_of_a_batch_gets_its_response(start_model: Any) -> None:
    worker = start_model(ADD, TENSORS, batch_size=2)[0]
    first, second = worker.ask(numbers(1), numbers(2, 3))
    assert values(first) == [3.0] and values(second) == [4.0, 5.0]
    message = ModelInferResponse.FromString(first)
    assert (message.model_name, message.model_version, message.id) == ("m", "1.0", "7")
    assert [output.name for output in message.outputs] == ["y"]


def test_an_error_fails_its_request_alone(start_model: Any) -> None:
    worker = start_model(ADD, TENSORS, batch_size=2)[0]
    good, bad = worker.ask(numbers(1), numbers(-1))
    assert values(good) == [3.0]
    assert isinstance(bad, Failed) and (bad.code, bad.message) == (400, "negative: [-1.0]")
    raised = worker.ask(numbers(99))
    assert isinstance(raised, Failed) and (raised.code, raised.message) == (500, "ninety-nine")
    assert values(worker.ask(numbers(1))) == [2.0]


def test_requests_are_checked_against_the_configuration(start_model: Any) -> None:
    worker = start_model(ADD, TENSORS | {"max_batch_size": 8})[0]
    refused = worker.ask(numbers(1))
    assert isinstance(refused, Failed) and refused.code == 400 and "'x' has shape [1]" in refused.message


def test_torchserves_own_apis_reach_the_model(start_model: Any) -> None:
    worker = start_model(REPEAT, {})[0]
    assert worker.ask([Input("data", "", b"one")]) == b"one"


def test_an_async_model(start_model: Any) -> None:
    assert values(start_model(ASYNC, TENSORS)[0].ask(numbers(2))) == [4.0]


def test_a_decoupled_model_answers_as_often_as_it_likes(start_model: Any) -> None:
    worker = start_model(REPEAT, {})[0]
    (job,) = worker.predict(text("a b"))
    worker.answer(job)
    found = [ModelStreamInferResponse.FromString(bytes(piece.data)) for piece in worker.pending[job] if piece.data]
    assert [one.infer_response.raw_output_contents[0][4:] for one in found] == [b"a", b"b"]


MANY = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    async def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(150):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([number], "f4"))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_responses_that_a_decoupled_model_sends_together_share_frames(
    start_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, and each as it would be alone."""
    config = TENSORS | {"model_transaction_policy": {"decoupled": True}}
    worker = start_model(MANY, config, credit_bytes=1 << 30)[0]
    frames: list[Any] = []
    take = worker._take

    def noted(message: Any) -> Any:
        frames.append(message)
        return take(message)

    monkeypatch.setattr(worker, "_take", noted)
    (job,) = worker.predict(numbers(1, options=";stream;triton"))
    worker.answer(job)
    found = [ModelStreamInferResponse.FromString(bytes(piece.data)) for piece in worker.pending[job] if piece.data]
    raw = b"".join(one.infer_response.raw_output_contents[0] for one in found)
    assert np.frombuffer(raw, "<f4").tolist() == list(range(150))
    assert not any(one.infer_response.parameters["triton_final_response"].bool_param for one in found)
    assert sum(isinstance(one, Pieces) for one in frames) in range(1, 15)
    assert sum(len(one.data) for one in frames if isinstance(one, Pieces)) >= 140


def test_a_slow_reader_gets_everything_that_a_decoupled_model_sent(start_model: Any) -> None:
    worker = start_model(MANY, TENSORS | {"model_transaction_policy": {"decoupled": True}}, credit_bytes=500)[0]
    (job,) = worker.predict(numbers(1, options=";stream;triton"))
    for count in range(1, 151):
        worker.pieces(job, count)
        worker.send(Credit(job, 200))
    worker.answer(job)
    found = [ModelStreamInferResponse.FromString(bytes(piece.data)) for piece in worker.pending[job] if piece.data]
    assert len(found) == 150


def test_decoupled_requests_run_beside_each_other(start_model: Any) -> None:
    """One that goes on for ever leaves the others alone, and ends when its client leaves."""
    worker = start_model(REPEAT, {}, credit_bytes=1 << 30)[0]
    (endless,) = worker.predict(text("endless"))
    worker.pieces(endless, 3)
    (short,) = worker.predict(text("x"))
    assert isinstance(worker.answer(short), bytes)
    worker.send(Cancel(endless))
    assert isinstance(worker.answer(endless), Failed)


def test_an_error_of_a_decoupled_model(start_model: Any) -> None:
    failed = start_model(REPEAT, {})[0].ask(text("bad"))
    assert isinstance(failed, Failed) and (failed.code, failed.message) == (500, "bad text")


def test_a_decoupled_model_may_go_on_after_an_error(start_model: Any) -> None:
    """A stream of Triton's has room for it; a call with one answer has not."""
    worker = start_model(REPEAT, {})[0]
    (job,) = worker.predict(text("a ! b"))
    worker.answer(job)
    found = [ModelStreamInferResponse.FromString(bytes(piece.data)) for piece in worker.pending[job] if piece.data]
    assert [one.error_message for one in found] == ["", "no word", ""]
    assert [one.infer_response.model_name for one in found] == ["m"] * 3
    assert not any(one.infer_response.parameters["triton_final_response"].bool_param for one in found)
    (single,) = text("a ! b")
    failed = worker.ask([Input("", "\0grpc", single.data)])
    assert isinstance(failed, Failed) and failed.message == "no word"


SEQUENCE = {
    "sequence_batching": {
        "control_input": [{"name": "ID", "control": [{"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_UINT64"}]}]
    }
}


def test_a_sequences_id_that_the_model_cannot_take_fails_its_request_alone(start_model: Any) -> None:
    worker = start_model(ADD, TENSORS | SEQUENCE)[0]

    def named(sequence_id: int) -> list[Input]:
        message = ModelInferRequest.FromString(bytes(numbers(1)[0].data))
        message.parameters["sequence_id"].int64_param = sequence_id
        return [Input("", "\0grpc", message.SerializeToString())]

    fine, refused = worker.ask(named(1), named(-1))
    assert values(fine) == [2.0]
    assert isinstance(refused, Failed) and refused.code == 400 and "-1 is no UINT64" in refused.message


def test_what_a_model_completes_is_its_signature(start_model: Any) -> None:
    _, ready = start_model(REPEAT, {})
    assert ready.info["signature"] == {
        "platform": "python",
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "optional": False}],
        "outputs": [{"name": "out", "datatype": "BYTES", "shape": [1], "optional": False}],
        "decoupled": True,
    }


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "no class TritonPythonModel"),
        ("class TritonPythonModel: pass", "no method execute"),
        (
            "class TritonPythonModel:\n    def execute(self, r): pass\n    def initialize(self, a): 1 / 0",
            "ZeroDivisionError",
        ),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(start_model: Any, source: str, words: str) -> None:
    _, failed = start_model(source, TENSORS)
    assert isinstance(failed, LoadFailed) and words in failed.info["message"]


COMPLETES = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        CALLS
        return config

    def execute(self, requests):
        pass
"""


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("config.set_max_batch_size(2)", "configuration specified max_batch_size 3, but the model's is 2"),
        ("config.set_model_transaction_policy({'decoupled': True})", "decoupled is False in the configuration"),
        ("config.set_model_transaction_policy({'x': True})", "not 'x'"),
        ("config.add_input({'name': 'x', 'data_type': 'TYPE_FP64', 'dims': [-1]})", "input 'x' is"),
        ("config.add_input({'name': 'z', 'data_type': 'TYPE_FP63', 'dims': [-1]})", "can't be used"),
        ("config.add_output({'name': 'z', 'data_type': 'TYPE_FP32', 'dims': [1], 'a': 1})", "unknown property 'a'"),
        ("config.add_output({'name': 'z', 'data_type': 'TYPE_FP32'})", "'dims' is missing"),
        ("pass", "output 'half' has no dims, also after auto_complete_config"),
    ],
)
def test_a_model_completes_only_what_its_configuration_leaves_open(start_model: Any, call: str, words: str) -> None:
    config = {
        "max_batch_size": 3,
        "input": TENSORS["input"],
        "output": [{"name": "half", "data_type": "TYPE_FP32", "dims": []}],
        "model_transaction_policy": {"decoupled": False},
    }
    _, failed = start_model(COMPLETES.replace("CALLS", call), config)
    assert isinstance(failed, LoadFailed) and words in failed.info["message"]


def test_what_a_model_completes_is_said_when_it_is_ready(start_model: Any) -> None:
    call = "config.set_max_batch_size(8); config.set_dynamic_batching()"
    _, ready = start_model(COMPLETES.replace("CALLS", call), TENSORS)
    assert ready.info["completed"] == {**TENSORS, "max_batch_size": 8, "dynamic_batching": {}}
