"""How requests reach the models of a Triton repository: together or alone, in which order, and how long they wait."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from support import GUARD_S, until
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

#: Says how many requests came together and how many calls of execute there were before; one for 0 waits at the gate.
GATED = """
import pathlib
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    COMPLETE

    def initialize(self, args):
        self.place = pathlib.Path(args["model_repository"]).parent
        self.name, self.calls = args["model_name"], 0

    def execute(self, requests):
        self.calls += 1
        values = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        if any(value.ravel()[0] == 0 for value in values):
            (self.place / f"{self.name}.waits").touch()
            while not (self.place / f"{self.name}.open").exists():
                threading.Event().wait(0.005)
        found = [np.array([len(requests), self.calls], np.int32).reshape(value.shape[:-1] + (2,)) for value in values]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", one)]) for one in found]
"""
COMPLETES = """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_INT32", "dims": [1]})
        config.add_output({"name": "Y", "data_type": "TYPE_INT32", "dims": [2]})
        config.set_max_batch_size(4)
        config.set_dynamic_batching()
        return config
"""
STREAMS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_INT32", "dims": [1]})
        config.add_output({"name": "Y", "data_type": "TYPE_INT32", "dims": [1]})
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def execute(self, requests):
        for request in requests:
            count, sender = pb_utils.get_input_tensor_by_name(request, "X"), request.get_response_sender()
            for _ in range(count.as_numpy()[0]):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", count.as_numpy())]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TENSORS = """
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 2 ] } ]
"""
RANKS = """
dynamic_batching {
  priority_levels: 3 default_priority_level: 2
  priority_queue_policy { key: 3 value: { max_queue_size: 1 } }
}
"""
REFUSES = """
dynamic_batching {
  default_queue_policy { default_timeout_microseconds: 60000000 allow_timeout_override: true max_queue_size: 2 }
}
"""
DELAYS = """
dynamic_batching {
  default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 60000000 allow_timeout_override: true }
}
"""


def limited(name: str, count: int) -> str:
    needs = f'rate_limiter {{ resources [ {{ name: "{name}" count: {count} }} ] }}'
    return 'backend: "python" max_batch_size: 4' + TENSORS + f"instance_group {{ count: 1 {needs} }}"


MODELS = {
    "completed": (GATED.replace("COMPLETE", COMPLETES), None),
    "half_said": (GATED.replace("COMPLETE", COMPLETES), 'backend: "python" input [ { name: "X" optional: true } ]'),
    "unbatched": (GATED.replace("COMPLETE", ""), limited("R", 1)),
    "streams": (STREAMS, None),
    "ranked": (GATED.replace("COMPLETE", ""), 'backend: "python" max_batch_size: 1' + TENSORS + RANKS),
    "refusing": (GATED.replace("COMPLETE", ""), 'backend: "python" max_batch_size: 1' + TENSORS + REFUSES),
    "delaying": (GATED.replace("COMPLETE", ""), 'backend: "python" max_batch_size: 1' + TENSORS + DELAYS),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, serving: Callable[..., Any]) -> Iterator[Any]:
    directory: Path = tmp_path_factory.mktemp("scheduling")
    repository = directory / "repository"
    for name, (source, config) in MODELS.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(source)
        if config is not None:
            (repository / name / "config.pbtxt").write_text(config)
    with serving(directory, None, {}, ["--ncs", "--model-repository", str(repository)]) as server:
        yield server


def request(model: str, value: int, **parameters: int) -> pb.ModelInferRequest:
    shape = [1] if model.startswith("streams") else [1, 1]
    tensor = pb.ModelInferRequest.InferInputTensor(name="X", datatype="INT32", shape=shape)
    message = pb.ModelInferRequest(model_name=model, inputs=[tensor])
    message.raw_input_contents.append(np.array([value], "<i4").tobytes())
    for name, number in parameters.items():
        message.parameters[name].uint64_param = number
    return message


def waiting(served: Any, model: str) -> int:
    found = httpx.get(f"{served.http_management}/models/{model}").json()
    return int(found[0]["jobQueueStatus"]["pendingRequests"])


class Gate:
    """A model whose only worker is held until `open`; `ask` returns when the request waits in its queue."""

    def __init__(self, served: Any, model: str, stub: GRPCInferenceServiceStub, pool: ThreadPoolExecutor) -> None:
        self._served, self.model, self._stub, self._pool = served, model, stub, pool
        self.first = self.send(0)
        until((served.directory / f"{model}.waits").exists)

    def send(self, value: int, model: str = "", /, **parameters: int) -> Future[list[int]]:
        def call() -> list[int]:
            answer = self._stub.ModelInfer(request(model or self.model, value, **parameters), timeout=GUARD_S)
            found: list[int] = np.frombuffer(answer.raw_output_contents[0], "<i4").tolist()
            return found

        return self._pool.submit(call)

    def ask(self, model: str = "", /, **parameters: int) -> Future[list[int]]:
        model = model or self.model
        before = waiting(self._served, model)
        found = self.send(1, model, **parameters)
        until(lambda: waiting(self._served, model) > before)
        return found

    def refused(self, **parameters: int) -> grpc.RpcError:
        with pytest.raises(grpc.RpcError) as error:
            self.send(1, **parameters).result(GUARD_S)
        return error.value

    def open(self) -> None:
        (self._served.directory / f"{self.model}.open").touch()
        assert self.first.result(GUARD_S)


@contextmanager
def gate_of(served: Any, model: str) -> Iterator[Gate]:
    (served.directory / f"{model}.open").unlink(missing_ok=True)
    (served.directory / f"{model}.waits").unlink(missing_ok=True)
    with grpc.insecure_channel(served.inference) as channel, ThreadPoolExecutor(16) as pool:
        gate = Gate(served, model, GRPCInferenceServiceStub(channel), pool)
        try:
            yield gate
        finally:
            (served.directory / f"{model}.open").touch()


@pytest.mark.parametrize("model", ["completed", "half_said"])
def test_what_a_model_completes_of_its_configuration_counts(served: Any, model: str) -> None:
    config = httpx.get(f"{served.http}/v2/models/{model}/config").json()
    assert config["max_batch_size"] == 4 and "dynamic_batching" in config
    assert [(one["name"], one["data_type"], one["dims"]) for one in config["input"]] == [("X", "TYPE_INT32", [1])]
    assert config["input"][0]["optional"] is (model == "half_said")
    metadata = httpx.get(f"{served.http}/v2/models/{model}").json()
    assert metadata["inputs"] == [{"name": "X", "datatype": "INT32", "shape": [-1, 1]}]
    assert metadata["outputs"] == [{"name": "Y", "datatype": "INT32", "shape": [-1, 2]}]
    with gate_of(served, model) as gate:
        others = [gate.ask() for _ in range(6)]
        gate.open()
        assert sorted(one.result(GUARD_S)[0] for one in others) == [2, 2, 4, 4, 4, 4]


def test_without_dynamic_batching_each_request_goes_alone(served: Any) -> None:
    with gate_of(served, "unbatched") as gate:
        others = [gate.ask() for _ in range(3)]
        gate.open()
        assert [one.result(GUARD_S)[0] for one in others] == [1, 1, 1]


def test_a_model_that_says_itself_that_it_is_decoupled_is(served: Any) -> None:
    config = httpx.get(f"{served.http}/v2/models/streams/config").json()
    assert config["model_transaction_policy"] == {"decoupled": True}
    with grpc.insecure_channel(served.inference) as channel:
        stub = GRPCInferenceServiceStub(channel)
        answers = list(stub.ModelStreamInfer(iter([request("streams", 3)]), timeout=GUARD_S))
    assert len(answers) == 3 and not any(one.error_message for one in answers), json.dumps(list(map(str, answers)))


def test_requests_go_by_their_priority(served: Any) -> None:
    with gate_of(served, "ranked") as gate:
        given = [{"priority": 3}, {}, {"priority": 2}, {"priority": 9}, {"priority": 1}, {"priority": 1}]
        others = [gate.ask(**parameters) for parameters in given]
        full = gate.refused(priority=3)
        assert full.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "priority 3" in str(full.details())
        gate.open()
        order = [one.result(GUARD_S)[1] for one in others]
        assert order == [order[4] + 5, order[4] + 2, order[4] + 3, order[4] + 4, order[4], order[4] + 1]


def test_priorities_count_over_http(served: Any) -> None:
    def ask(value: int, priority: int) -> int:
        tensor = {"name": "X", "datatype": "INT32", "shape": [1, 1], "data": [value]}
        body = {"inputs": [tensor], "parameters": {"priority": priority}}
        answer = httpx.post(f"{served.http}/v2/models/ranked/infer", json=body, timeout=GUARD_S).json()
        return int(answer["outputs"][0]["data"][1])

    with gate_of(served, "ranked") as gate, ThreadPoolExecutor(2) as pool:
        low = pool.submit(ask, 1, 3)
        until(lambda: waiting(served, "ranked") == 1)
        high = pool.submit(ask, 1, 1)
        until(lambda: waiting(served, "ranked") == 2)
        gate.open()
        assert low.result(GUARD_S) == high.result(GUARD_S) + 1


def test_a_request_is_refused_when_its_time_in_the_queue_is_over(served: Any) -> None:
    with gate_of(served, "refusing") as gate:
        patient = gate.ask()
        late = gate.refused(timeout=1000)
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED and "never ran" in str(late.details())
        gate.ask()
        assert gate.refused().code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        gate.open()
        assert patient.result(GUARD_S)


def test_a_request_whose_time_is_over_may_go_behind_the_others(served: Any) -> None:
    with gate_of(served, "delaying") as gate:
        late, patient = gate.ask(timeout=1), gate.ask()
        gate.open()
        assert late.result(GUARD_S)[1] == patient.result(GUARD_S)[1] + 1


def test_responses_of_decoupled_models_are_counted_by_their_number(served: Any) -> None:
    """Over gRPC and HTTP; no other model has such numbers."""

    def counts() -> dict[str, tuple[int, int, int]]:
        found = httpx.get(f"{served.http}/v2/models/streams/stats").json()["model_stats"][0]["response_stats"]
        kinds = ("success", "empty_response", "fail")
        return {index: tuple(one[kind].get("count", 0) for kind in kinds) for index, one in found.items()}

    with grpc.insecure_channel(served.inference) as channel:
        stub = GRPCInferenceServiceStub(channel)
        before = counts()
        for count in (2, 1):
            list(stub.ModelStreamInfer(iter([request("streams", count)]), timeout=GUARD_S))
        bad = pb.ModelInferRequest(model_name="streams")
        assert [one.error_message for one in stub.ModelStreamInfer(iter([bad]), timeout=GUARD_S)][0]
        statistics = stub.ModelStatistics(pb.ModelStatisticsRequest(name="streams"), timeout=GUARD_S).model_stats[0]
        other = stub.ModelStatistics(pb.ModelStatisticsRequest(name="ranked"), timeout=GUARD_S).model_stats[0]
    after = counts()
    more = {
        index: tuple(now - then for now, then in zip(found, before.get(index, (0, 0, 0)), strict=True))
        for index, found in after.items()
    }
    assert {index: one for index, one in more.items() if any(one)} == {"0": (2, 0, 1), "1": (1, 1, 0), "2": (0, 1, 0)}
    assert statistics.response_stats["0"].success.ns > 0 and not other.response_stats


# --- resources


def test_models_run_while_their_resources_are_free(tmp_path: Path, serving: Callable[..., Any]) -> None:
    repository = tmp_path / "repository"
    configs = {"one": limited("R", 2), "two": limited("R", 1), "other": limited("S", 1), "large": limited("S", 9)}
    for name, config in configs.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(GATED.replace("COMPLETE", ""))
        (repository / name / "config.pbtxt").write_text(config)
    words = ["--ncs", "--model-repository", str(repository), "--rate-limit", "execution_count"]
    with serving(tmp_path, None, {}, [*words, "--rate-limit-resource", "S:1"]) as server:
        server.wait_for_log("Model large could never run: it needs 9 of the resource S, and there are 1 on device 0")
        with gate_of(server, "one") as gate:
            waits = gate.ask("two")
            assert gate.send(1, "other").result(GUARD_S) == [1, 1]
            assert not waits.done() and waiting(server, "two") == 1, "its worker is idle, and R is taken"
            gate.open()
            assert waits.result(GUARD_S) == [1, 1]
        with gate_of(server, "two") as gate:
            waits = gate.ask("one")
            (worker,) = httpx.get(f"{server.http_management}/models/two").json()[0]["workers"]
            os.kill(worker["pid"], signal.SIGKILL)
            assert waits.result(GUARD_S) == [1, 2], "a dead worker's resources are free"
            assert gate.first.exception(GUARD_S)


def test_resources_count_only_with_a_rate_limit(served: Any) -> None:
    served.wait_for_log("rate_limiter (model unbatched 1) has no effect: rate_limit is off")
