"""Triton's ensembles over real processes: Python models as steps, from a repository as it is."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import psutil
import pytest

from support import GUARD_S, until
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

#: A Python model: `RUN` answers with its outputs by name, given the inputs by name.
MODEL = """
import json
import pathlib
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.marks = pathlib.Path(args["model_repository"]).parent

    def execute(self, requests):
        return [self.response(request) for request in requests]

    def response(self, request):
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            outputs = self.run(request, **given)
        except ValueError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items()])

    def run(self, request, **given):
RUN
"""
PREPROCESS = """
        image, = given["BYTES"] if given["BYTES"].ndim == 1 else given["BYTES"][0]
        return {"PIXELS": np.array([[float(one) for one in image.split()]], np.float32)}
"""
LARGEST = """
        return {"INDEX": given["X"].argmax(axis=1).astype(np.int64).reshape(-1, 1)}
"""
TOTAL = """
        if (given["X"] < 0).any():
            raise ValueError("a pixel is negative")
        return {"SUM": given["X"].sum(axis=1, keepdims=True)}
"""
POSTPROCESS = """
        by = given.get("BY", np.array([[1]], np.float32))[0, 0]
        label = f"{given['INDEX'][0, 0]} of {given['SUM'][0, 0] * by:g}"
        return {"LABEL": np.array([[label]], object)}
"""
#: Leaves files that name it as begun and its input; runs until nobody waits, and leaves a file then. A file `go` lets
#: it answer.
HOLD = """
        (self.marks / "held").touch()
        (self.marks / f"held {given['X'].ravel()[0]:g}").touch()
        while not request.is_cancelled() and not (self.marks / "go").exists():
            threading.Event().wait(0.005)
        if request.is_cancelled():
            (self.marks / "left").touch()
        return {"Y": given["X"]}
"""
PASS = """
        return {"Y": given["X"]}
"""
#: Asks an ensemble for its answer.
CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.response(request) for request in requests]

    def response(self, request):
        asked = pb_utils.InferenceRequest(
            model_name="chain",
            inputs=[pb_utils.Tensor("X", pb_utils.get_input_tensor_by_name(request, "X").as_numpy())],
            requested_output_names=["OUT"],
        )
        answer = asked.exec()
        if answer.has_error():
            return pb_utils.InferenceResponse(error=answer.error())
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", answer.output_tensors()[0].as_numpy() + 1)])
"""
REPEAT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "X").as_numpy().ravel()[0])
            for number in range(count):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([[number]], np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def model_of(run: str) -> str:
    return MODEL.replace("RUN\n", run).replace("import json\n", "import json\nimport threading\n")


def tensor(name: str, kind: str = "FP32", dims: str = "-1", more: str = "") -> str:
    return f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] {more} }}'


def config_of(inputs: list[str], outputs: list[str], batch: int = 4, more: str = "") -> str:
    return f"""
        max_batch_size: {batch}
        input [ {", ".join(inputs)} ]
        output [ {", ".join(outputs)} ]
        {more}
    """


def step(model: str, inputs: dict[str, str], outputs: dict[str, str], version: int = -1) -> str:
    maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
    maps += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()]
    return f'step {{ model_name: "{model}" model_version: {version} {" ".join(maps)} }}'


def ensemble_of(inputs: list[str], outputs: list[str], steps: list[str], batch: int = 4, more: str = "") -> str:
    return 'platform: "ensemble"' + config_of(
        inputs, outputs, batch, f"ensemble_scheduling {{ {' '.join(steps)} }} {more}"
    )


def x_to_out(
    *steps: str, x: str = "FP32", out: tuple[str, str] = ("FP32", "-1"), more: tuple[str, ...] = (), batch: int = 4
) -> str:
    """An ensemble with the input X and the output OUT, of these datatypes, OUT also of this shape."""
    return ensemble_of([tensor("X", x)], [tensor("OUT", *out), *more], [*steps], batch)


