"""A real chat model in each engine: OpenAI's and Anthropic's calls, streams, cancels, bad bodies, dead engines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import psutil
import pytest

import language_features
from smollm2 import MODEL, PACKAGES
from support import GUARD_S, until
from ts.protocol.open_inference_pb2 import InferParameter, ModelInferRequest
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

CLIENTS = Path(sys.prefix) / "clients"
SITE = Path("lib", f"python3.{sys.version_info.minor}", "site-packages")
pytestmark = pytest.mark.external


class Engine(NamedTuple):
    """An engine and what differs between engines. `packages`: folders of them; `model`: the model, in the engine's
    form; `text`: the name of a text in /tokenize and /detokenize; `victim`: the beginning of the name of the process
    that is killed, "" for the worker; `schemas`: answers can be made to obey a JSON schema; `places`: the texts that it
    computes side by side.
    """

    name: str
    packages: tuple[Path, ...]
    model: Path
    text: str
    config: str = ""
    victim: str = ""
    env: Mapping[str, str] = {}
    schemas: bool = True
    places: int = 4


ENGINES = (
    Engine("llama.cpp", (PACKAGES,), MODEL, "content"),
    Engine(
        "transformers",
        (CLIENTS / "transformers" / SITE, CLIENTS / "sentences" / SITE, PACKAGES),
        CLIENTS / "transformers" / "model",
        "prompt",
        schemas=False,
        places=32,
    ),
    Engine(
        "vllm",
        (CLIENTS / "vllm" / SITE,),
        CLIENTS / "vllm" / "model",  # made by `make test-vllm`
        "prompt",
        "startupTimeout: 600\nhandler: {engine: vllm, vllm_engine_config: {enforce_eager: true, max_num_seqs: 4}}\n",
        "VLLM::Engine",
        {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"},
    ),
)
#: transformers takes a second for 24 tokens of this model on a quiet machine of two cores, and minutes beside others.
MARKS = {"vllm": [pytest.mark.vllm], "transformers": [pytest.mark.slow]}
#: An engine's start, on a machine that is busy.
START_S = 600


def marked(engine: Engine) -> Any:
    there = all(one.is_dir() for one in engine.packages) and (engine.name != "vllm" or engine.model.exists())
    marks = [pytest.mark.skipif(not there, reason=f"the packages of {engine.name} are not installed (CONTRIBUTING.md)")]
    return pytest.param(engine, id=engine.name, marks=[*marks, *MARKS.get(engine.name, ())])


ASK = [{"role": "user", "content": "What is the capital of France? Answer with one sentence."}]
GREEDY = {"model": "chat", "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module", params=map(marked, ENGINES))
def engine(request: Any) -> Engine:
    found: Engine = request.param
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serving: Any, engine: Engine) -> Iterator[Any]:
    place = tmp_path_factory.mktemp("engine")
    paths = os.pathsep.join(map(str, engine.packages))
    if not engine.model.exists():  # the same weights in another form, which stays
        made = [sys.executable, str(Path(__file__).parent.parent / "hugging_face_model.py"), str(MODEL)]
        subprocess.run([*made, str(engine.model)], env={"PYTHONPATH": paths}, check=True, timeout=START_S)
    model = place / "store" / ("chat.gguf" if engine.model.is_file() else "chat")
    model.parent.mkdir()
    if engine.model.is_file():
        model.symlink_to(engine.model)
    else:
        model.mkdir()
        for file in engine.model.iterdir():
            (model / file.name).symlink_to(file)
        (model / "model-config.yaml").write_text(engine.config)
    settings = {
        "env": {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", **engine.env},
        "load_models": f"chat={model.name}",
        "default_response_timeout": "120",
        "metrics_mode": "prometheus",
    }
    with serving(place, place / "store", settings, []) as server:
        server.wait_for_log("of chat_1.0 is ready", timeout_s=START_S)
        yield server


@pytest.fixture
def url(server: Any) -> str:
    return str(server.http)


def said(url: str, **more: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={**GREEDY, "messages": ASK, **more})


def streamed(url: str, path: str = "v1/chat/completions", **more: Any) -> list[dict[str, Any]]:
    with httpx.stream("POST", f"{url}/{path}", json={**GREEDY, "messages": ASK, "stream": True, **more}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one["choices"])


def test_a_chat_whole_and_streamed_one_and_sixteen_at_a_time_say_the_same(url: str) -> None:
    whole = said(url).json()
    assert "Paris" in whole["choices"][0]["message"]["content"], whole
    assert whole["model"] == "chat" and whole["usage"]["total_tokens"] == sum(
        whole["usage"][f"{kind}_tokens"] for kind in ("prompt", "completion")
    )
    with ThreadPoolExecutor(16) as pool:
        texts = set(pool.map(lambda at: text_of(streamed(url)), range(16)))
    assert whole["choices"][0]["message"]["content"] in texts and all("Paris" in text for text in texts)
    prefixed = httpx.post(f"{url}/openai/v1/chat/completions", json={**GREEDY, "messages": ASK})
    assert "Paris" in prefixed.json()["choices"][0]["message"]["content"]


def test_what_the_engine_can_do_is_not_refused(url: str, engine: Engine) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
    schema |= {"required": ["city", "n"]}
    formed = said(
        url, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, max_tokens=60
    )
    if engine.schemas:
        assert json.loads(formed.json()["choices"][0]["message"]["content"]).keys() == {"city", "n"}
    else:
        error = formed.json()["error"]
        assert (formed.status_code, error["param"]) == (400, "response_format") and "llama.cpp" in error["message"]
    two = said(url, n=2, temperature=1, logprobs=True, top_logprobs=2).json()
    assert len(two["choices"]) == 2 and len(two["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    stopped = said(url, stop=["Paris"]).json()["choices"][0]
    assert stopped["finish_reason"] == "stop" and "Paris" not in stopped["message"]["content"]
    last = streamed(url, stream_options={"include_usage": True})[-1]
    assert last["usage"]["completion_tokens"] > 0
    completed = httpx.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "The sky is", "max_tokens": 4}).json()
    assert completed["choices"][0]["text"]


def test_the_table_of_the_documentation(url: str, engine: Engine) -> None:
    at = language_features.ENGINES.index(engine.name)
    found = {}
    for one in language_features.FEATURES:
        asked = {"model": "chat", **one.body}
        if asked.get("stream"):
            status, answer = 200, streamed(url, one.path, **asked)
        else:
            whole = httpx.post(f"{url}/{one.path}", json=asked, timeout=GUARD_S)
            status, answer = whole.status_code, whole.json()
        found[one.asked] = language_features.outcome(one, status, answer)
    assert found == {one.asked: one.outcomes[at] for one in language_features.FEATURES}


def test_other_calls_of_the_engine(url: str, engine: Engine) -> None:
    words = httpx.post(f"{url}/tokenize", json={"model": "chat", engine.text: "hello world"}).json()["tokens"]
    again = httpx.post(f"{url}/detokenize", json={"model": "chat", "tokens": words}).json()
    assert len(words) >= 2 and again[engine.text] == "hello world"
    message = {"model": "chat", "max_tokens": 16, "temperature": 0, "messages": ASK}
    claude = httpx.post(f"{url}/v1/messages", json=message).json()
    assert claude["type"] == "message" and claude["content"][0]["text"]
    counted = httpx.post(f"{url}/v1/messages/count_tokens", json=message).json()
    assert counted["input_tokens"] > 5
    reply = httpx.post(f"{url}/v1/responses", json={"model": "chat", "input": "Hi", "max_output_tokens": 5}).json()
    assert reply["object"] == "response"
    assert [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]] == ["chat"]


PROMPT = "The sky is"
#: Datatypes of the parameters of ModelInfer.
PARAMETERS = {"max_tokens": InferParameter(int64_param=12), "temperature": InferParameter(double_param=0.0)}


def infer_request(**more: Any) -> ModelInferRequest:
    request = ModelInferRequest(model_name="chat", parameters=PARAMETERS, **more)
    if not request.inputs:
        request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
            PROMPT.encode()
        )
    return request


def by_generate(server: Any) -> str:
    asked = {"text_input": PROMPT, "max_tokens": 12, "temperature": 0}
    return str(httpx.post(f"{server.http}/v2/models/chat/generate", json=asked).json()["text_output"])


def by_generate_stream(server: Any) -> str:
    asked = {"text_input": PROMPT, "max_tokens": 12, "temperature": 0}
    with httpx.stream("POST", f"{server.http}/v2/models/chat/generate_stream", json=asked) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1]["finish_reason"] == "length" and events[-1]["completion_tokens"] == 12
    assert len(events) > 6
    return "".join(event["text_output"] for event in events)


def by_v1(server: Any) -> str:
    def predictions(count: int) -> list[str]:
        asked = {"instances": [PROMPT] * count, "parameters": {"max_tokens": 12, "temperature": 0}}
        return list(httpx.post(f"{server.http}/v1/models/chat:predict", json=asked).json()["predictions"])

    first, second = predictions(2)  # computed together they may differ from one that is computed alone, in bfloat16
    assert first == second
    (alone,) = predictions(1)
    return alone


def by_infer(server: Any) -> str:
    inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [PROMPT]}]
    asked = {"inputs": inputs, "parameters": {"max_tokens": 12, "temperature": 0}}
    (output,) = httpx.post(f"{server.http}/v2/models/chat/infer", json=asked).json()["outputs"]
    return str(output["data"][0])


def by_model_infer(server: Any) -> str:
    with grpc.insecure_channel(server.inference) as channel:
        answer = GRPCInferenceServiceStub(channel).ModelInfer(infer_request(), timeout=GUARD_S)
    return bytes(answer.outputs[0].contents.bytes_contents[0]).decode()


def by_model_stream_infer(server: Any) -> str:
    """As Triton's clients do for its vLLM backend: raw tensors with the sampling parameters among them."""
    request = ModelInferRequest(model_name="chat")
    for name, text in (("text_input", PROMPT), ("sampling_parameters", '{"max_tokens": 12, "temperature": 0}')):
        request.inputs.add(name=name, datatype="BYTES", shape=[1])
        request.raw_input_contents.append(len(text).to_bytes(4, "little") + text.encode())
    request.inputs.add(name="stream", datatype="BOOL", shape=[1])
    request.raw_input_contents.append(b"\1")
    with grpc.insecure_channel(server.inference) as channel:
        answers = list(GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request]), timeout=GUARD_S))
    assert len(answers) > 6 and not any(answer.error_message for answer in answers)
    texts = [answer.infer_response.raw_output_contents for answer in answers]
    return b"".join(text[0][4:] for text in texts if text).decode()


