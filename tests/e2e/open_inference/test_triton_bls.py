"""Triton Python models that call other models of the same server, over real processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from e2e.servers import text_of, text_request
from support import GUARD_S, until
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

ADD_SUB = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.version = int(args["model_version"])

    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "B").as_numpy()
            if a.size and a[0] == -1:
                error = pb_utils.TritonError("minus one", pb_utils.TritonError.ALREADY_EXISTS)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            outputs = [pb_utils.Tensor("SUM", a + b + 100 * (self.version - 1)), pb_utils.Tensor("DIFF", a - b)]
            responses.append(pb_utils.InferenceResponse(outputs, parameters={"seen": request.request_id()}))
        return responses
"""
ADD_SUB_CONFIG = """
backend: "python"
input [ { name: "A" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "B" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "SUM" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "DIFF" data_type: TYPE_INT32 dims: [ -1 ] } ]
version_policy: { all {} }
"""
#: Answers N times with N; for a negative one without an end, until nobody waits: then it leaves a file of that name.
REPEAT = """
import pathlib
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.marks = pathlib.Path(args["model_repository"]).parent

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request, request.get_response_sender())).start()

    def answer(self, request, sender):
        count = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
        response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full(1024, count, np.int32))])
        if count < 0:
            sender.send(response)
            while not sender.is_cancelled():
                threading.Event().wait(0.005)
            (self.marks / f"left{count}").touch()
        for _ in range(count):
            sender.send(response)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
REPEAT_CONFIG = """
backend: "python"
input [ { name: "N" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] } ]
model_transaction_policy { decoupled: true }
"""
#: What a sequence has summed up so far.
TOTAL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.totals = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            key = request.correlation_id()
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self.totals[key] = 0
            self.totals[key] += pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("TOTAL", self.totals[key])]))
        return responses
"""
TOTAL_CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "TOTAL" data_type: TYPE_INT32 dims: [ 1 ] } ]
sequence_batching {}
"""
#: Runs the function of its own that the request names, and answers what that returns, as JSON.
CALLER = """
import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import triton_python_backend_utils as pb_utils

def add(a, b, model="add_sub", **more):
    tensors = [pb_utils.Tensor("A", np.array(a, np.int32)), pb_utils.Tensor("B", np.array(b, np.int32))]
    return pb_utils.InferenceRequest(model_name=model, inputs=tensors, **more)

def repeat(count, **more):
    tensors = [pb_utils.Tensor("N", np.array([count], np.int32))]
    return pb_utils.InferenceRequest(
        model_name="repeat", inputs=tensors, requested_output_names=["OUT"], **more
    )

def again(name, model, **more):
    tensors = [pb_utils.Tensor("DO", np.array([json.dumps([name])], object))]
    return pb_utils.InferenceRequest(
        model_name=model, inputs=tensors, requested_output_names=["SAID"], **more
    )

def said(response):
    if response.has_error():
        return [response.error().code(), response.error().message()]
    return {t.name(): t.as_numpy().tolist() for t in response.output_tensors()}

