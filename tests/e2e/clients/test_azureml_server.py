"""Azure's own inference server beside this one, with the same score.py: the same requests have the same status, body
and headers. Only the words of errors are ours."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from support import GUARD_S, until

pytestmark = [pytest.mark.external, pytest.mark.slow]

PLAIN = """
import json, os

def init():
    global began
    began = [os.environ["AZUREML_MODEL_DIR"]]

def run(data, request_headers):
    try:
        asked = json.loads(data)
    except ValueError:
        asked = data
    if asked == "fail":
        raise RuntimeError("secret")
    if asked == "object":
        return object()
    if asked == "nothing":
        return None
    if asked == "headers":
        return {name: request_headers.get(name) for name in ("X-Mine", "Content-Type", "User-Agent", "x-mine")}
    return [began, data]
"""
SCHEMA = """
import numpy as np
from inference_schema.parameter_types.numpy_parameter_type import NumpyParameterType
from inference_schema.parameter_types.standard_py_parameter_type import StandardPythonParameterType
from inference_schema.schema_decorators import input_schema, output_schema

def init():
    pass

@input_schema(param_name="rows", param_type=NumpyParameterType(np.array([[1, 2]])))
@input_schema(param_name="factor", param_type=StandardPythonParameterType(3))
@output_schema(output_type=StandardPythonParameterType([1]))
def run(rows, factor=2, request_headers=None):
    return [type(rows).__name__, (rows.sum(axis=1) * factor).tolist(), request_headers.get("X-Mine")]
"""
RAW = """
from azureml_inference_server_http.api.aml_request import AMLRequest, rawhttp
from azureml_inference_server_http.api.aml_response import AMLResponse
from flask import Response

def init():
    pass

@rawhttp
def run(request):
    words = request.args.get("answer")
    if words == "response":
        more = {"Content-Type": "image/x-mine", "X-Several": "a, b"}
        return AMLResponse(request.get_data()[::-1], 202, more)
    if words == "failed":
        return AMLResponse({"why": 1}, 503, {}, json_str=True)
    if words == "streamed":
        return Response((f"piece {at};" for at in range(3)), mimetype="text/x-mine")
    sent = {name: request.headers.get(name) for name in ("X-Mine", "Content-Type")}
    form = {name: request.form.getlist(name) for name in request.form}
    files = {name: file.read().decode() for name, file in request.files.items()}
    return [request.method, request.args.to_dict(flat=False), sent, form, files]
"""
#: Azure's headers of an answer, and one of the script's; `x-ms-run-fn-exec-ms` has the time.
HEADERS = ("x-ms-run-function-failed", "x-ms-server-version", "x-ms-client-request-id", "traceid", "x-several")
TIME, ID, OLD_ID = "x-ms-run-fn-exec-ms", "x-request-id", "x-ms-request-id"
JSON = {"content-type": "application/json"}


class Asked(NamedTuple):
    method: str
    target: str
    body: bytes = b""
    headers: dict[str, str] = {}


class Pair(NamedTuple):
    theirs: str
    ours: str

    def answers(self, asked: Asked) -> tuple[httpx.Response, httpx.Response]:
        head = {"x-mine": "a", "user-agent": "me", **asked.headers}
        theirs, ours = (
            httpx.request(asked.method, base + asked.target, content=asked.body, headers=head, timeout=GUARD_S)
            for base in self
        )
        return theirs, ours


@contextmanager
def azures_server(python: Path, env: dict[str, str]) -> Iterator[str]:
    """Its address. gunicorn is what Azure's command starts, too, but on a fixed port."""
    command = [str(python), "-m", "gunicorn", "-b", "127.0.0.1:0", "azureml_inference_server_http.server.entry:app"]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        reader = threading.Thread(target=server.stderr.read)
        try:
            found = next(match for line in server.stderr if (match := re.search(r"http://127\.0\.0\.1:\d+", line)))
            reader.start()
            yield found[0]
        finally:
            server.terminate()
            server.wait(GUARD_S)
            if reader.ident is not None:
                reader.join(GUARD_S)


