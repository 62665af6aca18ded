"""The limits for pages in a browser, tried by raw clients: every route of the table, with a browser's headers."""

from __future__ import annotations

import base64
import contextlib
import http.client
import itertools
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import GUARD_S, until
from ts_frontend.http.errors import ErrorDialect
from ts_frontend.http.routes import ROUTES
from ts_frontend.http.routing import Effect, Match, RouteTable, Row, Switch

#: Imported by its worker, it leaves a file behind.
ATTACK = """
from pathlib import Path
Path({mark!r}).write_text("ran")

class TritonPythonModel:
    def execute(self, requests):
        return []
"""
CONFIG = '{"backend": "python", "input": [{"name": "I", "data_type": "TYPE_FP32", "dims": [1]}]}'


def ask(
    port: int, method: str, target: str, headers: dict[str, str], body: bytes = b"", host: str = "127.0.0.1"
) -> tuple[int, bytes]:
    """A request with these headers and no others."""
    with answering(port, method, target, headers, body, host) as response:
        return response.status, response.read()


@contextlib.contextmanager
def answering(
    port: int, method: str, target: str, headers: dict[str, str], body: bytes = b"", host: str = "127.0.0.1"
) -> Iterator[http.client.HTTPResponse]:
    """As `ask`, with the answer's body unread: it may have no end."""
    connection = http.client.HTTPConnection(host, port, timeout=GUARD_S)
    connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
    for name, value in ({"Host": f"127.0.0.1:{port}", "Content-Length": str(len(body))} | headers).items():
        connection.putheader(name, value)
    connection.endheaders(body)
    with contextlib.closing(connection):
        yield connection.getresponse()


def loading(mark: Path) -> bytes:
    """The body of a call that loads a model made of the file that it brings."""
    code = base64.b64encode(ATTACK.format(mark=str(mark)).encode()).decode()
    return json.dumps({"parameters": {"config": CONFIG, "file:1/model.py": code}}).encode()


def test_no_page_runs_code_here(start: Any, tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    server = start("--model-control-mode", "explicit", model_repository=tmp_path / "repository")
    mark, port = tmp_path / "mark", server.port("http_inference")
    for origin in ("http://evil.example", "null"):
        foreign = {"Origin": origin, "Content-Type": "text/plain"}
        status, answer = ask(port, "POST", "/v2/repository/models/X/load", foreign, loading(mark))
        assert status == 403, answer
        assert set(json.loads(answer)) == {"error"}
    assert not mark.exists()
    own = {"Content-Type": "application/json"}
    status, answer = ask(port, "POST", "/v2/repository/models/X/load", own, loading(mark))
    assert status == 200 and mark.exists(), answer  # the very same body does it, sent by who may


# --- every route of the table


LISTENERS = ("http_inference", "http_management", "http_metrics")
TABLES = {names: RouteTable(ROUTES, names, [Switch.DOCS]) for names in (LISTENERS, *((name,) for name in LISTENERS))}


def decided(row: Row, method: str, *listeners: str) -> Match:
    return TABLES[listeners or LISTENERS].find(method, target_of(row))


def target_of(row: Row) -> str:
    """A path of that row; the things that it names don't exist, except the model."""
    names = {"model_name": "probe", "model_version": "1.0"}
    return re.sub(r"\{(\w+)\*?\}", lambda match: names.get(match[1], "x"), row.path)


ALL = [(row, method) for row in ROUTES for method in (row.methods.split() if row.methods != "*" else ["POST", "GET"])]
GUARDED = [
    (row, method)
    for row, method in ALL
    if row.effect is Effect.CHANGES or row.managing or decided(row, method).managing
]
JSON = [(row, method) for row, method in ALL if row.json]
FOREIGN = (
    {"Origin": "http://evil.example"},
    {"Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"},
    {"Origin": "null"},
    {"Origin": "http://localhost:1"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "CROSS-SITE", "Sec-Fetch-Mode": "no-cors"},
)


def is_in(dialect: ErrorDialect, answer: bytes, status: int) -> bool:
    found = json.loads(answer)
    if dialect is ErrorDialect.OPEN_INFERENCE:
        return set(found) == {"error"} and isinstance(found["error"], str)
    if dialect is ErrorDialect.OPENAI:
        return set(found["error"]) == {"message", "type", "param", "code"}
    if dialect is ErrorDialect.AZUREML:
        return set(found) == {"message"}
    if dialect is ErrorDialect.MLFLOW:
        return set(found) == {"error_code", "message"}
    return set(found) == {"code", "type", "message"} and found["code"] == status


def open_server(tmp_path_factory: Any, serving: Any, write_to: Any, probe_handler: Path, **more: Any) -> Any:
    directory = tmp_path_factory.mktemp("guarded")
    (directory / "store").mkdir()
    (directory / "repository").mkdir()
    write_to(directory / "store", "probe", probe_handler)
    settings = {
        "model_repository": directory / "repository",
        "model_control_mode": "explicit",
        "enable_docs_url": "true",
        "enable_model_api": "true",
        "default_workers_per_model": 1,
        "shared_memory_keys": ".*",
    }
    return serving(directory, directory / "store", settings | more, ["--ncs", "--models", "probe"])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: Any, serving: Any, write_to: Any, probe_handler: Path) -> Iterator[Any]:
    with open_server(tmp_path_factory, serving, write_to, probe_handler) as server:
        yield server


