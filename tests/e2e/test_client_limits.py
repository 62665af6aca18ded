"""The limits of clients, over every API: refusals with the time to come again, shares of a worker, a changed file."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.duration_pb2 import Duration

from support import GUARD_S, until
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from ts_frontend.protos.google_rpc_status_pb2 import Status
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

UPPER = """
def text(row):
    (value,) = row.values()
    return bytes(value).decode() if isinstance(value, (bytes, bytearray)) else str(value)

def handle(data, context):
    return None if data is None else [text(row).upper() for row in data]
"""
SUMS = """
import numpy as np

def handle(data, context):
    return None if data is None else [{"sum": np.array(row["x"], "f4").sum(keepdims=True)} for row in data]
"""
SUMS_CONFIG = """
openInference:
  inputs: [{name: x, datatype: FP32, shape: [-1]}]
  outputs: [{name: sum, datatype: FP32, shape: [1]}]
"""
#: Takes tensors, and requests of V1.
ROWS = """
import numpy as np

def answer(row):
    return {"sum": np.array(row["x"], "f4").sum(keepdims=True)} if "x" in row else "done"

def handle(data, context):
    return None if data is None else [answer(row) for row in data]
"""
#: Answers with as many tokens as were asked for, and says how many these were.
COUNTED = """
from ts.tensors.types import InferenceResponse, Tensor

def answer(row):
    words, wanted = bytes(row["data"]).decode().split(), row.request.parameters["max_tokens"]
    said = {"prompt_tokens": len(words), "completion_tokens": len(words[:wanted])}
    return InferenceResponse([Tensor.of("text", " ".join(words[:wanted]))], parameters=said)

def handle(data, context):
    return None if data is None else [answer(row) for row in data]
"""
#: Streams the words, and says how many tokens they were.
WORDS = """
from ts.tensors.types import InferenceResponse, Tensor

def handle(data, context):
    words = [] if data is None else bytes(data[0]["data"]).decode().split()
    for number, word in enumerate(words, 1):
        said = {"prompt_tokens": len(words), "completion_tokens": number}
        yield [InferenceResponse([Tensor.of("text", word + " ")], parameters=said)]
"""
#: A language model, whose engine has one answer of two tokens.
TALK = """
import json
from ts.language.handler import Head, LanguageModelHandler

class Talk(LanguageModelHandler):
    def initialize(self, context):
        pass

    async def ask(self, path, body):
        asked = json.loads(body)
        taken = len(asked["prompt"].split())
        usage = {"prompt_tokens": taken, "completion_tokens": 2, "total_tokens": taken + 2}
        if not asked.get("stream"):
            yield Head(200, "application/json")
            yield json.dumps({"choices": [{"text": "Hello world"}], "usage": usage}).encode()
            return
        yield Head(200, "text/event-stream")
        for text in ("Hello", " world"):
            yield b"data: %s\\n\\n" % json.dumps({"choices": [{"text": text}]}).encode()
        yield b"data: %s\\n\\ndata: [DONE]\\n\\n" % json.dumps({"choices": [], "usage": usage}).encode()
"""
#: Computes for as many ms as the request says, and writes down whose request it was. "hold" waits for the file `go`.
WORKS = """
import os, time

def handle(data, context):
    for row in data or ():
        ms, name = bytes(row["body"]).decode().split()
        while ms == "hold" and not os.path.exists(os.environ["ORDER"] + ".go"):
            time.sleep(0.005)
        ms = 0 if ms == "hold" else ms
        ends_s = time.perf_counter() + float(ms) / 1000
        while time.perf_counter() < ends_s:
            pass
        with open(os.environ["ORDER"], "a") as order:
            order.write(name + "\\n")
    return None if data is None else ["done"] * len(data)
"""
#: A client by its header may ask each model once; nobody comes again in time.
ONCE = """
identify: [header:x-client, address]
clients:
  fast: {who: header:fast, requests_per_second: 2, burst: 1}
  talker: {who: header:talker, requests_per_second: 1000, tokens_per_minute: 100}
  lone: {who: header:lone, concurrent: 1}
  streamer0: {who: header:streamer0, tokens_per_minute: 100}
  streamer1: {who: header:streamer1, tokens_per_minute: 100}
