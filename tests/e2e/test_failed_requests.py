"""Requests that fail leave nothing behind, on any service and however they fail: without the garbage collector, too.

The server runs with the collector turned off, so that objects which only it could free stay, and are counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import h2.connection
import h2.events
import httpx
import psutil
import pytest

from e2e.servers import text_request
from support import GUARD_S, until
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

BODY_BYTES = 200_000
#: How long a client may take for its body. Whole bodies are sent at once.
BODY_WAIT_S = 2
#: Of each kind of failure, in each test.
COUNTED = 4

#: In the server: no collections, and a socket that tells what is alive. `all` gives the types of what only a collection
#: would free, and what refers to the frames in it.
WITHOUT_COLLECTOR = """
import gc, json, os, socket, sys, threading
gc.disable()
KINDS = ("Job", "FedJob", "PriorityJob", "SequenceJob", "HttpRequest", "Exchange", "Multiplexer", "_Entry", "_Flight",
         "traceback")

def serve():
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(os.environ["ALIVE_DIR"], str(os.getpid())))
    listener.listen()
    while True:
        guest, _ = listener.accept()
        asked = guest.recv(100).decode()
        counts = {}
        if asked == "all":
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            gc.set_debug(0)
            for one in gc.garbage:
                name = type(one).__qualname__
                if name == "frame":
                    name = "frame " + one.f_code.co_qualname + " " + ",".join(one.f_locals)
                counts[name] = counts.get(name, 0) + 1
            gc.garbage.clear()
        else:
            for one in gc.get_objects():
                name = type(one).__name__
                if name in KINDS or isinstance(one, BaseException):
                    counts[name] = counts.get(name, 0) + 1
        guest.sendall(json.dumps(counts).encode())
        guest.close()

if os.environ.get("ALIVE_DIR"):
    threading.Thread(target=serve, daemon=True).start()
"""
HANDLER = """
import os, signal, time
from ts.utils.util import PredictionException

def value_of(row):
    found = row.get("data") or row.get("body") or row.get("text_input") or row.get("prompt") or b""
    found = found[0] if isinstance(found, list) else found
    found = found.get("text_input") or found.get("prompt") if isinstance(found, dict) else found
    return (found.encode() if isinstance(found, str) else bytes(found)).split(b" ")[0].decode()

def handle(data, context):
    if data is None:
        return None
    ask = value_of(data[0])
    if ask == "raise":
        raise PredictionException("too long", 413)
    if ask == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if ask == "item":
        return [PredictionException("only this one", 422)] * len(data)
    if ask == "large":
        return [b"x" * 300_000] * len(data)
    if ask == "hang":
        time.sleep(1000)
    if ask == "wait":
        with open(os.path.join(os.environ["ALIVE_DIR"], context.model_name + ".begun"), "ab") as note:
            note.write(b".")
    while ask == "wait" and not context.is_cancelled(0):
        time.sleep(0.001)
    return [b"ok"] * len(data)
"""
STREAM = (
    HANDLER.replace("def handle(", "def whole(")
    + """
def handle(data, context):
    if data is None:
        return
    yield [b"one"] * len(data)
    yield whole(data, context)
"""
)


class Alive:
    """The objects that the server still holds."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _asked(self, what: str) -> dict[str, int]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(GUARD_S)
            connection.connect(str(self._path))
            connection.sendall(what.encode())
            data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        return dict(json.loads(data))

    def count(self) -> dict[str, int]:
        return self._asked("count")

    def begun(self, model: str) -> int:
        """How many requests to wait the model's handler has been called with."""
        note = self._path.with_name(f"{model}.begun")
        return note.stat().st_size if note.exists() else 0

    def garbage(self) -> dict[str, int]:
        return self._asked("all")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serving: Callable[..., Any], write_to: Any) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("alive")
    (directory / "python").mkdir()
    (directory / "python" / "sitecustomize.py").write_text(WITHOUT_COLLECTOR)
    store = directory / "store"
    store.mkdir()
    write_to(store, "whole", HANDLER)
    write_to(store, "stream", STREAM)
    write_to(store, "idle", HANDLER)
    write_to(store, "mortal", HANDLER)
    write_to(store, "full", HANDLER, config="jobQueueSize: 1\n")
    write_to(store, "late", HANDLER, config="clientTimeoutInMills: 50\n")
    write_to(store, "hung", HANDLER, config="responseTimeout: 1\n")
    write_to(store, "kept", HANDLER, config="cache: true\n")
    settings = {
        "env": {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(directory / "python"), os.environ.get("PYTHONPATH")))),
            "ALIVE_DIR": str(directory),
        },
        "max_response_size": 250_000,
        "request_body_timeout_s": BODY_WAIT_S,
    }
    with serving(directory, store, settings, []) as found:
        for model in ("whole", "stream", "full", "late", "mortal", "hung", "kept"):
            found.register(model)
        found.register("idle", initial_workers=0)
        found.alive = Alive(directory / str(found.process.pid))
        yield found


