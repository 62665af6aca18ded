"""Workflows over a server's life: TorchServe's recorded calls, a real image, a restart, a disabled model API."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image

from support import GUARD_S, http_call, module_of

COMMAND = "from {0} import {1} as main; main()"
ARCHIVERS = {
    "model": COMMAND.format("model_archiver.model_packaging", "generate_model_archive"),
    "workflow": COMMAND.format("workflow_archiver.workflow_packaging", "generate_workflow_archive"),
}
BRANCHES = """
models:
    a: {url: probe.mar}
dag:
    pre: [a, b]
    a: [agg]
    b: [agg]
"""
IMAGE = "models: {m1: {url: tiny.mar}}\ndag: {pre: [m1]}\n"
FUNCTIONS = '''
"""What the workflows do between their models."""

import json


def pre(data, context):
    if data is None:
        return None
    return [row.get("data") or row.get("body") for row in data]


b = pre


def agg(data, context):
    if data is None:
        return None
    return [json.dumps({name: bytes(row[name]).decode() for name in ("a", "b")}) for row in data]
'''


@pytest.fixture(scope="module")
def golden() -> ModuleType:
    """The module that reads and makes the recorded calls."""
    spec = importlib.util.spec_from_file_location("http_golden", Path(__file__).with_name("test_http_golden.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["http_golden"] = module
    spec.loader.exec_module(module)
    return module


def make(kind: str, *words: str) -> None:
    subprocess.run([sys.executable, "-c", ARCHIVERS[kind], *words], check=True, capture_output=True, timeout=GUARD_S)


def fill(store: Path, handlers: Path) -> None:
    """The archives of the recorded calls, made by the commands."""
    work = store.parent / "sources"
    work.mkdir()
    (work / "functions.py").write_text(FUNCTIONS)
    (work / "index_to_name.json").write_text(json.dumps({str(number): f"class {number}" for number in range(1000)}))
    network = load_network(handlers / "tiny_classifier.py")
    torch.manual_seed(3)
    torch.save(network().state_dict(), work / "tiny.pt")
    (work / "tiny.py").write_text((handlers / "tiny_classifier.py").read_text())
    out = ["--export-path", str(store)]
    make("model", "--model-name", "probe", "-v", "1.0", "--handler", str(handlers / "probe_handler.py"), *out)
    tiny = ["--model-name", "tiny", "-v", "1.0", "--handler", "image_classifier", "--model-file", str(work / "tiny.py")]
    more = ["--serialized-file", str(work / "tiny.pt"), "--extra-files", str(work / "index_to_name.json")]
    make("model", *tiny, *more, *out)
    for name, spec in (("branches", BRANCHES), ("dn", IMAGE)):
        (work / f"{name}.yaml").write_text(spec)
        words = ["--spec-file", str(work / f"{name}.yaml"), "--handler", str(work / "functions.py")]
        make("workflow", "--workflow-name", name, *words, *out)


def load_network(path: Path) -> Any:
    return module_of(path).TinyClassifier


@pytest.fixture(scope="module")
def wars(tmp_path_factory: pytest.TempPathFactory, golden: ModuleType) -> Path:
    store = tmp_path_factory.mktemp("wars") / "store"
    store.mkdir()
    fill(store, golden.HANDLERS)
    return store


@pytest.fixture(scope="module")
def served(serving: Any, wars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The workflows have a store of their own."""
    directory = tmp_path_factory.mktemp("served")
    own = directory / "flows"
    own.mkdir()
    for war in wars.glob("*.war"):
        (own / war.name).write_bytes(war.read_bytes())
    models = directory / "models"
    models.mkdir()
    for archive in wars.glob("*.mar"):
        (models / archive.name).write_bytes(archive.read_bytes())
    with serving(
        directory, models, {"extract_files_max": 20, "preload_torch": "true"}, ["--ncs", "--workflow-store", str(own)]
    ) as server:
        yield server


def call(server: Any, api: str, method: str, target: str, body: bytes = b"", kind: str = "") -> tuple[int, bytes]:
    answer = http_call(server.port(f"http_{api}"), method, target, body, {"Content-Type": kind} if kind else {})
    return answer.status, answer.body


def manage(server: Any, method: str, target: str) -> tuple[int, Any]:
    status, answer = call(server, "management", method, target)
    return status, json.loads(answer)


def picture() -> bytes:
    out = io.BytesIO()
    Image.effect_mandelbrot((64, 64), (-3, -2.5, 2, 2.5), 50).convert("RGB").save(out, "PNG")
    return out.getvalue()


def test_recorded_calls(served: Any, golden: ModuleType) -> None:
    """In the order in which they were made with TorchServe."""
    for name in ("108", "250", "251", "253", "256", "260"):
        golden.check(name, golden.perform(served, name))
    assert manage(served, "POST", "/workflows?url=dn.war")[0] == 200
    for name in ("259", "261", "262"):
        golden.check(name, golden.perform(served, name))
    # Recorded with weights that aren't here: the same form, the same answer as from the model itself.
    form = (
        b'--B\r\nContent-Disposition: form-data; name="data"; filename="x.png"\r\n\r\n' + picture() + b"\r\n--B--\r\n"
    )
    status, answer = call(served, "inference", "POST", "/wfpredict/dn", form, "multipart/form-data; boundary=B")
    classes, recorded = json.loads(answer), golden.recorded("258").json()
    assert status == 200 and len(classes) == len(recorded) == 5
    assert [type(value) for value in classes.values()] == [type(value) for value in recorded.values()]
    assert answer.startswith(b'{\n  "class ')
    alone = call(served, "inference", "POST", "/predictions/dn__m1", picture(), "image/png")
    assert alone == (200, answer)
    assert manage(served, "DELETE", "/workflows/dn")[0] == 200
    assert manage(served, "GET", "/models") == (200, {"models": []})


