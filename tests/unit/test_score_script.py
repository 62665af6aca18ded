"""Azure ML's score.py in the built-in handler: what run gets, what it may return, descriptions, failures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ts.testing import Answer, Request, ServedModel
from ts.testing.fixtures import load_model  # noqa: F401
from ts.testing.served import NotLoaded

JSON = "application/json"
FAILED, TIME = "x-ms-run-function-failed", "x-ms-run-fn-exec-ms"
INIT = "def init():\n    global began\n    began = 1\n"
ECHO = INIT + "def run(data):\n    return [began, type(data).__name__, data]\n"


@pytest.fixture
def served(tmp_path: Path, load_model: Callable[..., ServedModel]) -> Callable[[str], ServedModel]:  # noqa: F811
    def load(script: str) -> ServedModel:
        (tmp_path / "main.py").write_text(script)
        return load_model(tmp_path / "main.py", handler="score_script", files={"modelFile": "main.py"})

    return load


def asked(model: ServedModel, body: bytes = b"", method: str = "POST", query: str = "", path: str = "/score") -> Answer:
    line = {":method": method, ":path": path, ":query": query}
    return model.predict(Request(body, headers={"content-type": JSON, **line}, content_type=""))


def test_a_body_is_text(served: Callable[[str], ServedModel]) -> None:
    model = served(ECHO)
    answer = asked(model, '{"a": "é"}'.encode())
    assert answer.json() == [1, "str", '{"a": "é"}']
    assert (answer.status, answer.headers["content-type"], answer.headers[FAILED]) == (200, JSON, "False")
    assert float(answer.headers[TIME]) >= 0
    assert asked(model).json() == [1, "str", ""]
    assert model.predict({"decoded": "by the server"}).json() == [1, "str", '{"decoded": "by the server"}']


@pytest.mark.parametrize(
    ("query", "given"),
    [
        ("", {}),
        ("a=1&b=[1,2]&c=text&d=null&e=", {"a": 1, "b": [1, 2], "c": "text", "d": None, "e": ""}),
        ("x=1&y=2&x=three", {"x": [1, "three"], "y": 2}),
        ("a=%7B%22b%22%3A%201%7D&c=a+b", {"a": {"b": 1}, "c": "a b"}),
        (f"a={'[' * 20_000}", {"a": "[" * 20_000}),
    ],
)
def test_the_parameters_of_a_get_are_json(
    served: Callable[[str], ServedModel], query: str, given: dict[str, Any]
) -> None:
    _, kind, data = asked(served(ECHO), method="GET", query=query).json()
    assert (kind, json.loads(data)) == ("str", given)


FAILS = f"""{INIT}
def run(data):
    if data == "object":
        return object()
    return 1 // int(data)
"""


def test_failures_are_told_without_their_details_and_each_request_by_itself(
    served: Callable[[str], ServedModel],
) -> None:
    bodies = (b"1", b"0", b"\xff", b"object")
    answers = served(FAILS).batch([Request(body, content_type=JSON) for body in bodies])
    heads = [(one.status, one.headers[FAILED], TIME in one.headers) for one in answers if isinstance(one, Answer)]
    assert heads == [(200, "False", True), (500, "True", False), (400, "False", False), (500, "False", False)]
    for failed in answers[1:]:
        assert isinstance(failed, Answer) and list(failed.json()) == ["message"]
        assert "ZeroDivision" not in failed.text and failed.headers["content-type"] == JSON


@pytest.mark.parametrize(("method", "status"), [("OPTIONS", 200), ("HEAD", 405), ("PUT", 405)])
def test_other_methods_do_not_run_the_script(served: Callable[[str], ServedModel], method: str, status: int) -> None:
    answer = asked(served(FAILS), b"0", method)
    assert (answer.status, answer.headers[FAILED]) == (status, "False")


def test_descriptions_of_three_versions(
    tmp_path: Path, served: Callable[[str], ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_NAME", "mine")
    monkeypatch.setenv("SERVICE_PATH_PREFIX", "/api/")
    model = served(ECHO)
    for query, key, version in (
        ("", "swagger", "2.0"),
        ("version=2.0", "swagger", "2.0"),
        ("version=3", "openapi", "3.0.3"),
        ("version=3.1", "openapi", "3.1.0"),
    ):
        found = asked(model, method="GET", query=query, path="/swagger.json").json()
        assert found[key] == version and found["info"] == {"title": "mine", "version": "1.0"}
        assert list(found["paths"]) == ["/api/", "/api/score", "/api/swagger.json"]
        text = json.dumps(found)
        for name in ("ServiceInput", "ServiceOutput", "ErrorResponse"):
            assert name in (found["definitions"] if key == "swagger" else found["components"]["schemas"])
            assert f"/{name}" in text, "it is referred to"
    assert asked(model, method="GET", query="version=4", path="/swagger.json").status == 404
    (tmp_path / "swagger3.json").write_text('{"own": true}')
    assert asked(model, method="GET", query="version=3", path="/swagger.json").json() == {"own": True}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("def init(): ...\n", "main.py has no run()"),
        ("run = 1\n", "main.py has no init() and no run()"),
        ("def init(): ...\ndef run(): ...\n", "run has no argument for the data"),
        ("def init(): ...\ndef run(request_headers): ...\n", "run has no argument for the data"),
        ("def init(): ...\ndef run(*data): ...\n", "run takes arguments by name"),
        ("def init(): raise OSError('no disk')\ndef run(data): ...\n", "no disk"),
        ("import nowhere\n", "nowhere"),
    ],
)
def test_scripts_that_cannot_serve_say_why(served: Callable[[str], ServedModel], script: str, said: str) -> None:
    with pytest.raises(NotLoaded) as error:
        served(script)
    assert said in str(error.value)
