"""The logs of a whole server: JSON lines, request ids from listener to handler, a log4j2 file, a flooding handler."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from support import GUARD_S
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

if TYPE_CHECKING:
    from e2e.servers import Serving, Start


TALKING = """
import logging, sys, threading

def handle(data, context):
    if data is None:
        return None
    print("handling", context.get_request_id(0))
    logging.warning("through logging")
    thread = threading.Thread(target=print, args=("from a thread",))
    thread.start()
    thread.join()
    if data[0].get("data") == b"fail" or data[0].get("body") == b"fail":
        raise ValueError("on request")
    return [context.get_request_id(0)]
"""
FLOODING = """
import sys

def handle(data, context):
    if data is None:
        return None
    sys.stdout.write("again and again\\n" * 60_000)
    return ["done"]
"""


def post(server: Serving, model: str, body: bytes, request_id: str = "") -> tuple[str, str]:
    """(the request id of the answer's header, its body)"""
    headers = {"content-type": "application/octet-stream"} | ({"x-request-id": request_id} if request_id else {})
    request = urllib.request.Request(f"{server.http}/predictions/{model}", body, headers)
    with urllib.request.urlopen(request, timeout=GUARD_S) as answer:
        return answer.headers["x-request-id"], answer.read().decode()


def call(server: Serving, model: str, request_id: str, data: bytes = b"") -> tuple[dict[str, Any], str]:
    """(the answer's metadata, its body or the error's status)"""
    with grpc.insecure_channel(server.inference) as channel:
        request = PredictionsRequest(model_name=model, input={"data": data})
        method = InferenceAPIsServiceStub(channel).Predictions
        answer, done = method.with_call(request, metadata=[("x-request-id", request_id)], timeout=GUARD_S)
        return dict(done.initial_metadata()), answer.prediction.decode()


def lines(server: Serving, name: str) -> list[dict[str, Any]]:
    text = (server.directory / "logs" / name).read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_json_logs_name_the_request_everywhere(start: Start, write: Callable[..., str]) -> None:
    write("talking", TALKING)
    server = start("--models", "talking", log_format="json", default_workers_per_model=1)
    assert post(server, "talking", b"x", "mine-1") == ("mine-1", "mine-1")
    made, seen = post(server, "talking", b"x")
    assert made == seen
    metadata, seen = call(server, "talking", "mine-2")
    assert (metadata["x-request-id"], seen) == ("mine-2", "mine-2")
    try:
        call(server, "talking", "mine-3", b"fail")
    except grpc.RpcError as error:
        assert ("x-request-id", "mine-3") in tuple(error.initial_metadata())
    server.terminate()
    access = {one["request_id"]: one for one in lines(server, "access_log.log")}
    assert access.keys() == {"mine-1", "mine-2", "mine-3", made}
    assert access["mine-1"]["request"] == "POST /predictions/talking HTTP/1.1"
    assert access["mine-3"]["status"] != 0
    model = lines(server, "model_log.log")
    assert [one["request_id"] for one in model if one["message"].startswith("handling")] == [
        one["message"].removeprefix("handling ") for one in model if one["message"].startswith("handling")
    ]
    assert len([one for one in model if "through logging" in one["message"] and "request_id" in one]) == 4
    assert all("request_id" not in one for one in model if one["message"] == "from a thread")
    assert [one["request_id"] for one in model if "ValueError: on request" in one["message"]] == ["mine-3"]
    for name in ("ts_log.log", "ts_metrics.log", "model_metrics.log"):
        assert all({"time", "level", "thread", "logger"} <= one.keys() for one in lines(server, name))


def test_a_log4j2_file_says_where_and_how(start: Start, tmp_path: Path, probe_handler: Path) -> None:
    file = tmp_path / "log4j2.xml"
    file.write_text(
        """<Configuration><Appenders>
        <File name="a" fileName="${env:LOG_LOCATION}/requests.txt"><PatternLayout pattern="%X{request_id} %m%n"/></File>
        <Console name="STDOUT"><PatternLayout pattern="%c{1} says %m%n"/></Console></Appenders>
        <Loggers><Logger name="ACCESS_LOG" level="info" additivity="false"><AppenderRef ref="a"/></Logger>
        <Root level="info"><AppenderRef ref="STDOUT"/></Root></Loggers></Configuration>"""
    )
    server = start("--models", "probe", "--log-config", str(file))
    post(server, "probe", b"{}", "mine")
    server.terminate()
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["requests.txt"]
    (line,) = (tmp_path / "logs" / "requests.txt").read_text().splitlines()
    assert line.startswith("mine /127.0.0.1:")
    said = server.lines.index("Model server started.")
    assert any("says http_inference listens on" in line for line in server.lines[:said])


def test_a_flooding_handler_is_cut_and_others_are_served(start: Start, write: Callable[..., str]) -> None:
    write("flooding", FLOODING)
    server = start("--models", "flooding,probe", default_workers_per_model=1, console_log=True)
    assert post(server, "flooding", b"")[1] == "done"
    assert server.predict("probe", {}) is not None
    server.wait_for_log("lines were dropped")
    server.terminate()
    logs = list((server.directory / "logs").glob("*.log"))
    assert len(logs) >= 5 and {one.stat().st_mode & 0o777 for one in logs} == {0o640}
    written = (server.directory / "logs" / "model_log.log").read_text().splitlines()
    flood = [line for line in written if "again and again" in line]
    cut = [int(line.partition(" - ")[2].split()[0]) for line in written if "lines were dropped" in line]
    assert len(flood) + sum(cut) == 60_000
    assert all("W-" in line and "flooding_1.0-stdout" in line for line in flood[:10])
