"""The console's calls without a browser: `/`, the events, a worker's log, the playground's paths, the switch."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import GUARD_S, http_call, until

HANDLER = """
def handle(data, context):
    if data is None:
        return []
    print("asked for", len(data), flush=True)
    return ["answer" for _ in data]
"""


@pytest.fixture(scope="module")
def console(server_of: Callable[..., Any]) -> Iterator[Any]:
    with server_of({"m": (HANDLER, "")}, default_workers_per_model=1) as server:
        yield server


def ask(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str, bytes]:
    """The status, content type and body of an answer."""
    answer = http_call(port, method, path, body, headers)
    return answer.status, answer.headers.get("content-type", ""), answer.body


class Watching:
    """A reader of the events."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GUARD_S)
        self.connection.request("GET", "/console/events")
        self.answer = self.connection.getresponse()
        assert self.answer.headers["content-type"] == "text/event-stream; charset=utf-8"

    def close(self) -> None:
        self.answer.close()
        self.connection.close()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        name = ""
        for line in self.answer:
            word, _, rest = line.decode().strip().partition(": ")
            if word == "event":
                name = rest
            elif word == "data":
                yield name, json.loads(rest)

    def until(self, name: str, look: Callable[[Any], Any]) -> Any:
        """The first event of that name that it is true of."""
        end_s = time.monotonic() + GUARD_S
        for kind, value in self:
            assert time.monotonic() < end_s, f"no such {name} within {GUARD_S} s; the last event: {kind} {value}"
            if kind == name and look(value):
                return value
        raise AssertionError(f"the events ended without such a {name}")


def model_of(state: Any) -> Any:
    return state["models"][0]


def test_the_root_answers_people_and_programs(console: Any) -> None:
    html = "text/html,application/xhtml+xml,*/*;q=0.8"
    management, inference = console.port("http_management"), console.port("http_inference")
    status, kind, body = ask(management, "GET", "/", accept=html)
    assert (status, kind) == (200, "text/html; charset=utf-8") and b"/console/main.js" in body
    status, _, body = ask(inference, "GET", "/", accept=html)
    assert status == 200 and f"http://127.0.0.1:{management}/console".encode() in body
    for port, apis in ((management, ["http_management"]), (inference, ["http_inference"])):
        for accept in ("*/*", "application/json"):
            status, kind, body = ask(port, "GET", "/", accept=accept)
            told = json.loads(body)
            assert (status, kind, told["apis"]) == (200, "application/json", apis)
            for name in ("description", "docs", "openapi"):
                assert ask(port, "GET", told[name])[0] == 200
    assert ask(inference, "GET", "/console")[0] == 404
    assert ask(management, "GET", "/console/nothing.js")[0] == 404


def test_events_tell_of_calls_and_of_deaths(console: Any) -> None:
    port, play = console.port("http_management"), "/console/predictions/m/1.0"
    watching = Watching(port)
    columns = watching.until("history", lambda value: True)["columns"]
    state = watching.until("state", lambda value: model_of(value)["status"] == "ready")
    (worker,) = model_of(state)["workers"]
    assert worker["state"] == "ready" and worker["device"] == "cpu" and worker["memoryBytes"] > 0
    assert state["server"]["addresses"]["http_management"] == console.http_management
    assert ask(port, "POST", play, b"x", content_type="text/plain")[2] == b"answer"
    sample = watching.until("sample", lambda value: value["models"].get("m/1.0", [0])[0])
    row = dict(zip(columns, sample["models"]["m/1.0"], strict=True))
    assert row["p50_ms"] > 0 and row["batch_size"] == 1 and sample["batches"]["m/1.0"]["1"] > 0
    log = json.loads(ask(port, "GET", f"/models/m/1.0/workers/{worker['id']}/log")[2])
    assert log == {"workerId": worker["id"], "pid": worker["pid"], "lines": ["asked for 1"]}
    assert ask(port, "GET", "/models/m/1.0/workers/1/log")[0] == 404

    os.kill(worker["pid"], signal.SIGKILL)
    back = watching.until(
        "state", lambda value: model_of(value)["lastFailure"] and model_of(value)["status"] == "ready"
    )
    died = model_of(back)["lastFailure"]
    assert "killed by SIGKILL" in died["reason"] and died["lastLines"] == ["asked for 1"]
    watching.close()


