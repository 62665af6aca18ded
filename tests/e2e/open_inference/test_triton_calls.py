"""The calls of Triton's clients other than plain inference: metrics, statistics, settings, compressed bodies, shared
memory. The recorded calls (test_triton_recordings.py) have their usual answers."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import struct
import subprocess
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from support import GUARD_S, until
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

SCORES = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if x.size and x.flat[0] == 13:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("thirteen")))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]))
        return responses
"""
SCORES_CONFIG = """
backend: "python" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 label_filename: "labels.txt" }
"""
#: Answers when the file `go` is beside it.
WAITS = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.go = os.path.join(args["model_repository"], "go")

    def execute(self, requests):
        while not os.path.exists(self.go):
            time.sleep(0.01)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
WAITS_CONFIG = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""
#: Answers each request as often as its number says.
SEVERAL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for index in range(int(request.inputs()[0].as_numpy()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([index], dtype=np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SEVERAL_CONFIG = """
backend: "python" model_transaction_policy { decoupled: true }
input { name: "x" data_type: TYPE_INT32 dims: 1 }
output { name: "y" data_type: TYPE_INT32 dims: 1 }
"""


#: As Triton's own example of custom metrics, in two instances.
METRICS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily
        counted = family(name="answered_total", description="Answered | requests", kind=family.COUNTER)
        self.counter = counted.Metric(labels={"model": "metrics", "kind": 'a"b'})
        self.gauge = family("last_value", "The last value", family.GAUGE).Metric(labels={"model": "metrics"})
        sizes = family(name="sizes", description="Sizes", kind=family.HISTOGRAM)
        self.sizes = sizes.Metric(labels={"model": "metrics"}, buckets=[1, 10])

    def execute(self, requests):
        answers = []
        for request in requests:
            tensor = request.inputs()[0].as_numpy()
            self.counter.increment(1)
            self.gauge.set(float(tensor.flat[0]))
            self.gauge.increment(0.5)
            self.sizes.observe(float(tensor.flat[0]))
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", tensor)]))
        return answers
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("repository")
    for name, source, config in (
        ("scores", SCORES, SCORES_CONFIG),
        ("waits", WAITS, WAITS_CONFIG),
        ("several", SEVERAL, SEVERAL_CONFIG),
        ("metrics", METRICS, WAITS_CONFIG + "instance_group [{ count: 2, kind: KIND_CPU }]"),
    ):
        (path / name / "1").mkdir(parents=True)
        (path / name / "1" / "model.py").write_text(source)
        (path / name / "config.pbtxt").write_text(config)
    (path / "scores" / "labels.txt").write_text("cat\ndog\n")
    return path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, repository: Path, serving: Callable[..., Any]) -> Iterator[Any]:
    settings: dict[str, object] = {
        "shared_memory_keys": "/tested_.*",
        "metrics_mode": "prometheus",
        "enable_model_api": "true",
    }
    arguments = ["--ncs", "--model-repository", str(repository)]
    with serving(tmp_path_factory.mktemp("server"), None, settings, arguments) as server:
        yield server


@pytest.fixture
def stub(served: Any) -> Iterator[GRPCInferenceServiceStub]:
    with grpc.insecure_channel(served.inference) as channel:
        yield GRPCInferenceServiceStub(channel)


def floats(*values: float, model: str = "scores", batch: bool = True, **parameters: Any) -> pb.ModelInferRequest:
    shape = [1, len(values)] if batch else [len(values)]
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=shape)
    request = pb.ModelInferRequest(model_name=model, inputs=[tensor])
    request.raw_input_contents.append(struct.pack(f"<{len(values)}f", *values))
    for name, value in parameters.items():
        put(request.parameters[name], value)
    return request


def put(parameter: Any, value: Any) -> None:
    field = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
    setattr(parameter, field, value)


def post(served: Any, path: str, body: Any = None, **more: Any) -> httpx.Response:
    return httpx.post(f"{served.http}/v2/{path}", json=body, timeout=GUARD_S, **more)


def json_request(*values: float, **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, len(values)], "data": values}], **more}


# --- statistics and settings


