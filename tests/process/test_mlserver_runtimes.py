"""MLServer's runtimes in a real worker: unchanged, one request or a stream of them for one call, their errors.

Promises 004-01, 004-02, 004-03, 004-04, 004-05, 004-06.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ts.protocol.frames import FEED_BYTES, Cancel, Credit, Failed, Feed, Input, LoadFailed, Ready
from ts.protocol.open_inference_pb2 import ModelInferRequest, ModelInferResponse

RUNTIMES = Path(__file__).parent.parent / "handlers" / "mlserver"


@pytest.fixture(params=["own", pytest.param("real", marks=pytest.mark.external)])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, client_python: Any, root: Path) -> str:
    """Whose package `mlserver` the worker imports: the one that comes with the server, or the real one."""
    if request.param == "real":
        monkeypatch.setattr(sys, "executable", str(client_python("mlserver")))
        monkeypatch.setenv("PYTHONPATH", str(root / "worker"))
    return str(request.param)


@pytest.fixture
def start_runtime(start_worker: Any, package: str) -> Callable[..., Any]:
    def start(name: str, folder: Path = RUNTIMES, **settings: Any) -> Any:
        """A worker, and its answer to Load."""
        worker = start_worker(load=False)
        adapted = {"model_settings": str(folder / name / "model-settings.json")}
        more = {"model_name": name, "model_dir": str(folder / name), "adapter": "mlserver_runtime"} | settings
        return worker, worker.load("", adapter_settings=adapted, **more)

    return start


def numbers(*values: int, options: str = "", request_id: str = "") -> Input:
    tensor = ModelInferRequest.InferInputTensor(name="x", datatype="INT32", shape=[len(values)])
    tensor.contents.int_contents.extend(values)
    message = ModelInferRequest(model_name="sum", id=request_id, inputs=[tensor])
    return Input("", f"\0grpc{options}", message.SerializeToString())


def text(value: str, options: str = "", request_id: str = "") -> Input:
    tensor = ModelInferRequest.InferInputTensor(name="prompt", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(value.encode())
    message = ModelInferRequest(model_name="text-model", id=request_id, inputs=[tensor])
    return Input("", f"\0grpc{options}", message.SerializeToString())


def total(answer: Any) -> int:
    assert isinstance(answer, bytes), answer
    (output,) = ModelInferResponse.FromString(answer).outputs
    return output.contents.int64_contents[0]


def words(pieces: list[bytes]) -> list[str]:
    return [ModelInferResponse.FromString(one).outputs[0].contents.bytes_contents[0].decode() for one in pieces if one]


def credit(worker: Any) -> Credit:
    """The next permission to send inputs."""
    while not worker.other:
        assert worker.receive()
    found = worker.other.pop(0)
    assert isinstance(found, Credit)
    return found


def room_for_all(worker: Any) -> None:
    """Returns when the handler waits for more, with all the room there is."""
    given = 0
    while given < FEED_BYTES:
        given += credit(worker).size_bytes
    assert given == FEED_BYTES


def test_one_request_one_answer(start_runtime: Any) -> None:
    worker, ready = start_runtime("sum")
    assert isinstance(ready, Ready), ready
    assert ready.info["takes_streams"] is True
    assert ready.info["signature"]["inputs"] == [
        {"name": "x", "datatype": "INT32", "shape": [-1], "parameters": {"content_type": "np"}}
    ]
    answer = worker.ask([numbers(1, 2, 3, request_id="7")])
    assert total(answer) == 106
    message = ModelInferResponse.FromString(answer)
    assert (message.model_name, message.model_version, message.id) == ("sum", "v1", "7")
    assert list(message.outputs[0].shape) == [1, 1], "arrays of shape [N] are sent as [N, 1]"


def test_answers_come_before_the_next_request(start_runtime: Any) -> None:
    worker, _ = start_runtime("text")
    (job,) = worker.predict([text("one two", ";stream;more")])
    assert words(worker.pieces(job, 2)) == ["one", "two"]
    room_for_all(worker)
    feed = Feed(job, [text("three", ";stream")], last=False)
    worker.send(feed)
    assert words(worker.pieces(job, 3)) == ["one", "two", "three"]
    assert credit(worker).size_bytes == 64 + len(feed.inputs[0].data), "it takes as much as it has read"
    worker.send(Feed(job, [text("stop", ";stream")], last=False))
    assert words([bytes(worker.answer(job))]) == ["one"]
    worker.send(Feed(job, [text("late", ";stream")], last=True))
    assert words([worker.ask([text("next", ";stream")])]) == ["next"], "what comes after the end is dropped"


def test_a_handler_that_is_busy_asks_for_no_more(start_runtime: Any) -> None:
    worker, _ = start_runtime("text")
    (job,) = worker.predict([text("endless", ";stream;more")])
    worker.pieces(job, 3)
    assert credit(worker).size_bytes == FEED_BYTES - 64 and not worker.other
    worker.send(Cancel(job))
    assert isinstance(worker.answer(job), Failed)


def test_a_cancel_reaches_a_handler_that_waits_for_requests(start_runtime: Any) -> None:
    worker, _ = start_runtime("text")
    (job,) = worker.predict([text("one", ";stream;more")])
    worker.pieces(job, 1)
    room_for_all(worker)  # it waits
    worker.send(Cancel(job))
    answer = worker.answer(job)
    assert isinstance(answer, Failed) and answer.code == 499
    assert worker.stop() == 0
    assert "cancelled" in worker.out_file.read_text()


def test_a_request_that_cannot_be_read_ends_the_stream(start_runtime: Any) -> None:
    worker, _ = start_runtime("text")
    (job,) = worker.predict([text("one", ";stream;more")])
    credit(worker)
    worker.send(Feed(job, [Input("", "\0grpc;stream", b"\xff\xff")], last=False))
    answer = worker.answer(job)
    assert isinstance(answer, Failed) and answer.code == 400 and "ModelInferRequest" in answer.message
    assert words([worker.ask([text("next", ";stream")])]) == ["next"]


def test_statuses_of_errors(start_runtime: Any) -> None:
    worker, _ = start_runtime("sum")
    refused = worker.ask([numbers(1, request_id="teapot")])
    assert isinstance(refused, Failed) and (refused.code, refused.message) == (418, "no coffee")
    wrong = worker.ask([text("a", request_id="1")])
    assert isinstance(wrong, Failed) and wrong.code == 500
    assert total(worker.ask([numbers(1)])) == 101


def test_json_brings_texts_and_headers(start_runtime: Any) -> None:
    worker, _ = start_runtime("text")
    tensor = {"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["hi"]}
    body = [Input("", "\0json", json.dumps({"id": "a", "inputs": [tensor]}).encode())]
    predict = worker.batch(body, headers=[("user", "ann")])
    worker.send(predict)
    answer = worker.answer(predict.items[0].job_id)
    assert isinstance(answer, bytes), answer
    found = json.loads(answer)
    assert found["id"] == "a" and found["model_version"] == "1.0"
    assert found["outputs"] == [
        {
            "name": "output",
            "datatype": "BYTES",
            "shape": [1],
            "data": ["HI"],
            "parameters": {"content_type": "str", "user": "ann"},
        }
    ]


def write(folder: Path, source: str, **settings: Any) -> Path:
    (folder / "m").mkdir()
    (folder / "m" / "own.py").write_text(f"from mlserver import MLModel, types\n{source}")
    (folder / "m" / "model-settings.json").write_text(json.dumps({"implementation": "own.Own"} | settings))
    return folder


def test_batches_are_joined_and_one_bad_request_fails_alone(start_runtime: Any, tmp_path: Path) -> None:
    source = """
