"""The calls for adapters, with a small engine in the place of a real one: several workers, failures, refusals, keys."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from support import GUARD_S, until

#: An engine that tells the adapter of each text, and its own process. `prompt: wait` waits for its end; an adapter with
#: a file `once` is loaded by the first worker alone, one with a file `die` ends the worker.
ENGINE = """
import asyncio, json, os
from pathlib import Path
from ts.language.handler import Head, LanguageModelHandler
from ts.utils.util import PredictionException

class Engine(LanguageModelHandler):
    def initialize(self, context):
        self.openai_adapters = dict((context.model_yaml_config.get("handler") or {}).get("adapters") or {})

    async def load_adapter(self, name, folder):
        if (Path(folder) / "die").is_file():
            os._exit(3)
        try:
            os.unlink(Path(folder) / "once")
        except FileNotFoundError:
            if (Path(folder) / "first").is_file():
                raise PredictionException(f"there is no room for {name}", 400)

    async def unload_adapter(self, name):
        pass

    async def ask(self, path, body):
        asked = json.loads(body)
        if asked.get("prompt") == "wait":
            await asyncio.Event().wait()
        if asked["model"] not in ("chat", *self.openai_adapters):
            raise PredictionException(f"there is no {asked['model']}", 404)
        yield Head(200, "application/json")
        yield json.dumps({"choices": [{"text": asked["model"]}], "pid": os.getpid()}).encode()
"""
PLAIN = """
def handle(data, context):
    return [b"" for _ in data or ()]