def body(ask: str) -> bytes:
    return ask.encode() + b" " + b"." * BODY_BYTES


def prediction(model: str, ask: str) -> PredictionsRequest:
    return PredictionsRequest(model_name=model, input={"data": body(ask)})


def _json(model: str, ask: str) -> dict[str, Any]:
    return {"inputs": [{"name": "data", "datatype": "BYTES", "shape": [1], "data": [body(ask).decode()]}]}


class Unanswered(Exception):
    """A failure that came as an answer."""


class Clients:
    """A call is made as `call(model, behaviour, seconds to wait)`; every failure is an exception."""

    def __init__(self, server: Any) -> None:
        self.http = httpx.Client(base_url=server.http)
        options = [("grpc.max_send_message_length", -1)]
        self.channel = grpc.insecure_channel(server.inference, options)
        self.native, self.oip = InferenceAPIsServiceStub(self.channel), GRPCInferenceServiceStub(self.channel)

    def close(self) -> None:
        self.http.close()
        self.channel.close()

    def predictions(self, model: str, ask: str, wait_s: float) -> None:
        self.native.Predictions(prediction(model, ask), timeout=wait_s)

    def stream_predictions(self, model: str, ask: str, wait_s: float) -> None:
        list(self.native.StreamPredictions(prediction(model, ask), timeout=wait_s))

    def stream_predictions_2(self, model: str, ask: str, wait_s: float) -> None:
        answers = list(self.native.StreamPredictions2(iter([prediction(model, ask)] * 2), timeout=wait_s))
        if any(answer.status.code for answer in answers):
            raise Unanswered

    def model_infer(self, model: str, ask: str, wait_s: float) -> None:
        self.oip.ModelInfer(text_request(model, body(ask)), timeout=wait_s)

    def model_stream_infer(self, model: str, ask: str, wait_s: float) -> None:
        metadata = [("oip-stream-dialect", "triton")]
        answers = list(
            self.oip.ModelStreamInfer(iter([text_request(model, body(ask))] * 2), timeout=wait_s, metadata=metadata)
        )
        if any(answer.error_message for answer in answers):
            raise Unanswered

    def model_stream_infer_mlserver(self, model: str, ask: str, wait_s: float) -> None:
        metadata = [("oip-stream-dialect", "mlserver")]
        list(self.oip.ModelStreamInfer(iter([text_request(model, body(ask))] * 2), timeout=wait_s, metadata=metadata))

    def model_infer_stream(self, model: str, ask: str, wait_s: float) -> None:
        call = self.channel.unary_stream(
            "/inference.GRPCInferenceService/ModelInferStream",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        list(call(text_request(model, body(ask)), timeout=wait_s))

    def _post(self, path: str, wait_s: float, **more: Any) -> None:
        answer = self.http.post(path, timeout=wait_s, **more)
        answer.raise_for_status()
        if '"error"' in answer.text:
            raise Unanswered

    def http_predictions(self, model: str, ask: str, wait_s: float) -> None:
        self._post(f"/predictions/{model}", wait_s, content=body(ask))

    def http_explanations(self, model: str, ask: str, wait_s: float) -> None:
        self._post(f"/explanations/{model}", wait_s, content=body(ask))

    def http_v1_predict(self, model: str, ask: str, wait_s: float) -> None:
        asked = {"instances": [0], "text_input": body(ask).decode()}
        self._post(f"/v1/models/{model}:predict", wait_s, json=asked)

    def http_infer(self, model: str, ask: str, wait_s: float) -> None:
        self._post(f"/v2/models/{model}/versions/1.0/infer", wait_s, json=_json(model, ask))

    def http_generate(self, model: str, ask: str, wait_s: float) -> None:
        self._post(f"/v2/models/{model}/generate", wait_s, json={"text_input": body(ask).decode()})

    def http_generate_stream(self, model: str, ask: str, wait_s: float) -> None:
        self._post(f"/v2/models/{model}/generate_stream", wait_s, json={"text_input": body(ask).decode()})

    def http_completions(self, model: str, ask: str, wait_s: float) -> None:
        self._post("/v1/completions", wait_s, json={"model": model, "prompt": body(ask).decode()})


SERVICES = [name for name in vars(Clients) if not name.startswith("_") and name != "close"]
#: One of each kind: a message, a stream of them, tensors, and HTTP with and without.
QUICK = ("predictions", "stream_predictions_2", "model_infer", "model_stream_infer", "http_predictions", "http_infer")
#: How a request ends: the model, what its handler does, how long its client waits.
WAYS: dict[str, tuple[str, str, float]] = {
    "raises": ("whole", "raise", GUARD_S),
    "item": ("whole", "item", GUARD_S),
    "too large": ("whole", "large", GUARD_S),
    "left": ("whole", "wait", 0.1),
    "too late": ("late", "", GUARD_S),
    "stream raises": ("stream", "raise", GUARD_S),
    "stream left": ("stream", "wait", 0.1),
    "queue full": ("full", "", GUARD_S),
    "no worker": ("idle", "", GUARD_S),
    "no model": ("nobody", "", GUARD_S),
}


@pytest.fixture
def clients(server: Any) -> Iterator[Clients]:
    found = Clients(server)
    try:
        yield found
    finally:
        found.close()


def fail(call: Callable[[str, str, float], None], model: str, ask: str, wait_s: float) -> None:
    """One request that has no answer."""
    try:
        call(model, ask, wait_s)
    except (grpc.RpcError, httpx.HTTPError, Unanswered):
        return
    raise AssertionError(f"{model} answered {ask!r}")


def settled(alive: Alive, before: dict[str, int], more_max: int) -> dict[str, int]:
    """The counts that have grown by more than that, once no object goes away any more."""
    end_s = time.monotonic() + GUARD_S
    while True:
        now = alive.count()
        grown = {name: count - before.get(name, 0) for name, count in now.items()}
        grown = {name: more for name, more in grown.items() if more > more_max}
        if not grown or time.monotonic() > end_s:
            return grown
        time.sleep(0.05)


def is_running(server: Any, model: str) -> bool:
    return bool(server.metric("ts_running_requests", model_name=model) == 1)


def occupies_late(server: Any, clients: Clients, asked: list[Any], begun: int) -> bool:
    """Whether a request of `asked` is in the handler of `late`, which had `begun` before. One that was itself too late,
    in the queue or at the worker, is sent again."""
    if not asked or asked[-1].done():
        asked.append(clients.native.Predictions.future(prediction("late", "wait"), timeout=GUARD_S))
    return bool(server.alive.begun("late") > begun)


@pytest.mark.parametrize(
    "service", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in SERVICES]
)
def test_a_failure_leaves_nothing_behind(server: Any, clients: Clients, service: str) -> None:
    """Each way to fail COUNTED times; the objects left by any single way would exceed the limit."""
    call = getattr(clients, service)
    busy: list[Any] = []
    late: list[Any] = []
    begun = server.alive.begun("late")
    # A cancelled request of the test before may still run, and would be taken for this one's.
    until(lambda: not is_running(server, "full") and not is_running(server, "late"))
    try:
        for is_there in (
            lambda: is_running(server, "full"),
            lambda: server.describe("full")["jobQueueStatus"]["remainingCapacity"] == 0,
        ):
            busy.append(clients.native.Predictions.future(prediction("full", "wait"), timeout=GUARD_S))
            until(is_there)
        until(lambda: occupies_late(server, clients, late, begun))
        for way in WAYS.values():
            fail(call, *way)  # the first brings what a server keeps for good
        before = server.alive.count()
        for _ in range(COUNTED):
            for way in WAYS.values():
                fail(call, *way)
    finally:
        for one in (*busy, *late):
            one.cancel()
    grown = settled(server.alive, before, COUNTED - 1)
    assert not grown, json.dumps(server.alive.garbage(), indent=1)


