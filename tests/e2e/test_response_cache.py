"""The cache of answers over every protocol: one entry for one question, one run for many requests, and its end."""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from support import GUARD_S, until
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

#: Answers with the number of its call, so that an answer that was kept has the same number again. The calls are in
#: the file `calls`, a line each, so that they outlive a worker. "wait" waits for the file `go`.
HANDLER = """
import os, time
from pathlib import Path
from ts.utils.util import PredictionException

PLACE = Path(os.environ["CACHE_TEST_DIR"])

def answered(row):
    text = row.get("data") or row.get("body") or b""
    text = text if isinstance(text, str) else bytes(text).decode()
    with (PLACE / "calls").open("a") as calls:
        calls.write(text + "\\n")
    while text.startswith("wait") and not (PLACE / "go").exists():
        time.sleep(0.001)
    if text.startswith("fail"):
        raise PredictionException("not today", 409)
    count = len((PLACE / "calls").read_text().splitlines())
    return "x" * 50_000 if text.startswith("large") else f"{count} {text}"

def handle(data, context):
    return None if data is None else [answered(row) for row in data]
"""
TENSORS = """
import numpy as np

count = 0

def handle(data, context):
    global count
    if data is None:
        return None
    count += 1
    return [{"y": np.array(row["x"], "f4") * 2, "n": np.array([count], "i8")} for row in data]
"""
TENSORS_CONFIG = """
cache: true
openInference:
  inputs: [{name: x, datatype: FP32, shape: [-1]}]
  outputs: [{name: y, datatype: FP32, shape: [-1]}, {name: n, datatype: INT64, shape: [1]}]
"""
STREAMS = """
def handle(data, context):
    for word in () if data is None else ("a", "b"):
        yield [word] * len(data)
"""
MODELS = {
    "plain": (HANDLER, "cache: {size: 40kB, key: X-Tenant}\n"),
    "short": (HANDLER, "cache: {ttl: 0.05}\n"),
    "tensors": (TENSORS, TENSORS_CONFIG),
    "streams": (STREAMS, "cache: true\n"),
    "sums": (HANDLER, "cache: true\nsequenceBatching: true\n"),
}


