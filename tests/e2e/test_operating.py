"""An operator's question to a running server: where the time of a request went."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from support import GUARD_S, Reply, http_call, until
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

HANDLER = """
def handle(data, context):
    if data is None:
        return None
    print("asked for", len(data), flush=True)
    print("\\x1b[2J\\u202e", flush=True)
    return ["answer"] * len(data)
"""
STREAM = """
def handle(data, context):
    if data is None:
        return
    for number in range(3):
        yield [f"{number} "] * len(data)
"""
COMMAND = (sys.executable, "-c", "import sys; from ts_frontend.cli.main import main; sys.exit(main())")
ASK = {"x-torchrelay-timing": "1"}


@pytest.fixture(scope="module")
def operated(server_of: Callable[..., Any]) -> Iterator[Any]:
    with server_of({"quick": (HANDLER, ""), "stream": (STREAM, "")}, access_log_timing="true") as server:
        yield server


def posted(server: Any, path: str, headers: dict[str, str]) -> Reply:
    return http_call(server.port("http_inference"), "POST", path, b"x", headers)


def entries(value: str) -> dict[str, float | str]:
    """The entries of a Server-Timing header: milliseconds, or a description."""
    found: dict[str, float | str] = {}
    for entry in value.split(", "):
        match = re.fullmatch(r'([a-z-]+);(?:dur=([0-9.]+)|desc="([^"]*)")', entry)
        assert match, value
        found[match[1]] = float(match[2]) if match[2] else match[3]
    return found


ALL = {"queue", "batch-wait", "batch", "transfer", "handler", "encode", "worker", "cold-start", "total"}


def check(found: dict[str, float | str]) -> None:
    """All parts are present, and their sum is the total, except the frontend's work before and after."""
    assert set(found) == ALL and found["batch"] == "1" and str(found["worker"]).isdecimal()
    parts = [value for name, value in found.items() if name not in ("total", "batch", "worker")]
    assert all(isinstance(part, float) and part >= 0 for part in parts)
    assert sum(float(part) for part in parts) <= float(found["total"])


def test_a_wrong_port_is_told_with_those_of_this_machines_server(operated: Any, torchserve: Any) -> None:
    """Both for gRPC and for HTTP."""
    env = {**os.environ, "TMPDIR": str(operated.directory / "tmp")}
    for words in (["list", "--management-port", "1"], ["top", "--once", "--url", "http://127.0.0.1:1"]):
        done = torchserve(*words, env=env)
        assert done.returncode == 1 and "No server answers at" in done.stderr
        assert f"runs on this machine as process {operated.process.pid}" in done.stderr
        assert str(operated.port("http_management")) in done.stderr


def test_http_tells_who_asks(operated: Any) -> None:
    answer = posted(operated, "/predictions/quick", ASK)
    assert answer.body == b"answer"
    check(entries(answer.headers["server-timing"]))
    answer = posted(operated, "/predictions/quick", {})
    assert "server-timing" not in answer.headers
    answer = posted(operated, "/predictions/absent", ASK)
    assert answer.status == 404 and set(entries(answer.headers["server-timing"])) == {"total"}


def test_a_stream_tells_what_is_known_at_its_beginning(operated: Any) -> None:
    answer = posted(operated, "/predictions/stream", ASK)
    assert answer.body == b"0 1 2 "
    assert {"queue", "worker", "total"} <= set(entries(answer.headers["server-timing"]))


def test_a_stream_tells_all_in_its_trailer(operated: Any) -> None:
    with socket.create_connection(("127.0.0.1", operated.port("http_inference")), timeout=GUARD_S) as one:
        one.sendall(
            b"POST /predictions/stream HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nte: trailers\r\n"
            b"content-length: 1\r\nx-torchrelay-timing: 1\r\n\r\nx"
        )
        answer = b"".join(iter(lambda: one.recv(65536), b"")).decode()
    head, _, body = answer.partition("\r\n\r\n")
    assert "\r\ntrailer: server-timing" in head
    check(entries(body.split("\r\n0\r\n")[1].strip().removeprefix("server-timing: ")))


def test_grpc_tells_in_the_trailers(operated: Any) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{operated.port('grpc_inference')}") as channel:
        stub = InferenceAPIsServiceStub(channel)
        for name, call in (("quick", stub.Predictions), ("stream", stub.StreamPredictions)):
            for metadata in (tuple(ASK.items()), ()):
                request = PredictionsRequest(model_name=name, input={"data": b"x"})
                if name == "quick":
                    _, done = call.with_call(request, metadata=metadata, timeout=GUARD_S)
                else:
                    done = call(request, metadata=metadata, timeout=GUARD_S)
                    assert len(list(done)) == 3
                found = dict(done.trailing_metadata())
                assert ("server-timing" in found) == bool(metadata)
                if metadata:
                    check(entries(found["server-timing"]))


