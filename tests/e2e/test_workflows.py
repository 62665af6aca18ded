"""Workflows on a real server: archives made by the real command, nodes that report their inputs."""

from __future__ import annotations

import concurrent.futures
import json
import re
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.servers import write_model
from support import GUARD_S, http_call, until

HERE = Path(__file__).parent / "workflows"
COMMAND = "from workflow_archiver.workflow_packaging import generate_workflow_archive as main; main()"

SEQUENCE = """
models:
    m:
        url: step
dag:
    pre: [m]
    m: [post]
"""
FAN = """
models:
    timeout-ms: 60000
    retry-attempts: 0
    start: {url: step}
    left: {url: step}
    right: {url: step}
dag:
    start: [left, right]
    left: [join]
    right: [join]
"""
LEAVES = """
models:
    retry-attempts: 0
    start: {url: step}
    a: {url: step}
dag:
    start: [a, plain]
"""
IMPATIENT = """
models:
    timeout-ms: 300
    retry-attempts: 2
    m: {url: step}
    patient: {url: step, retry-attempts: 0, timeout-ms: 60000}
dag:
    m: [patient]
"""
BATCHING = """
models:
    batch-size: 8
    max-batch-delay: 200
    timeout-ms: 60000
    first: {url: step}
    second: {url: step}
dag:
    first: [second]
"""


def pack(store: Path, name: str, spec: str, *, handler: bool = True, **options: str) -> str:
    """Makes NAME.war in the store with the command; its file name."""
    folder = store.parent / f"spec-{name}"
    folder.mkdir(exist_ok=True)
    (folder / "spec.yaml").write_text(spec)
    words = ["--workflow-name", name, "--spec-file", str(folder / "spec.yaml"), "--export-path", str(store)]
    if handler:
        words += ["--handler", str(HERE / "functions.py"), "--extra-files", str(HERE / "helpers_of_functions.py")]
    subprocess.run([sys.executable, "-c", COMMAND, *words], check=True, capture_output=True, timeout=GUARD_S)
    return f"{name}.war"