def by_code_points(server: Any) -> str:
    """As MAX's clients do: numbers without a datatype."""
    request = ModelInferRequest(model_name="chat", parameters=PARAMETERS)
    request.inputs.add(name="text_input").contents.int_contents.extend(map(ord, PROMPT))
    with grpc.insecure_channel(server.inference) as channel:
        answer = GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=GUARD_S)
    return "".join(map(chr, answer.outputs[0].contents.int_contents))


def by_bare_bytes(server: Any) -> str:
    """As Dynamo's clients do: raw bytes without their length."""
    request = ModelInferRequest(model_name="chat", parameters=PARAMETERS, raw_input_contents=[PROMPT.encode()])
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    with grpc.insecure_channel(server.inference) as channel:
        answers = list(GRPCInferenceServiceStub(channel).ModelInferStream(request, timeout=GUARD_S))
    assert len(answers) > 6
    return b"".join(one for answer in answers for one in answer.raw_output_contents).decode()


def by_stream_predictions(server: Any) -> str:
    request = PredictionsRequest(model_name="chat")
    request.input["body"] = json.dumps({"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "stream": True}).encode()
    with grpc.insecure_channel(server.inference) as channel:
        stub = InferenceAPIsServiceStub(channel)
        data = b"".join(piece.prediction for piece in stub.StreamPredictions(request, timeout=GUARD_S))
    events = [json.loads(event[6:]) for event in data.split(b"\n\n") if event.startswith(b"data: {")]
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


def by_predictions(server: Any) -> str:
    asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    return str(httpx.post(f"{server.http}/predictions/chat", json=asked).json()["choices"][0]["text"])


DIALECTS = [
    *(by_generate, by_generate_stream, by_v1, by_infer, by_model_infer, by_model_stream_infer, by_code_points),
    *(by_bare_bytes, by_stream_predictions, by_predictions),
]


def test_every_api_gives_the_same_text(server: Any) -> None:
    asked = {"model": "chat", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    text = httpx.post(f"{server.http}/v1/completions", json=asked).json()["choices"][0]["text"]
    assert text
    assert {one.__name__: one(server) for one in DIALECTS} == {one.__name__: text for one in DIALECTS}


def test_a_text_is_answered_with_a_text(url: str) -> None:
    plain = httpx.post(f"{url}/predictions/chat", content=PROMPT, headers={"content-type": "text/plain"}, timeout=60)
    assert plain.status_code == 200 and plain.text.strip() and not plain.text.startswith("{")


def counted(server: Any) -> dict[str, float]:
    """The metrics with vLLM's names; each has the model's name as its only label besides the buckets."""
    text = httpx.get(f"http://127.0.0.1:{server.port('http_metrics')}/metrics", timeout=GUARD_S).text
    found = {}
    for name, labels, value in re.findall(r"^(vllm:\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        assert 'model_name="chat",' in labels, labels
        if "le=" not in labels:
            found[name.removeprefix("vllm:")] = float(value)
    return found


def test_tokens_and_times_are_counted_under_vllms_names(server: Any, url: str, engine: Engine) -> None:
    said(url)
    streamed(url)  # so that every metric is there
    asked = {**GREEDY, "messages": ASK, "stream": True, "max_tokens": 4000, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked, timeout=GUARD_S):
        until(lambda: counted(server).get("num_requests_running") == 1, "all requests before this one are told")
    until(lambda: counted(server)["num_requests_running"] == 0, "the engine is idle")
    before = counted(server)
    streamed(url)  # the same answer, without a count that OpenAI's clients would see
    usage = whole = said(url).json()["usage"]

    def more() -> dict[str, float]:
        return {name: value - before[name] for name, value in counted(server).items()}

    until(lambda: more()["e2e_request_latency_seconds_count"] == 2, more)
    given = {kind: usage[f"{kind}_tokens"] + whole[f"{kind}_tokens"] for kind in ("prompt", "completion")}
    until(lambda: more()["generation_tokens_total"] >= given["completion"], more)  # vLLM's are told once a second
    found = more()
    assert (found["prompt_tokens_total"], found["generation_tokens_total"]) == tuple(given.values())
    assert found["time_to_first_token_seconds_count"] == found["request_time_per_output_token_seconds_count"] == 1
    assert 0 < found["time_to_first_token_seconds_sum"] < found["e2e_request_latency_seconds_sum"]
    hits = found.get("prefix_cache_hits_total", 0)
    # vLLM's cache has blocks of 128 tokens on CPUs, which is more than these prompts have; transformers has none.
    assert found["prefix_cache_queries_total"] >= hits and (hits > 0) is (engine.name == "llama.cpp")
    assert found["num_requests_running"] == 0


def test_the_places_of_the_engine_and_what_waits_for_them(server: Any, url: str, engine: Engine) -> None:
    text = httpx.get(f"http://127.0.0.1:{server.port('http_metrics')}/metrics", timeout=GUARD_S).text
    assert re.findall(r"^ts_concurrency\{.* (\S+)$", text, re.MULTILINE) == [f"{engine.places}.0"]
    if engine.name == "vllm":  # as transformers: test_full_engines.py. llama.cpp doesn't tell
        asked = {**GREEDY, "messages": ASK, "stream": True, "max_tokens": 4000, "ignore_eos": True, "temperature": 1}
        asked["n"] = 2 * engine.places
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked, timeout=GUARD_S):
            until(lambda: counted(server).get("num_requests_waiting") == engine.places, lambda: counted(server))
        until(lambda: counted(server)["num_requests_waiting"] == 0, lambda: counted(server))


def test_a_stream_counts_while_it_runs(server: Any, url: str, client_command: Any, tmp_path: Path) -> None:
    """In the metrics, and in `torchserve top`."""
    before = counted(server).get("generation_tokens_total", 0)
    asked = {**GREEDY, "messages": ASK, "stream": True, "max_tokens": 4000, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked, timeout=GUARD_S) as answer:
        lines = answer.iter_lines()

        def counts() -> bool:
            next(lines)
            return counted(server).get("generation_tokens_total", 0) > before

        until(counts, "tokens count before the answer's end")
        until(lambda: counted(server)["num_requests_running"] == 1, "the engine is told that one runs")

        def speed() -> float:
            next(lines)
            head, row = client_command(tmp_path, "top", "--url", server.http_management).stdout.splitlines()[-2:]
            assert row.startswith("chat")
            return float(row[: head.index("TOKENS OUT/S") + len("TOKENS OUT/S")].split()[-1])

        until(lambda: speed() > 0, "top shows the tokens a second")
    until(lambda: counted(server)["num_requests_running"] == 0, "the engine is told that nobody waits")


def test_hidden_paths_of_the_engine(url: str) -> None:
    for path in ("slots", "props", "lora-adapters", "v1/../slots", "metrics", "sleep", "collective_rpc"):
        hidden = httpx.post(f"{url}/predictions/chat/1.0/{path}", json={})
        assert hidden.status_code == 404, (path, hidden.text)


def test_a_client_that_leaves_frees_the_engine(url: str) -> None:
    """More clients than the engine has places leave long answers; a short one still comes."""

    def leave(at: int) -> None:
        asked = {**GREEDY, "messages": ASK, "stream": True, "max_tokens": 4000, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked) as answer:
            next(answer.iter_lines())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(8)))
    whole = httpx.Client(timeout=0.5)
    for _ in range(2):
        with pytest.raises(httpx.ReadTimeout):
            whole.post(
                f"{url}/v1/chat/completions", json={**GREEDY, "messages": ASK, "max_tokens": 8000, "ignore_eos": True}
            )
    assert "Paris" in said(url).json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "chat", "messages": 5}, 400),
        ({"model": "chat"}, 400),
        ({"model": "none", "messages": ASK}, 404),
        ({"messages": ASK}, 400),
        ({"model": "chat", "messages": [{"role": "user", "content": "word " * 40_000}]}, 400),
        ({"model": "chat", "messages": ASK, "max_tokens": "many"}, 400),
        ({"model": "chat", "messages": [{"role": "user", "content": "x"}] * 100_000}, 400),
        ({"model": "chat", "messages": ASK, "tools": "none"}, 400),
    ],
)
def test_bad_bodies_are_refused_in_openais_form(url: str, body: dict[str, Any], status: int) -> None:
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == status and answer.json()["error"]["message"], answer.text


