"""The models of all servers, and their requests: over TorchServe's paths, over a server's own paths (`/NAME`), and
over the Open Inference Protocol."""

from __future__ import annotations

import json
import random
import struct
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPException

import grpc
from measuring.h2load import PREFIX_BYTES, grpc_body
from measuring.processes import BenchmarkFailed

from ts.protocol import open_inference_pb2 as pb
from ts_frontend.protos.inference_pb2 import PredictionResponse, PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub as Names

CALL_S_MAX = 30.0
PIECES = 200
"""Of a stream."""
WIDTH = 1024
"""Floats of a row of the perceptron."""
IMAGE_SIDE = 256
SENTENCE = "The train to the coast leaves at nine, and whoever misses it waits for an hour at the station. "
VECTOR = 384
"""Floats of an embedding."""
STEPS = 8
"""Of a sequence."""
MESSAGE_BYTES_MAX = 64 << 20
CHANNEL_OPTIONS = [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), ("grpc.use_local_subchannel_pool", 1)]
_SMALL = b"x" * 16
HEAD_BYTES = 512
"""Of the JSON before a binary tensor, with spaces after it, so that all steps of sequences have the same headers."""
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


class WrongAnswer(BenchmarkFailed):
    """A server's answer was wrong."""


class NoAnswer(Exception):
    """A server gives no answer (yet), or an error."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request's model. `size`: bytes of an echo's body, or sentences of a text."""

    model: str
    size: int = 0

    @property
    def text(self) -> str:
        if self.model == "embed":
            return f"embed of {self.size} sentences"
        return f"{self.model} of {bytes_text(self.size)}" if self.size else self.model


def bytes_text(size: int) -> str:
    """A size as people write it; sizes are powers of 1024 times 1, 10 or 100."""
    for unit, name in ((1 << 20, "MB"), (1 << 10, "KB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} bytes"


@dataclass(frozen=True, slots=True)
class Question:
    """A request of one kind. `content_type` is empty for gRPC, where `body` is the message. `is_right` gets the
    answer's messages; HTTP has one. `more`: further headers over HTTP. `step`: the body of a step (from 0) of the
    sequence with this number, whose last step is STEPS - 1; `body` is then that of a sequence of one step."""

    path: str
    body: bytes
    content_type: str
    is_right: Callable[[Sequence[bytes]], bool]
    more: Sequence[tuple[str, str]] = ()
    step: Callable[[int, int], bytes] | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Of a request over HTTP."""
        return {"content-type": self.content_type, **dict(self.more)}

    @property
    def load_body(self) -> bytes:
        """The body in the form in which the load generator sends it."""
        return self.body if self.content_type else grpc_body(self.body)

    def answer_bytes(self, answer: Sequence[bytes]) -> int:
        """The size of these messages as response data, in bytes."""
        prefix = 0 if self.content_type else PREFIX_BYTES
        return sum(prefix + len(message) for message in answer)

    def ask(self, port: int, timeout_s: float = CALL_S_MAX) -> list[bytes]:
        """The messages of one answer. Raises NoAnswer."""
        try:
            if self.content_type:
                return [self._ask_http(port, timeout_s)]
            with grpc.insecure_channel(f"127.0.0.1:{port}", CHANNEL_OPTIONS) as channel:
                call = channel.stream_stream(self.path)
                return list(call(iter([self.body]), timeout=timeout_s, wait_for_ready=True))
        except (grpc.RpcError, HTTPException, OSError) as error:  # HTTPError and URLError are OSErrors
            raise NoAnswer(str(error)) from error

    def _ask_http(self, port: int, timeout_s: float) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{self.path}", self.body, self.headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return bytes(answer.read())

    def checked(self, port: int, name: str) -> list[bytes]:
        """The messages of one right answer. Raises NoAnswer, WrongAnswer."""
        answer = self.ask(port)
        if not self.is_right(answer):
            shown = [one[:80] for one in answer[:3]]
            raise WrongAnswer(f"{name} answers {self.path} with {shown} ({len(answer)} messages)")
        return answer


def body(call: Call) -> bytes:
    """The body of a request to a model with bytes as its input."""
    if call.model == "echo":
        return random.Random(call.size).randbytes(call.size)
    if call.model in ("mlp", "running_sum"):
        return _row()
    if call.model == "embed":
        return SENTENCE.encode() * call.size
    return image() if call.model == "image" else _SMALL


def is_answer(call: Call, answer: bytes) -> bool:
    """Whether the answer of a model with bytes as its output is right; the pieces of a stream are joined."""
    if call.model == "echo":
        return answer == body(call)
    if call.model in ("mlp", "image"):
        return answer.isdigit() and int(answer) < WIDTH
    if call.model == "embed":
        return (
            len(answer) == 4 * VECTOR and abs(sum(one * one for one in struct.unpack(f"<{VECTOR}f", answer)) - 1) < 0.01
        )
    if call.model == "pieces":
        return answer.count(b"ok") == PIECES and b"error" not in answer
    return answer == b"ok"


def by_path(call: Call, path: str) -> Question:
    """A request over HTTP, with bytes in both directions."""
    return Question(path, body(call), "application/octet-stream", lambda answer: is_answer(call, b"".join(answer)))


def by_torchserve_grpc(call: Call) -> Question:
    """TorchServe's Predictions or StreamPredictions."""

    def is_right(messages: Sequence[bytes]) -> bool:
        return is_answer(call, b"".join(PredictionResponse.FromString(one).prediction for one in messages))

    path = Names.StreamPredictions_PATH if call.model == "pieces" else Names.Predictions_PATH
    message = PredictionsRequest(model_name=call.model, input={"data": body(call)})
    return Question(path, bytes(message.SerializeToString()), "", is_right)


def echoed(question: Question) -> Question:
    """A request to a server that returns every unary request unchanged."""
    if question.path == Names.StreamPredictions_PATH:
        return question
    wanted = [question.body]
    return Question(question.path, question.body, question.content_type, lambda answer: list(answer) == wanted)


def by_open_inference(call: Call, http: bool) -> Question:
    """ModelInfer, or ModelStreamInfer for pieces: a tensor, raw over gRPC and JSON over HTTP."""
    if http:
        return _open_http(call)
    datatype, shape, raw = _tensor(call)
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype=datatype, shape=shape)
    message = pb.ModelInferRequest(model_name=_open_name(call), inputs=[tensor], raw_input_contents=[raw])

    def is_right(messages: Sequence[bytes]) -> bool:
        if call.model == "pieces":
            answers = [pb.ModelStreamInferResponse.FromString(one).infer_response for one in messages]
            return is_answer(call, b"".join(_raw(one) for one in answers))
        return len(messages) == 1 and _is_tensor(call, _raw(pb.ModelInferResponse.FromString(messages[0])))

    path = _STREAM if call.model == "pieces" else _INFER
    return Question(path, bytes(message.SerializeToString()), "", is_right)


def _open_http(call: Call) -> Question:
    """The tensor as JSON; that of an echo as bytes after the JSON, which its answer has, too."""
    datatype, shape, raw = _tensor(call)
    if call.model in ("echo", "running_sum"):
        return _open_binary(call)
    numbers = list(struct.unpack(f"<{len(raw) // 4}f", raw)) if datatype == "FP32" else list(raw)
    tensor = {"name": "x", "datatype": datatype, "shape": shape, "data": numbers}

    def is_right(messages: Sequence[bytes]) -> bool:
        (output,) = json.loads(messages[0])["outputs"]
        form = "f" if output["datatype"] == "FP32" else "q" if output["datatype"] == "INT64" else "B"
        return _is_tensor(call, struct.pack(f"<{len(output['data'])}{form}", *output["data"]))

    content = json.dumps({"inputs": [tensor]}).encode()
    return Question(f"/v2/models/{_open_name(call)}/infer", content, "application/json", is_right)


def _open_binary(call: Call) -> Question:
    """The tensor as bytes after the JSON, in the answer, too. The sum of a sequence's rows is that row in its first
    step."""
    datatype, shape, raw = _tensor(call)
    tensor = {"name": "x", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(raw)}}

    def content(**more: object) -> bytes:
        head = {"inputs": [tensor], "parameters": {"binary_data_output": True, **more}}
        return json.dumps(head).ljust(HEAD_BYTES).encode() + raw

    def step(number: int, at: int, steps: int = STEPS) -> bytes:
        return content(sequence_id=number, sequence_start=at == 0, sequence_end=at == steps - 1)

    in_sequence = call.model == "running_sum"
    return Question(
        f"/v2/models/{_open_name(call)}/infer",
        step(1, 0, steps=1) if in_sequence else content(),
        "application/octet-stream",
        lambda answer: answer[0].endswith(raw),
        (("inference-header-content-length", str(HEAD_BYTES)),),
        step if in_sequence else None,
    )


