"""The client's view of a working handler: pieces at once, and its request id everywhere."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from support import GUARD_S, http_call

HANDLER = """
import json
import time
from pathlib import Path

from ts.handler_utils.utils import send_intermediate_predict_response
from ts.utils.util import PredictionException


def wait_for(path):
    while not Path(path).exists():
        time.sleep(0.002)


def stream(ask, context):
    for number in range(3):
        send_intermediate_predict_response([f"piece {number} "], context.request_ids, "more", 200, context)
        wait_for(f"{ask['acknowledged']}{number}")
    return "end"


def mark(ask, context):
    Path(ask["ran"]).touch()
    return "ran"


def ids(ask, context):
    return {"id": context.get_request_id(0), "header": context.get_request_header(0, "x-request-id")}


def fails(ask, context):
    raise ValueError("on purpose")


def handle(data, context):
    if data is None:
        return None
    ask = data[0].get("body") or {"op": "acknowledge", "path": bytes(data[0]["path"]).decode()}
    if ask["op"] == "acknowledge":
        Path(ask["path"]).touch()
        return ["acknowledged"]
    return [globals()[ask["op"]](ask, context)]
"""


@pytest.fixture(scope="module")
def server(server_of: Any) -> Iterator[Any]:
    with server_of(dict.fromkeys(("one", "other"), (HANDLER, ""))) as server:
        yield server


def begin(server: Any, ask: dict[str, Any], **headers: str) -> http.client.HTTPConnection:
    """A prediction of model `one` that is sent; its answer is still to be read."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port("http_inference"), timeout=GUARD_S)
    connection.request("POST", "/predictions/one", json.dumps(ask), {"Content-Type": "application/json"} | headers)
    return connection


def predict(server: Any, ask: dict[str, Any], **headers: str) -> tuple[int, Any, dict[str, str]]:
    connection = begin(server, ask, **headers)
    response = connection.getresponse()
    answer = response.status, response.read(), {k.lower(): v for k, v in response.getheaders()}
    connection.close()
    return answer


def acknowledge(server: Any, path: str) -> None:
    """A request of its own, to the other model, that tells the streaming handler to go on."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = http_call(server.port("http_inference"), "POST", "/predictions/other", urlencode({"path": path}), form)
    assert answer.body == b"acknowledged"


# --- pieces


def test_a_piece_is_on_the_wire_before_the_next_is_made(server: Any, tmp_path: Path) -> None:
    """The handler makes no further piece until this client has read the last one and said so."""
    connection = begin(server, {"op": "stream", "acknowledged": str(tmp_path / "read")})
    response = connection.getresponse()
    assert response.getheader("transfer-encoding") == "chunked"
    assert response.getheader("ts_stream_next") == "true"
    for number in range(3):
        assert response.read1(100) == b"piece %d " % number
        acknowledge(server, str(tmp_path / f"read{number}"))
    assert response.read() == b"end"
    connection.close()


def test_each_piece_is_a_chunk_of_its_own(server: Any, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"read{number}").touch()
    body = json.dumps({"op": "stream", "acknowledged": str(tmp_path / "read")})
    size = f"Content-Length: {len(body)}"
    head = "POST /predictions/one HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\n{size}"
    with socket.create_connection(("127.0.0.1", server.port("http_inference")), timeout=GUARD_S) as one:
        one.sendall(f"{head}\r\n\r\n{body}".encode())
        answer = b"".join(iter(lambda: one.recv(65_536), b""))
    chunks = b"8\r\npiece 0 \r\n8\r\npiece 1 \r\n8\r\npiece 2 \r\n3\r\nend\r\n0\r\n\r\n"
    assert answer.partition(b"\r\n\r\n")[2] == chunks


# --- request ids


def test_a_clients_request_id_is_everywhere(server: Any) -> None:
    found, body, headers = predict(server, {"op": "ids"}, **{"X-Request-Id": "from-the-client/1"})
    assert (found, json.loads(body)) == (200, {"id": "from-the-client/1", "header": "from-the-client/1"})
    assert headers["x-request-id"] == "from-the-client/1"


def test_without_one_the_answer_has_the_handlers(server: Any) -> None:
    first, second = (predict(server, {"op": "ids"}) for _ in range(2))
    assert json.loads(first[1])["id"] == first[2]["x-request-id"]
    assert first[2]["x-request-id"] != second[2]["x-request-id"]


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "\xff"])
def test_what_cannot_be_an_id_is_replaced(server: Any, given: str) -> None:
    headers = predict(server, {"op": "ids"}, **{"X-Request-Id": given})[2]
    assert len(headers["x-request-id"]) == 36


def test_errors_and_logs_name_the_request(server: Any) -> None:
    found, _, headers = predict(server, {"op": "fails"}, **{"X-Request-Id": "failing-7"})
    assert (found, headers["x-request-id"]) == (503, "failing-7")
    server.wait_for_log("(request ids: failing-7)")


@pytest.mark.parametrize("api", ["http_inference", "http_management", "http_metrics"])
def test_answers_that_are_no_predictions_name_it_too(server: Any, api: str) -> None:
    for target in ("/", "/nothing", "/models/nope", "/metrics", "/ping"):
        answer = http_call(server.port(api), "GET", target, headers={"X-Request-Id": "mine"})
        assert answer.headers["x-request-id"] == "mine"
