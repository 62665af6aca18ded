"""What pages in a browser can't do, asked by raw clients: every route of the table, with what a browser would send."""

from __future__ import annotations

import base64
import http.client
import json
from pathlib import Path
from typing import Any

import pytest

GUARD_S = 60
#: Imported by its worker, it leaves a file behind.
ATTACK = """
from pathlib import Path
Path({mark!r}).write_text("ran")

class TritonPythonModel:
    def execute(self, requests):
        return []
"""
CONFIG = '{"backend": "python", "input": [{"name": "I", "data_type": "TYPE_FP32", "dims": [1]}]}'


def ask(
    port: int, method: str, target: str, headers: dict[str, str], body: bytes = b"", host: str = "127.0.0.1"
) -> tuple[int, bytes]:
    """A request with these headers and no others."""
    connection = http.client.HTTPConnection(host, port, timeout=GUARD_S)
    connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
    for name, value in ({"Host": f"127.0.0.1:{port}", "Content-Length": str(len(body))} | headers).items():
        connection.putheader(name, value)
    connection.endheaders(body)
    response = connection.getresponse()
    found = response.status, response.read()
    connection.close()
    return found


def loading(mark: Path) -> bytes:
    """The body of a call that loads a model made of the file that it brings."""
    code = base64.b64encode(ATTACK.format(mark=str(mark)).encode()).decode()
    return json.dumps({"parameters": {"config": CONFIG, "file:1/model.py": code}}).encode()


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"},
        {"Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"},
        {"Origin": "null", "Content-Type": "application/x-www-form-urlencoded"},
    ],
)
def test_no_page_runs_code_here(start: Any, tmp_path: Path, headers: dict[str, str]) -> None:
    (tmp_path / "repository").mkdir()
    server = start("--model-control-mode", "explicit", model_repository=tmp_path / "repository")
    mark, port = tmp_path / "mark", server.port("http_inference")
    status, answer = ask(port, "POST", "/v2/repository/models/X/load", headers, loading(mark))
    assert status == 403, answer
    assert set(json.loads(answer)) == {"error"}
    assert not mark.exists()
    own = {"Content-Type": "application/json"}
    status, answer = ask(port, "POST", "/v2/repository/models/X/load", own, loading(mark))
    assert status == 200 and mark.exists(), answer  # the very same body does it, sent by who may