def test_the_metrics_of_a_model_are_scraped(served: Any, stub: GRPCInferenceServiceStub) -> None:
    """Those of all its instances together, by their kind; they go with the model."""

    for value in (0.5, 3, 30, 3):
        stub.ModelInfer(floats(value, model="metrics", batch=False), timeout=GUARD_S)
    wanted = (
        "# HELP answered_total Answered _ requests",
        "# TYPE answered_total counter",
        'answered_total{model="metrics",kind="a\\"b",',
        'last_value{model="metrics",',
        "# TYPE sizes histogram",
        'sizes_bucket{model="metrics",',
        'le="10.0",} 3.0',
    )
    until(lambda: all(one in served.scraped() for one in wanted), served.scraped)
    values = {line.partition("{")[0]: line.rpartition(" ")[2] for line in served.scraped().splitlines()}
    found = {name: values[name] for name in ("answered_total", "last_value", "sizes_count", "sizes_sum")}
    assert found == {"answered_total": "4.0", "last_value": "3.5", "sizes_count": "4.0", "sizes_sum": "36.5"}
    served.unregister("metrics")
    until(lambda: "answered_total" not in served.scraped(), "its metrics are gone")


def test_what_is_refused_is_no_execution(served: Any, stub: GRPCInferenceServiceStub) -> None:
    """Whatever refuses it: the server before it has a worker, or the worker that reads it."""
    stub.ModelInfer(floats(1, 2))
    before = stub.ModelStatistics(pb.ModelStatisticsRequest(name="scores")).model_stats[0]
    wrong: list[pb.ModelInferRequest] = [floats(1, 2) for _ in range(5)]
    wrong[0].raw_input_contents[0] = b"x"
    wrong[1].inputs[0].datatype = "INT64"
    wrong[2].inputs[0].name = "unknown"
    wrong[3].inputs[0].shape[:] = [1, -2]
    wrong[4].ClearField("inputs")
    for request in wrong:
        with pytest.raises(grpc.RpcError):
            stub.ModelInfer(request)
    texts = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": ["a", "b"]}]}
    for body in (texts, {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1]}]}, {"inputs": 5}):
        assert post(served, "models/scores/infer", body).status_code == 400
    after = stub.ModelStatistics(pb.ModelStatisticsRequest(name="scores")).model_stats[0]
    assert after.execution_count == before.execution_count
    assert after.batch_stats == before.batch_stats


def test_what_workers_that_have_ended_did_stays_counted(served: Any, stub: GRPCInferenceServiceStub) -> None:
    stub.ModelInfer(floats(1, 2))
    before = stub.ModelStatistics(pb.ModelStatisticsRequest(name="scores")).model_stats[0].inference_stats
    (worker,) = served.worker_pids("scores")
    os.kill(worker, signal.SIGKILL)
    until(lambda: served.worker_pids("scores") not in ([], [worker]))
    after = stub.ModelStatistics(pb.ModelStatisticsRequest(name="scores")).model_stats[0].inference_stats
    assert after.compute_input == before.compute_input and after.compute_output == before.compute_output


def test_the_level_of_the_log_is_read_and_changed(served: Any, stub: GRPCInferenceServiceStub) -> None:
    known = httpx.get(f"{served.http}/v2/logging").json()
    assert (known["log_info"], known["log_verbose_level"], known["log_file"]) == (True, 0, "")
    changed = post(served, "logging", {"log_info": False}).json()
    assert (changed["log_info"], changed["log_warning"]) == (False, True)
    settings = {"log_verbose_level": pb.LogSettingsRequest.SettingValue(uint32_param=1)}
    assert stub.LogSettings(pb.LogSettingsRequest(settings=settings)).settings["log_verbose_level"].uint32_param == 1
    assert post(served, "logging", {"log_verbose_level": 0, "log_info": True}).json() == known
    ready = served.log.count("of scores_1 is ready")
    post(served, "logging", {"log_info": False})
    served.scale("scores", 2)
    post(served, "logging", {"log_info": True})
    served.scale("scores", 3)
    served.wait_for_log("of scores_1 is ready", ready + 1)
    assert served.log.count("of scores_1 is ready") == ready + 1, "what is not to be logged isn't"
    served.scale("scores", 1)
    for level in (0, 1):
        post(served, "logging", {"log_verbose_level": level})
        post(served, f"models/verbose{level}/infer", {"inputs": []})
    served.wait_for_log("ended 404: Model not found: verbose1")
    assert "verbose0/infer' ended" not in served.log
    post(served, "logging", {"log_verbose_level": 0})
    for body, says in (
        ({"log_file": "/tmp/x"}, "log_file can't be changed"),
        ({"log_colour": True}, "unknown log setting 'log_colour'"),
        ({"log_info": "yes"}, "log_info is true or false, not 'yes'"),
        ({"log_error": False}, "more severe messages are always shown"),
    ):
        refused = post(served, "logging", body)
        assert refused.status_code == 400 and says in refused.json()["error"]
    assert httpx.get(f"{served.http}/v2/logging").json() == known