PYTHON = 'backend: "python" '
X_TO_Y = PYTHON + config_of([tensor("X")], [tensor("Y")])
CLASSIFY = [
    step("preprocess", {"BYTES": "IMAGE"}, {"PIXELS": "pixels"}),
    step("largest", {"X": "pixels"}, {"INDEX": "index"}),
    step("total", {"X": "pixels"}, {"SUM": "sum"}),
    step("postprocess", {"INDEX": "index", "SUM": "sum", "BY": "SCALE"}, {"LABEL": "ANSWER"}),
]
IMAGE = [tensor("IMAGE", "STRING", "1"), tensor("SCALE", "FP32", "1", "optional: true")]
LABELLED = [tensor("INDEX", "INT64", "1"), tensor("SUM", "FP32", "1"), tensor("BY", "FP32", "1", "optional: true")]
CACHED = "response_cache { enable: true }"
FIRST = step("pass", {"X": "X"}, {"Y": "a"})
#: The source and the configuration of each; ensembles have no source.
MODELS = {
    "preprocess": (model_of(PREPROCESS), PYTHON + config_of([tensor("BYTES", "STRING", "1")], [tensor("PIXELS")])),
    "largest": (model_of(LARGEST), PYTHON + config_of([tensor("X")], [tensor("INDEX", "INT64", "1")], more=CACHED)),
    "total": (model_of(TOTAL), PYTHON + config_of([tensor("X")], [tensor("SUM", "FP32", "1")])),
    "postprocess": (model_of(POSTPROCESS), PYTHON + config_of(LABELLED, [tensor("LABEL", "STRING", "1")])),
    "hold": (model_of(HOLD), X_TO_Y),
    "pass": (model_of(PASS), X_TO_Y),
    "narrow": (model_of(HOLD), X_TO_Y + "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"),
    "repeat": (REPEAT, X_TO_Y + "model_transaction_policy { decoupled: true }"),
    "remembers": (model_of(PASS), X_TO_Y + "sequence_batching {}"),
    "caller": (CALLER, X_TO_Y),
}
ENSEMBLES = {
    "classify": ensemble_of(IMAGE, [tensor("ANSWER", "STRING", "1"), tensor("sum", "FP32", "1")], CLASSIFY),
    "outer": ensemble_of(
        [tensor("IN", "STRING", "1")],
        [tensor("OUT", "STRING", "1")],
        [step("classify", {"IMAGE": "IN"}, {"ANSWER": "OUT"})],
        more=CACHED,
    ),
    "side": ensemble_of(
        [tensor("X")],
        [tensor("A"), tensor("B")],
        [step("hold", {"X": "X"}, {"Y": "A"}), step("narrow", {"X": "X"}, {"Y": "B"})],
    ),
    "three": x_to_out(FIRST, step("hold", {"X": "a"}, {"Y": "b"}), step("pass", {"X": "b"}, {"Y": "OUT"})),
    "chain": x_to_out(step("pass", {"X": "X"}, {"Y": "a"}, 1), step("pass", {"X": "a"}, {"Y": "OUT"})),
    "middle": x_to_out(
        *(FIRST, step("repeat", {"X": "a"}, {"Y": "b"}), step("pass", {"X": "b"}, {"Y": "OUT"})),
        step("total", {"X": "b"}, {"SUM": "SUM"}),
        more=(tensor("a"), tensor("SUM", "FP32", "1")),
    ),
    "stream": x_to_out(FIRST, step("repeat", {"X": "a"}, {"Y": "OUT"})),
}
MODELS |= {name: ("", config) for name, config in ENSEMBLES.items()}


#: An inference graph around an ensemble.
ROUTED = """
kind: InferenceGraph
metadata: {name: routed}
spec:
  nodes:
    root:
      routerType: Sequence
      steps: [{serviceUrl: "http://classify.default.svc.cluster.local/v2/models/classify/infer"}]
"""


def write(repository: Path, name: str, source: str, config: str) -> None:
    (repository / name / "1").mkdir(parents=True, exist_ok=True)
    (repository / name / "config.pbtxt").write_text(config)
    if source:
        (repository / name / "1" / "model.py").write_text(source)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, serving: Callable[..., Any]) -> Iterator[Any]:
    directory: Path = tmp_path_factory.mktemp("ensembles")
    for name, (source, config) in MODELS.items():
        write(directory / "repository", name, source, config)
    more = ["--ncs", "--model-repository", str(directory / "repository"), "--model-control-mode", "explicit"]
    # Only the ensembles are named: they bring the models of their steps.
    more += [
        word
        for name in ("outer", "side", "three", "chain", "caller", "middle", "stream")
        for word in ("--load-model", name)
    ]
    store = directory / "store"
    store.mkdir()
    (store / "routed.yaml").write_text(ROUTED)
    server = serving(directory, store, {"ts_open_inference_protocol": "oip", "shared_memory_keys": "/tested_.*"}, more)
    try:
        yield server.wait_started()
    finally:
        server.terminate()
        print(server.log[-6000:])


