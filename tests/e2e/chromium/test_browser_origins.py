"""The powers of pages from other origins, in a real browser: Chromium without a window, through ChromeDriver.

The pages come from a server of the test; another port is another origin.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from browser import Browser
from support import GUARD_S, until
from ts_frontend.http.routes import ROUTES
from ts_frontend.http.routing import Effect, RouteTable, Row, Switch

decision = RouteTable(ROUTES, ("http_inference", "http_management", "http_metrics"), Switch).find

pytestmark = pytest.mark.external

HANDLER = """
from pathlib import Path

def handle(data, context):
    if data is None:
        return []
    with Path(__file__).with_name("calls").open("a") as calls:
        calls.write("call\\n")
    return [f"hello {sorted(row)}" for row in data]
"""
STREAMING = """
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return []
    for number in range(3):
        send_intermediate_predict_response([f"{number} "], context.request_ids, "more", 200, context)
    return ["end"]
"""


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"<!doctype html><title>a page of another origin</title>"
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """The origin of the page."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(GUARD_S)


class Site:
    """A model server, and the requests that its handler has seen."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.inference, self.management = server.http, server.http_management

    def calls(self) -> int:
        return sum(len(file.read_text().splitlines()) for file in self.server.store.rglob("calls"))

    def models(self) -> list[str]:
        connection = http.client.HTTPConnection(self.management.partition("//")[2], timeout=GUARD_S)
        connection.request("GET", "/models")
        found = [model["modelName"] for model in json.loads(connection.getresponse().read())["models"]]
        connection.close()
        return found

    def is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self.inference.partition("//")[2], timeout=GUARD_S)
        connection.request("POST", "/v2/repository/index")
        index = json.loads(connection.getresponse().read())
        connection.close()
        return all(model["state"] == "READY" for model in index)


def write_models(store: Path) -> None:
    for name, handler in (("hello", HANDLER), ("pieces", STREAMING), ("unwanted", HANDLER)):
        (store / name / "MAR-INF").mkdir(parents=True)
        (store / name / "handler.py").write_text(handler)
        model = {"modelName": name, "handler": "handler.py", "modelVersion": "1.0"}
        (store / name / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"runtime": "python", "model": model}))


def serve(serving: Any, directory: Path, **settings: object) -> Iterator[Site]:
    write_models(directory / "store")
    server = serving(directory, directory / "store", settings, ["--ncs", "--models", "hello", "pieces"])
    try:
        site = Site(server.wait_started())
        until(site.is_ready, "its models are ready")
        yield site
    finally:
        server.terminate()


@pytest.fixture(scope="module")
def with_cors(serving: Any, page: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from serve(
        serving,
        tmp_path_factory.mktemp("on"),
        cors_allowed_origin=page,
        cors_allowed_methods="GET, POST, PUT, OPTIONS",
        cors_allowed_headers="Content-Type",
    )


@pytest.fixture(scope="module")
def without_cors(serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from serve(serving, tmp_path_factory.mktemp("off"))


JSON_CALL = {"method": "POST", "headers": {"Content-Type": "application/json"}, "body": '{"x": 1}'}


def test_with_cors_a_page_can_predict(browser: Browser, page: str, with_cors: Site) -> None:
    browser.open(page)
    hello = f"{with_cors.inference}/predictions/hello"
    assert browser.fetch(hello, method="POST", body="text") == {"status": 200, "type": "cors", "text": "hello ['body']"}
    assert browser.fetch(hello, **JSON_CALL)["text"] == "hello ['body']"
    assert browser.fetch(hello, **(JSON_CALL | {"method": "PUT"}))["status"] == 200
    assert browser.fetch(f"{with_cors.inference}/predictions/pieces", **JSON_CALL)["text"] == "0 1 2 end"
    assert json.loads(browser.fetch(f"{with_cors.inference}/ping")["text"]) == {"status": "Healthy"}


def test_with_cors_a_page_can_read_errors(browser: Browser, page: str, with_cors: Site) -> None:
    browser.open(page)
    answer = browser.fetch(f"{with_cors.inference}/predictions/missing", **JSON_CALL)
    assert answer["status"] == 404
    assert json.loads(answer["text"])["message"] == "Model not found: missing"


def test_what_cors_does_not_name_is_not_allowed(browser: Browser, page: str, with_cors: Site) -> None:
    browser.open(page)
    hello = f"{with_cors.inference}/predictions/hello"
    assert browser.fetch(hello, method="DELETE") == {"error": "TypeError"}
    assert browser.fetch(hello, method="POST", headers={"X-Own": "1"}, body="x") == {"error": "TypeError"}


def test_another_page_than_the_named_one_can_not(browser: Browser, page: str, with_cors: Site) -> None:
    """`localhost` is another origin than 127.0.0.1."""
    browser.open(page.replace("127.0.0.1", "localhost"))
    assert browser.fetch(f"{with_cors.inference}/ping") == {"error": "TypeError"}
    assert browser.fetch(f"{with_cors.inference}/predictions/hello", **JSON_CALL) == {"error": "TypeError"}


def test_without_cors_a_page_can_not_predict(browser: Browser, page: str, without_cors: Site) -> None:
    browser.open(page)
    hello = f"{without_cors.inference}/predictions/hello"
    assert browser.fetch(f"{without_cors.inference}/ping") == {"error": "TypeError"}
    assert browser.fetch(hello, method="POST", body="text") == {"error": "TypeError"}
    before = without_cors.calls()
    assert browser.fetch(hello, **JSON_CALL) == {"error": "TypeError"}
    assert without_cors.calls() == before  # the browser has asked, and not sent it


def test_without_cors_a_page_can_not_manage(browser: Browser, page: str, without_cors: Site) -> None:
    """Nor without reading the answer, which browsers do for any page (`no-cors`)."""
    browser.open(page)
    register = f"{without_cors.management}/models?url=unwanted&synchronous=true&initial_workers=1"
    assert browser.fetch(register, method="POST") == {"error": "TypeError"}
    assert browser.fetch(register, method="POST", mode="no-cors")["type"] == "opaque"
    assert browser.fetch(f"{without_cors.management}/models/hello", method="DELETE") == {"error": "TypeError"}
    assert sorted(without_cors.models()) == ["hello", "pieces"]


def test_the_servers_own_page_can(browser: Browser, without_cors: Site) -> None:
    browser.open(f"{without_cors.management}/api-description")
    assert browser.fetch(f"{without_cors.management}/models/hello?min_worker=1", method="PUT")["status"] == 202
    assert browser.fetch(f"{without_cors.management}/models")["type"] == "basic"


# --- the guard: every route, by a page that isn't the server's


#: Imported by a worker, it leaves a file behind.
ATTACK = """
from pathlib import Path
Path({mark!r}).write_text("ran")