from mlserver.codecs import decode_args, NumpyCodec
import numpy as np

class Own(MLModel):
    @decode_args
    async def predict(self, x: np.ndarray) -> np.ndarray:
        if (x < 0).any():
            raise ValueError("negative")
        return x * len(x)
"""
    worker, _ = start_runtime("m", write(tmp_path, source), batch_size=3)
    found = worker.ask([numbers(1)], [numbers(2)], [numbers(3)])
    outputs = [ModelInferResponse.FromString(one).outputs[0] for one in found]
    assert [list(one.contents.int_contents) for one in outputs] == [[3], [6], [9]]
    assert [one.name for one in outputs] == ["output-0"] * 3
    good, bad, again = worker.ask([numbers(1)], [numbers(-1)], [numbers(3)])
    assert isinstance(bad, Failed)
    assert list(ModelInferResponse.FromString(good).outputs[0].contents.int_contents) == [1]
    assert list(ModelInferResponse.FromString(again).outputs[0].contents.int_contents) == [3]


def with_parameters(row: int, **parameters: str) -> Input:
    tensor = ModelInferRequest.InferInputTensor(name="x", datatype="INT32", shape=[1])
    tensor.contents.int_contents.append(row)
    for name, value in parameters.items():
        tensor.parameters[name].string_param = value
    return Input("", "\0grpc", ModelInferRequest(model_name="m", inputs=[tensor]).SerializeToString())


def test_parameters_of_a_batch_are_joined_and_come_apart(start_runtime: Any, tmp_path: Path) -> None:
    """As MLServer joins them: different values become a list, which the runtime may answer; equal ones stay single."""
    source = """