@pytest.fixture(autouse=True)
def unmarked(served: Any) -> None:
    """No model holds a request any more, and none has left a file."""
    for name in ("go", "held", "held 1", "held 2", "left"):
        (served.directory / name).unlink(missing_ok=True)


def text(value: bytes) -> bytes:
    return len(value).to_bytes(4, "little") + value


def request_of(model: str, outputs: tuple[str, ...] = (), **inputs: Any) -> pb.ModelInferRequest:
    """`inputs`: bytes for a text, or numbers."""
    request = pb.ModelInferRequest(model_name=model, id="r1")
    for name, value in inputs.items():
        is_text = isinstance(value, bytes)
        shape = [1, 1 if is_text else len(value)]
        request.inputs.add(name=name, datatype="BYTES" if is_text else "FP32", shape=shape)
        request.raw_input_contents.append(text(value) if is_text else np.array(value, "f4").tobytes())
    for name in outputs:
        request.outputs.add(name=name)
    return request


@pytest.fixture
def stub(served: Any) -> Iterator[GRPCInferenceServiceStub]:
    with grpc.insecure_channel(served.inference) as channel:
        yield GRPCInferenceServiceStub(channel)


def answered(response: pb.ModelInferResponse) -> dict[str, Any]:
    found = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        found[output.name] = raw[4:].decode() if output.datatype == "BYTES" else np.frombuffer(raw, "f4").tolist()
    return found


def statistics(stub: GRPCInferenceServiceStub, model: str) -> Any:
    return stub.ModelStatistics(pb.ModelStatisticsRequest(name=model), timeout=GUARD_S).model_stats[0]


def test_values_come_through_the_documented_graph(stub: GRPCInferenceServiceStub) -> None:
    before = {name: statistics(stub, name).inference_count for name in ("classify", "preprocess", "total")}
    response = stub.ModelInfer(request_of("classify", IMAGE=b"1 5 2", SCALE=[2.0]), timeout=GUARD_S)
    assert answered(response) == {"ANSWER": "1 of 16", "sum": [8.0]}
    assert (response.model_name, response.model_version, response.id) == ("classify", "1", "r1")
    response = stub.ModelInfer(request_of("classify", ("sum",), IMAGE=b"3 4"), timeout=GUARD_S)
    assert answered(response) == {"sum": [7.0]}
    after = statistics(stub, "classify")
    assert after.inference_count == after.inference_stats.success.count == before["classify"] + 2
    assert statistics(stub, "preprocess").inference_count == before["preprocess"] + 2
    parts = after.inference_stats
    assert parts.queue.ns + parts.compute_input.ns + parts.compute_infer.ns <= parts.success.ns


@pytest.mark.parametrize(
    "body",
    [
        {"instances": [[1, 2.5], [3, 4]]},
        {"inputs": [[1, 2, 3]], "parameters": {"a": 1}},
        {"instances": [{"X": [1, 2]}, {"X": [3, 4]}]},
        {"instances": [[1, 2], [3]]},
        {"instances": [1, 2]},
        {"instances": [["text"]]},
        {"instances": [{"other": [1]}]},
        {"instances": []},
        {"instances": 3},
        {"predictions": []},
        [1],
        "no JSON",
    ],
)
def test_v1_is_answered_as_by_a_model(served: Any, body: Any) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    answers = [httpx.post(f"{served.http}/v1/models/{name}:predict", content=content) for name in ("pass", "chain")]
    model, ensemble = answers
    assert ensemble.status_code == model.status_code, [one.text for one in answers]
    assert ensemble.headers["content-type"] == model.headers["content-type"]
    if model.status_code == 200:
        assert ensemble.json() == model.json()


def test_v1_has_rows_of_several_outputs_and_one_answer(served: Any) -> None:
    def ask(name: str, *instances: Any) -> httpx.Response:
        body = {"instances": instances}
        return httpx.post(f"{served.http}/v1/models/{name}:predict", json=body, timeout=GUARD_S)

    found = ask("classify", {"IMAGE": ["1 5 2"], "SCALE": [2.0]}).json()
    assert found == {"predictions": [{"ANSWER": "1 of 16", "sum": [8.0]}]}
    assert ask("classify", ["3 4"]).json()["predictions"][0]["sum"] == [7.0], "its only required input"
    one, two = ask("stream", [1]), ask("stream", [2])
    assert one.json() == {"predictions": [[0.0]]} and two.status_code == ask("repeat", [2]).status_code == 501