class Asked:
    """A server, its clients, and the calls of its handlers."""

    def __init__(self, server: Any, place: Path) -> None:
        self.server, self.place = server, place
        self.http = httpx.Client(base_url=server.http)
        self.channel = grpc.insecure_channel(server.inference)
        self.native, self.oip = InferenceAPIsServiceStub(self.channel), GRPCInferenceServiceStub(self.channel)

    def close(self) -> None:
        (self.place / "go").touch()
        self.http.close()
        self.channel.close()

    def calls(self, text: str) -> int:
        file = self.place / "calls"
        return file.read_text().splitlines().count(text) if file.exists() else 0

    def post(self, text: str, model: str = "plain", **headers: str) -> tuple[str, str]:
        """The answer, and whether it was kept."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        found = self.http.post(f"/predictions/{model}", content=text.encode(), headers=sent, timeout=GUARD_S)
        assert found.status_code == 200, found.text
        return found.text, found.headers.get("x-cache", "")

    def predict(self, text: str, name: str = "body", **metadata: str) -> tuple[str, str]:
        request = PredictionsRequest(model_name="plain", input={name: text.encode()})
        sent = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        found, call = self.native.Predictions.with_call(request, metadata=sent, timeout=GUARD_S)
        return found.prediction.decode(), dict(call.trailing_metadata()).get("x-cache", "")

    def waits_for(self, count: int, model: str = "plain") -> None:
        """Returns when so many requests are in progress, beside their run."""
        until(lambda: self.metric("ts_running_requests", model) == count + 1)

    def metric(self, name: str, model: str, label: str = "") -> float:
        text = httpx.get(f"http://127.0.0.1:{self.server.port('http_metrics')}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(f"{name}{{") and f'"{model}"' in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if label in line)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, server_of: Callable[..., Any]) -> Iterator[Asked]:
    place = tmp_path_factory.mktemp("place")
    with server_of(MODELS, env={"CACHE_TEST_DIR": str(place)}, metrics_mode="prometheus") as server:
        found = Asked(server, place)
        try:
            yield found
        finally:
            found.close()


def test_torchserves_apis_share_an_entry(asked: Asked) -> None:
    first = asked.post("shared")
    assert first == (first[0], "MISS") and first[0].endswith(" shared")
    kept = (first[0], "HIT")
    assert asked.post("shared") == asked.post("shared", content_type="application/octet-stream") == kept
    assert asked.predict("shared") == asked.predict("shared", authorization="nobody") == kept
    assert asked.post("shared", x_request_id="7", traceparent="00-1-1-00") == kept
    form = asked.http.post("/predictions/plain", files={"data": b"form"}, timeout=GUARD_S)
    again = asked.http.post("/predictions/plain", files={"data": b"form"}, timeout=GUARD_S)
    assert asked.predict("form", name="data") == (form.text, "HIT") == (again.text, again.headers["x-cache"])
    assert asked.calls("shared") == asked.calls("form") == 1


def raw(values: Sequence[float], request_id: str = "") -> pb.ModelInferRequest:
    request = typed(values, request_id)
    request.inputs[0].ClearField("contents")
    request.raw_input_contents.append(struct.pack(f"<{len(values)}f", *values))
    return request


def typed(values: Sequence[float], request_id: str = "") -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="tensors", id=request_id)
    request.inputs.add(name="x", datatype="FP32", shape=[len(values)]).contents.fp32_contents.extend(values)
    return request


def body(values: Sequence[float], **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [len(values)], "data": list(values)}], **more}


def binary(values: Sequence[float]) -> tuple[bytes, dict[str, str]]:
    data = struct.pack(f"<{len(values)}f", *values)
    message = body(values, parameters={"binary_data_output": True})
    message["inputs"][0] |= {"parameters": {"binary_data_size": len(data)}}
    del message["inputs"][0]["data"]
    head = json.dumps(message).encode()
    return head + data, {"inference-header-content-length": str(len(head))}


def test_tensors_in_all_dialects_share_an_entry(asked: Asked) -> None:
    values = [0.5, 0.1]
    words = []

    def infer(request: pb.ModelInferRequest) -> Any:
        found, call = asked.oip.ModelInfer.with_call(request, timeout=GUARD_S)
        words.append(dict(call.trailing_metadata())["x-cache"])
        return found

    def post(**more: Any) -> httpx.Response:
        found = asked.http.post("/v2/models/tensors/infer", timeout=GUARD_S, **more)
        assert found.status_code == 200, found.text
        words.append(found.headers["x-cache"])
        return found

    first = post(json=body(values, id="one")).json()
    over_grpc = infer(raw(values, "two"))
    as_typed = infer(typed(values))
    again = post(json=body(values)).json()
    content, headers = binary(values)
    mixed = post(content=content, headers=headers)
    assert words == ["MISS", "HIT", "HIT", "HIT", "HIT"]
    y, n = first["outputs"]
    assert y["data"] == [1.0, 0.20000000298023224] and first["id"] == "one" and "id" not in again
    assert again["outputs"] == first["outputs"]
    assert list(over_grpc.raw_output_contents) == [struct.pack("<2f", *y["data"]), struct.pack("<q", *n["data"])]
    assert over_grpc.id == "two" and (over_grpc.model_name, over_grpc.model_version) == ("tensors", "1.0")
    assert list(as_typed.outputs[0].contents.fp32_contents) == y["data"] and not as_typed.raw_output_contents
    size = int(mixed.headers["inference-header-content-length"])
    assert mixed.content[size:] == b"".join(over_grpc.raw_output_contents)
    own = {"cache-control": "no-store"}  # the worker's own
    plain = asked.http.post("/v2/models/tensors/infer", json=body(values), headers=own, timeout=GUARD_S)
    assert plain.json()["outputs"][0] == y and list(plain.json()) == list(again)
    apart = asked.http.post("/v2/models/tensors/infer", content=content, headers={**headers, **own}, timeout=GUARD_S)
    assert apart.headers["content-type"] == mixed.headers["content-type"]
    assert json.loads(apart.content[:size]) == json.loads(mixed.content[:size])


@contextmanager
def waiting(asked: Asked, text: str, *timeouts_s: float) -> Iterator[list[Any]]:
    """Requests that wait for one run, each until its own time."""
    (asked.place / "go").unlink(missing_ok=True)
    request = PredictionsRequest(model_name="plain", input={"body": text.encode()})
    calls = [asked.native.Predictions.future(request, timeout=timeout_s) for timeout_s in timeouts_s]
    asked.waits_for(len(timeouts_s))
    try:
        yield calls
    finally:
        (asked.place / "go").touch()


def test_who_leaves_takes_nothing_from_the_others(asked: Asked) -> None:
    with waiting(asked, "wait, some leave", GUARD_S, GUARD_S, GUARD_S) as calls:
        calls[0].cancel()
        asked.waits_for(2)
        (asked.place / "go").touch()
        answers = {call.result(GUARD_S).prediction for call in calls[1:]}
    assert len(answers) == 1 and asked.calls("wait, some leave") == 1


def test_a_dead_worker_fails_all_that_wait_and_the_next_runs(asked: Asked) -> None:
    with waiting(asked, "wait for the dead", GUARD_S, GUARD_S) as calls:
        os.kill(asked.server.worker_pids("plain")[0], signal.SIGKILL)
        assert {call.exception(GUARD_S).code() for call in calls} == {grpc.StatusCode.UNAVAILABLE}
    assert asked.post("wait for the dead")[1] == "MISS"


def test_a_registered_version_never_answers_from_an_older_one(asked: Asked) -> None:
    first = asked.post("again", model="short")
    asked.server.unregister("short")
    asked.server.register("short")
    assert asked.post("again", model="short") != (first[0], "HIT")
    assert asked.server.describe("short")["cache"]["entries"] == 1


def test_models_that_cant_have_one_say_so(asked: Asked) -> None:
    assert "sequenceBatching" in asked.server.describe("sums")["warnings"][0]
    assert "cache" not in asked.server.describe("sums")
    assert any("its handler streams" in one for one in asked.server.describe("streams")["warnings"])
    assert asked.server.stream("streams", b"x") == [b"a", b"b"]


def test_the_counts(asked: Asked) -> None:
    before = statistics(asked)
    for _ in range(3):
        asked.oip.ModelInfer(raw([7.0]), timeout=GUARD_S)
    now = statistics(asked)
    stats = now.inference_stats
    assert stats.cache_hit.count - before.inference_stats.cache_hit.count == 2 and stats.cache_hit.ns > 0
    assert stats.cache_miss.count - before.inference_stats.cache_miss.count == 1
    assert stats.success.count - before.inference_stats.success.count == 3
    assert now.inference_count - before.inference_count == 1 == now.execution_count - before.execution_count
    assert stats.compute_infer.count == now.inference_count
    over_http = asked.http.get("/v2/models/tensors/stats").json()["model_stats"][0]["inference_stats"]
    assert int(over_http["cache_hit"]["count"]) == stats.cache_hit.count
    assert asked.metric("nv_cache_num_hits_per_model", "tensors") == stats.cache_hit.count
    assert asked.metric("nv_cache_num_misses_per_model", "tensors") == stats.cache_miss.count
    assert asked.metric("ts_cache_requests_total", "tensors", 'result="hit"') == stats.cache_hit.count
    assert asked.metric("nv_inference_count", "tensors") == now.inference_count


def statistics(asked: Asked) -> Any:
    return asked.oip.ModelStatistics(pb.ModelStatisticsRequest(name="tensors"), timeout=GUARD_S).model_stats[0]
