"""TorchScript and ONNX models of a Triton repository in a real worker; warm-up, and checks of models' outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from ts.protocol.frames import Failed, Input, LoadFailed
from ts.protocol.open_inference_pb2 import ModelInferRequest, ModelInferResponse

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def tensor(name: str, *dims: int, kind: str = "FP32", **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{kind}", "dims": list(dims), **more}


def request(**inputs: np.ndarray[Any, Any]) -> list[Input]:
    message = ModelInferRequest(model_name="m")
    for name, array in inputs.items():
        kind = {"float32": "FP32", "int64": "INT64"}[str(array.dtype)]
        message.inputs.add(name=name, datatype=kind, shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    return [Input("", "\0grpc", message.SerializeToString())]


def found(answer: Any, index: int = 0) -> np.ndarray[Any, Any]:
    assert isinstance(answer, bytes), answer
    response = ModelInferResponse.FromString(answer)
    dtype = {"FP32": "<f4", "INT64": "<i8"}[response.outputs[index].datatype]
    data = np.frombuffer(response.raw_output_contents[index], dtype)
    return data.reshape(tuple(response.outputs[index].shape))


def floats(*values: float) -> np.ndarray[Any, Any]:
    return np.array([values], np.float32)


@pytest.fixture
def start_model(shared_forkservers: Any, tmp_path: Path) -> Any:
    def start(backend: str, file: str, write: Any, config: dict[str, Any], **settings: Any) -> Any:
        """A worker, forked from a process with torch, and its answer to Load. `write(path)` makes the model's
        file."""
        version = tmp_path / "repository" / "m" / "1"
        version.mkdir(parents=True)
        write(version / file)
        adapted = {"config": config, "model_file": str(version / file), "backend": backend}
        worker, _ = shared_forkservers(True).fork()
        return worker, worker.load("", adapter="triton", adapter_settings=adapted, model_dir=str(version), **settings)

    return start


class Affine(torch.nn.Module):
    """y is a - b, and n says how many rows the run had."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a - b, torch.full((a.shape[0], 1), a.shape[0])