def state(server: Any) -> list[tuple[int, bytes]]:
    """The state that attacks would change."""
    inference, management = server.port("http_inference"), server.port("http_management")
    own = {"Content-Type": "application/json"}
    return [
        ask(inference, "POST", "/v2/repository/index", own),
        ask(inference, "GET", "/v2/logging", {}),
        ask(inference, "GET", "/v2/trace/setting", {}),
        ask(inference, "GET", "/v2/systemsharedmemory/status", {}),
        ask(management, "GET", "/models", {}),
        ask(management, "GET", "/workflows", {}),
    ]


def test_each_attack_is_refused_on_each_listener(guarded: Any) -> None:
    """Whatever has a row: also where this listener has no such route. The content types take turns, so that each route
    meets each of them, as does each listener with each origin."""
    until(lambda: b"UNAVAILABLE" not in state(guarded)[0][1], "the model is ready")
    before = state(guarded)
    assert len(GUARDED) > 30
    contents = itertools.cycle(({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/json"}))
    for row, method in GUARDED:
        for listener in LISTENERS:
            for headers, content in zip(FOREIGN, contents, strict=False):
                found = ask(guarded.port(listener), method, target_of(row), headers | content, b'{"parameters": {}}')
                assert found[0] == 403, (row, method, listener, headers, content, found)
                if method != "HEAD":
                    assert is_in(decided(row, method, listener).dialect, found[1], 403), (row, found)
    assert state(guarded) == before


def test_a_foreign_host_gets_nothing(guarded: Any) -> None:
    """The names take turns over the routes of each listener."""
    hosts = itertools.cycle(("evil.example", "evil.example:{}", "127.0.0.1.evil.example", "localhost.evil.example"))
    for row, method in ALL:
        for listener, host in zip(LISTENERS, hosts, strict=False):
            port = guarded.port(listener)
            status, answer = ask(port, method, target_of(row), {"Host": host.format(port)})
            assert status == 403, (row, method, listener, host, answer)
            assert is_in(decided(row, method, listener).dialect, answer, 403), (row, answer)
    status, _ = ask(guarded.port("http_inference"), "GET", "/nowhere", {"Host": "evil.example"})
    assert status == 403


SHOWN = (
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
    {"Origin": "http://localhost:1", "Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "Navigate"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "iframe"},
    {"Origin": "null", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "embed"},
)


def test_no_foreign_page_opens_what_a_model_answers(guarded: Any) -> None:
    """In a window or a frame, by any route that runs a model; a typed address and the server's own page do."""
    runs = [(row, method) for row, method in ALL if row.effect is Effect.RUNS]
    assert len(runs) > 30
    shown_ways = itertools.cycle(SHOWN)
    for row, method in runs:
        for listener in LISTENERS:
            port = guarded.port(listener)
            for headers in itertools.islice(shown_ways, 2):
                found = ask(port, method, target_of(row), headers | {"Content-Type": "text/plain"}, b"{}")
                assert found[0] == 403 and b"cors_allowed_origin" in found[1], (row, method, listener, headers, found)
            if not decided(row, method, listener).managing:
                own = {"Origin": f"http://127.0.0.1:{port}", "Sec-Fetch-Site": "same-origin"}
                for headers in ({"Sec-Fetch-Site": "none"}, own):
                    shown = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document", **headers}
                    assert ask(port, method, target_of(row), shown, b"{}")[0] != 403, (row, method, listener)


def test_no_answer_is_a_document(guarded: Any) -> None:
    """By any route, to any page and program; only the server's own pages have a policy of their own. Those who ask take
    turns over the routes of each listener."""
    pages = {"/", "/docs", "/v2/docs", "/console"}
    own: tuple[dict[str, str], ...] = ({}, {"Accept": "text/html"})
    foreign_turns, own_turns = itertools.cycle((FOREIGN[0], SHOWN[0])), itertools.cycle(own)
    for row, method in ALL:
        for listener in LISTENERS:
            for headers in (next(foreign_turns), *([] if (row, method) in GUARDED else [next(own_turns)])):
                with answering(guarded.port(listener), method, target_of(row), headers, b"{}") as answer:
                    found = {name.lower(): value for name, value in answer.getheaders()}
                told = (row, method, listener, headers, answer.status, found)
                assert found["x-content-type-options"] == "nosniff", told
                assert found["cross-origin-resource-policy"] == "same-origin", told
                assert "content-type" in found or found["content-length"] == "0", told
                page = "text/html" in found.get("content-type", "")
                policy = "default-src 'self'; " if page else "sandbox; default-src 'none'"
                assert found["content-security-policy"].startswith(policy), told
                assert not page or (answer.status == 200 and row.path in pages), told


def test_programs_go_on_as_they_did(guarded: Any) -> None:
    """`curl -d` and Triton's clients send JSON as a form or without a content type; TorchServe's take the query."""
    inference, management = guarded.port("http_inference"), guarded.port("http_management")
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for headers in (form, {}, {"Content-Type": "application/json"}):
        status, answer = ask(inference, "POST", "/v2/logging", headers, b'{"log_verbose_level": 0}')
        assert status == 200, answer
        status, answer = ask(inference, "POST", "/v2/repository/models/none/unload", headers)
        assert status != 415 and status != 403, answer
        assert ask(management, "PUT", "/models/probe?min_worker=1", headers)[0] == 202
    assert ask(management, "POST", "/models?url=probe", form)[0] == 409


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_http_2_has_the_same_guard(guarded: Any) -> None:
    port = guarded.port("http_management")
    for authority, more, status in (
        (f"127.0.0.1:{port}", (), 200),
        ("evil.example", (), 403),
        ("localhost", ("-H", "sec-fetch-site: cross-site"), 403),
    ):
        command = ["curl", "-sS", "--http2-prior-knowledge", "-o", "-", "-w", " %{http_version} %{http_code}"]
        command += ["-H", f"Host: {authority}", *more, f"http://127.0.0.1:{port}/models"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S).stdout
        assert said.endswith(f" 2 {status}"), said


# --- other listeners


def test_a_shared_listener_and_a_named_host(
    tmp_path_factory: Any, serving: Any, write_to: Any, probe_handler: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with open_server(
        *(tmp_path_factory, serving, write_to, probe_handler),
        inference_address=address,
        management_address=address,
        metrics_address=address,
        allowed_hosts="models.example.org, .inner.example.org, 10.1.2.3",
        cors_allowed_origin="https://app.example.org",
        grpc_metrics="true",
    ) as server:
        before = state_of_one(port)
        for row, method in GUARDED:
            for headers in FOREIGN:
                found = ask(port, method, target_of(row), headers | {"Content-Type": "text/plain"}, b"{}")
                assert found[0] == 403, (row, method, headers, found)
        assert state_of_one(port) == before
        for host, status in (
            ("models.example.org", 200),
            ("MODELS.example.org.:1", 200),
            ("a.b.inner.example.org", 200),
            ("10.1.2.3", 200),
            ("inner.example.org", 403),
            ("example.org", 403),
            ("xmodels.example.org", 403),
        ):
            for listener in (port, server.port("grpc_inference")):
                assert ask(listener, "GET", "/metrics", {"Host": host})[0] == status, host
        app = {"Origin": "https://app.example.org", "Sec-Fetch-Site": "cross-site"}
        assert ask(port, "PUT", "/models/probe/1.0/set-default", app)[0] == 200
        assert ask(port, "POST", "/v2/logging", app | {"Content-Type": "application/json"}, b"{}")[0] == 200
        assert ask(port, "POST", "/v2/logging", app | {"Content-Type": "text/plain"}, b"{}")[0] == 415
        assert ask(port, "PUT", "/models/probe/1.0/set-default", app | {"Host": "evil.example"})[0] == 403
        asked = app | {"Access-Control-Request-Method": "POST"}
        assert ask(port, "OPTIONS", "/v2/logging", asked)[0] == 200


def state_of_one(port: int) -> list[tuple[int, bytes]]:
    return [ask(port, "GET", target, {}) for target in ("/models", "/workflows", "/v2/logging", "/v2/trace/setting")]


def test_listeners_that_other_machines_reach(
    tmp_path_factory: Any, serving: Any, write_to: Any, probe_handler: Path
) -> None:
    """Any name unless `allowed_hosts` is set; then the address that was connected to is one, too. Foreign origins are
    refused in any case."""
    for allowed, status in ((None, 200), ("models.example.org", 403), ("*", 200)):
        more: dict[str, Any] = {} if allowed is None else {"allowed_hosts": allowed}
        with open_server(
            *(tmp_path_factory, serving, write_to, probe_handler),
            inference_address="http://0.0.0.0:0",
            management_address="http://0.0.0.0:0",
            disable_token_authorization="true",
            **more,
        ) as server:
            port = server.port("http_management")
            assert ask(port, "GET", "/models", {"Host": "any.example"})[0] == status
            for host in ("127.0.0.1", "localhost", "0.0.0.0", socket.gethostname(), "models.example.org"):
                assert ask(port, "GET", "/models", {"Host": host})[0] == 200, host
            inference = server.port("http_inference")
            for headers in FOREIGN:
                assert ask(inference, "POST", "/v2/logging", headers, b"{}")[0] == 403
                assert ask(port, "DELETE", "/models/probe", headers)[0] == 403


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_unix_sockets(tmp_path_factory: Any, serving: Any, write_to: Any, probe_handler: Path) -> None:
    """Any name may be there, as clients make one up; for foreign pages something would have to forward them."""
    path = tmp_path_factory.mktemp("s") / "s"
    with open_server(
        *(tmp_path_factory, serving, write_to, probe_handler),
        inference_address=f"unix:{path}",
    ):

        def call(*more: str) -> str:
            command = ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "--unix-socket", str(path), *more]
            return subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S).stdout

        assert call("http://any.example/v2/models") == "200"
        assert call("-d", "{}", "http://any.example/v2/logging") == "200"
        shown = ("-d", "{}", "-H", "Sec-Fetch-Mode: navigate")
        for own, status in (("http://localhost", "200"), ("http://evil.example", "403")):
            assert call(*shown, "-H", f"Origin: {own}", f"{own}/predictions/probe") == status
            assert call(*shown, "-H", f"Origin: {own}", f"{own}/v2/logging") == "403"