models:
  upper: {defaults: {requests_per_second: 0.01, burst: 1}, clients: {fast: {}, talker: {}, lone: {}}}
  sums: {defaults: {requests_per_second: 0.01, burst: 1}}
  ticket: {defaults: {requests_per_second: 0.01, burst: 1}}
  states: {defaults: {requests_per_second: 0.01, burst: 1}}
  rows: {defaults: {items_per_second: 8}}
  talk: {defaults: {tokens_per_minute: 100}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, server_of: Callable[..., Any]) -> Iterator[Any]:
    place = tmp_path_factory.mktemp("limits")
    (place / "limits.yaml").write_text(ONCE)
    models = {"upper": (UPPER, ""), "sums": (SUMS, SUMS_CONFIG), "counted": (COUNTED, ""), "works": (WORKS, "")}
    models |= {
        "rows": (ROWS, SUMS_CONFIG),
        "words": (WORDS, ""),
        "talk": (TALK, ""),
        "ticket": (UPPER, "useJobTicket: true\n"),
        "states": (UPPER, "sequenceBatching: true\n"),
    }
    env = {"ORDER": str(place / "order")}
    with server_of(models, env=env, limits_file=place / "limits.yaml", metrics_mode="prometheus") as server:
        server.place = place
        yield server


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http, timeout=GUARD_S) as client:
        yield client


TENSOR = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}
CHAT = {"model": "upper", "messages": [{"role": "user", "content": "a"}]}
#: The path, the body, and the message in the body of the refusal, by dialect.
DIALECTS: dict[str, tuple[str, Any, Callable[[Any], str]]] = {
    "torchserve": ("/predictions/upper", "a", lambda body: body["message"]),
    "v1": ("/v1/models/upper:predict", {"instances": ["a"]}, lambda body: body["message"]),
    "v2": ("/v2/models/sums/infer", TENSOR, lambda body: body["error"]),
    "completions": ("/v1/completions", {"model": "upper", "prompt": "a"}, lambda body: body["error"]["message"]),
    "chat": ("/v1/chat/completions", CHAT, lambda body: body["error"]["message"]),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_dialect_tells_the_limit_and_the_time_to_come_again(http: httpx.Client, dialect: str) -> None:
    path, content, message = DIALECTS[dialect]
    headers = {"x-client": dialect}
    more: Any = {"content": content} if isinstance(content, str) else {"json": content}
    first = http.post(path, headers=headers, **more)
    assert first.status_code == 200, first.text
    assert first.headers["x-ratelimit-limit-requests"] == "1"
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    assert re.fullmatch(r"1m\d+s", first.headers["x-ratelimit-reset-requests"])
    refused = http.post(path, headers=headers, **more)
    assert refused.status_code == 429, refused.text
    said = message(refused.json())
    assert f"Client header:{dialect} is over its limit of 0.01 requests a second (requests_per_second)" in said
    seconds = float(re.search(r"again in (\S+) s", said)[1])  # type: ignore[index]
    assert 0 < seconds <= 100 and 0 <= int(refused.headers["retry-after"]) - seconds <= 1.5
    assert 0 < int(refused.headers["retry-after-ms"]) <= 100_001
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    other = http.post(path, headers={"x-client": f"{dialect}2"}, **more)
    assert other.status_code == 200, "each client has its own limit"


def test_openais_error_is_a_rate_limit(http: httpx.Client) -> None:
    asked = [http.post("/v1/chat/completions", json=CHAT, headers={"x-client": "typed"}) for _ in range(2)]
    error = asked[1].json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")


def predictions(channel: grpc.Channel, metadata: list[tuple[str, str]]) -> Any:
    request = PredictionsRequest(model_name="upper", input={"data": b"a"})
    return InferenceAPIsServiceStub(channel).Predictions.with_call(request, metadata=metadata, timeout=GUARD_S)


def infer(channel: grpc.Channel, metadata: list[tuple[str, str]]) -> Any:
    request = pb.ModelInferRequest(model_name="sums")
    request.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(1)
    return GRPCInferenceServiceStub(channel).ModelInfer.with_call(request, metadata=metadata, timeout=GUARD_S)


def streamed(channel: grpc.Channel, metadata: list[tuple[str, str]]) -> Any:
    request = PredictionsRequest(model_name="upper", input={"data": b"a"})
    call = InferenceAPIsServiceStub(channel).StreamPredictions(request, metadata=metadata, timeout=GUARD_S)
    return list(call), call


@pytest.mark.parametrize("call", [predictions, infer, streamed])
def test_grpc_tells_when_to_come_again_in_its_status(server: Any, call: Callable[..., Any]) -> None:
    metadata = [("x-client", call.__name__)]
    with grpc.insecure_channel(server.inference) as channel:
        _, answered = call(channel, metadata)
        if call is not streamed:
            assert dict(answered.initial_metadata())["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(grpc.RpcError) as refused:
            call(channel, metadata)
    error: Any = refused.value
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "requests_per_second" in error.details()
    trailers = dict(error.trailing_metadata())
    assert trailers["x-ratelimit-limit-requests"] == "1"
    (detail,) = Status.FromString(trailers["grpc-status-details-bin"]).details
    assert detail.type_url.endswith("google.rpc.RetryInfo")
    delay = Duration.FromString(detail.value[2:])  # the field's number and length are before it
    assert 0 < delay.ToTimedelta().total_seconds() <= 100


def rows(count: int) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="rows")
    request.inputs.add(name="x", datatype="FP32", shape=[count]).contents.fp32_contents.extend([1] * count)
    return request


def test_items_are_limited_over_http_and_grpc(server: Any, http: httpx.Client) -> None:
    """4000 items are owed for minutes; requests of a single item would be within the limit."""
    tensor = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [4000], "data": [1] * 4000}]}
    asked = {
        "http": lambda: http.post("/v2/models/rows/infer", json=tensor, headers={"x-client": "http"}),
        "v1": lambda: http.post("/v1/models/rows:predict", json={"instances": [1] * 4000}, headers={"x-client": "v1"}),
    }
    for client, ask in asked.items():
        first = ask()
        assert first.status_code == 200, first.text
        assert first.headers["x-ratelimit-limit-items"] == "8" and first.headers["x-ratelimit-remaining-items"] == "0"
        refused = ask()
        assert refused.status_code == 429
        said = f"Client header:{client} is over its limit of 8 items a second (items_per_second) for model rows"
        assert said in refused.text, refused.text
    with grpc.insecure_channel(server.inference) as channel:
        infer = GRPCInferenceServiceStub(channel).ModelInfer
        metadata = [("x-client", "items")]
        infer(rows(4000), metadata=metadata, timeout=GUARD_S)
        with pytest.raises(grpc.RpcError) as error:
            infer(rows(1), metadata=metadata, timeout=GUARD_S)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "(items_per_second) for model rows" in error.value.details()
    assert server.metric("ts_client_refused_requests_total", client="other", limit="items") >= 3