class Own(MLModel):
    async def predict(self, payload):
        given = payload.inputs[0].parameters
        parameters = types.Parameters(who=given.who, all=",".join(given.who), content_type=given.content_type)
        (found,) = payload.inputs
        output = types.ResponseOutput(
            name="y", shape=found.shape, datatype="INT32", data=found.data, parameters=parameters
        )
        return types.InferenceResponse(model_name=self.name, outputs=[output])
"""
    worker, _ = start_runtime("m", write(tmp_path, source), batch_size=2)
    found = worker.ask(
        [with_parameters(1, who="ann", content_type="np")], [with_parameters(2, who="bob", content_type="np")]
    )
    outputs = [ModelInferResponse.FromString(one).outputs[0] for one in found]
    assert [list(one.contents.int_contents) for one in outputs] == [[1], [2]]
    assert [one.parameters["who"].string_param for one in outputs] == ["ann", "bob"]
    assert [one.parameters["all"].string_param for one in outputs] == ["ann,bob"] * 2
    assert [one.parameters["content_type"].string_param for one in outputs] == ["np"] * 2


def asked(worker: Any, line: str, body: Any = None) -> Any:
    """The answer of one of the runtime's own paths, as JSON."""
    method, _, target = line.partition(" ")
    path, _, query = target.partition("?")
    headers = [("content-type", "application/json"), (":method", method), (":path", path), (":query", query)]
    data = b"" if body is None else json.dumps(body).encode()
    predict = worker.batch([Input("", "\0route", data)], headers=headers)
    worker.send(predict)
    (item,) = predict.items
    last = worker.answer(item.job_id)
    assert isinstance(last, bytes), last
    return json.loads(b"".join(bytes(one.data) for one in worker.pending.get(item.job_id, ())) or last)


