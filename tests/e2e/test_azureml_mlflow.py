"""Azure ML's and MLflow's paths without their packages: their forms of health, errors and ids, and who may use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from support import until

SCORE = """
import os, threading

def init():
    pass

def run(data):
    if data == "die":
        os._exit(3)
    if data == "wait":
        threading.Event().wait()
    return data
"""
FAILED, OLD_ID, ID = "x-ms-run-function-failed", "x-ms-request-id", "x-request-id"
Start = Callable[..., Any]


@pytest.fixture
def azure(tmp_path: Path, serving: Callable[..., Any]) -> Iterator[Start]:
    """`azure()`: a server of a score.py, by Azure's variables alone; `azure(NAME="value")`: by more of them."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "score.py").write_text(SCORE)
    env = {"AML_APP_ROOT": str(tmp_path / "app"), "AZUREML_ENTRY_SCRIPT": "score.py", "HTTP_X_MS_SERVER_VERSION": "v 1"}

    def begin(**more: str) -> Any:
        settings = {"env": env | more, "default_workers_per_model": 1, "enable_model_api": "true"}
        server = running.enter_context(serving(tmp_path, None, settings, []))
        until(lambda: httpx.get(server.http).status_code == 200)
        return server

    with ExitStack() as running:
        yield begin


def test_azures_paths(azure: Start) -> None:
    server = azure()
    answer = httpx.post(f"{server.http}/score", content="text", headers={ID: "mine", "TraceId": "t"})
    assert (answer.status_code, answer.text) == (200, '"text"')
    assert [answer.headers[name] for name in (ID, OLD_ID, "traceid", "x-ms-server-version")] == [
        *("mine", "mine", "t", "v 1")
    ]
    assert httpx.get(server.http).text == "Healthy"
    assert httpx.get(f"{server.http}/swagger.json").json()["info"]["title"] == "ML service"
    refused = httpx.post(f"{server.http}/score", content="text", headers={OLD_ID: "i" * 101})
    assert refused.status_code == 431 and OLD_ID in refused.json()["message"]
    assert httpx.put(f"{server.http}/score").json().keys() == {"message"}
    assert httpx.post(f"{server.http}/predictions/model", content="text").json() == "text"


def test_a_dead_worker_is_a_failed_run_and_without_a_model_the_server_is_not_healthy(azure: Start) -> None:
    server = azure()
    died = httpx.post(f"{server.http}/score", content="die", headers={OLD_ID: "mine"})
    assert (died.status_code, list(died.json())) == (500, ["message"])
    assert (died.headers[FAILED], died.headers[OLD_ID]) == ("True", "mine")
    server.unregister("model")
    gone = httpx.post(f"{server.http}/score", content="1")
    assert (gone.status_code, list(gone.json()), gone.headers[FAILED]) == (400, ["message"], "False")
    assert httpx.get(server.http).status_code == 503


def test_a_run_over_the_scoring_timeout_has_failed(azure: Start) -> None:
    server = azure(SCORING_TIMEOUT_MS="1")
    late = httpx.post(f"{server.http}/score", content="wait")
    assert (late.status_code, list(late.json()), late.headers[FAILED]) == (500, ["message"], "True")


def test_another_models_answer_has_azures_headers_and_no_description(
    tmp_path: Path, start: Start, write: Callable[..., str]
) -> None:
    write("echo", "def handle(data, context):\n    return data and [row['body'] for row in data]\n")
    server = start("--models", "echo", env={"AZUREML_MODEL_DIR": "/models"}, default_workers_per_model=1)
    answer = httpx.post(f"{server.http}/score", content=b"a=1", headers={"content-type": "text/plain", OLD_ID: "x"})
    assert (answer.content, answer.headers.get(OLD_ID)) == (b"a=1", "x"), (answer.text, server.log)
    assert httpx.get(f"{server.http}/swagger.json").status_code == 404


def test_mlflows_paths_without_its_package(tmp_path: Path, start: Start) -> None:
    (tmp_path / "flow").mkdir()
    (tmp_path / "flow" / "MLmodel").write_text("flavors: {}\n")
    server = start(
        "--models",
        f"flow={tmp_path / 'flow'}",
        "--platform",
        "mlflow",
        default_workers_per_model=1,
        exit_on_error="false",
    )
    server.wait_for_log("A folder with MLmodel needs the package mlflow")
    failed = httpx.post(f"{server.http}/invocations", json={"inputs": [1]})
    assert (failed.status_code, failed.json()["error_code"]) == (503, "TEMPORARILY_UNAVAILABLE")
    assert failed.json().keys() == {"error_code", "message"}
    version = httpx.get(f"{server.http}/version")
    assert version.status_code == 200 and version.text[0].isdecimal()
    assert httpx.get(f"{server.http}/health").status_code == httpx.get(f"{server.http}/ping").status_code


@pytest.fixture
def plain(start: Start) -> Iterator[Any]:
    yield start("--models", "probe", default_workers_per_model=1)


def test_other_platforms_have_none_of_these_paths(plain: Any) -> None:
    for path in ("/score", "/swagger.json", "/health", "/version"):
        assert httpx.get(f"{plain.http}{path}").status_code in (404, 405), path
    assert OLD_ID not in httpx.get(f"{plain.http}/ping").headers