class TritonPythonModel:
    def execute(self, requests):
        return []
"""
SIMPLE = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")


@pytest.fixture(scope="module")
def managed(serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server that takes code with a call (explicit mode), and with everything switched on."""
    directory = tmp_path_factory.mktemp("managed")
    (directory / "repository").mkdir()
    yield from serve(
        serving,
        directory,
        model_repository=directory / "repository",
        model_control_mode="explicit",
        enable_docs_url="true",
        shared_memory_keys=".*",
        allowed_hosts="told.example",
    )


def target_of(row: Row) -> str:
    names = {"model_name": "hello", "model_version": "1.0"}
    return re.sub(r"\{(\w+)\*?\}", lambda match: names.get(match[1], "x"), row.path)


def listeners(site: Site) -> list[str]:
    return [site.inference, site.management, f"http://127.0.0.1:{site.server.port('http_metrics')}"]


def statuses(site: Site, method: str, word: str) -> list[str]:
    """Of the requests with that method whose query says `word`, in the access log."""
    line = re.compile(rf'"{method} \S*\?{word}\S* HTTP/[\d.]+" (\d+)')
    return [match[1] for text in site.server.lines if (match := line.search(text))]


def state(site: Site) -> list[Any]:
    found: list[Any] = [sorted(site.models())]
    for method, target in (
        ("POST", "/v2/repository/index"),
        ("GET", "/v2/logging"),
        ("GET", "/v2/trace/setting"),
        ("GET", "/v2/systemsharedmemory/status"),
    ):
        connection = http.client.HTTPConnection(site.inference.partition("//")[2], timeout=GUARD_S)
        connection.request(method, target)
        found.append(json.loads(connection.getresponse().read()))
        connection.close()
    return found