def test_unknown_paths_have_openais_form(url: str) -> None:
    for path in ("v1/nothing", "openai/v1/nothing"):
        answer = httpx.post(f"{url}/{path}", json={"model": "chat"})
        assert answer.status_code == 404 and answer.json()["error"]["message"], answer.text


def test_an_engine_that_dies_is_started_again(server: Any, engine: Engine) -> None:
    def ask(at: int) -> str:
        return streamed_to_its_end(server.http)

    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(ask, at) for at in range(8)]
        (pid,) = server.worker_pids("chat")
        (victim,) = (
            [one.pid for one in psutil.Process(pid).children() if one.name().startswith(engine.victim)]
            if engine.victim
            else [pid]
        )
        os.kill(victim, signal.SIGKILL)
        assert all(one.result(GUARD_S) for one in calls)
    until(lambda: pid not in server.worker_pids("chat"), "the worker goes on without an engine")
    server.wait_for_log("of chat_1.0 is ready", 2, START_S)
    assert "Paris" in said(server.http).json()["choices"][0]["message"]["content"]


def streamed_to_its_end(url: str) -> str:
    """What a stream ended with: an error event, a status, or all of its answer."""
    asked = {**GREEDY, "messages": ASK, "stream": True, "max_tokens": 100, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.status_code != 200 or "error" in lines[-1] or lines[-1] == "data: [DONE]", lines[-1]
    return lines[-1]