def test_each_request_of_a_stream_counts(server: Any) -> None:
    request = pb.ModelInferRequest(model_name="sums")
    request.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(1)
    metadata = [("x-client", "streams"), ("oip-stream-dialect", "triton")]
    with grpc.insecure_channel(server.inference) as channel:
        stub = GRPCInferenceServiceStub(channel)
        answers = list(stub.ModelStreamInfer(iter([request] * 3), metadata=metadata, timeout=GUARD_S))
    assert [bool(one.error_message) for one in answers] == [False, True, True]
    assert "(requests_per_second) for model sums" in answers[1].error_message


@pytest.mark.parametrize("model", ["ticket", "states"])
def test_models_with_queues_of_their_own_have_limits_too(http: httpx.Client, model: str) -> None:
    headers = {"x-client": "own", "ts_request_sequence_id": "one"}
    first, second = (http.post(f"/predictions/{model}", content="a", headers=headers) for _ in range(2))
    assert (first.status_code, first.text) == (200, "A")
    assert second.status_code == 429


def test_a_client_that_waits_as_long_as_it_was_told_is_served(http: httpx.Client) -> None:
    headers = {"x-client": "fast"}
    served = refused = 0
    while served < 3:
        answer = http.post("/predictions/works", content="0 fast", headers=headers)
        if answer.status_code == 200:
            served += 1
        else:
            refused += 1
            assert answer.status_code == 429 and refused < 20
            time.sleep(int(answer.headers["retry-after-ms"]) / 1000)
    assert refused