class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_name"]

    def execute(self, requests):
        return [self.response(getattr(self, name)(*more)) for name, more in map(self.order, requests)]

    def order(self, request):
        name, *more = json.loads(pb_utils.get_input_tensor_by_name(request, "DO").as_numpy()[0])
        return name, more

    def response(self, found):
        text = json.dumps(found, default=bytes.decode)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array([text], object))])

    def both(self):
        memory = pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0)
        trace = pb_utils.InferenceTrace()
        response = add([1, 2], [3, 5], request_id="r7", preferred_memory=memory, trace=trace).exec()
        return [said(response), json.loads(response.parameters())["seen"]]

    def one(self):
        return said(add([1], [3], requested_output_names=["DIFF"]).exec())

    def version(self, number):
        return said(add([1], [1], model_version=number, requested_output_names=["SUM"]).exec())

    def faults(self):
        cut = pb_utils.InferenceRequest(model_name="add_sub", inputs=[], requested_output_names=["SUM"])
        requests = [add([1], [1], model="nobody"), cut, add([-1], [1]), repeat(1), add([1], [1], model_version=7)]
        return [said(request.exec()) for request in requests]

    def threads(self, count):
        with ThreadPoolExecutor(8) as pool:
            responses = pool.map(lambda i: add([i], [1]).exec(), range(count))
            return int(sum(response.output_tensors()[0].as_numpy()[0] for response in responses))

    def large(self, size):
        response = add(np.ones(size, np.int32), np.ones(size, np.int32)).exec()
        if response.has_error():
            return said(response)
        return int(response.output_tensors()[0].as_numpy().sum())

    def pieces(self, count):
        return [r.output_tensors()[0].as_numpy()[0] for r in repeat(count).exec(decoupled=True)].count(count)

    def begun(self, mark):
        for response in repeat(mark).exec(decoupled=True):
            print("begun", mark, flush=True)
        return said(response)

    def ended(self, mark):
        answers = repeat(mark).exec(decoupled=True)
        first = next(answers)
        answers.cancel()
        return [said(response) for response in answers]

    def abandoned(self, mark):
        for response in repeat(mark).exec(decoupled=True):
            break
        return "left"

    def late(self, mark):
        return [said(response) for response in repeat(mark, timeout=2_000_000).exec(decoupled=True)]

    def itself(self):
        return said(again("both", self.name, timeout=300_000).exec())

    def through(self, model):
        return said(again("both", model).exec())

    def torchserve(self):
        tensors = [pb_utils.Tensor("data", np.array([b"quiet"], object))]
        return said(pb_utils.InferenceRequest(model_name="upper", inputs=tensors).exec())

    def sequence(self):
        found = []
        for flags in (1, 0, 2):
            tensor = pb_utils.Tensor("X", np.array([3], np.int32))
            request = pb_utils.InferenceRequest(
                model_name="total", inputs=[tensor], requested_output_names=[], correlation_id=5, flags=flags
            )
            found.append(said(request.exec()))
        return found

    def repository(self):
        ready = [pb_utils.is_model_ready("spare"), pb_utils.is_model_ready("spare", "9")]
        pb_utils.unload_model("spare")
        ready.append(pb_utils.is_model_ready(model_name="spare"))
        pb_utils.load_model(model_name="spare", config=json.dumps({"backend": "python", "max_batch_size": 3}))
        ready.append(pb_utils.is_model_ready("spare"))
        try:
            pb_utils.load_model("nobody")
        except pb_utils.TritonModelException as error:
            return [*ready, str(error)]
"""
ASYNC = (
    CALLER.replace("def execute", "async def execute").replace(
        "self.response(getattr(self, name)(*more))", "self.response(await self.done(name, more))"
    )
    + """
    async def done(self, name, more):
        found = getattr(self, name)(*more)
        return await found if asyncio.iscoroutine(found) else found

    async def gathered(self, count):
        responses = await asyncio.gather(*[add([i], [1]).async_exec() for i in range(count)])
        return [said(response)["SUM"][0] for response in responses]

    async def streams(self, count):
        iterators = await asyncio.gather(*[repeat(count).async_exec(decoupled=True) for _ in range(2)])
        first = [r.output_tensors()[0].as_numpy()[0] for r in iterators[0]].count(count)
        second = [r.output_tensors()[0].as_numpy()[0] async for r in iterators[1]].count(count)
        return [first, second]

    async def itself_async(self):
        return said(await again("both", self.name).async_exec())

    async def begun_async(self, mark):
        async for response in await repeat(mark).async_exec(decoupled=True):
            print("begun", mark, flush=True)
        return said(response)