def _open_name(call: Call) -> str:
    """The name in the Open Inference Protocol, whose no-op returns the tensor."""
    return "identity" if call.model == "noop" else call.model


def _tensor(call: Call) -> tuple[str, list[int], bytes]:
    """The tensor's datatype, its shape, and the values as bytes."""
    if call.model in ("noop", "pieces"):
        return "FP32", [1, 16] if call.model == "noop" else [16], struct.pack("<16f", *range(16))
    raw = body(call)
    return ("FP32", [1, WIDTH], raw) if call.model in ("mlp", "running_sum") else ("UINT8", [len(raw)], raw)


def _raw(answer: pb.ModelInferResponse) -> bytes:
    """The values of an answer's only tensor, as bytes."""
    if answer.raw_output_contents:
        return bytes(answer.raw_output_contents[0])
    contents = answer.outputs[0].contents
    if contents.int64_contents:
        return struct.pack(f"<{len(contents.int64_contents)}q", *contents.int64_contents)
    if contents.fp32_contents:
        return struct.pack(f"<{len(contents.fp32_contents)}f", *contents.fp32_contents)
    return bytes(contents.uint_contents)


def _is_tensor(call: Call, raw: bytes) -> bool:
    if call.model in ("mlp", "image"):
        return len(raw) == 8 and 0 <= struct.unpack("<q", raw)[0] < WIDTH
    return raw == _tensor(call)[2]


def _row() -> bytes:
    numbers = random.Random(1)
    return struct.pack(f"<{WIDTH}f", *(numbers.uniform(-1, 1) for _ in range(WIDTH)))


@lru_cache
def image() -> bytes:
    """A PNG of coloured blocks."""
    numbers, side = random.Random(2), IMAGE_SIDE
    blocks = [[numbers.randbytes(3) for _ in range(side // 8)] for _ in range(side // 8)]
    lines = b"".join(b"\0" + b"".join(block * 8 for block in blocks[row // 8]) for row in range(side))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*one) for one in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