class Client:
    """Calls to a server's HTTP APIs."""

    def __init__(self, server: Any) -> None:
        self.server = server

    def call(
        self, api: str, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        answer = http_call(self.server.port(f"http_{api}"), method, target, body, headers or {})
        return answer.status, answer.body, answer.headers

    def manage(self, method: str, target: str, body: Any = None) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        data = json.dumps(body).encode() if body is not None else b""
        status, answer, _ = self.call("management", method, target, data, headers)
        return status, json.loads(answer)

    def predict(self, workflow: str, body: bytes | str, act: str = "", **headers: str) -> tuple[int, Any]:
        data = body.encode() if isinstance(body, str) else body
        more = {"Content-Type": "text/plain", **({"X-Act": act} if act else {}), **headers}
        status, answer, _ = self.call("inference", "POST", f"/wfpredict/{workflow}", data, more)
        try:
            return status, json.loads(answer)
        except ValueError:
            return status, answer

    def model_names(self) -> list[str]:
        return [model["modelName"] for model in self.manage("GET", "/models")[1]["models"]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("workflows") / "store"
    write_model(directory, "step", HERE / "step.py")
    return directory


@pytest.fixture(scope="module")
def client(serving: Any, store: Path) -> Iterator[Client]:
    """One server with these workflows, which the tests leave as they are."""
    for name, spec in {
        "sequence": SEQUENCE,
        "fan": FAN,
        "leaves": LEAVES,
        "impatient": IMPATIENT,
        "batching": BATCHING,
    }.items():
        pack(store, name, spec)
    with serving(store.parent, store, {}, ["--ncs"]) as server:
        found = Client(server)
        for name in ("sequence", "fan", "leaves", "impatient", "batching"):
            status, answer = found.manage("POST", f"/workflows?url={name}.war")
            assert (status, answer) == (
                200,
                {"status": f"Workflow {name} has been registered and scaled successfully."},
            ), server.log
        yield found


# --- data between nodes


def test_a_sequence_of_functions_and_a_model(client: Client) -> None:
    status, body, headers = client.call(
        "inference", "POST", "/wfpredict/sequence", b"hi", {"Content-Type": "text/plain"}
    )
    assert (status, headers["content-type"]) == (200, "application/json")
    inner = json.loads(re.fullmatch(rb"post\((.*)\)", body, re.DOTALL)[1])  # type: ignore[index]
    assert (inner["node"], inner["got"]) == ("sequence__m", {"body": "pre(hi)"})
    assert inner["id"] == headers["x-request-id"]


def test_every_method_and_content_type_predicts(client: Client) -> None:
    for method in ("GET", "PUT"):
        assert client.call("inference", method, "/wfpredict/fan", b"x")[0] == 200
    form = {"Content-Type": "multipart/form-data; boundary=B"}
    body = b'--B\r\nContent-Disposition: form-data; name="data"; filename="f"\r\n\r\nfilled in\r\n--B--\r\n'
    answer = client.call("inference", "POST", "/wfpredict/sequence", body, form)[1]
    assert b"pre(filled in)" in answer
    first = json.loads(
        client.call("inference", "POST", "/wfpredict/batching", b'{"a": 1}', {"Content-Type": "application/json"})[1]
    )
    assert json.loads(first["got"]["body"])["got"] == {"body": {"a": 1}}


def test_branches_come_together_by_their_names(client: Client) -> None:
    status, answer = client.predict("fan", "hello")
    assert status == 200 and sorted(answer) == ["left", "right"]
    for name, value in answer.items():
        assert value["node"] == f"fan__{name}"
        assert list(value["got"]) == ["body"]
        start = json.loads(value["got"]["body"])
        assert (start["node"], start["got"]) == ("fan__start", {"body": "hello"})


def test_bytes_beside_another_answer_are_an_error_that_names_the_node(client: Client) -> None:
    status, answer = client.predict("leaves", "x", "a=bytes:ff00")
    assert status == 500 and "node a" in answer["message"]


def test_one_last_node_may_answer_with_bytes_and_its_own_status(client: Client) -> None:
    assert client.predict("batching", "x", "second=bytes:ff00") == (200, b"\xff\x00")
    status, answer = client.predict("batching", "x", "second=status:404")
    assert (status, answer["node"]) == (404, "batching__second")


def test_many_at_once_get_their_own_answers(client: Client) -> None:
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda number: client.predict("fan", f"<{number}>"), range(64)))
    for number, (status, answer) in enumerate(answers):
        text = answer.decode() if isinstance(answer, bytes) else json.dumps(answer)
        assert status == 200 and set(re.findall(r"<(\d+)>", text)) == {str(number)}


def test_requests_share_batches(client: Client) -> None:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = [answer for _, answer in pool.map(lambda number: client.predict("batching", str(number)), range(16))]
    assert max(answer["batch"] for answer in answers) > 1
    assert max(json.loads(answer["got"]["body"])["batch"] for answer in answers) > 1


# --- what goes wrong


def test_a_failing_node_is_named(client: Client) -> None:
    status, answer = client.predict("leaves", "x", "start=fail")
    assert (status, answer["code"], answer["type"]) == (500, 500, "InternalServerException")
    assert answer["message"].startswith(
        "Error executing start: Prediction failed: ValueError: as asked (handler.py, line "
    )


def test_a_nodes_own_refusal_is_passed_on(client: Client) -> None:
    status, answer = client.predict("impatient", "x", "m=refuse:422")
    assert (status, answer["message"]) == (422, "Error executing m: not with me")
    status, answer = client.predict("impatient", "x", "m=status:418")
    assert (status, answer["message"]) == (418, "Error executing m: its handler answered with status 418")


def test_a_client_who_leaves_cancels_all_of_it(client: Client, tmp_path: Path) -> None:
    left, right, never = tmp_path / "left", tmp_path / "right", tmp_path / "never"
    act = f"left=wait:{left}|{never}, right=wait:{right}|{never}"
    with socket.create_connection(("127.0.0.1", client.server.port("http_inference")), GUARD_S) as connection:
        head = f"POST /wfpredict/fan HTTP/1.1\r\nHost: localhost\r\nX-Act: {act}\r\nContent-Length: 1\r\n\r\nx"
        connection.sendall(head.encode())
        until(lambda: left.exists() and right.exists())
        connection.close()
        until((tmp_path / "left.cancelled").exists)
        until((tmp_path / "right.cancelled").exists)
    assert client.predict("fan", "x")[0] == 200