"""
)
DECOUPLED = CALLER.replace(
    "        return [self.response(getattr(self, name)(*more)) for name, more in map(self.order, requests)]",
    """        for request in requests:
            name, more = self.order(request)
            request.get_response_sender().send(self.response(getattr(self, name)(*more)), 1)""",
)
CALLER_CONFIG = """
backend: "python"
input [ { name: "DO" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "SAID" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
UPPER = "def handle(data, context):\n    return data and [bytes(row['data']).decode().upper() for row in data]\n"
MODELS = {
    "add_sub": (ADD_SUB, ADD_SUB_CONFIG),
    "spare": (ADD_SUB, 'backend: "python"'),
    "repeat": (REPEAT, REPEAT_CONFIG),
    "total": (TOTAL, TOTAL_CONFIG),
    "caller": (CALLER, CALLER_CONFIG),
    "caller_async": (ASYNC, CALLER_CONFIG),
    "caller_decoupled": (DECOUPLED, CALLER_CONFIG + "model_transaction_policy { decoupled: true }"),
}


@pytest.fixture(scope="module")
def calling(
    tmp_path_factory: pytest.TempPathFactory, serving: Callable[..., Any], write_to: Callable[..., str]
) -> Iterator[Any]:
    directory: Path = tmp_path_factory.mktemp("bls")
    repository, store = directory / "repository", directory / "store"
    for name, (source, config) in MODELS.items():
        for version in ("1", "2") if name == "add_sub" else ("1",):
            (repository / name / version).mkdir(parents=True)
            (repository / name / version / "model.py").write_text(source)
        (repository / name / "config.pbtxt").write_text(config)
    store.mkdir()
    write_to(store, "upper", UPPER)
    more = ["--ncs", "--model-repository", str(repository), "--model-control-mode", "explicit", "--load-model", "*"]
    server = serving(directory, store, {}, more)
    try:
        server.wait_started()
        server.register("upper")
        yield server
    finally:
        server.terminate()
        print(server.log[-6000:])


def order(model: str, *words: Any) -> pb.ModelInferRequest:
    return text_request(model, json.dumps(words), "DO")


def ask(served: Any, model: str, *words: Any) -> Any:
    with grpc.insecure_channel(served.inference) as channel:
        stub = GRPCInferenceServiceStub(channel)
        if model == "caller_decoupled":
            (answer,) = stub.ModelStreamInfer(iter([order(model, *words)]), timeout=GUARD_S)
            assert not answer.error_message
            answer = answer.infer_response
        else:
            answer = stub.ModelInfer(order(model, *words), timeout=GUARD_S)
    return json.loads(text_of(answer))


def mark_of(served: Any, number: int) -> None:
    """Returns when the model that gives answers without an end has learnt that nobody wants them."""
    path = served.directory / f"left{number}"
    until(path.exists, lambda: f"{path} did not appear:\n{served.log}")


def marked(served: Any, number: int, seconds: float) -> bool:
    """Whether it learns of it in so many seconds."""
    try:
        return bool(until((served.directory / f"left{number}").exists, timeout_s=seconds))
    except AssertionError:
        return False


CALLERS = ("caller", "caller_async", "caller_decoupled")


@pytest.mark.parametrize("model", CALLERS)
def test_a_model_calls_another(calling: Any, model: str) -> None:
    assert ask(calling, model, "both") == [{"SUM": [104, 107], "DIFF": [-2, -3]}, "r7"]
    assert ask(calling, model, "one") == {"DIFF": [-2]}
    assert ask(calling, model, "pieces", 500) == 500
    assert ask(calling, model, "large", 700_000) == 2 * 700_000 + 100 * 700_000


@pytest.mark.parametrize("model", CALLERS)
def test_what_fails_is_the_error_of_the_response(calling: Any, model: str) -> None:
    missing, invalid, own, decoupled, version = ask(calling, model, "faults")
    assert missing == [2, "Model not found: nobody"]
    assert invalid[0] == 3 and "'A' is missing" in invalid[1]
    assert own == [6, "minus one"]
    assert decoupled[0] == 3 and "decoupled=True" in decoupled[1]
    assert version == [2, "Model version: 7 does not exist for model: add_sub"]


def test_what_is_too_large_is_not_sent(calling: Any) -> None:
    code, message = ask(calling, "caller", "large", 1_000_000)
    assert code == 3 and "max_request_size" in message
    assert ask(calling, "caller", "one") == {"DIFF": [-2]}


def test_versions_can_be_named(calling: Any) -> None:
    assert [ask(calling, "caller", "version", number) for number in (1, 2, -1)] == [
        {"SUM": [2]},
        {"SUM": [102]},
        {"SUM": [102]},
    ]


def test_calls_from_threads_of_the_model(calling: Any) -> None:
    assert ask(calling, "caller", "threads", 50) == sum(range(50)) + 50 * 101
    assert ask(calling, "caller_decoupled", "threads", 50) == sum(range(50)) + 50 * 101


def test_calls_of_coroutines_run_beside_each_other(calling: Any) -> None:
    assert ask(calling, "caller_async", "gathered", 300) == [i + 101 for i in range(300)]
    assert ask(calling, "caller_async", "streams", 50) == [50, 50]


def test_sequences_of_other_models(calling: Any) -> None:
    assert ask(calling, "caller", "sequence") == [{"TOTAL": [3]}, {"TOTAL": [6]}, {"TOTAL": [9]}]


def test_calls_of_calls_and_of_archives(calling: Any) -> None:
    for model in CALLERS:
        (text,) = ask(calling, model, "through", "caller_async" if model == "caller" else "caller")["SAID"]
        assert json.loads(text)[1] == "r7"
        assert ask(calling, model, "torchserve") == {"output": ["QUIET"]}


def test_a_call_that_waits_for_its_own_caller_ends_with_its_timeout(calling: Any) -> None:
    code, message = ask(calling, "caller", "itself")
    assert code == 4 and "Model caller gave no answer to a call from model caller" in message
    assert "busy" in message
    assert ask(calling, "caller", "one") == {"DIFF": [-2]}
    assert ask(calling, "caller_async", "itself_async")["SAID"]


def test_a_timeout_ends_an_answer_that_goes_on(calling: Any) -> None:
    *_, last = ask(calling, "caller", "late", -11)
    assert last[0] == 4 and "in time" in last[1]
    mark_of(calling, -11)


@pytest.mark.parametrize("model", CALLERS)
def test_an_iterator_that_is_cancelled_or_left_ends_its_call(calling: Any, model: str) -> None:
    number = -100 - CALLERS.index(model)
    ((code, _),) = ask(calling, model, "ended", number)
    assert code == 7
    mark_of(calling, number)
    assert ask(calling, model, "abandoned", number - 10) == "left"
    mark_of(calling, number - 10)


@pytest.mark.parametrize(
    ("model", "way"), [("caller", "begun"), ("caller_async", "begun_async"), ("caller_decoupled", "begun")]
)
def test_a_client_that_leaves_ends_what_was_asked_for_it(calling: Any, model: str, way: str) -> None:
    number = -200 - CALLERS.index(model)
    with grpc.insecure_channel(calling.inference) as channel:
        stub = GRPCInferenceServiceStub(channel)
        if model == "caller_decoupled":
            call: Any = stub.ModelStreamInfer(iter([order(model, way, number)]), timeout=GUARD_S)
        else:
            call = stub.ModelInfer.future(order(model, way, number), timeout=GUARD_S)
        calling.wait_for_log(f"begun {number}")
        call.cancel()
        mark_of(calling, number)
    assert ask(calling, model, "one") == {"DIFF": [-2]}


def test_the_deadline_of_a_request_is_that_of_its_calls(calling: Any) -> None:
    """On a busy machine the first seconds may be over before the call is made."""
    for number, seconds in ((-301, 1), (-302, 8), (-303, 60)):
        with grpc.insecure_channel(calling.inference) as channel, pytest.raises(grpc.RpcError) as refused:
            GRPCInferenceServiceStub(channel).ModelInfer(order("caller", "begun", number), timeout=seconds)
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if seconds == 60 or marked(calling, number, seconds):
            break
    mark_of(calling, number)


def test_a_worker_that_dies_ends_its_calls(calling: Any) -> None:
    with grpc.insecure_channel(calling.inference) as channel:
        call = GRPCInferenceServiceStub(channel).ModelInfer.future(order("caller", "begun", -401), timeout=GUARD_S)
        calling.wait_for_log("begun -401")
        (pid,) = calling.worker_pids("caller")
        psutil.Process(pid).kill()
        mark_of(calling, -401)
        with pytest.raises(grpc.RpcError):
            call.result()
    assert ask(calling, "caller", "one") == {"DIFF": [-2]}


def test_models_are_loaded_and_unloaded_by_models(calling: Any) -> None:
    *ready, refused = ask(calling, "caller", "repository")
    assert ready == [True, False, False, True] and "nobody" in refused
    config = httpx.get(f"{calling.http}/v2/models/spare/config").json()
    assert config["max_batch_size"] == 3


def test_calls_are_counted_like_those_of_clients(calling: Any) -> None:
    def answered() -> int:
        found = httpx.get(f"{calling.http}/v2/models/add_sub/versions/1/stats").json()
        return int(found["model_stats"][0]["inference_count"])

    before = answered()
    ask(calling, "caller", "version", 1)
    assert answered() == before + 1
