"""Clients of HTTP/1.1 that leave: their requests are cancelled, those who stay keep theirs."""

from __future__ import annotations

import http.client
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from support import GUARD_S, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="read from Linux's tables of connections")


def ask(server: Any, request: dict[str, object], host: str = "127.0.0.1") -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(host, server.port("http_inference"), timeout=GUARD_S)
    part = 'Content-Disposition: form-data; name="data"; filename="f"\r\nContent-Type: application/octet-stream'
    body = f"--B\r\n{part}\r\n\r\n{json.dumps(request)}\r\n--B--\r\n"
    connection.request("POST", "/predictions/probe", body, {"Content-Type": "multipart/form-data; boundary=B"})
    return connection


def test_who_waits_gets_the_answer(shared: Any, tmp_path: Path) -> None:
    """Beside one that has left, and for longer than it takes to notice that."""
    begun, release = tmp_path / "begun", tmp_path / "release"
    waiting = ask(shared, {"op": "hold", "begun": str(begun), "release": str(release)})
    until(begun.exists)
    leaving = ask(shared, {"op": "work", "ran": str(tmp_path / "ran")})
    leaving.close()
    shared.wait_for_log('"POST /predictions/probe HTTP/1.1" 499')
    release.touch()
    response = waiting.getresponse()
    assert (response.status, response.read()) == (200, b"held")
    waiting.close()
    assert not (tmp_path / "ran").exists()


def test_the_handler_is_cancelled_over_ipv6(start: Any, tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    server = start(inference_address="http://[::1]:0")
    server.register("probe")
    begun, left = tmp_path / "begun", tmp_path / "left"
    connection = ask(server, {"op": "until_cancelled", "begun": str(begun), "left": str(left)}, "::1")
    until(begun.exists)
    connection.close()
    until(left.exists)