def test_paths_of_its_own(start_runtime: Any) -> None:
    worker, ready = start_runtime("routes")
    assert {"method": "GET", "path": "/greet/{name}"} in ready.info["routes"]
    assert asked(worker, "GET /greet/you?times=2&loud=true") == {"text": "HELLO YOU HELLO YOU"}
    assert asked(worker, "GET /greet/you?times=x")["detail"][0]["loc"] == ["query", "times"]
    tensor = {"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}
    assert asked(worker, "POST /count", {"inputs": [tensor, tensor]})["outputs"][0]["data"] == [2]
    assert asked(worker, "POST /count", {"inputs": []}) == {"error": "no inputs to count"}
    assert asked(worker, "POST /count")["detail"][0]["type"] == "missing"
    assert asked(worker, "POST /v2/models/routes/explain", {"b": 1, "a": 2}) == ["a", "b"]
    assert asked(worker, "POST /invocations") == "mine"


@pytest.mark.external
@pytest.mark.parametrize("whose", ["own", "real"])
def test_tables(
    start_worker: Any, tmp_path: Path, whose: str, monkeypatch: pytest.MonkeyPatch, client_python: Any, root: Path
) -> None:
    """With pandas, by either package's codec."""
    path = [root / "worker", *([root / "worker" / "ts" / "compat" / "shims"] if whose == "own" else [])]
    monkeypatch.setattr(sys, "executable", str(client_python("mlserver")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, path)))
    source = """
import pandas as pd
from mlserver.codecs import PandasCodec

class Own(MLModel):
    async def predict(self, payload):
        table = self.decode_request(payload, default_codec=PandasCodec)
        assert isinstance(table, pd.DataFrame), table
        table["sum"] = table["a"] + table["b"]
        assert list(table.pop("name")) == ["x", "y"], table
        return self.encode_response(table, default_codec=PandasCodec)
"""
    folder = write(tmp_path, source)
    adapted = {"model_settings": str(folder / "m" / "model-settings.json")}
    worker = start_worker(load=False)
    ready = worker.load(
        "", adapter_settings=adapted, model_name="m", model_dir=str(folder / "m"), adapter="mlserver_runtime"
    )
    assert isinstance(ready, Ready), ready
    columns = [("a", "INT64", [1, 2]), ("b", "FP64", [0.5, 1.5]), ("name", "BYTES", ["x", "y"])]
    inputs = [{"name": name, "datatype": kind, "shape": [2, 1], "data": data} for name, kind, data in columns]
    inputs[2]["parameters"] = {"content_type": "str"}
    body = {"inputs": inputs, "parameters": {"content_type": "pd"}}
    for given in (body, {"inputs": inputs}):
        found = json.loads(worker.ask([Input("", "\0json", json.dumps(given).encode())]))
        assert {one["name"]: one["data"] for one in found["outputs"]} == {
            "a": [1, 2],
            "b": [0.5, 1.5],
            "sum": [1.5, 3.5],
        }
        assert found["parameters"]["content_type"] == "pd"


def test_a_batch_of_streams_and_single_requests(start_runtime: Any) -> None:
    worker, _ = start_runtime("text", batch_size=2)
    first, second = worker.predict([text("a b", ";stream")], [text("c")])
    assert words([bytes(worker.answer(second))]) == ["C"]
    worker.answer(first)
    assert words([bytes(one.data) for one in worker.pending[first]]) == ["a", "b"]


@pytest.mark.parametrize(
    ("source", "settings", "reason"),
    [
        ("class Own(MLModel):\n    async def load(self): return False", {}, "load() returned False"),
        ("class Other(MLModel): pass", {}, "Own"),
        ("Own = 3", {}, "not a class like MLModel"),
        ("class Own(MLModel): pass", {"inputs": [{"name": "x", "shape": [1]}]}, "datatype"),
    ],
)
def test_what_cannot_be_loaded_says_why(
    start_runtime: Any, tmp_path: Path, source: str, settings: dict[str, Any], reason: str
) -> None:
    answer = start_runtime("m", write(tmp_path, source, **settings))[1]
    assert isinstance(answer, LoadFailed)
    assert reason in answer.info["message"], answer.info


def test_unloading_and_what_is_not_implemented(start_runtime: Any, tmp_path: Path) -> None:
    source = """
class Own(MLModel):
    async def unload(self):
        print("unloaded", flush=True)
        return True
"""
    worker, ready = start_runtime("m", write(tmp_path, source))
    assert "takes_streams" not in ready.info
    refused = worker.ask([numbers(1)])
    assert isinstance(refused, Failed) and refused.code == 501
    assert worker.stop() == 0
    assert "unloaded" in worker.out_file.read_text()