def test_grpc_knows_no_workflows(served: Any) -> None:
    import grpc

    assert manage(served, "POST", "/workflows?url=branches.war&workflow_name=named")[0] == 200
    with pytest.raises(grpc.RpcError) as error:
        served.predict("named", b"x")
    assert error.value.code() == grpc.StatusCode.NOT_FOUND
    assert manage(served, "DELETE", "/workflows/named")[0] == 200


class Lives:
    """A server that was restarted with a workflow of its store, `kept`, and one that came from `away`, `far`."""

    def __init__(self, serving: Any, directory: Path, wars: Path) -> None:
        self.directory, self.store, self.away = directory, directory / "store", directory / "away"
        self._serving = serving
        for folder in (self.store, self.away):
            folder.mkdir()
        for name in ("probe.mar", "branches.war"):
            (self.store / name).write_bytes((wars / name).read_bytes())
        (self.away / "other.mar").write_bytes((wars / "probe.mar").read_bytes())
        url = f"'file://{self.away}/other.mar'"
        (directory / "spec.yaml").write_text(f"models: {{a: {{url: {url}}}, b: {{url: {url}}}}}\ndag: {{a: [b]}}")
        words = ["--workflow-name", "far", "--spec-file", str(directory / "spec.yaml")]
        make("workflow", *words, "--export-path", str(self.away))
        self.server = self.start()

    def start(self) -> Any:
        self.server = self._serving(self.directory, self.store, {"allowed_urls": f"file://{self.away}/.*"}, [])
        return self.server

    def files(self) -> list[str]:
        return sorted(path.name for path in self.store.iterdir())


@pytest.fixture(scope="module")
def lives(serving: Any, wars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    found = Lives(serving, tmp_path_factory.mktemp("lives"), wars)
    try:
        server = found.server.wait_started()
        assert manage(server, "POST", "/workflows?url=branches.war&workflow_name=kept&response_timeout=77")[0] == 200
        assert manage(server, "POST", "/workflows?url=branches.war&workflow_name=left")[0] == 200
        assert manage(server, "PUT", "/models/kept__a?min_worker=2&synchronous=true")[0] == 200
        assert manage(server, "DELETE", "/workflows/left")[0] == 200
        assert manage(server, "POST", f"/workflows?url=file://{found.away}/far.war")[0] == 200
        assert found.files() == ["branches.war", "far.war", "other.mar", "probe.mar"]
        assert server.terminate() == 0
        found.start().wait_started()
        yield found
    finally:
        found.server.terminate()


def test_workflows_survive_a_restart(lives: Lives) -> None:
    server = lives.server
    listed = manage(server, "GET", "/workflows")[1]["workflows"]
    assert listed == [
        {"workflowName": "far", "workflowUrl": f"file://{lives.away}/far.war"},
        {"workflowName": "kept", "workflowUrl": "branches.war"},
    ]
    models = [model["modelName"] for model in manage(server, "GET", "/models")[1]["models"]]
    assert models == ["far__a", "far__b", "kept__a"]
    described = manage(server, "GET", "/models/kept__a")[1][0]
    assert (described["minWorkers"], described["responseTimeout"]) == (2, 77)
    status, answer = call(server, "inference", "POST", "/wfpredict/kept", b"again", "text/plain")
    assert (status, json.loads(answer)["b"]) == (200, "again")


def test_downloaded_archives_go_with_the_workflow(lives: Lives) -> None:
    """Two nodes share one that came from elsewhere."""
    body, kind = b'{"op": "ret_str"}', "application/json"
    status, answer = call(lives.server, "inference", "POST", "/wfpredict/far", body, kind)
    assert (status, json.loads(answer)["fields"]["body"]["head"]) == (200, "plain \xc3\xa9 text")
    assert manage(lives.server, "DELETE", "/workflows/far")[0] == 200
    assert lives.files() == ["branches.war", "probe.mar"]
    assert sorted(path.name for path in lives.away.iterdir()) == ["far.war", "other.mar"]


def test_a_workflow_that_cannot_come_back_is_set_aside(lives: Lives) -> None:
    """The start says so, the others are served, and the next start finds it again."""
    assert lives.server.terminate() == 0
    whole = (lives.store / "branches.war").read_bytes()
    (lives.store / "branches.war").write_bytes(whole[: len(whole) // 2])
    server = lives.start().wait_started()
    assert re.search(r"Workflow kept of the snapshot is set aside.*Put branches.war back", server.log)
    assert "kept" not in [one["workflowName"] for one in manage(server, "GET", "/workflows")[1]["workflows"]]
    assert server.terminate() == 0
    (lives.store / "branches.war").write_bytes(whole)
    server = lives.start().wait_started()
    assert "kept" in [one["workflowName"] for one in manage(server, "GET", "/workflows")[1]["workflows"]]
    described = manage(server, "GET", "/models/kept__a")[1][0]
    assert (described["minWorkers"], described["responseTimeout"]) == (2, 77)


def test_without_the_model_api(serving: Any, tmp_path: Path, wars: Path) -> None:
    with serving(tmp_path, wars, {"enable_model_api": "false"}, ["--ncs"]) as server:
        for method, target in (("POST", "/workflows?url=branches.war"), ("DELETE", "/workflows/x")):
            status, answer = manage(server, method, target)
            assert (status, answer["type"]) == (405, "MethodNotAllowedException")
        assert manage(server, "GET", "/workflows") == (200, {"workflows": []})