def over_http1(port: int, path: str, head: str, sent: bytes, *, waits: bool) -> None:
    """A request over HTTP/1.1, of which `sent` is a part. `waits`: its client waits for the error, else it leaves."""
    with socket.create_connection(("127.0.0.1", port), GUARD_S) as one:
        one.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{head}\r\n".encode())
        with contextlib.suppress(ConnectionError):  # an error may come before the rest was sent
            one.sendall(sent)
            if waits:
                assert one.recv(100)


GRPC = {"te": "trailers"}
OVER = (h2.events.StreamEnded, h2.events.StreamReset)


def over_http2(
    port: int, path: str, kind: str, sent: bytes, *, waits: bool, whole: bool = False, more: Mapping[str, str] = GRPC
) -> None:
    """The same over HTTP/2: the client resets the stream. `whole`: the request ends after `sent`."""
    headers = {":method": "POST", ":path": path, ":scheme": "http", ":authority": "localhost", "content-type": kind}
    http = h2.connection.H2Connection()
    http.initiate_connection()
    http.send_headers(1, list({**headers, **more}.items()))
    with socket.create_connection(("127.0.0.1", port), GUARD_S) as one:
        one.sendall(http.data_to_send())
        seen: list[Any] = []
        while sent and not any(isinstance(event, OVER) for event in seen):
            size = min(len(sent), http.local_flow_control_window(1), http.max_outbound_frame_size)
            if size:
                http.send_data(1, sent[:size], end_stream=whole and size == len(sent))
                sent = sent[size:]
                one.sendall(http.data_to_send())
            else:
                seen += http.receive_data(one.recv(1 << 16))
        while waits and not any(isinstance(event, OVER) for event in seen):
            seen += http.receive_data(one.recv(1 << 16))
        if not waits:
            http.reset_stream(1, 8)
            one.sendall(http.data_to_send())