def test_the_store_and_what_the_playground_refuses(console: Any) -> None:
    port = console.port("http_management")
    assert json.loads(ask(port, "GET", "/console/store")[2]) == {"models": ["m"]}
    assert ask(port, "POST", "/console/predictions/none/1.0", b"x", content_type="text/plain")[0] == 404
    assert ask(port, "POST", "/console/predictions/m/1.0", b"x", origin="http://evil.example")[0] == 403
    assert ask(port, "GET", "/console/events", origin="http://evil.example")[0] == 403
    assert ask(console.port("http_inference"), "POST", "/console/predictions/m/1.0", b"x")[0] == 404
    tensors = "/console/v2/models/m/versions/1.0/infer"
    status, _, body = ask(port, "POST", tensors, b'{"inputs": []}', content_type="application/json")
    assert status in (200, 400, 500) and b"nothing answers" not in body  # a model without tensors: its handler decides


def test_readers_do_not_hold_up_the_end_of_the_server(
    serving: Any, write_to: Callable[..., str], tmp_path: Path
) -> None:
    write_to(tmp_path / "store", "m", HANDLER)
    settings = {"drain_timeout_s": 2 * GUARD_S}
    with serving(tmp_path, tmp_path / "store", settings, ["--ncs"]) as server:
        watching = Watching(server.port("http_management"))
        watching.until("sample", lambda value: True)
        server.process.send_signal(signal.SIGTERM)
        for _ in watching:  # until its end
            pass
        watching.close()
        until(lambda: server.process.poll() is not None, "the server has ended, long before its time was up")


def test_it_can_be_switched_off(serving: Any, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with serving(
        tmp_path, tmp_path / "store", {"enable_console": "false", "enable_docs_url": "false"}, ["--ncs"]
    ) as server:
        for api in ("http_management", "http_inference"):
            for path in ("/", "/console", "/console/main.js", "/console/events", "/docs"):
                assert ask(server.port(api), "GET", path, accept="text/html")[0] in (404, 405), path
        assert ask(server.port("http_management"), "GET", "/models")[0] == 200


SPEAKER = """
import json

class Speaker:
    openai_api = True

    def initialize(self, context):
        self.version = context.manifest["model"]["modelVersion"]

    def handle(self, data, context):
        return [json.dumps([self.version, context.get_request_header(0, "url_path")])]
"""


def test_a_chat_reaches_the_version_that_the_page_shows(
    serving: Any, write_to: Callable[..., str], tmp_path: Path
) -> None:
    store, path = tmp_path / "store", "/console/predictions/speaker/{}/v1/chat/completions"
    write_to(store, "speaker", SPEAKER)
    write_to(store, "speaker", SPEAKER, version="2.0", directory="speaker-2")
    write_to(store, "m", HANDLER)
    with serving(tmp_path, store, {}, ["--ncs", "--models", "speaker", "m"]) as server:
        server.register("speaker-2")
        port = server.port("http_management")
        watching = Watching(port)
        state = watching.until("state", lambda value: all(one["status"] == "ready" for one in value["models"]))
        assert {one["key"]: one["chats"] for one in state["models"]} == {
            "m/1.0": False,
            "speaker/1.0": True,
            "speaker/2.0": True,
        }
        watching.close()

        def chat(version: str, on: int = port, **headers: str) -> tuple[int, Any]:
            body = b'{"model": "speaker", "messages": []}'
            status, _, said = ask(on, "POST", path.format(version), body, content_type="application/json", **headers)
            return status, json.loads(said)

        for version in ("1.0", "2.0"):
            assert chat(version) == (200, [version, "v1/chat/completions"])
        status, said = chat("3.0")
        assert status == 404 and said["error"]["message"]
        assert chat("1.0", origin="http://evil.example")[0] == 403
        assert chat("1.0", on=server.port("http_inference"))[0] == 404