def test_an_output_that_isnt_wanted_has_no_step_run_for_it(stub: GRPCInferenceServiceStub) -> None:
    before = statistics(stub, "postprocess").inference_stats.success.count
    stub.ModelInfer(request_of("classify", ("sum",), IMAGE=b"3 4"), timeout=GUARD_S)
    assert statistics(stub, "postprocess").inference_stats.success.count == before


def test_an_ensemble_of_an_ensemble(stub: GRPCInferenceServiceStub) -> None:
    assert answered(stub.ModelInfer(request_of("outer", IN=b"0 0 9"), timeout=GUARD_S)) == {"OUT": "2 of 9"}


def test_a_kept_answer_runs_no_step(stub: GRPCInferenceServiceStub) -> None:
    before = statistics(stub, "postprocess").inference_count
    for _ in range(3):
        assert answered(stub.ModelInfer(request_of("outer", IN=b"0 7"), timeout=GUARD_S)) == {"OUT": "1 of 7"}
    assert statistics(stub, "postprocess").inference_count == before + 1
    assert statistics(stub, "outer").inference_stats.cache_hit.count >= 2


def test_a_python_model_asks_an_ensemble(stub: GRPCInferenceServiceStub) -> None:
    assert answered(stub.ModelInfer(request_of("caller", X=[3.0]), timeout=GUARD_S)) == {"Y": [4.0]}


@pytest.mark.parametrize("binary", [False, True])
def test_http_with_json_and_binary_tensors(served: Any, binary: bool) -> None:
    body: dict[str, Any] = {"id": "r2", "outputs": [{"name": "ANSWER", "parameters": {"binary_data": binary}}]}
    body["inputs"] = [{"name": "IMAGE", "datatype": "BYTES", "shape": [1, 1], "data": ["2 6"]}]
    data = text(b"2 6")
    if binary:
        del body["inputs"][0]["data"]
        body["inputs"][0]["parameters"] = {"binary_data_size": len(data)}
    head = json.dumps(body).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))} if binary else {}
    url = f"{served.http}/v2/models/classify/infer"
    answer = httpx.post(url, content=head + data if binary else head, headers=headers)
    assert answer.status_code == 200, answer.text
    size = int(answer.headers.get("inference-header-content-length", len(answer.content)))
    found = json.loads(answer.content[:size])
    assert (found["model_name"], found["id"]) == ("classify", "r2")
    (output,) = found["outputs"]
    assert answer.content[size:] == text(b"1 of 8") if binary else output["data"] == ["1 of 8"]


def test_metadata_config_readiness_and_index(served: Any) -> None:
    with httpx.Client(base_url=served.http, timeout=GUARD_S) as client:
        found = client.get("/v2/models/classify").json()
        assert found["platform"] == "ensemble" and found["inputs"][0]["shape"] == [-1, 1]
        config = client.get("/v2/models/classify/config").json()
        assert [one["model_name"] for one in config["ensemble_scheduling"]["step"]][:2] == ["preprocess", "largest"]
        assert client.get("/v2/models/classify/ready").json()["ready"] is True
        client.post("/v2/repository/models/total/unload").raise_for_status()
        assert client.get("/v2/models/classify/ready").status_code == 503
        assert client.get("/v2/models/outer/ready").status_code == 503
        index = {one["name"]: one for one in client.post("/v2/repository/index").json()}
        assert index["classify"]["state"] == "UNAVAILABLE"
        assert index["classify"]["reason"] == "step 3 (total): model 'total' is not served"
        body = {"inputs": [{"name": "IMAGE", "datatype": "BYTES", "shape": [1, 1], "data": ["2 6"]}]}
        refused = client.post("/v2/models/classify/infer", json=body)
        assert refused.status_code == 503 and "in ensemble 'classify', step 3 (total)" in refused.json()["error"]
        client.post("/v2/repository/models/classify/load").raise_for_status()
        assert client.get("/v2/models/classify/ready").json()["ready"] is True
        within = {"inputs": [body["inputs"][0] | {"name": "IN"}]}
        assert client.post("/v2/models/outer/infer", json=within).status_code == 200
    described = served.describe("classify")
    assert (described["minWorkers"], described["workers"]) == (0, [])
    with pytest.raises(grpc.RpcError, match="scale the models of its steps"):
        served.scale("classify", 2)
    steps = described["steps"]
    assert [one["modelName"] for one in steps] == ["preprocess", "largest", "total", "postprocess"]


