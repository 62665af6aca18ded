"""Keys over time on a whole server: expiry, rotation under load, shared listeners, several servers, commands."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from e2e.servers import probe_store
from support import GUARD_S, Reply, free_port, http_call, until
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

REQUEST = PredictionsRequest(model_name="probe", input={"data": b"{}"})
FIRST = {"inference": "first-inference-key", "management": "first-management-key"}


def status(server: Any, api: str, target: str, *secret: str, method: str = "GET", **headers: str) -> int:
    return answer(server, api, target, *secret, method=method, **headers)[0]


def answer(server: Any, api: str, target: str, *secret: str, method: str = "GET", **headers: str) -> Reply:
    if secret:
        headers["Authorization"] = f"Bearer {secret[0]}"
    return http_call(server.port(f"http_{api}"), method, target, headers=headers)


def keys_of(directory: Path) -> dict[str, str]:
    content = json.loads((directory / "key_file.json").read_text())
    return {kind: entry["key"] for kind, entry in content.items()}


def mount(place: Path, keys: dict[str, str]) -> None:
    """A new version of a secret as Kubernetes brings it: files are links through a link that is exchanged."""
    place.mkdir(exist_ok=True)
    version = place / f"..{len(list(place.iterdir()))}"
    version.mkdir()
    for name, text in keys.items():
        (version / name).write_text(text)
        if not (place / name).is_symlink():
            (place / name).symlink_to(Path("..data") / name)
    (place / "..new").symlink_to(version.name)
    os.replace(place / "..new", place / "..data")


@pytest.fixture(scope="module")
def mounted(serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Keys from a mounted secret (`server.directory / "mounted"`), both HTTP APIs on one listener, CORS on."""
    directory = tmp_path_factory.mktemp("mounted")
    mount(directory / "mounted", FIRST)
    address = f"http://127.0.0.1:{free_port()}"
    settings = {
        "token_path": directory / "mounted",
        "token_reload_interval_s": 0.1,
        "inference_address": address,
        "management_address": address,
        "cors_allowed_origin": "https://example.org",
        "cors_allowed_headers": "Authorization",
        "default_workers_per_model": 1,
        "env": {"TS_API_TOKEN": "the-api-key"},
    }
    with serving(directory, probe_store(directory), settings, ["--ncs", "--models", "probe"]) as one:
        until(lambda: status(one, "inference", "/predictions/probe", FIRST["inference"]) == 200)
        yield one


@pytest.fixture
def first_keys(mounted: Any) -> Iterator[Any]:
    """The server with FIRST in its secret, again afterwards."""
    yield mounted
    mount(mounted.directory / "mounted", FIRST)
    for api, target in (("inference", "/predictions/probe"), ("management", "/models")):
        until(lambda: status(mounted, api, target, FIRST[api]) == 200)  # noqa: B023


# --- one listener, keys from outside


def test_each_path_of_a_shared_listener_wants_its_own_key(mounted: Any) -> None:
    for target, kind, other in (
        ("/predictions/probe", "inference", "management"),
        ("/models", "management", "inference"),
        ("/models/probe", "management", "inference"),
    ):
        assert status(mounted, "inference", target, FIRST[kind]) == 200
        assert status(mounted, "inference", target, FIRST[other]) == 400
        assert status(mounted, "inference", target) == 400
    for kind in ("inference", "management"):
        assert status(mounted, "inference", "/nowhere", FIRST[kind]) == 404
        assert status(mounted, "inference", "/models/probe", FIRST[kind], method="OPTIONS") == 200
    assert status(mounted, "inference", "/nowhere") == 400
    assert status(mounted, "inference", "/ping") == 200


def test_given_keys_turn_tokens_on_and_no_file_is_written(mounted: Any) -> None:
    assert "Token authorization is on: keys are given by token_path, api_token." in mounted.log
    assert not (mounted.directory / "key_file.json").exists()
    assert not any(secret in mounted.log for secret in (*FIRST.values(), "the-api-key"))


def test_given_keys_are_not_renewed_here(mounted: Any) -> None:
    code, _, body = answer(mounted, "management", "/token?type=inference", "the-api-key")
    assert code == 400
    assert json.loads(body)["message"].startswith("The inference key was given to the server (token_path")
    assert status(mounted, "management", "/token?type=inference", FIRST["management"]) == 400
    assert status(mounted, "inference", "/predictions/probe", FIRST["inference"]) == 200