def test_a_page_can_not_have_code_run(browser: Browser, page: str, managed: Site) -> None:
    """With any content type that browsers send without asking, from another origin and from another port."""
    mark = managed.server.directory / "mark"
    code = base64.b64encode(ATTACK.format(mark=str(mark)).encode()).decode()
    config = '{"backend": "python", "input": [{"name": "I", "data_type": "TYPE_FP32", "dims": [1]}]}'
    body = json.dumps({"parameters": {"config": config, "file:1/model.py": code}})
    load = f"{managed.inference}/v2/repository/models/bad/load"
    before = state(managed)
    for origin in (page, page.replace("127.0.0.1", "localhost"), page.replace("127.0.0.1", "rebound.example")):
        browser.open(origin)
        for kind in SIMPLE:
            sent = browser.fetch(load, method="POST", mode="no-cors", headers={"Content-Type": kind}, body=body)
            assert sent["type"] == "opaque"
        sent = browser.fetch(load, method="POST", headers={"Content-Type": "application/json"}, body=body)
        assert sent == {"error": "TypeError"}
        assert '"error"' in browser.submit(load, "post", "text/plain")
    assert state(managed) == before and not mark.exists()
    connection = http.client.HTTPConnection(managed.inference.partition("//")[2], timeout=GUARD_S)
    connection.request("POST", "/v2/repository/models/bad/load", body, {"Content-Type": "application/json"})
    assert connection.getresponse().status == 200 and mark.exists()  # sent by a program, it does what it would have
    connection.close()


def test_a_page_changes_nothing_by_any_route(browser: Browser, page: str, managed: Site) -> None:
    """Requests without a preflight reach the server and are refused; for the others, the preflight fails."""
    before = state(managed)
    browser.open(page.replace("127.0.0.1", "localhost"))
    refused = 0
    for row in ROUTES:
        for method in ("GET", "POST", "PUT", "DELETE") if row.methods == "*" else row.methods.split():
            target = target_of(row)
            decided = decision(method, target)
            for number, origin in enumerate(listeners(managed)):
                word = f"w{ROUTES.index(row)}x{method}x{number}x"
                simple = method in ("GET", "POST")
                options = {"body": '{"parameters": {}}'} if method == "POST" else {}
                sent = browser.fetch(f"{origin}{target}?{word}", method=method, mode="cors", **options)
                assert sent == {"error": "TypeError"}, (row, method, sent)  # it reads nothing
                if not simple:
                    assert method == "OPTIONS" or not statuses(managed, method, word), (row, method)  # never sent
                elif decided.managing or decided.effect is Effect.CHANGES:
                    managed.server.wait_for_log(f"?{word}")
                    assert set(statuses(managed, method, word)) == {"403"}, (row, method)
                    refused += 1
    assert refused > 60
    assert state(managed) == before


def test_a_page_whose_name_was_made_to_mean_this_machine(browser: Browser, managed: Site) -> None:
    """Its browser takes the server for the page's own; also over a form, and for the names that the server was told."""
    before = state(managed)
    for origin in listeners(managed):
        rebound = origin.replace("127.0.0.1", "rebound.example")
        browser.open(f"{rebound}/api-description")
        assert "ForeignHostException" in browser.text()
        for row in ROUTES:
            for method in ("GET", "POST", "DELETE") if row.methods == "*" else row.methods.split():
                sent = browser.fetch(f"{rebound}{target_of(row)}", method=method)
                assert sent["status"] == 403, (row, method, sent)
                assert method == "HEAD" or "rebound.example" in sent["text"]
    assert state(managed) == before
    browser.open(managed.management.replace("127.0.0.1", "told.example") + "/api-description")
    assert browser.fetch("/models")["status"] == 200
    assert browser.fetch("/models/hello?min_worker=1", method="PUT")["status"] == 202