def test_an_unloaded_ensemble_takes_along_what_no_other_one_needs(served: Any) -> None:
    config = x_to_out(FIRST, step("spare", {"X": "a"}, {"Y": "OUT"}))
    write(served.directory / "repository", "spare", model_of(PASS), X_TO_Y)
    write(served.directory / "repository", "last", "", config)
    with httpx.Client(base_url=served.http, timeout=GUARD_S) as client:
        client.post("/v2/repository/models/last/load").raise_for_status()
        body = {"parameters": {"unload_dependents": True}}
        client.post("/v2/repository/models/last/unload", json=body).raise_for_status()
        ready = {name: client.get(f"/v2/models/{name}/ready").status_code for name in ("last", "spare", "pass")}
    assert ready == {"last": 404, "spare": 404, "pass": 200}


@pytest.mark.parametrize(
    ("model", "inputs", "code", "said"),
    [
        ("classify", {"IMAGE": b"1 -5"}, grpc.StatusCode.INTERNAL, "step 3 (total): a pixel is negative"),
        ("classify", {}, grpc.StatusCode.INVALID_ARGUMENT, "input 'IMAGE' is missing"),
        ("classify", {"IMAGE": [1.0]}, grpc.StatusCode.INVALID_ARGUMENT, "input 'IMAGE' is of FP32"),
        ("classify", {"IMAGE": b"1", "Z": b"1"}, grpc.StatusCode.INVALID_ARGUMENT, "unexpected input 'Z'"),
    ],
)
def test_what_a_failed_request_says(
    stub: GRPCInferenceServiceStub, model: str, inputs: dict[str, Any], code: grpc.StatusCode, said: str
) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        stub.ModelInfer(request_of(model, **inputs), timeout=GUARD_S)
    assert failed.value.code() is code and said in failed.value.details()


def test_a_full_queue_ends_the_request_at_once_and_cancels_its_sibling(
    served: Any, stub: GRPCInferenceServiceStub
) -> None:
    held = [stub.ModelInfer.future(request_of("narrow", X=[1.0]), timeout=GUARD_S)]
    until(lambda: statistics_of_queue(served, "narrow") == 0 and (served.directory / "held").exists())
    held += [stub.ModelInfer.future(request_of("narrow", X=[1.0]), timeout=GUARD_S) for _ in range(40)]
    refused: Any = until(lambda: next((call for call in held if call.done()), None))
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.RpcError) as failed:
        stub.ModelInfer(request_of("side", X=[1.0]), timeout=GUARD_S)
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "step 2 (narrow)" in failed.value.details()
    held.append(stub.ModelInfer.future(request_of("hold", X=[2.0]), timeout=GUARD_S))
    until((served.directory / "held 2").exists)  # the sibling has gone, whether it had begun or not
    (served.directory / "go").touch()
    until(lambda: all(call.done() for call in held))
    until(lambda: nothing_left(served))


def statistics_of_queue(served: Any, model: str) -> int:
    return int(served.describe(model)["jobQueueStatus"]["pendingRequests"])


def nothing_left(served: Any) -> bool:
    return all(statistics_of_queue(served, name) == 0 for name in ("hold", "narrow", "pass", "three", "side"))


def test_a_client_that_leaves_cancels_the_step_that_runs(served: Any, stub: GRPCInferenceServiceStub) -> None:
    call = stub.ModelInfer.future(request_of("three", X=[1.0]), timeout=GUARD_S)
    until((served.directory / "held").exists)
    call.cancel()
    until((served.directory / "left").exists)
    until(lambda: nothing_left(served))


def test_one_deadline_for_all_steps(served: Any, stub: GRPCInferenceServiceStub) -> None:
    request = request_of("three", X=[1.0])
    request.parameters["timeout"].int64_param = 1_000_000
    with pytest.raises(grpc.RpcError) as failed:
        stub.ModelInfer(request, timeout=GUARD_S)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: nothing_left(served))