LENGTH = f"Content-Length: {2 * BODY_BYTES}\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"
PART = b"." * BODY_BYTES
CHUNK = b"%x\r\n%b\r\n" % (BODY_BYTES, PART)
PREFIX = (2 * BODY_BYTES).to_bytes(5, "big")
#: Ends of requests whose bodies aren't there as a whole, for HTTP: the client leaves or takes too long, too much comes.
HTTP_WAYS: dict[str, Callable[[int, str], None]] = {
    "left": lambda port, path: over_http1(port, path, LENGTH, PART, waits=False),
    "left, in chunks": lambda port, path: over_http1(port, path, CHUNKED, CHUNK, waits=False),
    "broken chunk": lambda port, path: over_http1(port, path, CHUNKED, CHUNK + b"no size\r\n", waits=False),
    "too long": lambda port, path: over_http1(port, path, LENGTH, PART, waits=True),
    "too much": lambda port, path: over_http1(port, path, CHUNKED, CHUNK * 40, waits=True),
    "left over HTTP/2": lambda port, path: over_http2(port, path, "application/json", PART, waits=False),
    "too long over HTTP/2": lambda port, path: over_http2(port, path, "application/json", PART, waits=True),
}
HTTP_PATHS = ["/predictions/whole", "/v2/models/whole/infer", "/v2/models/whole/generate_stream", "/v1/completions"]
#: The same for gRPC, and messages that can't be read.
GRPC_WAYS: dict[str, Callable[[int, str], None]] = {
    "left": lambda port, path: over_http2(port, path, "application/grpc", PREFIX + PART, waits=False),
    "deadline": lambda port, path: over_http2(
        port, path, "application/grpc", PREFIX + PART, waits=True, more=GRPC | {"grpc-timeout": "100m"}
    ),
    "ended too early": lambda port, path: over_http2(
        port, path, "application/grpc", PREFIX + PART, waits=True, whole=True
    ),
    "too large": lambda port, path: over_http2(
        port, path, "application/grpc", b"\0\xff" + PREFIX[2:] + PART, waits=True
    ),
    "not compressed": lambda port, path: over_http2(
        port,
        path,
        "application/grpc",
        b"\1" + len(PART).to_bytes(4, "big") + PART,
        waits=True,
        whole=True,
        more=GRPC | {"grpc-encoding": "gzip"},
    ),
    "no protobuf": lambda port, path: over_http2(
        port, path, "application/grpc", b"\0" + len(PART).to_bytes(4, "big") + PART, waits=True, whole=True
    ),
}
SERVE = "/org.pytorch.serve.grpc.inference.InferenceAPIsService"
GRPC_PATHS = [f"{SERVE}/Predictions", f"{SERVE}/StreamPredictions", f"{SERVE}/StreamPredictions2"]
GRPC_PATHS += [f"/inference.GRPCInferenceService/{name}" for name in ("ModelInfer", "ModelStreamInfer")]


