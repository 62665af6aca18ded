"""What is asked of the servers, and which answer is the right one."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from measuring.h2load import PREFIX_BYTES
from ts_frontend.protos.inference_pb2 import PredictionResponse, PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub as Names

HANDLERS = Path(__file__).resolve().parent.parent / "handlers"
CALL_S_MAX = 30.0
PIECES = 200
_ANSWER: bytes = PredictionResponse(prediction=b"ok").SerializeToString()
_TORCH_ANSWER: bytes = PredictionResponse(prediction=b"64.0").SerializeToString()


class WrongAnswer(Exception):
    """A server answered something else than it should."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of call. `answer` is its messages; `clients` are the usual numbers of clients."""

    name: str
    title: str
    path: str
    answer: Sequence[bytes]
    clients: Sequence[int]

    @property
    def request(self) -> bytes:
        data = {"data": b"x" * 16}
        return bytes(PredictionsRequest(model_name=self.name, input=data).SerializeToString())


NOOP = Workload("noop", "no-op Predictions over gRPC", Names.Predictions_PATH, [_ANSWER], (1, 16, 64))
PIECES_STREAM = Workload(
    "pieces",
    f"StreamPredictions of {PIECES} small pieces over gRPC; a request is a whole stream",
    Names.StreamPredictions_PATH,
    [_ANSWER] * PIECES,
    (1, 16),
)
WITH_TORCH = Workload("with_torch", "a model that imports torch", Names.Predictions_PATH, [_TORCH_ANSWER], (1,))


def answer_bytes(answer: Sequence[bytes]) -> int:
    """Bytes of response data that these messages are."""
    return sum(PREFIX_BYTES + len(message) for message in answer)


def ask(port: int, workload: Workload, timeout_s: float = CALL_S_MAX) -> list[bytes]:
    """The messages of one answer, asked for with grpcio's client. Raises grpc.RpcError."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream(workload.path)
        return list(call(workload.request, timeout=timeout_s, wait_for_ready=True))


def check(name: str, port: int, workload: Workload, answer: Sequence[bytes]) -> None:
    """Raises WrongAnswer unless a real gRPC client gets `answer`, with status OK."""
    try:
        got = ask(port, workload)
    except grpc.RpcError as error:
        raise WrongAnswer(f"{name} answers with an error: {error}") from error
    if got != list(answer):
        raise WrongAnswer(f"{name} answers {got[:3]} ({len(got)} messages) instead of {list(answer)[:3]}")


def build_archive(name: str, handler: Path, store: Path) -> Path:
    """A model archive of one handler file and nothing else, in the form both servers read."""
    manifest = (
        '{"createdOn": "", "runtime": "python", "archiverVersion": "0", "model": '
        f'{{"modelName": "{name}", "modelVersion": "1.0", "handler": "{handler.name}"}}}}'
    )
    path = store / f"{name}.mar"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", manifest)
        archive.write(handler, handler.name)
    return path
