"""What pages of other origins can do, asked of a real browser: Chromium without a window, through ChromeDriver.

The pages come from a server of the test; another port is another origin.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.external

GUARD_S = 120
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)
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
#: Runs in the page: what the answer was, or which error the browser gave the page instead.
FETCH = """
const [url, options, done] = [arguments[0], arguments[1], arguments[arguments.length - 1]];
fetch(url, options).then(
  async (answer) => done({status: answer.status, type: answer.type, text: await answer.text()}),
  (error) => done({error: error.name}),
);
"""


class Browser:
    """A session of ChromeDriver."""

    def __init__(self, port: int, chromium: str, profile: Path) -> None:
        self._port = port
        options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        asked = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        self._session = f"/session/{self._ask('POST', '/session', asked)['sessionId']}"
        self._ask("POST", f"{self._session}/timeouts", {"script": GUARD_S * 1000})

    def _ask(self, method: str, path: str, value: object = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=GUARD_S)
        connection.request(method, path, None if value is None else json.dumps(value))
        response = connection.getresponse()
        answer = json.loads(response.read())["value"]
        connection.close()
        assert response.status == 200, answer
        return answer

    def open(self, url: str) -> None:
        self._ask("POST", f"{self._session}/url", {"url": url})

    def fetch(self, url: str, **options: Any) -> dict[str, Any]:
        """`fetch` in the open page."""
        return dict(self._ask("POST", f"{self._session}/execute/async", {"script": FETCH, "args": [url, options]}))

    def close(self) -> None:
        self._ask("DELETE", self._session)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or chromium is None:
        pytest.skip("Chromium and ChromeDriver are not installed (Debian's packages: chromium, chromium-driver)")
    process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process:
        assert process.stdout is not None
        try:
            said = ""
            while not (match := re.search(r"started successfully on port (\d+)", said)):
                line = process.stdout.readline()
                assert line, said
                said += line
            browser = Browser(int(match[1]), chromium, tmp_path_factory.mktemp("profile"))
            yield browser
            browser.close()
        finally:
            process.terminate()


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
    """A model server and what its handler has seen."""

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
        yield Site(server.wait_started())
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