@pytest.fixture(scope="module")
def pair(
    client_python: Callable[[str], Path],
    client_env: dict[str, str],
    serving: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], Pair]]:
    """`pair(SCRIPT)`: both servers of a script."""
    python = client_python("azureml")
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    running = ExitStack()

    def begin(script: str) -> Pair:
        root = tmp_path_factory.mktemp("app")
        (root / "scripts").mkdir()
        (root / "scripts" / "score.py").write_text(script)
        own = {
            "AML_APP_ROOT": str(root),
            "AZUREML_ENTRY_SCRIPT": "scripts/score.py",
            "AZUREML_MODEL_DIR": "/models",
            "HTTP_X_MS_SERVER_VERSION": "azmlinfsrv/1",
            "SERVICE_NAME": "mine",
        }
        settings = {"env": {**own, "PYTHONPATH": str(packages)}, "default_workers_per_model": 1}
        ours = running.enter_context(serving(tmp_path_factory.mktemp("ours"), None, settings, []))
        until(lambda: httpx.get(ours.http).status_code == 200)
        return Pair(running.enter_context(azures_server(python, {**client_env, **own})), ours.http)

    with running:
        yield begin


@pytest.fixture(scope="module")
def plain(pair: Callable[[str], Pair]) -> Pair:
    return pair(PLAIN)


@pytest.fixture(scope="module")
def schema(pair: Callable[[str], Pair]) -> Pair:
    return pair(SCHEMA)


@pytest.fixture(scope="module")
def raw(pair: Callable[[str], Pair]) -> Pair:
    return pair(RAW)


def compared(pair: Pair, asked: Asked) -> httpx.Response:
    """Our answer, which is that of Azure's server."""
    theirs, ours = pair.answers(asked)
    assert ours.status_code == theirs.status_code, (theirs.text, ours.text)
    if "message" in theirs.text and theirs.status_code >= 400:
        assert isinstance(ours.json()["message"], str) and list(theirs.json()) == ["message"]
        assert list(ours.json()) == ["message"]
    else:
        assert ours.content == theirs.content
        if theirs.content and asked.target != "/":
            assert ours.headers["content-type"] == theirs.headers["content-type"]
    for name in HEADERS:
        assert ours.headers.get(name) == theirs.headers.get(name), name
    assert (TIME in ours.headers) is (TIME in theirs.headers)
    for name in (ID, OLD_ID):
        if name in asked.headers and name in theirs.headers:
            assert ours.headers[name] == theirs.headers[name]
        elif name in theirs.headers:
            assert ours.headers[name], "each server makes its own"
    if OLD_ID in theirs.headers and theirs.headers[OLD_ID] == theirs.headers[ID]:
        assert ours.headers[OLD_ID] == ours.headers[ID]
    return ours


LONG = "i" * 101
SCORES = [
    Asked("POST", "/score", b'{"a": [1, 2.5, "\xc3\xa9"]}', JSON),
    Asked("POST", "/score", b"any text", {"content-type": "text/plain"}),
    Asked("POST", "/score", b""),
    Asked("POST", "/score", b"\xff\xfe", JSON),
    Asked("GET", "/score"),
    Asked("GET", "/score?a=1&b=[1,2]&c=a&d=null&foo=x&foo=2&e=&f=%C3%A9+%2B"),
    Asked("OPTIONS", "/score"),
    Asked("PUT", "/score", b"1"),
    Asked("POST", "/score", b'"fail"'),
    Asked("POST", "/score", b'"object"'),
    Asked("POST", "/score", b'"nothing"'),
    Asked("POST", "/score", b'"headers"', JSON),
    Asked("GET", "/"),
    Asked("POST", "/score", b"1", {ID: "one"}),
    Asked("POST", "/score", b"1", {OLD_ID: "two"}),
    Asked("POST", "/score", b"1", {"x-ms-client-request-id": "three"}),
    Asked("POST", "/score", b"1", {ID: "one", OLD_ID: "two", "x-ms-client-request-id": "three", "TraceId": "four"}),
    Asked("GET", "/", b"", {ID: "one", "x-ms-client-request-id": "three"}),
    Asked("GET", "/swagger.json?version=5", b"", {ID: "one"}),
    Asked("POST", "/score", b'"fail"', {OLD_ID: "two"}),
    Asked("POST", "/score", b"1", {ID: "i" * 100, OLD_ID: "j" * 100}),
    Asked("POST", "/score", b"1", {OLD_ID: LONG}),
    Asked("POST", "/score", b"1", {"x-ms-client-request-id": LONG, "TraceId": "four"}),
]