def test_the_access_log_tells_of_all(operated: Any) -> None:
    posted(operated, "/predictions/quick", {"x-request-id": "logged"})
    operated.wait_for_log('"POST /predictions/quick HTTP/1.1" 200')
    log = Path(operated.directory) / "logs" / "access_log.log"
    line = next(line for line in log.read_text().splitlines() if '"POST /predictions/quick HTTP/1.1" 200' in line)
    check(entries(line.split(" 200 ")[1].partition(" ")[2]))


@pytest.fixture
def printed(operated: Any, torchserve: Any) -> Callable[..., str]:
    """The output of a command into a pipe; it must succeed."""

    def run(*words: str) -> str:
        done = torchserve(*words, "--url", f"http://127.0.0.1:{operated.port('http_management')}", code=0)
        assert "\x1b" not in done.stdout, "no colours in a pipe"
        return str(done.stdout)

    return run


def test_top_prints_a_table_into_a_pipe(printed: Callable[..., str]) -> None:
    lines = printed("top").splitlines()
    assert lines[0].startswith("torchrelay ") and " ready " in lines[0]
    rows = [line.split()[:5] for line in lines if line.startswith(("quick", "stream"))]
    assert rows == [[name, "1.0", "*", "ready", "1/1"] for name in ("quick", "stream")]


@contextlib.contextmanager
def terminal(*words: str, columns: int, lines: int, **variables: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command on a terminal of that size, and the terminal's other side."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [*COMMAND, *words], stdin=theirs, stdout=theirs, stderr=theirs, env=env | variables, start_new_session=True
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_top_draws_on_a_narrow_terminal(operated: Any) -> None:
    """In a terminal of that size: the other screen, both models, and Ctrl-C, after which all is as before."""
    url = f"http://127.0.0.1:{operated.port('http_management')}"
    with terminal("top", "--url", url, columns=60, lines=20, TERM="xterm-256color") as (process, ours):
        drawn = b""
        while not (b"quick" in drawn and b"stream" in drawn):
            assert select.select([ours], [], [], GUARD_S)[0], drawn
            drawn += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the terminal's other side is closed
            while more := os.read(ours, 65536):
                drawn += more
        assert process.wait(GUARD_S) == 130
    assert b"\x1b[?1049h" in drawn and b"\x1b[?1049l" in drawn.rpartition(b"\x1b[?1049h")[2]
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.decode().replace("\x1b[H", "\n"))
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", plain)]
    assert max(map(len, lines)) <= 60, lines
    heads = next(line.split() for line in lines if line.startswith("MODEL"))
    assert heads[0] == "MODEL" and {"WORKERS", "CALLS/S", "P95", "STATUS"} <= set(heads) and "BATCH" not in heads


def ports(operated: Any) -> list[str]:
    inference, management = (str(operated.port(f"grpc_{api}")) for api in ("inference", "management"))
    return ["--inference-port", inference, "--management-port", management]


def on_terminal(operated: Any, *words: str, columns: int = 80) -> str:
    """All that a client command writes to a terminal of that width; it must succeed."""
    with terminal(*words, *ports(operated), columns=columns, lines=24, NO_COLOR="1") as (process, ours):
        told = b""
        with contextlib.suppress(OSError):  # the terminal's other side is closed
            while select.select([ours], [], [], GUARD_S)[0] and (more := os.read(ours, 65536)):
                told += more
        assert process.wait(GUARD_S) == 0, told
    return told.decode().replace("\r\n", "\n")


def test_list_fits_a_terminal(operated: Any, torchserve: Any) -> None:
    whole = [line.split()[-1] for line in torchserve("list", *ports(operated), code=0).stdout.splitlines()]
    lines = on_terminal(operated, "list", columns=60).splitlines()
    assert [line.split()[0] for line in lines] == ["MODEL", "quick", "stream"]
    assert max(map(len, lines)) <= 60, lines
    assert all(url.endswith(line.split()[-1].lstrip("…")) for line, url in zip(lines, whole, strict=True))


def test_predict_ends_its_line_on_a_terminal(operated: Any, torchserve: Any, tmp_path: Path) -> None:
    (tmp_path / "body").write_text("{}")
    words = ("predict", "quick", str(tmp_path / "body"))
    answer = str(torchserve(*words, *ports(operated), code=0).stdout)
    assert answer and not answer.endswith("\n"), "a pipe gets the model's bytes"
    assert on_terminal(operated, *words) == f"{answer}\n"


def test_logs_print_what_workers_said(operated: Any, printed: Callable[..., str], torchserve: Any) -> None:
    posted(operated, "/predictions/quick", {})
    found = until(lambda: printed("logs", "quick"))
    assert re.search(r"^quick 1\.0 9\d+ \| asked for 1$", found, re.MULTILINE) and "stream" not in found
    assert r"\x1b[2J\u202e" in found and found.replace("\n", "").isprintable()
    url = f"http://127.0.0.1:{operated.port('http_management')}"
    assert "quick" in torchserve("logs", "quik", "--url", url, code=1).stderr