@pytest.mark.parametrize("way", HTTP_WAYS)
def test_an_unfinished_body_leaves_nothing_behind(server: Any, way: str) -> None:
    leaves_nothing(server, lambda path: HTTP_WAYS[way](server.port("http_inference"), path), HTTP_PATHS)


@pytest.mark.parametrize("way", GRPC_WAYS)
def test_an_unfinished_message_leaves_nothing_behind(server: Any, way: str) -> None:
    leaves_nothing(server, lambda path: GRPC_WAYS[way](server.port("grpc_inference"), path), GRPC_PATHS)


def leaves_nothing(server: Any, ask: Callable[[str], None], paths: list[str]) -> None:
    """Both times all ask at once, since some wait for BODY_WAIT_S: the first brings what a server keeps for good."""
    with ThreadPoolExecutor(len(paths) * COUNTED) as pool:
        list(pool.map(ask, paths * COUNTED))
        before = server.alive.count()
        list(pool.map(ask, paths * COUNTED))
    assert not settled(server.alive, before, COUNTED - 1), json.dumps(server.alive.garbage(), indent=1)


DEADLY = ["predictions", "stream_predictions_2", "model_infer", "model_stream_infer", "http_predictions", "http_infer"]


@pytest.mark.long
@pytest.mark.parametrize("service", ["predictions", "model_infer", "http_predictions", "http_infer"])
def test_requests_of_the_cache_leave_nothing_behind(server: Any, clients: Clients, service: str) -> None:
    call = getattr(clients, service)

    def ask() -> None:
        for _ in range(COUNTED):
            for behaviour, wait_s in (("raise", GUARD_S), ("item", GUARD_S), ("large", GUARD_S), ("wait", 0.1)):
                fail(call, "kept", behaviour, wait_s)
            call("kept", "", GUARD_S)  # from the second on it has run

    ask()
    before = server.alive.count()
    ask()
    assert not settled(server.alive, before, COUNTED - 1), json.dumps(server.alive.garbage(), indent=1)


@pytest.mark.parametrize(("model", "ask"), [("mortal", "die"), ("hung", "hang")])
def test_a_dead_worker_leaves_nothing_behind(server: Any, clients: Clients, model: str, ask: str) -> None:
    def die(*calls: str) -> None:
        for call in calls:
            fail(getattr(clients, call), model, ask, GUARD_S)
            until(lambda: server.worker_pids(model))
            clients.predictions(model, "", GUARD_S)

    die(DEADLY[0])
    before = server.alive.count()
    die(*DEADLY)
    assert not settled(server.alive, before, 1), json.dumps(server.alive.garbage(), indent=1)


MANY, LARGE_BYTES, GROWN_BYTES_MAX = 30, 5_000_000, 60 << 20


@pytest.mark.slow
def test_many_large_requests_that_fail_need_no_memory(server: Any, clients: Clients) -> None:
    """4 x 30 requests of 5 MB are 600 MB; a few of them are in flight at a time."""
    process = psutil.Process(server.process.pid)
    for call in ("predictions", "stream_predictions", "model_infer", "http_predictions"):
        fail(getattr(clients, call), "whole", "raise " + "." * LARGE_BYTES, GUARD_S)
    before = process.memory_info().rss
    for call in ("predictions", "stream_predictions", "model_infer", "http_predictions"):
        for _ in range(MANY):
            fail(getattr(clients, call), "whole", "raise " + "." * LARGE_BYTES, GUARD_S)
    assert process.memory_info().rss - before < GROWN_BYTES_MAX