def test_a_browser_may_ask_before_it_sends_a_key(mounted: Any) -> None:
    asked = {"Origin": "https://example.org", "Access_Control_Request_Method": "POST"}
    for model in ("probe", "missing"):
        code, headers, body = answer(mounted, "inference", f"/predictions/{model}", method="OPTIONS", **asked)
        assert (code, body) == (200, b"")
        assert headers["access-control-allow-origin"] == "https://example.org"
        assert headers["access-control-allow-headers"] == "Authorization"
    assert status(mounted, "inference", "/predictions/probe", method="OPTIONS") == 400


# --- rotation


def test_no_request_is_lost_while_keys_change(first_keys: Any) -> None:
    """Clients always have a key that counts: the old one, until the new one does; as many requests as that takes."""
    server, place = first_keys, first_keys.directory / "mounted"
    current, stop, outcomes = [FIRST["inference"]], threading.Event(), Counter[Any]()

    def over_http() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port("http_inference"), timeout=GUARD_S)
        while not stop.is_set():
            headers = {"Authorization": f"Bearer {current[0]}"}
            connection.request("POST", "/predictions/probe", b"{}", headers)
            response = connection.getresponse()
            response.read()
            outcomes[response.status] += 1
        connection.close()

    def over_grpc() -> None:
        with grpc.insecure_channel(server.inference) as channel:
            stub = InferenceAPIsServiceStub(channel)
            while not stop.is_set():
                try:
                    stub.Predictions(REQUEST, metadata=[("authorization", f"Bearer {current[0]}")], timeout=GUARD_S)
                    outcomes["OK"] += 1
                except grpc.RpcError as error:
                    outcomes[error.code()] += 1

    threads = [threading.Thread(target=one) for one in (over_http, over_http, over_grpc)]
    for thread in threads:
        thread.start()
    try:
        for number in range(5):
            old, new = current[0], f"next-inference-key-{number}"
            mount(place, FIRST | {"inference": f"{old}\n{new}"})
            until(lambda: status(server, "inference", "/predictions/probe", new) == 200)  # noqa: B023
            assert status(server, "inference", "/predictions/probe", old) == 200
            current[0] = new
            before = outcomes.copy()
            until(lambda: outcomes[200] > before[200] + 4 and outcomes["OK"] > before["OK"] + 2)  # noqa: B023
            mount(place, FIRST | {"inference": new})
            until(lambda: status(server, "inference", "/predictions/probe", old) == 400)  # noqa: B023
    finally:
        stop.set()
        for thread in threads:
            thread.join(GUARD_S)
    assert set(outcomes) == {200, "OK"}, outcomes


# --- time, other servers, the end


def test_a_key_expires_and_a_new_one_is_made(start: Any, tmp_path: Path) -> None:
    """The log then says that it expired; the API key doesn't."""
    server = start(disable_token_authorization="false", token_expiration_min=0.05)
    assert status(server, "management", "/token?type=management", keys_of(tmp_path)["API"]) == 200
    old = keys_of(tmp_path)  # made just now: the first one is as old as the start
    assert status(server, "management", "/models", old["management"]) == 200
    until(lambda: status(server, "management", "/models", old["management"]) == 400)
    server.wait_for_log("its key has expired")
    assert status(server, "management", "/token?type=management", old["API"]) == 200
    assert status(server, "management", "/models", keys_of(tmp_path)["management"]) == 200


def test_an_address_outside_turns_tokens_on(start: Any, tmp_path: Path) -> None:
    server = start(management_address="http://0.0.0.0:0")
    assert "Token authorization is on: other machines can reach management_address=http://0.0.0.0:0." in server.log
    assert "off (--enable-model-api turns it on) for the same reason." in server.log
    assert status(server, "management", "/models") == 400
    assert status(server, "management", "/models", keys_of(tmp_path)["management"]) == 200


def test_tokens_are_off_on_loopback(shared: Any) -> None:
    assert "Token authorization is off: every inference and management address is a loopback address." in shared.log
    assert status(shared, "management", "/token?type=inference") == 404
    assert not (shared.directory / "key_file.json").exists()