def test_a_worker_that_dies_fails_the_request_with_its_step(served: Any, stub: GRPCInferenceServiceStub) -> None:
    call = stub.ModelInfer.future(request_of("three", X=[1.0]), timeout=GUARD_S)
    until((served.directory / "held").exists)
    (pid,) = served.worker_pids("hold")
    psutil.Process(pid).kill()
    until(call.done)
    assert call.code() is grpc.StatusCode.UNAVAILABLE and "step 2 (hold)" in call.details()
    (served.directory / "go").touch()
    until(lambda: served.worker_pids("hold"))
    assert answered(stub.ModelInfer(request_of("three", X=[4.0]), timeout=GUARD_S)) == {"OUT": [4.0]}


@pytest.mark.parametrize("final", [False, True])
def test_a_decoupled_last_step_streams(stub: GRPCInferenceServiceStub, final: bool) -> None:
    request = request_of("stream", X=[3.0])
    if final:
        request.parameters["triton_enable_empty_final_response"].bool_param = True
    found = [one.infer_response for one in stub.ModelStreamInfer(iter([request]), timeout=GUARD_S)]
    if final:
        assert found.pop().parameters["triton_final_response"].bool_param is True
    assert [answered(one) for one in found] == [{"OUT": [0.0]}, {"OUT": [1.0]}, {"OUT": [2.0]}]
    assert {one.model_name for one in found} == {"stream"} and {one.id for one in found} == {"r1"}


def test_the_steps_after_a_decoupled_one_run_for_each_of_its_answers(stub: GRPCInferenceServiceStub) -> None:
    request = request_of("middle", X=[3.0])
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    *found, last = [one.infer_response for one in stub.ModelStreamInfer(iter([request]), timeout=GUARD_S)]
    assert [answered(one) for one in found] == [{"OUT": [n], "a": [3.0], "SUM": [n]} for n in (0.0, 1.0, 2.0)]
    assert not last.outputs and last.parameters["triton_final_response"].bool_param is True


def test_an_ensemble_without_such_a_step_answers_a_stream_once(stub: GRPCInferenceServiceStub) -> None:
    (only,) = stub.ModelStreamInfer(iter([request_of("classify", IMAGE=b"4")]), timeout=GUARD_S)
    assert answered(only.infer_response)["ANSWER"] == "0 of 4"
    assert only.infer_response.parameters["triton_final_response"].bool_param is True


