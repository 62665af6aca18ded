"""Models managed while they serve: versions, scaling, concurrent streams, and the state after a restart."""

from __future__ import annotations

import contextlib
import io
import json
import time
import urllib.error
import urllib.request
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import torch

from support import GUARD_S, until
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub
from ts_frontend.protos.management_pb2 import ListModelsRequest, SetDefaultRequest

VERSIONED = "def handle(data, context):\n    return ['{version}'] * len(data or [])\n"
COMPUTING = """
import torch

class Model:
    def initialize(self, context):
        self.weights = torch.rand(400, 400)
        self.expected = (self.weights @ self.weights).sum().item()  # parallel while it loads

    def handle(self, data, context):
        got = (self.weights @ self.weights).sum().item()
        return [abs(got - self.expected) < 1] * len(data)
"""
TORCH_THERE = """
import sys

there = "torch" in sys.modules

def handle(data, context):
    return [str(there).lower()] * len(data or [])
"""
NEEDS_TORCH = """
def explain(data):
    import torch
"""


def request_for(value: object, model: str = "probe") -> PredictionsRequest:
    return PredictionsRequest(model_name=model, input={"data": json.dumps(value).encode()})


async def test_streams_and_unary_requests_share_a_generator(start, write, probe_handler):
    server = start()
    server.register("generating", batch_size=4)

    async with grpc.aio.insecure_channel(server.inference) as channel:
        stub: Any = InferenceAPIsServiceStub(channel)
        long = stub.StreamPredictions(request_for({"count": 100_000}, "generating"))
        assert (await long.read()).prediction == b"0 "
        answer = await stub.Predictions(request_for({"count": 2}, "generating"), timeout=GUARD_S)
        assert answer.prediction == b"0 1 end"
        pieces = [piece.prediction async for piece in stub.StreamPredictions(request_for({"count": 3}, "generating"))]
        assert b"".join(pieces) == b"0 1 2 end"
        assert (await long.read()).prediction == b"1 "
        long.cancel()


@pytest.mark.slow
def test_scaling_through_the_forkserver_takes_a_tenth_of_what_exec_takes(start, write, tmp_path):
    """The model imports torch, as every model does; both servers run in one test, so the ratio holds on any machine."""
    write("computing", COMPUTING)
    took_s = {}
    for how in ("exec", "fork"):
        server = start(worker_start=how, preload_torch="true", preloaded=())
        server.register("computing")
        begun_s = time.monotonic()
        server.scale("computing", 4)
        took_s[how] = time.monotonic() - begun_s
        server.terminate()
    assert took_s["fork"] < took_s["exec"] / 10, took_s


@pytest.mark.parametrize("preloaded", ["true", pytest.param("false", marks=pytest.mark.long)])
def test_torch_is_imported_before_the_fork_or_by_who_needs_it(start, write, preloaded):
    write("torch_there", TORCH_THERE + NEEDS_TORCH)
    write("not_needed", TORCH_THERE)
    server = start(preload_torch=preloaded, preloaded=())
    server.register("torch_there")
    server.register("not_needed")
    assert server.predict("torch_there", {}) == preloaded.encode()
    assert server.predict("not_needed", {}) == b"false"
    server.register("probe")
    assert len(json.loads(server.predict("probe", {"op": "random"}))) == 3


def test_what_is_served_survives_a_restart(start, write):
    for version in ("1.0", "2.0"):
        write("pair", VERSIONED.format(version=version), version=version, directory=f"pair-{version}")
    server = start(snapshots=True)
    server.register("pair-1.0")
    server.register("pair-2.0", initial_workers=0, batch_size=3)
    server.manage("SetDefault", SetDefaultRequest(model_name="pair", model_version="2.0"))
    server.scale("pair", 2)
    assert server.terminate() == 0
    again = start(snapshots=True)
    again.wait_for_log("is ready (pid", 3)
    assert (again.predict("pair", {}), again.predict("pair", {}, version="1.0")) == (b"2.0", b"1.0")
    description = again.describe("pair", "2.0")
    assert (description["minWorkers"], len(description["workers"]), description["batchSize"]) == (2, 2, 3)
    assert again.terminate() == 0
    fresh = start("--ncs", snapshots=True)
    assert json.loads(fresh.manage("ListModels", ListModelsRequest()))["models"] == []


@pytest.mark.long
def test_bare_weights_take_json_csv_and_arrays_over_torchserves_apis(start, tmp_path):
    place = tmp_path / "net"
    place.mkdir()
    torch.export.save(torch.export.export(torch.nn.Identity(), (torch.zeros(1, 2),)), place / "net.pt2")
    server = start("--models", f"net={place}", default_workers_per_model=1)
    server.wait_for_log("is ready (pid")
    array = io.BytesIO()
    np.save(array, np.array([[1.0, 2.0]]))
    for data in (b"[[1.0, 2.0]]", b'{"instances": [[1.0, 2.0]]}', b"1.0,2.0", array.getvalue()):
        with grpc.insecure_channel(server.inference) as channel:
            sent = PredictionsRequest(model_name="net", input={"data": data})
            got = InferenceAPIsServiceStub(channel).Predictions(sent, timeout=GUARD_S).prediction
        assert json.loads(got) == [[1.0, 2.0]]
        for path in ("/predictions/net", "/invocations"):
            request = urllib.request.Request(server.http + path, data, {"Content-Type": "application/octet-stream"})
            with urllib.request.urlopen(request, timeout=GUARD_S) as answer:
                assert json.loads(answer.read()) == [[1.0, 2.0]]
    form = urllib.request.Request(server.http + "/predictions/net", b"[[1.0, 2.0]]")
    with urllib.request.urlopen(form, timeout=GUARD_S) as answer:  # as curl -d sends it
        assert json.loads(answer.read()) == [[1.0, 2.0]]
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(server.http + "/predictions/net", b"a=b"), timeout=GUARD_S)
    with refused.value:
        assert refused.value.code == 400


