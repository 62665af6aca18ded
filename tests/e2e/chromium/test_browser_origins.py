"""The powers of pages from other origins, in a real browser: Chromium without a window, through ChromeDriver.

The pages come from a server of the test; another port is another origin.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from browser import Browser
from e2e.servers import write_model
from support import GUARD_S, QuietHandler, http_server, until
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


class Page(QuietHandler):
    """A page that may do what it wants, and shows what is posted to it; `ran`: the requests of scripts in answers."""

    ran: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        if self.path.startswith("/ran"):
            self.ran.append(self.path)
        self.show(b"<!doctype html><title>a page of another origin</title>")

    def do_POST(self) -> None:
        self.show(self.rfile.read(int(self.headers["Content-Length"])).partition(b"=")[2])

    def show(self, body: bytes) -> None:
        self.answer(200, body, {"content-type": "text/html"})


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """The origin of the page."""
    with http_server(Page) as url:
        yield url


class Site:
    """A model server, and the requests that its handler has seen."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.inference, self.management = server.http, server.http_management

    def calls(self) -> int:
        return sum(len(file.read_text().splitlines()) for file in self.server.store.rglob("calls"))

    def models(self) -> list[str]:
        return [
            model["modelName"] for model in httpx.get(f"{self.management}/models", timeout=GUARD_S).json()["models"]
        ]

    def is_ready(self) -> bool:
        index = httpx.post(f"{self.inference}/v2/repository/index", timeout=GUARD_S).json()
        return all(model["state"] == "READY" for model in index)


def write_models(store: Path) -> None:
    for name, handler in (("hello", HANDLER), ("pieces", STREAMING), ("unwanted", HANDLER)):
        write_model(store, name, handler)


def serve(serving: Any, directory: Path, **settings: object) -> Iterator[Site]:
    write_models(directory / "store")
    with serving(directory, directory / "store", settings, ["--ncs", "--models", "hello", "pieces"]) as server:
        site = Site(server.wait_started())
        until(site.is_ready, "its models are ready")
        yield site


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
    assert json.loads(answer["text"])["message"].startswith("Model not found: missing. Models here: ")


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
    assert browser.fetch(register, method="POST", mode="no-cors") == {"error": "TypeError"}
    assert browser.fetch(f"{without_cors.management}/models/hello", method="DELETE") == {"error": "TypeError"}
    assert sorted(without_cors.models()) == ["hello", "pieces"]


def test_the_servers_own_page_can(browser: Browser, without_cors: Site) -> None:
    browser.open(f"{without_cors.management}/console")
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
        found.append(httpx.request(method, site.inference + target, timeout=GUARD_S).json())
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
            assert sent == {"error": "TypeError"}
        sent = browser.fetch(load, method="POST", headers={"Content-Type": "application/json"}, body=body)
        assert sent == {"error": "TypeError"}
        assert '"error"' in browser.submit(load, "post", "text/plain")
    assert state(managed) == before and not mark.exists()
    own = httpx.post(load, content=body, headers={"Content-Type": "application/json"}, timeout=GUARD_S)
    assert own.status_code == 200 and mark.exists()  # sent by a program, it does what it would have


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


def test_a_page_whose_name_was_made_to_mean_this_machine(browser: Browser, page: str, managed: Site) -> None:
    """Its browser takes the server for the page's own, but shows answers without an origin; not so for told names."""
    before = state(managed)
    for number, row in enumerate(ROUTES[::4]):  # test_guard.py asks all of them, faster than a browser
        rebound = listeners(managed)[number % 3].replace("127.0.0.1", "rebound.example")
        for method in {"GET", "POST"} & set((row.methods if row.methods != "*" else "GET POST").split()):
            browser.open(page)
            shown = browser.submit(f"{rebound}{target_of(row)}", method, "text/plain")
            assert "rebound.example" in shown and "allowed_hosts" in shown, (row, method, shown)
            assert browser.origin() == "null"
    assert state(managed) == before
    browser.open(managed.management.replace("127.0.0.1", "told.example") + "/console")
    assert browser.fetch("/models")["status"] == 200
    assert browser.fetch("/models/hello?min_worker=1", method="PUT")["status"] == 202


# --- a model's answer is never a document