"""
FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture(scope="module")
def server(server_of: Callable[..., Any]) -> Iterator[Any]:
    config = "minWorkers: 2\nmaxWorkers: 2\nmaxConcurrency: 1\nresponseTimeout: 600\n"
    with server_of({"chat": (ENGINE, config), "plain": (PLAIN, "")}, metrics_mode="prometheus") as server:
        server.scale("chat", 2)
        yield server


@pytest.fixture
def adapter(server: Any) -> Callable[..., str]:
    """`adapter(name, *files)`: the source of an adapter with these further files."""

    def make(name: str, *files: str) -> str:
        folder = server.store / "loras" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file in (*FILES, *files):
            (folder / file).touch()
        return f"loras/{name}"

    return make


def change(server: Any, method: str, path: str, **body: str) -> httpx.Response:
    return httpx.request(method, f"{server.http_management}/models/{path}", json=body or None, timeout=GUARD_S)


def listed(server: Any) -> dict[str, str]:
    found = change(server, "GET", "chat/adapters").json()["adapters"]
    return {one["name"]: one["src"] for one in found}


def said(server: Any, model: str, **more: Any) -> httpx.Response:
    return httpx.post(f"{server.http}/v1/completions", json={"model": model, "prompt": "", **more}, timeout=GUARD_S)


def everywhere(server: Any, model: str) -> None:
    """Returns when each worker has answered with the adapter."""
    until(lambda: len(server.worker_pids("chat")) == 2, lambda: server.log)
    pids, seen = set(server.worker_pids("chat")), set[int]()

    def asked() -> bool:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: said(server, model), range(4)))
        assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
        seen.update(answer.json()["pid"] for answer in answers)
        return seen >= pids

    until(asked, lambda: f"{seen} of {pids}")


def test_every_worker_has_it_even_while_all_of_them_are_busy(server: Any, adapter: Callable[..., str]) -> None:
    with httpx.Client(timeout=GUARD_S) as client, ThreadPoolExecutor(2) as pool:
        body = {"model": "chat", "prompt": "wait"}
        held = [pool.submit(client.post, f"{server.http}/v1/completions", json=body) for _ in range(2)]
        until(lambda: server.metric("ts_running_requests", model_name="chat") == 2, lambda: server.log)
        assert change(server, "POST", "chat/adapters", name="a", src=adapter("a")).json() == {
            "status": 'Adapter "a" of model "chat" loaded'
        }
        assert change(server, "POST", "chat/1.0/adapters?name=a&src=loras/a").status_code == 200  # as the query, too
        for pid in server.worker_pids("chat"):  # the requests end with their workers
            os.kill(pid, signal.SIGKILL)
        assert {one.result(GUARD_S).status_code for one in held} == {507}
    everywhere(server, "a")
    assert listed(server) == {"a": str((server.store / "loras" / "a").resolve())}
    assert change(server, "DELETE", "chat/adapters/a").status_code == 200
    assert said(server, "a").status_code == 404 and listed(server) == {}


def test_what_one_worker_refuses_none_has(server: Any, adapter: Callable[..., str]) -> None:
    refused = change(server, "POST", "chat/adapters", name="b", src=adapter("b", "once", "first"))
    assert (refused.status_code, refused.json()["type"]) == (400, "BadRequestException")
    assert refused.json()["message"] == "there is no room for b"
    assert listed(server) == {} and said(server, "b").status_code == 404
    dead = change(server, "POST", "chat/adapters", name="c", src=adapter("c", "die"))
    assert dead.status_code == 500 and "Worker died" in dead.text
    until(lambda: len(server.worker_pids("chat")) == 2, lambda: server.log)
    assert listed(server) == {} and said(server, "c").status_code == 404


def test_a_worker_that_starts_later_has_it(server: Any, adapter: Callable[..., str]) -> None:
    server.scale("chat", 1)
    assert change(server, "POST", "chat/adapters", name="d", src=adapter("d")).status_code == 200
    server.scale("chat", 2)
    everywhere(server, "d")
    server.scale("chat", 0)
    refused = change(server, "POST", "chat/adapters", name="e", src=adapter("e"))
    assert refused.status_code == 503 and listed(server).keys() == {"d"}
    assert change(server, "DELETE", "chat/adapters/d").status_code == 200
    server.scale("chat", 2)
    assert said(server, "d").status_code == 404 and said(server, "chat").status_code == 200


def test_refusals(server: Any, adapter: Callable[..., str], tmp_path: Path) -> None:
    source = adapter("f")
    plain = change(server, "POST", "plain/adapters", name="f", src=source)
    assert plain.status_code == 501 and "vllm, transformers" in plain.text
    assert change(server, "GET", "plain/adapters").status_code == 501
    assert change(server, "GET", "nobody/adapters").status_code == 404
    assert change(server, "DELETE", "chat/adapters/f").status_code == 404
    assert change(server, "PUT", "chat/adapters/f").status_code == 405
    (server.store / source / FILES[1]).unlink()
    lacking = change(server, "POST", "chat/adapters", name="f", src=source)
    assert lacking.status_code == 404 and FILES[1] in lacking.text
    none = change(server, "POST", "chat/adapters", name="f", src="loras/none")
    assert none.status_code == 404 and none.json()["message"].startswith("Adapter not found at: loras/none")
    for name in FILES:
        (tmp_path / name).touch()
    for src in (str(tmp_path), tmp_path.as_uri(), f"loras/../../{tmp_path.name}", f"loras%2f..%2f{tmp_path.name}"):
        assert change(server, "POST", "chat/adapters", name="f", src=src).status_code == 404, src
    assert change(server, "POST", "chat/adapters", name="f", src="s3://bucket/f").status_code == 400
    assert change(server, "POST", "chat/adapters", name="f").status_code == 400
    for name in ("", "a b", "a/b", "a:b", "..", "x" * 257):
        assert change(server, "POST", "chat/adapters", name=name, src=adapter("f")).status_code == 400, name
    assert change(server, "POST", "chat/adapters", name="plain", src=adapter("f")).status_code == 409
    assert httpx.post(f"{server.http}/adapters", json={"name": "f", "src": source}).status_code == 404  # SageMaker's
    assert listed(server) == {}


def test_keys_are_those_for_management(serving: Any, write_to: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    write_to(tmp_path / "store", "chat", ENGINE)
    settings = {"load_models": "chat", "disable_token_authorization": "false", "default_workers_per_model": 1}
    with serving(tmp_path, tmp_path / "store", settings, ["--ncs"]) as guarded:
        guarded.wait_for_log("of chat_1.0 is ready")
        keys = json.loads((guarded.directory / "key_file.json").read_text())
        kinds = {name: {"authorization": f"Bearer {keys[name]['key']}"} for name in ("management", "inference")}
        url = f"{guarded.http_management}/models/chat/adapters"
        assert httpx.get(url, headers=kinds["management"]).json() == {"adapters": []}
        body = {"name": "a", "src": "a"}
        for headers in ({}, kinds["inference"]):
            assert httpx.post(url, json=body, headers=headers).status_code == 400
            assert httpx.delete(f"{url}/a", headers=headers).status_code == 400
        assert httpx.post(url, json=body, headers=kinds["management"]).status_code == 404
