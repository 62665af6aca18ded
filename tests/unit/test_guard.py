"""The guard's decisions, and the table of routes by which it decides: no route may be without a row."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from pathlib import Path

import pytest

import ts_frontend.http
from streams import asked
from ts_frontend.config.keys import KeyKind
from ts_frontend.config.kinds import parse_name
from ts_frontend.errors import ServeError
from ts_frontend.http.errors import ErrorDialect
from ts_frontend.http.errors import refusal as told
from ts_frontend.http.openapi import document
from ts_frontend.http.request import BodyLimits, HttpAnswer, HttpRequest, Serve
from ts_frontend.http.routes import ROUTES
from ts_frontend.http.routing import HTTP_MANAGEMENT, Effect, Guard, Hosts, RouteTable, Row, Switch

LOAD = ("POST", "/v2/repository/models/X/load")
EVIL = (b"origin", b"http://evil.example")
CROSS = (b"sec-fetch-site", b"cross-site")
JSON_TYPE = (b"content-type", b"application/json")
HTTP = Path(ts_frontend.http.__file__).parent


ALL = ("http_inference", "http_management", "http_metrics")
TABLE = RouteTable(ROUTES, ALL, Switch)
decision = TABLE.find


def refusal(
    guard: Guard, method: str, path: str, *headers: tuple[bytes, bytes], reached: str = "127.0.0.1"
) -> HttpAnswer | None:
    request = HttpRequest(asked(method, path.encode(), headers, reached), "id", BodyLimits(1, 1))
    match = decision(method, path)
    try:
        guard.check(request, match)
    except ServeError as error:
        return told(error, match.dialect)
    return None


def status(guard: Guard, method: str, path: str, *headers: tuple[bytes, bytes]) -> int:
    found = refusal(guard, method, path, (b"host", b"localhost:8080"), *headers)
    return 200 if found is None else found.status


LOCAL = Guard(Hosts("127.0.0.1"))


# --- pages


def test_pages_of_other_origins_change_nothing() -> None:
    assert status(LOCAL, *LOAD, EVIL, JSON_TYPE) == 403
    assert status(LOCAL, *LOAD, CROSS, JSON_TYPE) == 403
    for site in (b"same-site", b"Cross-Site", b"of-tomorrow"):
        assert status(LOCAL, *LOAD, (b"sec-fetch-site", site), JSON_TYPE) == 403
    assert status(LOCAL, *LOAD, (b"origin", b"http://localhost:8080"), EVIL, JSON_TYPE) == 403
    assert status(LOCAL, *LOAD, (b"sec-fetch-site", b"same-origin"), CROSS, JSON_TYPE) == 403
    for origin in (b"null", b"http://localhost", b"http://localhost:1", b"http://[", b"http://", b"localhost:8080"):
        assert status(LOCAL, *LOAD, (b"origin", origin), JSON_TYPE) == 403, origin


def test_the_servers_own_pages_and_programs_do() -> None:
    own = ((b"origin", b"http://LOCALHOST:8080"), (b"sec-fetch-site", b"same-origin"))
    assert status(LOCAL, *LOAD, *own, JSON_TYPE) == 200
    assert status(LOCAL, *LOAD, JSON_TYPE) == 200
    assert status(LOCAL, *LOAD) == 200
    assert status(LOCAL, "DELETE", "/models/m", (b"sec-fetch-site", b"none")) == 200


def test_answers_of_models_are_shown_to_no_other_site() -> None:
    mine = decision("POST", "/predictions/m")
    of_models = Guard(Hosts("127.0.0.1"), of_a_model=lambda method, path: mine)
    for shown in ((b"sec-fetch-mode", b"navigate"), (b"sec-fetch-dest", b"iframe"), (b"sec-fetch-dest", b" OBJECT ")):
        for target in ("/predictions/m", "/v1/models/m:predict", "/wfpredict/w", "/m/predict", "/invocations"):
            assert status(LOCAL, "POST", target, CROSS, shown) == 403, target
            assert status(LOCAL, "GET", target, (b"sec-fetch-site", b"none"), shown) == 200
            assert status(LOCAL, "POST", target, CROSS, (b"sec-fetch-mode", b"cors")) == 200
        assert status(LOCAL, "GET", "/models", (b"sec-fetch-site", b"none"), shown) == 200
        assert status(of_models, "POST", "/mine", CROSS, shown) == 403
        allowing = Guard(Hosts("127.0.0.1"), "http://app.example")
        assert status(allowing, "POST", "/predictions/m", (b"origin", b"http://app.example"), CROSS, shown) == 200


def test_content_types() -> None:
    own = (b"sec-fetch-site", b"same-origin")
    for kind, by_program, by_page in (
        (b"application/json; charset=utf-8", 200, 200),
        (b"text/plain", 415, 415),
        (b" TEXT/PLAIN ;x", 415, 415),
        (b"multipart/form-data; boundary=b", 415, 415),
        (b"text/ping", 415, 415),
        (b"application/csp-report", 415, 415),
        (b"application/x-www-form-urlencoded", 200, 415),
        (b"", 200, 415),
    ):
        assert status(LOCAL, *LOAD, (b"content-type", kind)) == by_program
        assert status(LOCAL, *LOAD, (b"content-type", kind), own) == by_page
    assert status(LOCAL, "POST", "/models", (b"content-type", b"text/plain"), own) == 200
    assert status(LOCAL, "POST", "/v1/chat/completions", EVIL) == 415


def test_cors_names_who_may() -> None:
    guard = Guard(Hosts("127.0.0.1"), "http://app.example")
    app = (b"origin", b"http://app.example")
    assert status(guard, *LOAD, app, CROSS, JSON_TYPE) == 200
    assert status(guard, *LOAD, app, CROSS) == 415
    assert status(guard, *LOAD, app, EVIL, JSON_TYPE) == 403
    assert status(guard, *LOAD, CROSS, JSON_TYPE) == 403
    assert status(Guard(Hosts("127.0.0.1"), "*"), *LOAD, EVIL, CROSS, JSON_TYPE) == 200


# --- names


@pytest.mark.parametrize(
    ("host", "known"),
    [
        *(
            (name, True)
            for name in ("localhost", "LocalHost.:80", "x.localhost", "127.0.0.1:1", "127.9.9.9", "[::1]:1")
        ),
        *((name, True) for name in ("[::ffff:127.0.0.1]", "told.example:9", "10.0.0.7", "[fe80::1]")),
        *((name, True) for name in ("a.example", "b.sub.example", "c.b.sub.example")),
        *(
            (name, False)
            for name in ("evil.example", "sub.example", "xa.example", "localhost.evil.example", "10.0.0.8")
        ),
        *(
            (name, False)
            for name in ("", ".", "user@localhost", "localhost/x", "localhost:80:80", "[::1", "0.0.0.0", "[::]")
        ),
        *(
            (name, False)
            for name in ("xlocalhost", "localhost" + "x" * 300, "local host", "a.example,localhost", "::1")
        ),
    ],
)
def test_names_of_a_local_listener(host: str, known: bool) -> None:
    hosts = Hosts("127.0.0.1", ("told.example", "10.0.0.7", "fe80::1"), ("a.example", ".sub.example"))
    assert not hosts.any_name
    assert hosts.has(host, "127.0.0.1") is known


def test_names_of_other_listeners() -> None:
    assert not Hosts("").has(".", "")
    assert Hosts("0.0.0.0").any_name and Hosts("name.example").any_name and Hosts("").any_name
    assert Hosts("127.0.0.1", (), ("*",)).any_name
    outside = Hosts("0.0.0.0", ("0.0.0.0",), ("a.example",))
    assert not outside.any_name
    for name, known in (("10.2.3.4", True), ("a.example", True), ("0.0.0.0", True), ("10.2.3.5", False), ("b", False)):
        assert outside.has(name, "10.2.3.4") is known
    assert Hosts("::", ("::",), ("a",)).has("10.2.3.4", "::ffff:10.2.3.4")


def test_a_foreign_name_reads_nothing_in_the_form_of_the_path() -> None:
    for path, keys in (("/models", {"code", "type", "message"}), ("/v2", {"error"}), ("/v1/models", {"error"})):
        found = refusal(LOCAL, "GET", path, (b"host", b"evil.example"))
        assert found is not None and found.status == 403
        answer = json.loads(found.body)  # type: ignore[arg-type]
        assert set(answer) == keys and "evil.example" in str(answer) and "allowed_hosts" in str(answer)
    assert refusal(LOCAL, "GET", "/models", (b"host", b"localhost"), (b"host", b"evil.example")) is not None


def test_allowed_names() -> None:
    for text, name in (
        ("A.Example.", "a.example"),
        ("*.a.example", ".a.example"),
        (".a", ".a"),
        ("*", "*"),
        ("[::1]", "::1"),
        ("0::1", "::1"),
        ("10.0.0.1", "10.0.0.1"),
    ):
        assert parse_name(text) == name
    for text in ("a:80", "http://a", "a/b", "", "a b", "a*b", "..", "a..b", "[a]:1"):
        with pytest.raises(ValueError, match="names and addresses"):
            parse_name(text)


# --- the table


def test_forms_of_a_path_make_no_difference() -> None:
    for path in ("/v2/logging", "/v2/logging/", "/v2/logging///", "/v2/logging" + "/" * 300):
        assert decision("POST", path) == decision("POST", "/v2/logging")
    assert decision("HEAD", "/v2/logging") == decision("GET", "/v2/logging")


def test_what_no_row_names_is_closed() -> None:
    for method, path in (
        ("POST", "/new"),
        ("GET", "/v2/repository/new"),
        ("DELETE", "/v2/logging"),
        ("POST", "//models"),
    ):
        found = decision(method, path)
        assert not found.known and found.managing and found.effect is Effect.CHANGES
    for path in ("", "*", "new", "/", "//"):
        assert decision("POST", path).effect is Effect.CHANGES
    assert decision("POST", "/v2/new").dialect is ErrorDialect.OPEN_INFERENCE


def test_the_consoles_playground_is_the_managers() -> None:
    """At the console's address it runs models for pages of that address, and for nobody else's."""
    own = ((b"origin", b"http://localhost:8080"), (b"sec-fetch-site", b"same-origin"))
    rows = [row for row in ROUTES if row.effect is Effect.RUNS and row.when is Switch.CONSOLE]
    assert len(rows) == 6
    for row in rows:
        path = re.sub(r"\{\w+\}", "x", row.path)
        assert decision("POST", path).managing and decision("POST", path).keys == (KeyKind.MANAGEMENT,)
        assert status(LOCAL, "POST", path, JSON_TYPE, *own) == 200
        for foreign in (EVIL, CROSS):
            assert status(LOCAL, "POST", path, JSON_TYPE, foreign) == 403


def test_nothing_but_the_table_routes() -> None:
    """No service looks at the parts of a path: a route without a row would have no guard and no key."""
    for file in sorted(HTTP.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            assert not isinstance(node, ast.Match), f"{file.name}:{node.lineno}"
            assert not (isinstance(node, ast.Attribute) and node.attr == "segments"), f"{file.name}:{node.lineno}"


def test_rows_are_consistent() -> None:
    places = [(method, row.path, row.on, row.when) for row in ROUTES for method in row.methods.split()]
    assert len(set(places)) == len(places)
    for row in ROUTES:
        assert row.path.startswith("/") and row.methods, row
        assert not row.keys or row.effect is not Effect.OPEN, row
        assert row.effect is not Effect.CHANGES or row.keys, row
        if row.path.startswith("/v2") and row.effect is Effect.CHANGES:
            assert row.json and row.dialect is ErrorDialect.OPEN_INFERENCE, row


# --- a new route


class Greeter:
    """A service with one more function."""

    async def greet(self, request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, (), request.path_params["name"].encode())


def test_a_new_route_is_a_row_and_its_function() -> None:
    """Guard, keys, methods, errors and the API description read the row."""
    row = Row(
        *("POST", "/greetings/{name}", Effect.CHANGES, Greeter.greet, "Greet somebody", "greet"),
        on=(HTTP_MANAGEMENT,),
        keys=(KeyKind.MANAGEMENT,),
        dialect=ErrorDialect.OPENAI,
        json=True,
    )
    table = RouteTable([row], (HTTP_MANAGEMENT,), services=[Greeter()])
    match = table.find("POST", "/greetings/Ada")
    assert (match.effect, match.managing, match.json) == (Effect.CHANGES, True, True)
    assert (match.keys, match.dialect, match.params) == ((KeyKind.MANAGEMENT,), ErrorDialect.OPENAI, {"name": "Ada"})
    assert table.find("GET", "/greetings/Ada").allowed == ["POST"]
    elsewhere = RouteTable([*ROUTES, row], ("http_inference",)).find("POST", "/greetings/Ada")
    assert not elsewhere.params and elsewhere.effect is Effect.CHANGES, "no weaker where it isn't"
    described = document("t", "1", table.rows)["paths"]["/greetings/{name}"]["post"]
    assert (described["operationId"], described["description"]) == ("greet", "Greet somebody")
    request = HttpRequest(asked("POST", b"/greetings/Ada", [CROSS], "::1"), "id", BodyLimits(1, 1))
    with pytest.raises(ServeError):
        LOCAL.check(request, match)
    request.path_params = match.params
    assert match.serve is not None and asyncio.run(answer_of(match.serve, request)).body == b"Ada"


async def answer_of(serve: Serve, request: HttpRequest) -> HttpAnswer:
    return await serve(request)