@pytest.mark.external
def test_openais_client_retries_and_succeeds(
    server: Any, client_python: Callable[[str], Path], client_env: dict[str, str]
) -> None:
    program = Path(__file__).parent / "clients" / "programs" / "openai_limited.py"
    done = subprocess.run(
        [str(client_python("openai")), str(program), server.http],
        env=client_env,
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    assert done.stdout.strip() == "openai ok", done.stderr


def test_tokens_are_reserved_by_the_most_that_may_come_and_settled_by_those_that_came(http: httpx.Client) -> None:
    def ask(most: int, client: str = "talker") -> httpx.Response:
        body = {"model": "counted", "prompt": "a b c", "max_tokens": most}
        return http.post("/v1/completions", json=body, headers={"x-client": client})

    first = ask(80)
    assert first.json()["usage"]["total_tokens"] == 6
    assert first.headers["x-ratelimit-limit-tokens"] == "100"
    assert int(first.headers["x-ratelimit-remaining-tokens"]) < 20, "those that may come are taken at the beginning"
    second = ask(80)
    assert second.status_code == 200, "it has got back those that didn't come"
    refusals = [one for one in (ask(90) for _ in range(3)) if one.status_code == 429]
    assert "100 tokens a minute (tokens_per_minute)" in refusals[0].json()["error"]["message"]
    assert ask(90, "quiet").status_code == 200


@pytest.mark.parametrize("usage", [True, False])
def test_tokens_of_a_stream_are_settled_at_its_end(http: httpx.Client, usage: bool) -> None:
    headers = {"x-client": f"streamer{usage:d}"}
    body: dict[str, Any] = {"model": "words", "prompt": "a b c", "max_tokens": 60, "stream": True}
    if usage:
        body["stream_options"] = {"include_usage": True}
    left = []
    for _ in range(3):  # 60 of 100 are reserved each time
        answer = http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n"), answer.text
        left.append(int(answer.headers["x-ratelimit-remaining-tokens"]))
    used = [before - after for before, after in zip(left, left[1:], strict=False)]
    assert all(0 < count < 20 for count in used), left


def infer_talk(channel: grpc.Channel, most: int, metadata: list[tuple[str, str]]) -> None:
    answer = GRPCInferenceServiceStub(channel).ModelInfer(talk_request(most), metadata=metadata, timeout=GUARD_S)
    assert answer.raw_output_contents[0].endswith(b"Hello world")


def stream_talk(channel: grpc.Channel, most: int, metadata: list[tuple[str, str]]) -> None:
    stub = GRPCInferenceServiceStub(channel)
    answers = list(stub.ModelStreamInfer(iter([talk_request(most)]), metadata=metadata, timeout=GUARD_S))
    if answers[0].error_message:
        raise ValueError(answers[0].error_message)
    assert len(answers) == 3


def talk_request(most: int) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="talk", raw_input_contents=[b"\x03\0\0\0a b"])
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.parameters["max_tokens"].int64_param = most
    return request


def talk_body(most: int, *, stream: bool) -> PredictionsRequest:
    body = {"prompt": "a b", "max_tokens": most, "stream": stream}
    return PredictionsRequest(model_name="talk", input={"body": json.dumps(body).encode()})


def predict_talk(channel: grpc.Channel, most: int, metadata: list[tuple[str, str]]) -> None:
    stub = InferenceAPIsServiceStub(channel)
    answer = stub.Predictions(talk_body(most, stream=False), metadata=metadata, timeout=GUARD_S)
    assert b"Hello world" in answer.prediction


def stream_predict_talk(channel: grpc.Channel, most: int, metadata: list[tuple[str, str]]) -> None:
    stub = InferenceAPIsServiceStub(channel)
    answers = list(stub.StreamPredictions(talk_body(most, stream=True), metadata=metadata, timeout=GUARD_S))
    assert b"".join(one.prediction for one in answers).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("ask", [infer_talk, stream_talk, predict_talk, stream_predict_talk])
def test_tokens_count_over_grpc(server: Any, ask: Callable[..., None]) -> None:
    """About 80 of 100 are reserved each time, and 4 were used."""
    server.wait_for_log("of talk_1.0 is ready")
    metadata = [("x-client", ask.__name__), ("oip-stream-dialect", "triton")]
    with grpc.insecure_channel(server.inference) as channel:
        for _ in range(3):
            ask(channel, 55, metadata)
        with pytest.raises((grpc.RpcError, ValueError), match="tokens_per_minute"):
            ask(channel, 500, metadata)


