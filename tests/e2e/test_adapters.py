"""Adapters (LoRA) of transformers and vLLM, loaded and unloaded while they run. Texts are compared with `generate` of
peft."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest

from support import GUARD_S, ran, until, with_packages
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

PROGRAMS = Path(__file__).parent.parent / "data" / "programs"
pytestmark = [pytest.mark.external, pytest.mark.slow]  # the calls themselves: test_adapter_calls.py
PROMPT, TOKENS = "The sky is", 40
GREEDY = {"temperature": 0, "max_tokens": TOKENS}
#: The start of vLLM's engine, on a machine that is busy.
START_S = 600
#: The characters of a text that vLLM's engine computes as peft does.
SAME = 20


class Models(NamedTuple):
    """Folders of models and adapters; `expected`: what `generate` makes of PROMPT; `env`: with the packages."""

    folder: Path
    expected: dict[str, str]
    env: dict[str, str]


@pytest.fixture(scope="module")
def models(client_python: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    env, asked = with_packages(client_python("transformers"), client_python("peft")), (PROMPT, str(TOKENS))
    found = ran(PROGRAMS / "small_models.py", env, str(folder), *asked)
    found |= ran(PROGRAMS / "small_adapters.py", env, str(folder / "llama"), str(folder / "loras"), *asked)
    shutil.copytree(folder / "llama", folder / "tuned")
    shutil.copytree(folder / "loras" / "short", folder / "tuned" / "short")
    (folder / "tuned" / "model-config.yaml").write_text("handler: {adapters: {brief: short}}\n")
    return Models(folder, found, env)


@pytest.fixture(scope="module")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory, serving: Any) -> Iterator[Any]:
    named = {"chat": "llama", "tuned": "tuned", "reranker": "reranker"}
    loads = ",".join(f"{name}={folder}" for name, folder in named.items())
    settings = {"env": models.env, "load_models": loads}
    with serving(tmp_path_factory.mktemp("served"), models.folder, settings, []) as server:
        for name in named:
            server.wait_for_log(f"of {name}_1.0 is ready")
        yield server


@pytest.fixture
def unloaded(server: Any) -> Iterator[None]:
    """The adapters of `chat` are unloaded after the test."""
    yield
    for one in listed(server):
        assert change(server, "DELETE", f"chat/adapters/{one}").status_code == 200


def change(server: Any, method: str, path: str, **body: str) -> httpx.Response:
    return httpx.request(method, f"{server.http_management}/models/{path}", json=body or None, timeout=GUARD_S)


def load(server: Any, name: str, src: str | None = None, status: int = 200) -> str:
    answer = change(server, "POST", "chat/adapters", name=name, src=src or f"loras/{name}")
    assert answer.status_code == status, answer.text
    return answer.text


def listed(server: Any, model: str = "chat") -> dict[str, str]:
    found = change(server, "GET", f"{model}/adapters").json()["adapters"]
    return {one["name"]: one["src"] for one in found}


def completed(server: Any, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, **GREEDY, **more}
    return httpx.post(f"{server.http}/v1/completions", json=body, timeout=GUARD_S)


def text(server: Any, model: str) -> str:
    answer = completed(server, model)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_the_example_says_both_texts(
    server: Any, models: Models, root: Path, client_python: Callable[[str], Path]
) -> None:
    program = root / "examples" / "language_models" / "adapters.py"
    env = {**os.environ, "OPENAI_BASE_URL": f"{server.http}/v1", "MANAGEMENT_URL": server.http_management}
    words = [str(client_python("kserve")), str(program), "chat", "short", "loras/short", PROMPT]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=GUARD_S)
    assert done.returncode == 0, done.stderr
    (base, with_it), chosen = done.stdout.splitlines(), {"max_tokens": 24}
    assert base == f"chat: {completed(server, 'chat', **chosen).json()['choices'][0]['text']!r}"
    assert with_it.startswith("short: ") and with_it.removeprefix("short: ") != base.removeprefix("chat: ")
    assert not listed(server)


@pytest.mark.usefixtures("unloaded")
def test_texts_with_and_without_adapters_side_by_side_are_those_of_peft(server: Any, models: Models) -> None:
    expected = models.expected
    assert text(server, "chat") == expected["llama"]
    for name in ("formal", "short"):
        assert expected[name] != expected["llama"] and completed(server, name).status_code == 404
        load(server, name)
        assert text(server, name) == text(server, f"chat:{name}") == expected[name]

    def ask(at: int) -> bool:
        name = ("formal", "chat", "short")[at % 3]
        if at % 4 == 0:  # others come and go beside it
            completed(server, "chat:short", prompt="word " * at, temperature=1, max_tokens=3 * at + 1)
        return text(server, name) == expected["llama" if name == "chat" else name]

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(ask, range(36)))
    header = {"X-Amzn-SageMaker-Adapter-Identifier": "formal"}
    body = {"prompt": PROMPT, **GREEDY}
    found = httpx.post(f"{server.http}/predictions/chat", json=body, headers=header, timeout=GUARD_S)
    assert found.json()["choices"][0]["text"] == expected["formal"]
    tensors = {"text_input": PROMPT, "model": "formal", **GREEDY}
    generated = httpx.post(f"{server.http}/v2/models/chat/generate", json=tensors, timeout=GUARD_S)
    assert generated.json()["text_output"] == expected["formal"]


@pytest.mark.usefixtures("unloaded")
def test_loading_and_unloading(server: Any, models: Models) -> None:
    load(server, "formal")
    load(server, "formal")  # the same again
    source = str(models.folder.resolve() / "loras" / "formal")
    assert listed(server) == {"formal": source}
    assert "is loaded from" in load(server, "formal", "loras/short", 409)
    names = {one["id"] for one in httpx.get(f"{server.http}/v1/models").json()["data"]}
    assert {"chat", "formal", "chat:formal"} <= names
    body = {"model": "formal", "prompt": PROMPT, **GREEDY, "stream": True}
    with httpx.stream("POST", f"{server.http}/v1/completions", json=body, timeout=GUARD_S) as answer:
        lines = (line[6:] for line in answer.iter_lines() if line.startswith("data: {"))
        said = [json.loads(next(lines))]
        assert change(server, "DELETE", "chat/1.0/adapters/formal").status_code == 200
        load(server, "formal", "loras/short")  # others get another one under its name
        assert text(server, "formal") == models.expected["short"]
        said += map(json.loads, lines)
    assert "".join(one["choices"][0]["text"] for one in said) == models.expected["formal"]
    assert change(server, "DELETE", "chat/adapters/formal").status_code == 200
    assert completed(server, "formal").status_code == 404
    asked = {"model": "formal", "prompt": PROMPT}
    late = httpx.post(f"{server.http}/predictions/chat", json=asked, timeout=GUARD_S)  # as one that was on its way
    assert late.status_code == 404 and "formal was unloaded" in late.text
    gone = change(server, "DELETE", "chat/adapters/formal")
    assert (gone.status_code, gone.json()["type"]) == (404, "ModelNotFoundException")
    assert text(server, "chat") == models.expected["llama"] and listed(server) == {}


def test_adapters_of_the_settings_and_those_that_were_loaded_come_again_with_a_new_worker(
    server: Any, models: Models
) -> None:
    assert listed(server, "tuned").keys() == {"brief"} and text(server, "brief") == models.expected["short"]
    assert change(server, "POST", "tuned/adapters", name="formal", src="loras/formal").status_code == 200
    assert change(server, "DELETE", "tuned/adapters/brief").status_code == 200
    (pid,) = server.worker_pids("tuned")
    os.kill(pid, signal.SIGKILL)
    until(lambda: server.worker_pids("tuned") not in ([], [pid]), lambda: server.log, timeout_s=GUARD_S)
    assert text(server, "formal") == models.expected["formal"] and listed(server, "tuned").keys() == {"formal"}
    assert completed(server, "brief").status_code == 404


def test_an_adapter_whose_folder_has_gone_keeps_a_new_worker_from_loading_until_it_is_unloaded(
    server: Any, models: Models
) -> None:
    source = edited(models, "passing")
    assert change(server, "POST", "tuned/adapters", name="passing", src=source).status_code == 200
    shutil.rmtree(models.folder / source)
    (pid,) = server.worker_pids("tuned")
    os.kill(pid, signal.SIGKILL)
    server.wait_for_log(f"{source} is not the folder of an adapter of peft")
    assert change(server, "DELETE", "tuned/adapters/passing").status_code == 200
    until(lambda: server.worker_pids("tuned"), lambda: server.log, timeout_s=GUARD_S)
    assert text(server, "tuned") == models.expected["llama"]


def edited(models: Models, name: str, to: Path | None = None, **settings: Any) -> str:
    folder = (to or models.folder) / "loras" / name
    shutil.copytree(models.folder / "loras" / "formal", folder, dirs_exist_ok=True)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    return f"loras/{name}"


def test_adapters_that_are_refused(server: Any, models: Models, tmp_path: Path) -> None:
    assert "use_dora" in load(server, "weighted", status=400)
    assert "lm_head.base_layer.weight" in load(server, "with_weights", status=400)
    for settings, why in (
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"peft_type": "NO_SUCH"}, "not the folder of an adapter"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"bias": "all"}, "bias"),
        ({"r": 3}, "does not fit the model"),
        ({"target_modules": ["no_such"]}, "does not fit the model"),
        ({"target_modules": ["q_proj", "input_layernorm"]}, "does not fit the model"),
        ({"target_modules": ["q_proj"]}, "does not fit the model"),
    ):
        assert why in load(server, "odd", edited(models, "odd", **settings), 400), settings
    broken = edited(models, "broken")
    (models.folder / broken / "adapter_model.safetensors").write_bytes(b"no weights")
    assert "not the folder of an adapter" in load(server, "odd", broken, 400)
    (models.folder / broken / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors" in load(server, "odd", broken, 404)
    shutil.copytree(models.folder / "loras" / "formal", tmp_path / "outside")
    for src, status in {
        "loras/none": 404,
        "loras/../loras/formal": 404,
        str(tmp_path / "outside"): 404,
        (tmp_path / "outside").as_uri(): 404,
        "https://127.0.0.1:1/formal": 400,
        "hf://org/name": 400,
        "": 404,
    }.items():
        load(server, "odd", src or " ", status if src else 404)
    for name in ("", "a b", "a/b", "a:b", "..", "x" * 257):
        assert change(server, "POST", "chat/adapters", name=name, src="loras/formal").status_code == 400, name
    assert "name of a model" in load(server, "tuned", "loras/formal", 409)
    assert change(server, "POST", "chat/adapters", name="x").status_code == 400
    assert change(server, "POST", "nobody/adapters", name="x", src="loras/formal").status_code == 404
    assert change(server, "GET", "chat/2.0/adapters").status_code == 404
    reranker = change(server, "POST", "reranker/adapters", name="x", src="loras/formal")
    assert reranker.status_code == 501 and "continue a text" in reranker.text
    assert listed(server) == {} and text(server, "chat") == models.expected["llama"]


def test_clients_of_predictions_change_no_adapters(server: Any) -> None:
    body = {"name": "formal", "src": "loras/formal"}
    headers = {"url_path": "adapters", ":method": "POST", ":path": "/adapters", "content-type": "application/json"}
    for path in ("predictions/chat", "predictions/chat/1.0/adapters", "predictions/chat/1.0/v1/load_lora_adapter"):
        assert httpx.post(f"{server.http}/{path}", json=body).status_code in (400, 404)
    host, port = server.http.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    for name, value in (("content-type", "\0route"), ("content-type", "%00route"), (":method", "POST")):
        with socket.create_connection((host, int(port)), GUARD_S) as sock:
            head = f"POST /predictions/chat HTTP/1.1\r\nhost: {host}:{port}\r\n{name}: {value}\r\nconnection: close\r\n"
            sock.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            answer = sock.makefile("rb").read()
            assert answer.startswith(b"HTTP/1.1 400 "), answer
    metadata = [(key, value) for key, value in headers.items() if key.isidentifier()]
    with grpc.insecure_channel(server.inference) as channel:
        request = PredictionsRequest(model_name="chat", input={"\0route": data, "body": data})
        with pytest.raises(grpc.RpcError):
            InferenceAPIsServiceStub(channel).Predictions(request, metadata=metadata, timeout=GUARD_S)
    assert listed(server) == {}


def test_sagemakers_calls(models: Models, tmp_path: Path, serving: Any) -> None:
    shutil.copytree(models.folder / "llama", tmp_path / "ml" / "model")
    shutil.copytree(models.folder / "loras", tmp_path / "ml" / "adapters")
    env = {**models.env, "SAGEMAKER_BASE_DIR": str(tmp_path / "ml"), "TS_PLATFORM": "sagemaker"}
    with serving(tmp_path, None, {"env": env}, []) as server:
        server.wait_for_log("of model_1.0 is ready")
        url = server.http
        body = {"name": "formal", "src": str(tmp_path / "ml" / "adapters" / "formal")}
        assert httpx.post(f"{url}/adapters", json=body, timeout=GUARD_S).status_code == 200
        assert httpx.get(f"{url}/adapters").json() == {"adapters": [body]}
        outside = {"name": "other", "src": str(models.folder / "loras" / "formal")}
        assert httpx.post(f"{url}/adapters", json=outside, timeout=GUARD_S).status_code == 404

        def invoked(adapter: str) -> httpx.Response:
            header = {"X-Amzn-SageMaker-Adapter-Identifier": adapter}
            asked = {"prompt": PROMPT, **GREEDY}
            return httpx.post(f"{url}/invocations", json=asked, headers=header, timeout=GUARD_S)

        assert invoked("formal").json()["choices"][0]["text"] == models.expected["formal"]
        assert invoked("other").status_code == 404
        assert httpx.delete(f"{url}/adapters/formal", timeout=GUARD_S).status_code == 200
        assert httpx.delete(f"{url}/adapters/formal").status_code == invoked("formal").status_code == 404


@pytest.fixture(scope="module")
def vllm(models: Models, tmp_path_factory: pytest.TempPathFactory, serving: Any) -> Iterator[Any]:
    packages = next(iter((Path(sys.prefix) / "clients" / "vllm").glob("lib/python*/site-packages")), None)
    if packages is None:
        pytest.skip("vLLM is not installed (CONTRIBUTING.md)")
    place = tmp_path_factory.mktemp("vllm")
    store = place / "store"
    shutil.copytree(models.folder / "loras", store / "loras")
    shutil.copytree(models.folder / "llama", store / "chat")
    options = {"enforce_eager": True, "max_model_len": 256, "dtype": "float32"}
    # `short` has weights for lm_head, which vLLM 0.32 on CPUs also adds for requests without an adapter.
    handler = {"engine": "vllm", "vllm_engine_config": options, "adapters": {"polite": "polite"}}
    shutil.copytree(models.folder / "loras" / "formal", store / "chat" / "polite")
    settings = {"startupTimeout": START_S, "handler": handler}
    (store / "chat" / "model-config.yaml").write_text(json.dumps(settings))
    env = {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    with serving(place, store, {"env": env, "load_models": "chat=chat"}, []) as server:
        server.wait_for_log("of chat_1.0 is ready", timeout_s=START_S)
        yield server


def beginning(server: Any, model: str) -> str:
    """Of its text: at the end, other roundings may choose another token."""
    return text(server, model)[:SAME]


@pytest.mark.vllm
def test_vllm_loads_and_unloads_adapters_while_it_runs(vllm: Any, models: Models) -> None:
    expected = {name: text[:SAME] for name, text in models.expected.items()}
    assert beginning(vllm, "polite") == beginning(vllm, "chat:polite") == expected["formal"], "of its settings"
    assert beginning(vllm, "chat") == expected["llama"] and completed(vllm, "formal").status_code == 404
    for _ in range(2):
        load(vllm, "formal")
        load(vllm, "formal")  # the same again
        assert beginning(vllm, "formal") == expected["formal"]
        names = {one["id"] for one in httpx.get(f"{vllm.http}/v1/models").json()["data"]}
        assert names == {"chat", "formal", "chat:formal", "polite", "chat:polite"}
        assert beginning(vllm, "chat:formal") == expected["formal"]
        body = {"model": "formal", "prompt": PROMPT, **GREEDY, "stream": True}
        with httpx.stream("POST", f"{vllm.http}/v1/completions", json=body, timeout=GUARD_S) as answer:
            lines = (line[6:] for line in answer.iter_lines() if line.startswith("data: {"))
            said = [json.loads(next(lines))]
            assert change(vllm, "DELETE", "chat/adapters/formal").status_code == 200
            said += map(json.loads, lines)
        assert "".join(one["choices"][0]["text"] for one in said)[:SAME] == expected["formal"]
        assert completed(vllm, "formal").status_code == 404
    late = httpx.post(f"{vllm.http}/predictions/chat", json={"model": "formal", "prompt": PROMPT}, timeout=GUARD_S)
    assert late.status_code == 404


@pytest.mark.vllm
def test_adapters_that_vllm_refuses(vllm: Any, models: Models) -> None:
    for settings, why in (({"r": 64}, "max_lora_rank"), ({"bias": "all"}, "bias")):
        told = load(vllm, "odd", edited(models, "odd", vllm.store, **settings), 400)
        assert "vLLM refuses the adapter odd" in told and why in told
    assert listed(vllm).keys() == {"polite"} and beginning(vllm, "chat") == models.expected["llama"][:SAME]
    folder = str(vllm.store / "loras" / "formal")
    for path in ("v1/load_lora_adapter", "v1/load_lora_adapter/", "adapters"):
        asked = {"lora_name": "formal", "lora_path": folder, "name": "formal", "src": folder}
        assert httpx.post(f"{vllm.http}/predictions/chat/1.0/{path}", json=asked).status_code == 404
    assert completed(vllm, "formal").status_code == 404