#: The text that a page has a model answer: shown as a document, it would tell the page's server.
SCRIPT = (
    "<!doctype html><h1>shown</h1><script>new Image().src = '{page}/ran?{word}'; fetch('{page}/ran?{word}')</script>"
)
ECHO = """
from ts.handler_utils.utils import send_intermediate_predict_response

def text(value):
    return bytes(value).decode() if isinstance(value, (bytes, bytearray)) else str(value)

def handle(data, context):
    if data is None:
        return []
    answers = ["".join(text(value) for value in row.values()) for row in data]
    {deed}
    return answers
"""
MODELS = {
    "plain": "pass",
    "html": "[context.set_response_content_type(i, 'text/html; charset=utf-8') for i in range(len(data))]",
    "headers": "[context.set_response_header(i, name, '*') for i in range(len(data)) for name in "
    "('Content-Security-Policy', 'X-Content-Type-Options', 'Cross-Origin-Resource-Policy')]",
    "stream": "send_intermediate_predict_response(answers, context.request_ids, 'more', 200, context)",
    "failing": "raise ValueError(answers[0])",
}
OTHERS = [name for name in MODELS if name != "html"]
FORM = """
const [url, method, encoding, text] = arguments;
const form = Object.assign(document.createElement("form"), {action: url, method, enctype: encoding});
form.append(Object.assign(document.createElement("textarea"), {name: "data", value: text}));
document.body.append(form);
form.submit();
"""


@pytest.fixture(scope="module")
def echoing(serving: Any, page: str, write_to: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server that lets the page show answers, since others are refused before a model answers."""
    directory = tmp_path_factory.mktemp("echoing")
    for name, deed in MODELS.items():
        write_to(directory / "store", name, ECHO.replace("{deed}", deed))
    settings = {"cors_allowed_origin": page, "enable_docs_url": "true"}
    with serving(directory, directory / "store", settings, ["--ncs", "--models", *MODELS]) as server:
        site = Site(server.wait_started())
        until(site.is_ready, "its models are ready")
        yield site


RUNS = [
    (row, method) for row in ROUTES if row.effect is Effect.RUNS for method in ("GET", "POST") if row.accepts(method)
]


def test_no_answer_of_a_model_runs_in_the_browser(browser: Browser, page: str, echoing: Site) -> None:
    """By every route that runs a model, by a form of every kind, and by a link; every third also with an answer that
    the model doesn't call a document."""
    shown = set()
    for number, (row, method) in enumerate(RUNS):
        other = OTHERS[number // 3 % len(OTHERS)]
        for model in ("html", other) if number % 3 == 0 else ("html",):
            word = f"n{number}x{model}x"
            text = SCRIPT.format(page=page, word=word)
            at = echoing.management if row.when is Switch.CONSOLE else echoing.inference
            target = f"{at}{target_of(row).replace('hello', model)}"
            browser.open(page)
            browser.run(FORM, f"{target}?x={text}", method.lower(), SIMPLE[number % 3], text)
            echoing.server.wait_for_log(word)
            if "shown" in browser.text() and browser.origin() == "null":
                shown.add(row.path)
    assert {"/predictions/{model_name}", "/v1/models/{model_name}:predict", "/models/{model_name}/invoke"} <= shown
    assert not Page.ran
    browser.open(page)
    browser.run(FORM, f"{page}/echo", "post", SIMPLE[0], SCRIPT.format(page=page, word="control"))
    until(lambda: Page.ran, "the same script runs where nothing forbids it")
    Page.ran.clear()


def test_no_foreign_page_shows_what_a_model_answers(browser: Browser, page: str, without_cors: Site) -> None:
    """Neither in a window nor in a frame; the model isn't asked."""
    before = without_cors.calls()
    for number, (row, method) in enumerate(RUNS[::3]):  # test_guard.py asks all of them, faster than a browser
        at = without_cors.management if row.when is Switch.CONSOLE else without_cors.inference
        browser.open(page if number % 2 else page.replace("127.0.0.1", "localhost"))
        told = browser.submit(f"{at}{target_of(row)}", method.lower(), SIMPLE[number % 3])
        assert "cors_allowed_origin" in told, (row, method, told)
    browser.open(page)
    browser.run(
        "document.body.append(Object.assign(document.createElement('iframe'), {src: arguments[0]}))",
        f"{without_cors.inference}/predictions/hello?framed",
    )
    without_cors.server.wait_for_log("?framed")
    assert statuses(without_cors, "GET", "framed") == ["403"]
    assert without_cors.calls() == before
    browser.open(f"{without_cors.inference}/predictions/hello")  # a typed address
    until(lambda: without_cors.calls() == before + 1, "it was asked")


def test_a_page_of_the_inference_address_manages_nothing(browser: Browser, managed: Site) -> None:
    before = state(managed)
    browser.open(f"{managed.inference}/docs")
    for target in ("/v2/repository/models/hello/unload", "/v2/repository/models/bad/load", "/v2/logging"):
        sent = browser.fetch(target, method="POST", headers={"Content-Type": "application/json"}, body="{}")
        assert sent["status"] == 403 and "may not manage" in sent["text"], sent
    assert browser.fetch("/v2/models/hello")["status"] == 200
    assert state(managed) == before