def test_a_worker_that_dies_in_the_middle(client: Client, tmp_path: Path) -> None:
    attempts = tmp_path / "attempts"
    assert client.predict("sequence", "x", f"m=die-once:{attempts}")[0] == 200
    assert attempts.read_text().count("attempt") == 2
    status, answer = client.predict("impatient", "x", "patient=die")
    assert status == 500 and answer["message"].startswith("Error executing patient: Worker died.")
    assert client.predict("impatient", "x")[0] == 200


# --- management


def test_nodes_are_models_and_functions_are_not_listed(client: Client) -> None:
    names = client.model_names()
    assert {"fan__start", "fan__left", "fan__right", "sequence__m"} <= set(names)
    assert not {"fan__join", "sequence__pre", "sequence__post"} & set(names)
    description = client.manage("GET", "/models/batching__first")[1][0]
    assert (description["batchSize"], description["maxBatchDelay"], len(description["workers"])) == (8, 200, 1)


def test_list_and_describe(client: Client) -> None:
    listed = client.manage("GET", "/workflows?limit=2")[1]
    assert listed == {
        "nextPageToken": "2",
        "workflows": [
            {"workflowName": "batching", "workflowUrl": "batching.war"},
            {"workflowName": "fan", "workflowUrl": "fan.war"},
        ],
    }
    rest = client.manage("GET", "/workflows?limit=100&next_page_token=2")[1]
    assert [entry["workflowName"] for entry in rest["workflows"]] == ["impatient", "leaves", "sequence"]
    assert client.manage("GET", "/workflows/batching")[1] == [
        {
            "workflowName": "batching",
            "workflowUrl": "batching.war",
            "minWorkers": 1,
            "maxWorkers": 1,
            "batchSize": 8,
            "maxBatchDelay": 200,
            "workflowDag": "{first=[second]}",
        }
    ]


def unpacked(client: Client) -> list[str]:
    return sorted(path.name for path in client.server.directory.glob("tmp/*/workflows/*"))


def test_register_by_json_under_another_name_and_unregister(client: Client) -> None:
    before, models = unpacked(client), client.model_names()
    body = {"url": "sequence.war", "workflow_name": "again", "response_timeout": 33, "startup_timeout": 44}
    assert client.manage("POST", "/workflows", body)[0] == 200
    assert b"pre(x)" in client.predict("again", "x")[1]
    described = client.manage("GET", "/models/again__m")[1][0]
    assert (described["responseTimeout"], described["startupTimeout"]) == (33, 44)
    assert client.manage("DELETE", "/workflows/again") == (200, {"status": 'Workflow "again" unregistered'})
    assert client.predict("again", "x")[0] == 404
    assert (unpacked(client), client.model_names()) == (before, models)
    assert client.manage("GET", "/models/again__pre")[0] == 404


def test_requests_on_their_way_are_answered_before_it_goes(client: Client, tmp_path: Path) -> None:
    assert client.manage("POST", "/workflows?url=fan.war&workflow_name=going")[0] == 200
    begun, go = tmp_path / "begun", tmp_path / "go"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.predict, "going", "x", f"start=wait:{begun}|{go}")
        until(begun.exists)
        leaving = pool.submit(client.manage, "DELETE", "/workflows/going")
        until(lambda: client.manage("GET", "/workflows/going")[0] == 404)
        assert client.manage("POST", "/workflows?url=fan.war&workflow_name=going")[0] == 409
        go.touch()
        assert waiting.result(GUARD_S)[0] == 200
        assert leaving.result(GUARD_S)[0] == 200


def test_a_name_that_is_taken(client: Client) -> None:
    conflict = {"code": 409, "type": "ConflictStatusException", "message": "Workflow fan is already registered."}
    assert client.manage("POST", "/workflows?url=fan.war") == (409, conflict)
    assert client.manage("POST", "/models?url=step&model_name=mine__m")[0] == 200
    status, answer = client.manage("POST", "/workflows?url=sequence.war&workflow_name=mine")
    assert status == 409 and "mine__m" in answer["message"]
    assert client.manage("DELETE", "/models/mine__m")[0] == 200