@pytest.mark.external
def test_tritons_own_client_library(served: Any, client_python: Any, client_env: dict[str, str]) -> None:
    script = Path(__file__).with_name("triton_ensembles.py")
    command = [str(client_python("mlserver")), str(script), served.inference, served.http.removeprefix("http://")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, env=client_env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["classified"] == [["1 of 16", [[8.0]]]] * 3
    assert found["shared"] == [[[0.0, 1.0, 2.0, 3.0]]] * 2
    assert found["classes"] == [["4.000000:1", "2.000000:2"]] * 2
    assert found["streamed"] == [[[0.0]], [[1.0]], [[2.0]]]
    assert found["platforms"] == ["ensemble"] * 2


def test_an_inference_graph_around_an_ensemble(served: Any) -> None:
    served.register("routed.yaml")
    tensor = {"name": "IMAGE", "datatype": "BYTES", "shape": [1, 1], "data": ["2 6"]}
    answer = httpx.post(f"{served.http}/v2/models/routed/infer", json={"inputs": [tensor]}, timeout=GUARD_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"][0]["data"] == ["1 of 8"]
    tensor["data"] = ["2 -6"]
    answer = httpx.post(f"{served.http}/v2/models/routed/infer", json={"inputs": [tensor]}, timeout=GUARD_S)
    assert answer.status_code == 500 and "node root, step 0: in ensemble 'classify', step 3" in answer.json()["error"]


def test_a_watched_ensemble_comes_with_its_step(tmp_path: Path, serving: Callable[..., Any]) -> None:
    repository = tmp_path / "repository"
    write(repository, "step", "broken(", X_TO_Y)
    config = x_to_out(step("step", {"X": "X"}, {"Y": "OUT"}))
    write(repository, "whole", "", config)
    more = ["--ncs", "--model-repository", str(repository), "--model-control-mode", "poll"]
    with serving(tmp_path, None, {"repository_poll_secs": 1}, more) as server:

        def status() -> int:
            return httpx.get(f"{server.http}/v2/models/whole/ready", timeout=GUARD_S).status_code

        index = httpx.post(f"{server.http}/v2/repository/index", timeout=GUARD_S).json()
        (reason,) = [one["reason"] for one in index if one["name"] == "whole"]
        assert "step 1 (step) can't be loaded" in reason and status() == 404
        write(repository, "step", model_of(PASS), X_TO_Y)
        until(lambda: status() == 200)


PASSES = step("pass", {"X": "X"}, {"Y": "OUT"})
REFUSED = [
    (
        x_to_out(step("pass", {"X": "Q"}, {"Y": "OUT"})),
        "step 1 (pass) takes tensor 'Q' as its input 'X', but no step makes it",
    ),
    (x_to_out(step("pass", {"X": "X"}, {"Y": "Q"})), "no step makes output 'OUT'"),
    (x_to_out(step("nobody", {"X": "X"}, {"Y": "OUT"})), "step 1 (nobody): model 'nobody' is not served"),
    (x_to_out(step("pass", {"X": "X"}, {"Y": "OUT"}, 9)), "step 1 (pass): model 'pass' version 9 is not served"),
    (
        x_to_out(step("pass", {"Z": "X"}, {"Y": "OUT"})),
        "step 1 (pass): model 'pass' has no input 'Z'; there are: X",
    ),
    (
        x_to_out(step("pass", {"X": "X"}, {"Z": "OUT"})),
        "step 1 (pass): model 'pass' has no output 'Z'; there are: Y",
    ),
    (
        x_to_out(PASSES, x="INT32"),
        "tensor 'X': the ensemble has INT32 [-1, -1], input 'X' of step 1 (pass) has FP32 [-1, -1]",
    ),
    (
        x_to_out(PASSES, out=("FP32", "2, 2")),
        "tensor 'OUT': output 'Y' of step 1 (pass) has FP32 [-1, -1], the ensemble has FP32 [-1, 2, 2]",
    ),
    (
        x_to_out(step("pass", {"X": "a"}, {"Y": "OUT"}), step("pass", {"X": "OUT"}, {"Y": "a"})),
        "ensemble_scheduling has a cycle: step 1 (pass) -> step 2 (pass) -> step 1 (pass)",
    ),
    (x_to_out(step("bad", {"X": "X"}, {"Y": "OUT"})), "step 1 (bad) leads back to the ensemble itself"),
    (x_to_out(PASSES, batch=8), "max_batch_size of the ensemble is 8, that of model 'pass' is 4"),
    (
        x_to_out(step("repeat", {"X": "X"}, {"Y": "a"}), step("repeat", {"X": "a"}, {"Y": "OUT"})),
        "step 1 (repeat) and step 2 (repeat) have decoupled models, and only one step may",
    ),
    (
        x_to_out(step("remembers", {"X": "X"}, {"Y": "OUT"})),
        "step 1 (remembers): model 'remembers' has sequences, which ensembles don't pass on",
    ),
    (
        x_to_out(step("postprocess", {"SUM": "X"}, {"LABEL": "OUT"}), out=("STRING", "-1")),
        "step 1 (postprocess): input_map lacks input 'INDEX' of model 'postprocess'",
    ),
    (
        x_to_out(PASSES.replace("model_version", 'model_namespace: "n" model_version')),
        "step 1 (pass): model_namespace is not supported",
    ),
    (config_of([tensor("X")], [tensor("OUT")], 4, 'platform: "ensemble"'), "ensemble_scheduling is not given"),
]


@pytest.mark.parametrize(("config", "said"), REFUSED)
def test_an_ensemble_that_cant_work_is_refused_with_its_step_and_tensor(served: Any, config: str, said: str) -> None:
    write(served.directory / "repository", "bad", "", config)
    answer = httpx.post(f"{served.http}/v2/repository/models/bad/load", timeout=GUARD_S)
    assert answer.status_code == 400 and said in answer.json()["error"], answer.text


def test_ensembles_that_lead_to_each_other_are_refused(served: Any) -> None:
    for name, other in (("one", "two"), ("two", "one")):
        config = x_to_out(step(other, {"X": "X"}, {"OUT": "OUT"}))
        write(served.directory / "repository", name, "", config)
    answers: list[httpx.Response] = []

    def load(name: str) -> None:
        answers.append(httpx.post(f"{served.http}/v2/repository/models/{name}/load", timeout=GUARD_S))

    threads = [threading.Thread(target=load, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
    assert [answer.status_code for answer in answers] == [400, 400]
    assert all("leads back to the ensemble itself" in answer.json()["error"] for answer in answers)
