"""The requests of the benchmarks, and their right answers."""

from __future__ import annotations

import json
import urllib.request
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from measuring.h2load import PREFIX_BYTES, grpc_body
from measuring.processes import BenchmarkFailed
from ts_frontend.protos.inference_pb2 import PredictionResponse, PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub as Names

HANDLERS = Path(__file__).resolve().parent.parent / "handlers"
CALL_S_MAX = 30.0
HTTP_BODY = b"x" * 16
PIECES = 200
_ANSWER: bytes = PredictionResponse(prediction=b"ok").SerializeToString()
HTTP_ANSWER = [b"ok"]


class WrongAnswer(BenchmarkFailed):
    """A server's answer was wrong."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of call. `answer`: the messages of its answer; `clients`: the usual numbers of clients."""

    name: str
    title: str
    path: str
    answer: Sequence[bytes]
    clients: Sequence[int]

    @property
    def request(self) -> bytes:
        data = {"data": HTTP_BODY}
        return bytes(PredictionsRequest(model_name=self.name, input=data).SerializeToString())

    @property
    def http_path(self) -> str:
        return f"/predictions/{self.name}"

    @property
    def http_body(self) -> bytes:
        return HTTP_BODY

    @property
    def http_type(self) -> str:
        """The body's content type."""
        return "application/octet-stream"

    def prepare(self, store: Path) -> None:
        """Writes the models of the servers into the folder `store`."""
        build_archive(self.name, HANDLERS / f"{self.name}.py", store)


NOOP = Workload("noop", "no-op Predictions (gRPC; `…-http`: HTTP/1.1)", Names.Predictions_PATH, [_ANSWER], (1, 16, 64))
PIECES_STREAM = Workload(
    "pieces",
    f"StreamPredictions of {PIECES} small pieces over gRPC; a request is a whole stream",
    Names.StreamPredictions_PATH,
    [_ANSWER] * PIECES,
    (1, 16),
)
YIELDS = Workload(
    "yields",
    f"StreamPredictions of {PIECES} small pieces from a generator",
    Names.StreamPredictions_PATH,
    [_ANSWER] * PIECES,
    (1, 16),
)


class Client(Protocol):
    """The protocol of requests: gRPC or HTTP."""

    http1: bool

    def url(self, port: int, workload: Workload) -> str: ...
    def body(self, workload: Workload) -> bytes: ...
    def ask(self, port: int, workload: Workload, timeout_s: float = CALL_S_MAX) -> list[bytes]:
        """The messages of one answer. Raises NoAnswer."""

    def answer_bytes(self, answer: Sequence[bytes]) -> int:
        """The size of these messages as response data, in bytes."""


class NoAnswer(Exception):
    """A server gives no answer (yet), or an error."""


class GrpcClient:
    http1 = False

    def url(self, port: int, workload: Workload) -> str:
        return f"http://127.0.0.1:{port}{workload.path}"

    def body(self, workload: Workload) -> bytes:
        return grpc_body(workload.request)

    def ask(self, port: int, workload: Workload, timeout_s: float = CALL_S_MAX) -> list[bytes]:
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                call = channel.unary_stream(workload.path)
                return list(call(workload.request, timeout=timeout_s, wait_for_ready=True))
        except grpc.RpcError as error:
            raise NoAnswer(str(error)) from error

    def answer_bytes(self, answer: Sequence[bytes]) -> int:
        return sum(PREFIX_BYTES + len(message) for message in answer)


class HttpClient:
    http1 = True

    def url(self, port: int, workload: Workload) -> str:
        return f"http://127.0.0.1:{port}{workload.http_path}"

    def body(self, workload: Workload) -> bytes:
        return workload.http_body

    def ask(self, port: int, workload: Workload, timeout_s: float = CALL_S_MAX) -> list[bytes]:
        headers = {"content-type": workload.http_type}
        request = urllib.request.Request(self.url(port, workload), workload.http_body, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return [answer.read()]
        except OSError as error:  # HTTPError and URLError are OSErrors
            raise NoAnswer(str(error)) from error

    def answer_bytes(self, answer: Sequence[bytes]) -> int:
        return sum(map(len, answer))


GRPC, HTTP = GrpcClient(), HttpClient()


def check(name: str, client: Client, port: int, workload: Workload, answer: Sequence[bytes]) -> None:
    """Raises WrongAnswer unless a real client gets `answer`, or an equivalent one, with status OK."""
    try:
        got = client.ask(port, workload)
    except NoAnswer as error:
        raise WrongAnswer(f"{name} answers with an error: {error}") from error
    if got != list(answer):
        raise WrongAnswer(f"{name} answers {got[:3]} ({len(got)} messages) instead of {list(answer)[:3]}")


def build_archive(
    name: str,
    handler: Path,
    store: Path,
    settings: Mapping[str, object] | None = None,
    more: Mapping[str, str] | None = None,
) -> Path:
    """A model archive of one handler file, with `settings` as its model-config.yaml and the files `more` (name to
    text), in the format that both servers read."""
    model = {"modelName": name, "modelVersion": "1.0", "handler": handler.name}
    files = {**(more or {})}
    if settings:
        model["configFile"] = "model-config.yaml"
        files["model-config.yaml"] = "".join(f"{key}: {value}\n" for key, value in settings.items())
    manifest = {"createdOn": "", "runtime": "python", "archiverVersion": "0", "model": model}
    path = store / f"{name}.mar"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        archive.write(handler, handler.name)
        for file, text in files.items():
            archive.writestr(file, text)
    return path