def test_statistics_are_metrics_too(served: Any, stub: GRPCInferenceServiceStub) -> None:
    stub.ModelInfer(floats(1))
    count = stub.ModelStatistics(pb.ModelStatisticsRequest(name="scores")).model_stats[0].inference_count
    shown = served.scraped()
    assert f'nv_inference_count{{model="scores",version="1",}} {float(count)}' in shown
    assert 'nv_inference_exec_count{model="waits",version="1",}' in shown
    for part in ("input", "output"):
        (line,) = re.findall(rf'nv_inference_compute_{part}_duration_us{{model="scores",version="1",}} (.*)', shown)
        assert float(line) > 0


# --- paths and bodies


def test_calls_with_room_for_one_answer(served: Any) -> None:
    """Of a model that sends another number of them."""
    bodies: dict[str, Any] = {
        "v2/models/several/infer": {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1]}]},
        "v2/models/several/generate": {},
        "v1/models/several:predict": {},
    }
    for count, status in ((0, 501), (1, 200), (2, 501)):
        bodies["v2/models/several/infer"]["inputs"][0]["data"] = [count]
        bodies["v2/models/several/generate"]["x"] = count
        bodies["v1/models/several:predict"]["instances"] = [count]
        # `generate` joins any number of texts, and takes the last of other outputs.
        for path, body in bodies.items():
            found = httpx.post(f"{served.http}/{path}", json=body, timeout=GUARD_S)
            assert found.status_code == (200 if path.endswith("generate") and count else status), (path, found.text)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "raw deflate"])
def test_a_body_may_be_compressed(served: Any, encoding: str) -> None:
    data = json.dumps(json_request(*range(2000))).encode()
    raw = zlib.compressobj(wbits=-15)
    packed = {
        "gzip": gzip.compress(data),
        "deflate": zlib.compress(data),
        "raw deflate": raw.compress(data) + raw.flush(),
    }
    name = encoding.split()[-1]
    headers = {"content-encoding": name, "accept-encoding": name}
    found = httpx.post(f"{served.http}/v2/models/scores/infer", content=packed[encoding], headers=headers)
    assert found.headers["content-encoding"] == name
    assert found.json()["outputs"][0]["data"] == list(range(2000))


def test_bodies_that_cannot_be_decompressed_are_refused(served: Any) -> None:
    def ask(content: bytes, encoding: str) -> httpx.Response:
        url = f"{served.http}/v2/models/scores/infer"
        return httpx.post(url, content=content, headers={"content-encoding": encoding}, timeout=GUARD_S)

    unknown = ask(b"x", "br")
    assert (unknown.status_code, unknown.headers["accept-encoding"]) == (501, "gzip, deflate")
    packed = gzip.compress(json.dumps(json_request(1.0)).encode())
    for bad in (b"not gzip", packed[:-4], packed + b"more", b""):
        assert ask(bad, "gzip").status_code == 400
    assert ask(gzip.compress(bytes(20_000_000)), "gzip").status_code == 413
    plain = httpx.post(f"{served.http}/v2/models/scores/infer", json=json_request(1.0))
    assert "content-encoding" not in plain.headers


# --- shared memory