def exchanged(path: Path, spec: str) -> str:
    """Puts a specification that the command wouldn't pack into an archive; its file name."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (name for name in files if name.endswith(".yaml"))
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in {**files, name: spec.encode()}.items():
            archive.writestr(member, data)
    return path.name


BROKEN = {
    "cycle": ("models: {a: {url: step}, b: {url: step}}\ndag: {a: [b], b: [a]}", 400, "cycle: a -> b -> a"),
    "missing": ("models: {a: {url: step}, b: {url: gone.mar}}\ndag: {a: [b]}", 404, "gone.mar"),
    "climbing": ("models: {a: {url: ../step}}\ndag: {a: []}", 404, "Relative path is not allowed"),
    "elsewhere": ("models: {a: {url: 'https://example.org/x.mar'}}\ndag: {a: []}", 404, "allowed URL"),
    "function": ("models: {a: {url: step}}\ndag: {a: [no_such]}", 500, "no function no_such"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_registered_leaves_nothing_behind(client: Client, store: Path, name: str) -> None:
    spec, status, text = BROKEN[name]
    before = unpacked(client), client.model_names(), client.manage("GET", "/workflows")
    url = exchanged(store / pack(store, f"broken-{name}", "dag: {pre: []}"), spec)
    found, answer = client.manage("POST", f"/workflows?url={url}")
    assert found == status and text in answer["message"], answer
    assert "org.pytorch" not in answer["message"]
    assert (unpacked(client), client.model_names(), client.manage("GET", "/workflows")) == before
    assert client.predict(f"broken-{name}", "x")[0] == 404
    assert not list(client.server.directory.glob("tmp/*/models/*"))


def test_failures_of_nodes_are_all_told(client: Client, store: Path) -> None:
    spec = "models: {a: {url: gone.mar}, b: {url: step}, c: {url: lost.mar}}\ndag: {a: [b], b: [c]}"
    status, answer = client.manage("POST", f"/workflows?url={pack(store, 'holes', spec)}")
    assert (status, answer["type"]) == (404, "WorkflowException")
    first, _, second = answer["message"].partition(", Workflow Node ")
    assert first.startswith(
        "Workflow holes has failed to register. Failures: ["
        "Workflow Node holes__a failed to register. Details: Model not found at: gone.mar"
    )
    assert second.startswith("holes__c failed to register. Details: Model not found at: lost.mar")
    assert not [name for name in client.model_names() if name.startswith("holes")]


def test_archives_that_are_none(client: Client, store: Path) -> None:
    (store / "text.war").write_text("no zip")
    with zipfile.ZipFile(store / "climbing.war", "w") as archive:
        archive.writestr("../../evil.py", "")
    with zipfile.ZipFile(store / "bare.war", "w") as archive:
        archive.writestr("spec.yaml", "dag: {a: []}")
    for name in ("text", "climbing", "bare"):
        status, answer = client.manage("POST", f"/workflows?url={name}.war")
        assert (status, answer["type"]) == (400, "InvalidWorkflowException"), answer
    status, answer = client.manage("POST", "/workflows?url=step")
    assert status == 400 and "directory" in answer["message"]


def test_urls_as_for_models(client: Client) -> None:
    for query, status, kind, message in (
        ("", 400, "BadRequestException", "Parameter url is required."),
        ("?url=../x.war", 404, "WorkflowNotFoundException", "Relative path is not allowed in url: ../x.war"),
        ("?url=x.war", 404, "WorkflowNotFoundException", "Workflow not found in workflow store: x.war"),
        ("?url=fan.war&response_timeout=soon", 409, "ConflictStatusException", ""),
        ("?url=fan.war&workflow_name=a%2Fb", 400, "BadRequestException", ""),
    ):
        found, answer = client.manage("POST", f"/workflows{query}")
        assert (found, answer["type"]) == (status, kind) and answer["message"].startswith(message)