class Summed(torch.nn.Module):
    def forward(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": given["a"] + given["b"]}


def script(module: torch.nn.Module) -> Any:
    return lambda path: torch.jit.script(module).save(str(path))


OUTPUTS = [tensor("y", -1), tensor("n", 1, kind="INT64")]


@pytest.mark.parametrize("names", [("b", "a"), ("in__1", "in__0"), ("second", "first")])
def test_torchscript_inputs_are_found_by_argument_by_index_or_in_order(
    start_model: Any, names: tuple[str, str]
) -> None:
    config = {"max_batch_size": 8, "input": [tensor(name, -1) for name in names], "output": OUTPUTS}
    worker, _ = start_model("pytorch", "model.pt", script(Affine()), config)
    answer = worker.ask(request(**{names[0]: floats(1, 2), names[1]: floats(10, 20)}))
    in_order = names == ("second", "first")
    assert found(answer).tolist() == [[-9, -18] if in_order else [9, 18]]


def test_requests_of_a_batch_share_a_run_as_far_as_their_shapes_agree(start_model: Any) -> None:
    config = {"max_batch_size": 3, "input": [tensor("a", -1), tensor("b", -1)], "output": OUTPUTS}
    worker, _ = start_model("pytorch", "model.pt", script(Affine()), config)
    one, two, wide = floats(1, 2), np.ones((2, 2), np.float32), floats(1, 2, 3)
    answers = worker.ask(*(request(a=x, b=x * 0) for x in (one, two, wide, one)))
    assert [found(answer).shape for answer in answers] == [(1, 2), (2, 2), (1, 3), (1, 2)]
    assert [int(found(answer, 1).ravel()[0]) for answer in answers] == [3, 3, 1, 1]
    assert found(answers[1]).tolist() == [[1, 1], [1, 1]]
    refused = worker.ask(request(a=np.ones((4, 2), np.float32), b=np.ones((4, 2), np.float32)))
    assert isinstance(refused, Failed) and "is a batch of 4; max_batch_size is 3" in refused.message


def test_a_torchscript_model_may_take_and_give_a_dict(start_model: Any) -> None:
    config = {"max_batch_size": 0, "input": [tensor("a", 1, -1), tensor("b", 1, -1)], "output": [tensor("sum", 1, -1)]}
    worker, _ = start_model("pytorch", "model.pt", script(Summed()), config)
    assert found(worker.ask(request(a=floats(1), b=floats(2)))).tolist() == [[3]]
    assert found(worker.ask(request(a=floats(1), b=floats(2, 3, 4)))).tolist() == [[3, 4, 5]]


class Shouting(torch.nn.Module):
    def forward(self, words: list[str], times: torch.Tensor) -> list[str]:
        return [word.upper() for word in words]


class Measured(torch.nn.Module):
    """The texts, and their bytes."""

    def forward(self, words: list[str]) -> tuple[list[str], torch.Tensor]:
        return words, torch.tensor([len(word) for word in words])


def words_of(answer: Any) -> list[bytes]:
    assert isinstance(answer, bytes), answer
    response = ModelInferResponse.FromString(answer)
    data, found = response.raw_output_contents[0], []
    while data:
        size = int.from_bytes(data[:4], "little")
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    assert response.outputs[0].datatype == "BYTES"
    return found


def words(shape: list[int], *given: str) -> list[Input]:
    message = ModelInferRequest(model_name="m")
    message.inputs.add(name="words", datatype="BYTES", shape=shape)
    message.raw_input_contents.append(b"".join(len(one).to_bytes(4, "little") + one for one in map(str.encode, given)))
    return [Input("", "\0grpc", message.SerializeToString())]


def test_torchscript_takes_and_gives_texts_as_lists(start_model: Any) -> None:
    config = {
        "input": [tensor("words", -1, kind="STRING")],
        "output": [tensor("same", -1, kind="STRING"), tensor("sizes", -1, kind="INT64")],
    }
    worker, _ = start_model("pytorch", "model.pt", script(Measured()), config)
    answer = worker.ask(words([2], "a", "größe"))
    assert words_of(answer) == [b"a", "größe".encode()] and found(answer, 1).tolist() == [1, 7]


def test_a_batch_of_texts_is_one_list(start_model: Any) -> None:
    def one(name: str) -> dict[str, Any]:
        return tensor(name, 1, kind="STRING", reshape={"shape": []})

    config = {"max_batch_size": 8, "input": [one("words"), tensor("times", 1)], "output": [one("loud")]}
    worker, _ = start_model("pytorch", "model.pt", script(Shouting()), config)
    message = ModelInferRequest.FromString(bytes(words([2, 1], "a", "b")[0].data))
    message.inputs.add(name="times", datatype="FP32", shape=[2, 1])
    message.raw_input_contents.append(bytes(8))
    asked = [Input("", "\0grpc", message.SerializeToString())]
    for answer in worker.ask(asked, asked):
        assert words_of(answer) == [b"A", b"B"]
        assert list(ModelInferResponse.FromString(answer).outputs[0].shape) == [2, 1]


@pytest.mark.parametrize(
    ("module", "dims", "most", "says"),
    [
        (Affine(), [-1], 0, "takes as List[str]; the argument 'a' of forward is of type Tensor"),
        (Measured(), [-1, 2], 0, "has 2 dimensions"),
        (Measured(), [1], 4, "write reshape { shape: [ ] }"),
    ],
)
def test_texts_that_torchscript_cannot_take_are_refused_when_it_is_loaded(
    start_model: Any, module: torch.nn.Module, dims: list[int], most: int, says: str
) -> None:
    names = ["a", "b"] if isinstance(module, Affine) else ["words"]
    inputs = [tensor(name, *dims, kind="STRING") for name in names]
    config = {"max_batch_size": most, "input": inputs, "output": [tensor("y", -1)]}
    _, refused = start_model("pytorch", "model.pt", script(module), config)
    assert isinstance(refused, LoadFailed) and says in refused.info["message"]


def test_a_torchscript_model_that_fails_or_is_not_described(start_model: Any) -> None:
    config = {"input": [tensor("a", 1, -1), tensor("b", 1, -1)], "output": OUTPUTS}
    worker, _ = start_model("pytorch", "model.pt", script(Affine()), config)
    failed = worker.ask(request(a=floats(1, 2), b=floats(1, 2, 3)))
    assert isinstance(failed, Failed) and failed.code == 500 and "must match" in failed.message
    mistaken = worker.ask(request(a=floats(1), b=floats(1)))
    assert isinstance(mistaken, Failed) and "output 'y' has shape [1, 1], not [-1]" in mistaken.message


def test_torchscript_needs_to_be_told_what_goes_in(start_model: Any) -> None:
    _, refused = start_model("pytorch", "model.pt", script(Affine()), {"output": OUTPUTS})
    assert isinstance(refused, LoadFailed)
    assert "backend pytorch needs each input in config.pbtxt" in refused.info["message"]


def graph(path: Path) -> None:
    """y is the double of x."""
    two = helper.make_tensor("two", TensorProto.FLOAT, [1], [2.0])
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 2]) for name in ("x", "y")]
    made = helper.make_graph([helper.make_node("Mul", ["x", "two"], ["y"])], "g", value[:1], value[1:], [two])
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def test_an_onnx_model_says_itself_what_goes_in(start_model: Any) -> None:
    worker, ready = start_model("onnxruntime", "model.onnx", graph, {"max_batch_size": 4})
    assert ready.info["signature"]["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2], "optional": False}]
    first, second = worker.ask(request(x=floats(1, 2)), request(x=floats(3, 4)))
    assert found(first).tolist() == [[2, 4]] and found(second).tolist() == [[6, 8]]
    refused = worker.ask(request(x=floats(1, 2, 3)))
    assert isinstance(refused, Failed) and "has shape [1, 3]; the model takes [-1, 2]" in refused.message


def test_an_onnx_model_that_hasnt_what_the_configuration_says(start_model: Any) -> None:
    _, refused = start_model("onnxruntime", "model.onnx", graph, {"output": [tensor("z", 2)]})
    assert isinstance(refused, LoadFailed)
    assert "output 'z' is not in the graph, which has: y" in refused.info["message"]


def test_tensors_are_reshaped_into_the_model_and_out_of_it(start_model: Any) -> None:
    config = {
        "max_batch_size": 4,
        "input": [tensor("x", 1, 2, reshape={"shape": [2]})],
        "output": [tensor("y", 2, 1, reshape={"shape": [2]})],
    }
    worker, _ = start_model("onnxruntime", "model.onnx", graph, config)
    assert found(worker.ask(request(x=np.ones((3, 1, 2), np.float32)))).tolist() == [[[2], [2]]] * 3


#: Says how often it was called.
COUNTS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.seen = []

    def {execute}(self, requests):
        responses = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            self.seen.append(float(x.sum()))
            if x.shape[-1] == 3:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("three")))
            else:
                seen = np.array([self.seen], dtype=np.float32)
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", seen)]))
        return responses