def ports() -> list[str]:
    zero = ["grpc_inference_port=0", "grpc_management_port=0"]
    zero += [f"{api}_address=http://127.0.0.1:0" for api in ("inference", "management", "metrics")]
    return [word for pair in zero for word in ("--set", pair)]


def torchserve(directory: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """One command in a directory; its output goes to a file, which a server in the background may keep."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("TS_", "TORCHSERVE_"))}
    with (directory / "output.txt").open("w+") as file:
        done = subprocess.run(
            [sys.executable, "-c", "from ts_frontend.cli.main import main; raise SystemExit(main())", *words],
            cwd=directory,
            env=env | environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            timeout=GUARD_S,
            check=False,
        )
        file.seek(0)
        return subprocess.CompletedProcess(done.args, done.returncode, file.read())


def test_the_commands_find_and_send_the_key(start: Any, tmp_path: Path, client_command: Any) -> None:
    server = start(disable_token_authorization="false", load_models="probe", default_workers_per_model=1)
    here = {
        "TORCHSERVE_INFERENCE_PORT": str(server.port("grpc_inference")),
        "TORCHSERVE_MANAGEMENT_PORT": str(server.port("grpc_management")),
    }
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    keys = keys_of(tmp_path)
    assert "probe" in client_command(tmp_path, "list", **here).stdout
    until(lambda: status(server, "inference", "/v2/models/probe/ready") == 200)
    assert client_command(tmp_path, "predict", "probe", "--input", "data={}", **here).stdout.strip() == "ok"
    assert "probe" in client_command(elsewhere, "list", "--token", keys["management"], **here).stdout
    assert "probe" in client_command(elsewhere, "list", **here, TORCHSERVE_TOKEN=keys["management"]).stdout
    assert "probe" in client_command(elsewhere, "list", "--key-file", str(tmp_path / "key_file.json"), **here).stdout
    assert client_command(elsewhere, "ping", **here).returncode == 0
    refused = client_command(elsewhere, "list", **here)
    assert refused.returncode == 1
    assert "The server requires its management key; none was sent." in refused.stdout
    refused = client_command(elsewhere, "predict", "probe", "--input", "data={}", "--token", keys["management"], **here)
    assert "The server requires its inference key; the one of --token" in refused.stdout


def test_stop_deletes_the_key_file(tmp_path: Path, store: Path) -> None:
    """Also one that was left behind; the start says where the keys are."""
    (tmp_path / "tmp").mkdir()
    env = {"TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "key_file.json").write_text("left behind")
    begun = torchserve(tmp_path, "--start", "--ncs", "--model-store", str(store), "--set",
                       "disable_token_authorization=false", *ports(), **env)  # fmt: skip
    try:
        assert begun.returncode == 0, begun.stdout
        assert f"The server's keys are in {tmp_path / 'key_file.json'}" in begun.stdout
        assert set(keys_of(tmp_path)) == {"management", "inference", "API"}
    finally:
        stopped = torchserve(tmp_path, "--stop", **env)
    assert "TorchServe has stopped." in stopped.stdout
    assert not (tmp_path / "key_file.json").exists()


def test_keys_are_in_no_file_of_the_server(start: Any, tmp_path: Path) -> None:
    """Neither snapshots nor logs, nor a handler's environment."""
    given = {"TS_INFERENCE_TOKEN": "given-inference", "TS_MANAGEMENT_TOKEN": "given-management"}
    server = start(executed=True, snapshots=True, env=given, load_models="probe", default_workers_per_model=1)
    assert status(server, "management", "/models/probe", "given-management") == 200
    for secret in ("given-inference", "wrong-secret"):
        status(server, "inference", "/predictions/probe", secret)
        status(server, "management", "/models", secret)
    until(lambda: status(server, "inference", "/v2/models/probe/ready") == 200)
    worker = json.loads(answer(server, "management", "/models/probe", "given-management")[2])[0]["workers"][0]["pid"]
    environ = Path(f"/proc/{worker}/environ").read_bytes()
    server.terminate()
    found = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(file.suffix == ".cfg" for file in found)
    assert any(file.name == "ts_log.log" for file in found)
    for text in (b"given-inference", b"given-management", b"wrong-secret"):
        assert text not in environ
        assert [file for file in found if text in file.read_bytes()] == []
