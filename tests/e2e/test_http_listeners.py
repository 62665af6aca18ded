"""Which API answers where: shared addresses, free ports, addresses that can't be had, paths that are elsewhere."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from support import free_port, http_call
from ts_frontend.http.request import NOT_FOUND


def ask(port: int, method: str, target: str, body: bytes | None = None) -> tuple[int, Any]:
    """The status and JSON (or text) of a call."""
    answer = http_call(port, method, target, body)
    return answer.status, answer.value()


def kinds(port: int) -> dict[str, int]:
    """The answers of the three APIs on one port."""
    targets = {"inference": "/ping", "management": "/models", "metrics": "/metrics"}
    return {api: ask(port, "GET", target)[0] for api, target in targets.items()}


def test_each_api_answers_on_its_own_free_port_and_nowhere_else(shared: Any) -> None:
    ports = [shared.port(f"http_{api}") for api in ("inference", "management", "metrics")]
    assert len({*ports, shared.port("grpc_inference"), shared.port("grpc_management")}) == 5
    assert kinds(ports[0]) == {"inference": 200, "management": 404, "metrics": 404}
    assert kinds(ports[1]) == {"inference": 404, "management": 200, "metrics": 404}
    assert kinds(ports[2]) == {"inference": 404, "management": 404, "metrics": 200}


def test_equal_addresses_of_inference_and_management_are_one_listener(start: Any) -> None:
    port = free_port()
    server = start(inference_address=f"http://127.0.0.1:{port}", management_address=f"http://127.0.0.1:{port}")
    assert server.port("http_inference") == server.port("http_management") == port
    assert kinds(port) == {"inference": 200, "management": 200, "metrics": 404}
    assert ask(port, "POST", "/models?url=probe&initial_workers=1")[0] == 200
    assert ask(port, "PUT", "/predictions/probe", b"{}") == (200, "ok")
    assert ask(port, "PUT", "/models/probe?min_worker=0&synchronous=true")[0] == 200
    assert ask(port, "DELETE", "/models/probe")[0] == 200
    paths = ask(port, "OPTIONS", "/")[1]["paths"]
    assert {"/ping", "/models", "/predictions/{model_name}"} <= paths.keys()
    assert "/metrics" not in paths


def test_three_equal_addresses_are_one_listener(start: Any) -> None:
    port = free_port()
    names = ("inference_address", "management_address", "metrics_address")
    server = start(**dict.fromkeys(names, f"http://127.0.0.1:{port}"))
    server.wait_for_log("http_metrics listens on")
    assert {server.port(f"http_{api}") for api in ("inference", "management", "metrics")} == {port}
    assert kinds(port) == {"inference": 200, "management": 200, "metrics": 200}
    assert {"/ping", "/models", "/metrics"} <= ask(port, "GET", "/api-description")[1]["paths"].keys()


def test_further_ports_of_inference_answer_as_the_first(start: Any) -> None:
    port = free_port()
    addresses = dict.fromkeys(("inference_address", "management_address"), f"http://127.0.0.1:{port}")
    server = start(**addresses, http_extra_ports="0,0")
    ports = {server.port(f"http_inference_{number}") for number in (2, 3)}
    assert len(ports | {port}) == 3
    assert kinds(port) == {"inference": 200, "management": 200, "metrics": 404}
    for extra in ports:
        assert kinds(extra) == {"inference": 200, "management": 404, "metrics": 404}
        status, says = ask(extra, "GET", "/models")
        assert (status, f"port {port}" in says["message"]) == (404, True), says


def test_without_the_metrics_api_its_port_stays_free(start: Any) -> None:
    port = free_port()
    server = start(enable_metrics_api="false", metrics_address=f"http://127.0.0.1:{port}")
    assert not server.port("http_metrics")
    assert kinds(server.port("http_inference")) == {"inference": 200, "management": 404, "metrics": 404}
    with pytest.raises(ConnectionRefusedError):
        ask(port, "GET", "/metrics")


@pytest.mark.parametrize("api", ["management_address", "grpc_inference_port"])
def test_a_taken_port_is_named_and_nothing_is_left(start: Any, api: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        value = port if api == "grpc_inference_port" else f"http://127.0.0.1:{port}"
        server = start(wait=False, **{api: value})
        assert server.wait() == 1
    found = [line for line in server.lines if re.search(rf"cannot listen on 127\.0\.0\.1:{port}", line)]
    name = "grpc_inference" if api == "grpc_inference_port" else f"http_{api.removesuffix('_address')}"
    holder = rf" by \S+ \(process {os.getpid()}\)\. \S+"
    reason = rf"{name}: cannot listen on 127\.0\.0\.1:{port}: Address already in use{holder}.* sets another port"
    assert any(re.search(reason, line) for line in found), found
    assert "Traceback" not in server.log
    assert "Model server started." not in server.log


def test_a_taken_port_is_told_before_any_model_is_loaded(start: Any, write: Any, tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    write("slow", f"open({str(loaded)!r}, 'w').close()\ndef handle(data, context):\n    return ['ok']\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start("--models", "slow", wait=False, management_address=f"http://127.0.0.1:{port}")
        assert server.wait() == 1
    assert f"http_management: cannot listen on 127.0.0.1:{port}: Address already in use" in server.log
    assert not loaded.exists()


def test_one_port_under_two_names_is_refused(start: Any) -> None:
    port = free_port()
    server = start(wait=False, inference_address=f"http://127.0.0.1:{port}", metrics_address=f"http://localhost:{port}")
    assert server.wait() == 1
    assert f"cannot listen on localhost:{port}" in server.log


# --- paths that nobody serves, or another listener


@pytest.mark.parametrize(
    ("api", "path", "told"),
    [
        ("http_inference", "/prediction/probe", " Did you mean /predictions/{{model_name}}?"),
        ("http_management", "/model/probe", " Did you mean /models/{{model_name}}?"),
        ("http_inference", "/models/probe", " The management API serves this path: port {http_management}."),
        ("http_management", "/predictions/probe", " The inference API serves this path: port {http_inference}."),
        ("http_metrics", "/metric", " Did you mean /metrics?"),
        ("http_inference", "/nosuch", ""),
    ],
)
def test_an_unknown_path_is_told_with_what_is_near(shared: Any, api: str, path: str, told: str) -> None:
    ports = {one: shared.port(one) for one in ("http_inference", "http_management")}
    error = {"code": 404, "type": "ResourceNotFoundException", "message": f"{NOT_FOUND}{told.format(**ports)}"}
    assert ask(shared.port(api), "GET", path) == (404, error)


def test_an_unknown_path_of_the_open_inference_protocol(shared: Any) -> None:
    told = "Not Found: nothing answers POST /v2/model/probe/infer. Did you mean /v2/models/{model_name}/infer?"
    assert ask(shared.port("http_inference"), "POST", "/v2/model/probe/infer", b"{}") == (404, {"error": told})


def test_a_path_of_a_listener_at_a_unix_socket(start: Any, tmp_path: Path) -> None:
    server = start(inference_address=f"unix:{tmp_path / 'inference.sock'}")
    told = ask(server.port("http_management"), "GET", "/predictions/x")[1]["message"]
    assert told == f"{NOT_FOUND} The inference API serves this path: its Unix socket."