def test_a_directory_that_the_operator_names_is_served_by_the_configured_handler_and_after_a_restart(start, tmp_path):
    place = tmp_path / "elsewhere" / "net"
    place.mkdir(parents=True)
    (place / "weights.pth").write_bytes(b"of the handler")
    handler = tmp_path / "configured.py"
    handler.write_text(
        "import os\n\ndef handle(data, context):\n    folder = context.system_properties['model_dir']\n"
        "    return [open(os.path.join(folder, 'weights.pth')).read()] * len(data or [])\n"
    )
    server = start("--models", f"net={place}", snapshots=True, default_service_handler=str(handler))
    server.wait_for_log("is ready (pid")
    assert server.predict("net", {}) == b"of the handler"
    with pytest.raises(grpc.RpcError, match="does not match any allowed URL"):
        server.register(str(place), model_name="other")
    assert server.terminate() == 0
    again = start(snapshots=True, default_service_handler=str(handler))
    again.wait_for_log("is ready (pid")
    assert again.predict("net", {}) == b"of the handler"


def test_a_killed_server_remembers_too(start):
    server = start(snapshots=True)
    server.register("probe")
    server.wait_for_log("is ready (pid")
    server.scale("probe", 2)
    config = server.directory / "logs" / "config"
    until(
        lambda: any(
            'minWorkers\\"\\: 2' in path.read_text() or '"minWorkers"\\: 2' in path.read_text()
            for path in config.glob("*snapshot.cfg")
        )
    )
    workers = server.worker_pids("probe")
    server.process.kill()
    server.wait()
    until(lambda: not any(map(psutil.pid_exists, workers)), "no orphan outlives the server")
    again = start(snapshots=True)
    again.wait_for_log("is ready (pid", 2)
    assert again.predict("probe", {}) == b"ok"


def test_named_models_are_loaded_at_start_and_a_broken_one_does_not_stop_the_others(start):
    server = start("--models", "renamed=probe", "nowhere.mar", default_workers_per_model=1)
    server.wait_for_log("is ready (pid")
    server.wait_for_log("Failed to load model: nowhere.mar")
    assert server.predict("renamed", {}) == b"ok"
    assert server.describe("renamed")["loadedAtStartup"] is True


def test_a_killed_surplus_worker_gives_its_request_back(start, tmp_path):
    server = start()
    server.register("probe", initial_workers=2)
    begun, release = tmp_path / "begun", tmp_path / "release"
    with grpc.insecure_channel(server.inference) as channel:
        stub = InferenceAPIsServiceStub(channel)
        holds = [
            stub.Predictions.future(request_for({"op": "hold", "begun": f"{begun}{number}", "release": str(release)}))
            for number in range(2)
        ]
        for number in range(2):
            until((tmp_path / f"begun{number}").exists)
        server.scale("probe", 1, timeout=0)
        assert len(server.worker_pids("probe")) == 1
        release.touch()
        assert [hold.result(GUARD_S).prediction for hold in holds] == [b"held", b"held"]


@pytest.mark.long
async def test_stalled_readers_do_not_slow_a_healthy_stream(start):
    """64 clients that stop reading occupy neither the worker of a generator, nor the server: another one, whose pieces
    are more than any credit, is read to its end meanwhile."""
    server = start()
    server.register("generating")

    async def read_whole(stub: Any) -> None:
        request = request_for({"count": 300, "size": 1000}, "generating")
        pieces = [piece async for piece in stub.StreamPredictions(request, timeout=GUARD_S)]
        assert len(pieces) == 301

    #: Channels of one process share a connection, and with it HTTP/2's window, unless they are told not to.
    own_connection = [("grpc.use_local_subchannel_pool", 1)]
    async with contextlib.AsyncExitStack() as stack:

        async def client() -> Any:
            channel = grpc.aio.insecure_channel(server.inference, own_connection)
            return InferenceAPIsServiceStub(await stack.enter_async_context(channel))

        healthy = await client()
        await read_whole(healthy)
        stalled = []
        for _ in range(64):
            request = request_for({"count": 10_000_000, "size": 32_768}, "generating")
            stalled.append((await client()).StreamPredictions(request))
            await stalled[-1].read()
        for _ in range(3):
            await read_whole(healthy)
        for call in stalled:
            call.cancel()


#: The first worker that starts is the last to be ready.
SLOW_FIRST = """
import os
import time

def mark(path):
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

class Model:
    def initialize(self, context):
        first, second = (os.path.join(context.system_properties["model_dir"], one) for one in ("first", "second"))
        if not mark(first):
            mark(second)
            return
        while not os.path.exists(second):
            time.sleep(0.3)
        time.sleep(0.3)

    def handle(self, data, context):
        return ["ok"] * len(data)
"""


def test_a_synchronous_call_waits_for_the_workers_of_one_that_was_not(start, write):
    write("slow_first", SLOW_FIRST)
    server = start()
    server.register("slow_first", initial_workers=0)
    server.scale("slow_first", 1, synchronous=False)
    server.scale("slow_first", 2)
    assert [worker["status"] for worker in server.describe("slow_first")["workers"]] == ["READY", "READY"]