@pytest.mark.parametrize("asked", SCORES, ids=[f"{at}-{one.method}-{one.target[:24]}" for at, one in enumerate(SCORES)])
def test_a_script_without_decorators(plain: Pair, asked: Asked) -> None:
    compared(plain, asked)


def test_a_form_is_text_too(plain: Pair) -> None:
    """There, run gets nothing of it."""
    asked = Asked("POST", "/score", b"a=1&b=2", {"content-type": "application/x-www-form-urlencoded"})
    theirs, ours = plain.answers(asked)
    assert (theirs.json(), ours.json()) == ([["/models"], ""], [["/models"], "a=1&b=2"])


def test_an_id_of_a_request_that_is_too_long(plain: Pair) -> None:
    """There, the answer has no id then; here, one that the server made or took."""
    theirs, ours = plain.answers(Asked("POST", "/score", b"1", {ID: LONG}))
    assert ours.status_code == theirs.status_code == 431 and list(ours.json()) == ["message"]


@pytest.mark.parametrize(
    "asked",
    [
        Asked("POST", "/score", b'{"rows": [[1, 2], [3, 4]], "factor": 5}', JSON),
        Asked("POST", "/score", b'{"rows": [[1, 2]]}', {"content-type": "application/x-mine+json; charset=utf-8"}),
        Asked("POST", "/score", b'{"rows": [[1, 2]], "unknown": 1}', JSON),
        Asked("POST", "/score", b'{"factor": 5}', JSON),
        Asked("POST", "/score", b"[1]", JSON),
        Asked("POST", "/score", b"{", JSON),
        Asked("POST", "/score", b"", JSON),
        Asked("POST", "/score", b'{"rows": [[1, 2]]}', {"content-type": "text/plain"}),
        Asked("POST", "/score", b'{"rows": "no array"}', JSON),
        Asked("GET", "/score?rows=[[1,2]]&factor=7"),
        Asked("GET", "/score?factor=7"),
        Asked("OPTIONS", "/score"),
    ],
    ids=str,
)
def test_a_script_with_a_schema(schema: Pair, asked: Asked) -> None:
    compared(schema, asked)


@pytest.mark.parametrize(
    "asked",
    [
        Asked("POST", "/score?a=1&a=2", b"a=1&b=%C3%A9", {"content-type": "application/x-www-form-urlencoded"}),
        Asked(
            "POST",
            "/score",
            b'--x\r\nContent-Disposition: form-data; name="f"; filename="f.txt"\r\n\r\nfile\r\n--x--\r\n',
            {"content-type": "multipart/form-data; boundary=x"},
        ),
        Asked("GET", "/score?a=1"),
        Asked("OPTIONS", "/score"),
        Asked("POST", "/score?answer=response", b"\x00\xff", {"content-type": "application/octet-stream"}),
        Asked("POST", "/score?answer=failed", b"1"),
        Asked("POST", "/score?answer=streamed", b"1"),
    ],
    ids=str,
)
def test_a_script_with_the_request_itself(raw: Pair, asked: Asked) -> None:
    compared(raw, asked)


@pytest.mark.parametrize("version", ["", "?version=2", "?version=3", "?version=3.1", "?version=3.0"])
@pytest.mark.parametrize("script", ["plain", "schema"])
def test_descriptions(version: str, script: str, request: pytest.FixtureRequest) -> None:
    theirs, ours = request.getfixturevalue(script).answers(Asked("GET", f"/swagger.json{version}"))
    assert ours.status_code == theirs.status_code == 200
    there, here = theirs.json(), ours.json()
    assert here["info"]["title"] == there["info"]["title"] == "mine"
    assert here["info"]["version"] == there["info"]["version"]
    assert (here.get("swagger"), here.get("openapi")) == (there.get("swagger"), there.get("openapi"))
    for document in (there, here):
        document["schemas"] = document.get("definitions") or document["components"]["schemas"]
    for name in ("ServiceInput", "ServiceOutput", "ErrorResponse"):
        assert here["schemas"][name] == there["schemas"][name]
    operations = [
        {(path, method, one["operationId"]) for path, all_ in document["paths"].items() for method, one in all_.items()}
        for document in (there, here)
    ]
    assert operations[0] == operations[1]