def test_a_client_has_so_many_requests_at_once(server: Any, http: httpx.Client) -> None:
    def ask(ms: int) -> httpx.Response:
        return http.post("/predictions/works", content=f"{ms} lone", headers={"x-client": "lone"})

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, [300] * 4))
    assert sorted(one.status_code for one in answers)[:1] == [200]
    refused = [one for one in answers if one.status_code == 429]
    assert refused and "its limit is 1 (concurrent)" in refused[0].json()["message"]
    assert ask(0).status_code == 200, "the place is free again"


def asked_by(server: Any, client: str, ms: float | str, count: int) -> None:
    with httpx.Client(base_url=server.http, timeout=GUARD_S) as http:
        for _ in range(count):
            content = f"{ms} {client}"
            answer = http.post("/predictions/works", content=content, headers={"x-client": client})
            assert answer.status_code == 200, answer.text


def test_a_greedy_client_delays_others_by_its_turn_alone(server: Any) -> None:
    order = server.place / "order"
    order.write_text("")
    small = [f"small{number}" for number in range(9)]
    with ThreadPoolExecutor(80) as pool:
        asked = [pool.submit(asked_by, server, "before", "hold", 1)]
        until(lambda: server.metric("ts_running_requests", model_name="works") == 1)
        for number, name in ((60, ["greedy"] * 60), (69, small)):
            asked += [pool.submit(asked_by, server, one, 5, 1) for one in name]
            until(lambda most=number: server.metric("ts_queued_requests", model_name="works") == most)  # type: ignore[misc]
        (server.place / "order.go").touch()
        for one in asked:
            one.result(GUARD_S)
    names = order.read_text().split()
    assert names.pop(0) == "before" and len(names) == 69
    assert max(map(names.index, small)) < 2 * len(small), "it gets one turn in each round of the ten clients"


def test_a_broken_file_keeps_the_limits(server: Any, http: httpx.Client) -> None:
    limits = server.place / "limits.yaml"
    good = limits.read_text()
    limits.write_text("defaults: {requests_per_secnd: 1}\n")
    server.wait_for_log("did you mean requests_per_second?")
    headers = {"x-client": "kept"}
    assert [http.post("/predictions/upper", content="a", headers=headers).status_code for _ in range(2)] == [200, 429]
    count = server.log.count("The limits were read again")
    limits.write_text(good.replace("upper: {defaults: {requests_per_second: 0.01, burst: 1}", "upper: {defaults: {}"))
    server.wait_for_log("The limits were read again", count + 1)
    assert http.post("/predictions/upper", content="a", headers=headers).status_code == 200


def test_metrics_have_the_names_of_the_file_alone(server: Any, http: httpx.Client) -> None:
    for name in ("fast", "somebody"):
        http.post("/predictions/works", content="0 x", headers={"x-client": name})
    assert server.metric("ts_client_requests_total", client="fast") > 0
    assert server.metric("ts_client_requests_total", client="other") > 0
    assert not server.metric("ts_client_requests_total", client="header:somebody")
    assert server.metric("ts_client_refused_requests_total", client="other", limit="requests") > 0
    assert server.metric("ts_refused_requests_total", model_name="upper", reason="limited") > 0


def test_top_shows_clients(server: Any, http: httpx.Client, client_command: Callable[..., Any]) -> None:
    http.post("/v1/chat/completions", json=CHAT, headers={"x-client": "shown"})
    printed = client_command(server.place, "top", "--once", "--clients", "--url", server.http_management).stdout
    assert "CLIENT" in printed and "header:shown" in printed, printed


def test_a_server_with_a_wrong_file_does_not_start(tmp_path: Path, torchserve: Callable[..., Any]) -> None:
    file = tmp_path / "limits.yaml"
    file.write_text(json.dumps({"clients": {"a": {}}}))
    words = ("--start", "--foreground", "--model-store", str(tmp_path), "--limits-file", str(file))
    assert "clients.a.who must name the client" in str(torchserve(*words, code=1))