class Region:
    """A file of shared memory that is registered as `name`."""

    def __init__(self, stub: GRPCInferenceServiceStub, size: int) -> None:
        self.name = f"tested_{uuid.uuid4().hex}"
        self.path, self.size, self.stub = Path("/dev/shm", self.name), size, stub
        self.path.write_bytes(bytes(size))

    def register(self, offset: int = 0, size: int = 0) -> None:
        request = pb.SystemSharedMemoryRegisterRequest(
            name=self.name, key=f"/{self.name}", offset=offset, byte_size=size or self.size
        )
        self.stub.SystemSharedMemoryRegister(request)

    def parameters(self, size: int, offset: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = {"shared_memory_region": self.name, "shared_memory_byte_size": size}
        return found | ({"shared_memory_offset": offset} if offset else {})


@pytest.fixture
def region(stub: GRPCInferenceServiceStub) -> Iterator[Region]:
    found = Region(stub, 64)
    yield found
    stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name=found.name))
    found.path.unlink()


def shared_request(region: Region, size: int = 8) -> pb.ModelInferRequest:
    """Two floats from the region's start, answered at its byte 32."""
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 2])
    request = pb.ModelInferRequest(model_name="scores", inputs=[tensor])
    for name, value in region.parameters(size).items():
        put(request.inputs[0].parameters[name], value)
    output = request.outputs.add(name="y")
    for name, value in region.parameters(16, 32).items():
        put(output.parameters[name], value)
    return request


def test_a_region_that_shrinks_fails_requests_and_nothing_else(
    served: Any, stub: GRPCInferenceServiceStub, region: Region
) -> None:
    region.register()
    pids = served.worker_pids("scores")
    os.truncate(region.path, 4)
    with pytest.raises(grpc.RpcError, match="ends after 4 bytes"):
        stub.ModelInfer(shared_request(region))
    request = shared_request(region)
    request.inputs[0].parameters.clear()
    request.raw_input_contents.append(bytes(8))
    with pytest.raises(grpc.RpcError, match="smaller than it was when it was registered"):
        stub.ModelInfer(request)
    assert stub.ModelInfer(floats(1)).outputs[0].name == "y"
    assert served.worker_pids("scores") == pids


def test_regions_that_may_not_be_registered(served: Any, stub: GRPCInferenceServiceStub, region: Region) -> None:
    def status_of(key: str, offset: int = 0, size: int = 8) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as refused:
            stub.SystemSharedMemoryRegister(
                pb.SystemSharedMemoryRegisterRequest(name="r", key=key, offset=offset, byte_size=size)
            )
        found: grpc.StatusCode = refused.value.code()
        return found

    assert status_of("/others") is grpc.StatusCode.PERMISSION_DENIED
    assert status_of("/tested_/../../etc/passwd") is grpc.StatusCode.INVALID_ARGUMENT
    assert status_of("/tested_none") is grpc.StatusCode.INVALID_ARGUMENT
    assert status_of(f"/{region.name}", 60, 8) is grpc.StatusCode.INVALID_ARGUMENT
    assert status_of(f"/{region.name}", 0, 1 << 62) is grpc.StatusCode.INVALID_ARGUMENT
    link = Path("/dev/shm", f"tested_{uuid.uuid4().hex}")
    link.symlink_to("/etc/passwd")
    try:
        assert status_of(f"/{link.name}") is grpc.StatusCode.INVALID_ARGUMENT
    finally:
        link.unlink()
    region.register(0, 16)
    with pytest.raises(grpc.RpcError, match="registered already"):
        region.register()
    with pytest.raises(grpc.RpcError, match="more than the 16 of region"):
        stub.ModelInfer(shared_request(region, 24))
    with pytest.raises(grpc.RpcError) as cuda:
        stub.CudaSharedMemoryRegister(pb.CudaSharedMemoryRegisterRequest(name="c", byte_size=8))
    assert cuda.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert post(served, "cudasharedmemory/region/c/register", {}).status_code == 501
    assert post(served, "cudasharedmemory/unregister").status_code == 200


@pytest.mark.external
def test_tritons_own_client_library(served: Any, client_python: Any, client_env: dict[str, str]) -> None:
    script = Path(__file__).with_name("triton_shared_memory.py")
    command = [str(client_python("mlserver")), str(script), served.inference, served.http.removeprefix("http://")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, env=client_env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["grpc"] == found["http"] == [[1.5, 2.5]]
    assert found["classes"] == [["2.000000:1:dog"]] * 4
    assert found["counts"][0] == found["counts"][1] >= 6
    assert found["log"] is True and found["trace"] == [["OFF"], ["OFF"]]