"""


def samples(*dims: int, **more: Any) -> dict[str, Any]:
    inputs = {"x": {"data_type": "TYPE_FP32", "dims": list(dims), **more}}
    return {
        "max_batch_size": 4,
        "input": [tensor("x", -1)],
        "output": [tensor("y", -1)],
        "model_warmup": [{"name": "first", "batch_size": 2, "inputs": inputs, "count": 3}],
    }


@pytest.mark.parametrize("execute", ["def execute", "async def execute"])
def test_a_model_is_warm_before_it_is_ready(start_model: Any, execute: str, tmp_path: Path) -> None:
    source = COUNTS.replace("def {execute}", execute)
    warm = tmp_path / "repository" / "m" / "warmup"

    def write(path: Path) -> None:
        path.write_text(source)
        warm.mkdir()
        (warm / "ones").write_bytes(np.ones(4, np.float32).tobytes())

    worker, _ = start_model("python", "model.py", write, samples(2, input_data_file="ones"))
    assert found(worker.ask(request(x=floats(5)))).tolist() == [[4, 4, 4, 5]]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (samples(3, zero_data=True), "model_warmup 'first' failed: three"),
        (samples(2, input_data_file="../../secret"), "leads out of the directory warmup"),
        (samples(1 << 40, zero_data=True), "takes over"),
        (samples(2, input_data_file="none"), "model_warmup 'first': "),
    ],
)
def test_a_model_that_cannot_be_warmed_is_not_ready(start_model: Any, config: dict[str, Any], says: str) -> None:
    source = COUNTS.replace("def {execute}", "def execute")
    _, refused = start_model("python", "model.py", lambda path: path.write_text(source), config)
    assert isinstance(refused, LoadFailed) and says in refused.info["message"]


WRONG = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        name, dtype = [("z", "f4"), ("y", "i8"), ("y", "f4")][len(requests) - 1]
        tensor = pb_utils.Tensor(name, np.zeros((1, 2), dtype))
        return [pb_utils.InferenceResponse([tensor]) for _ in requests]
"""


def test_what_a_python_model_gives_beside_its_configuration_is_said_in_its_log(start_model: Any) -> None:
    """As with Triton, whose Python models may give other datatypes than declared, and outputs that nobody sees."""
    config = {"max_batch_size": 4, "input": [tensor("x", -1)], "output": [tensor("y", -1)]}
    worker, _ = start_model("python", "model.py", lambda path: path.write_text(WRONG), config)
    assert ModelInferResponse.FromString(worker.ask(request(x=floats(1)))).outputs == []
    for other in worker.ask(*[request(x=floats(1))] * 2):
        assert [one.datatype for one in ModelInferResponse.FromString(other).outputs] == ["INT64"]
    assert [found(one).tolist() for one in worker.ask(*[request(x=floats(1))] * 3)] == [[[0, 0]]] * 3
    said = worker.err_file.read_text()
    assert "the model gave an output 'z'" in said and said.count("output 'y' is of INT64, not FP32") == 1
