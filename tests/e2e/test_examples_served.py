"""The examples through a running server, started with the `torchserve` command and called with gRPC."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import grpc
import httpx
import pytest
from PIL import Image

from support import module_of
from ts_frontend.protos import inference_pb2, inference_pb2_grpc, management_pb2, management_pb2_grpc

CALL_S_MAX = 120.0


class Clients(NamedTuple):
    """Stubs of both services, and the HTTP inference address."""

    inference: inference_pb2_grpc.InferenceAPIsServiceStub
    management: management_pb2_grpc.ManagementAPIsServiceStub
    http: str

    def openai(self, **body: Any) -> Any:
        """The answer of a completion, or the events of a stream."""
        answer = httpx.post(f"{self.http}/v1/completions", json={"model": "text_stream"} | body, timeout=CALL_S_MAX)
        if not body.get("stream"):
            return answer.json()
        *events, end, _ = answer.text.split("\n\n")
        assert end == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def request(self, model: str, data: bytes, version: str = "") -> inference_pb2.PredictionsRequest:
        return inference_pb2.PredictionsRequest(model_name=model, model_version=version, input={"data": data})

    def predict(self, model: str, data: bytes, version: str = "") -> bytes:
        answer = self.inference.Predictions(self.request(model, data, version), timeout=CALL_S_MAX)
        return bytes(answer.prediction)

    def stream(self, model: str, data: bytes) -> list[bytes]:
        responses = self.inference.StreamPredictions(self.request(model, data), timeout=CALL_S_MAX)
        return [response.prediction for response in responses]

    def register(self, url: str) -> str:
        request = management_pb2.RegisterModelRequest(url=url, initial_workers=1, synchronous=True)
        return str(self.management.RegisterModel(request, timeout=CALL_S_MAX).msg)


@pytest.fixture(scope="module")
def quickstart(root: Path) -> ModuleType:
    return module_of(root / "ts_scripts/quickstart.py")


@pytest.fixture(scope="module")
def store(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The committed archives, and the densenet161 stand-in beside them."""
    folder = tmp_path_factory.mktemp("store")
    for archive in (root / "model_store").glob("*.mar"):
        (folder / archive.name).write_bytes(archive.read_bytes())
    build = [sys.executable, str(root / "examples/densenet161/build.py"), "--stand-in", "--export-path", str(folder)]
    subprocess.run(build, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def clients(quickstart: ModuleType, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    ports = quickstart.choose_ports(only_free=True)
    with (
        quickstart.server(tmp_path_factory.mktemp("s"), ports, store),
        grpc.insecure_channel(f"127.0.0.1:{ports['grpc_inference_port']}") as inference,
        grpc.insecure_channel(f"127.0.0.1:{ports['grpc_management_port']}") as management,
    ):
        yield Clients(
            inference_pb2_grpc.InferenceAPIsServiceStub(inference),
            management_pb2_grpc.ManagementAPIsServiceStub(management),
            f"http://127.0.0.1:{ports['inference_address']}",
        )


@pytest.fixture(scope="module")
def digits(clients: Clients) -> str:
    clients.register("digits.mar")
    clients.register("digits_v2.mar")
    return "digits"


@pytest.fixture(scope="module")
def text_stream(clients: Clients) -> str:
    clients.register("text_stream.mar")
    return "text_stream"


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.long
def test_every_sample_is_classified(clients: Clients, digits: str, root: Path, version: str) -> None:
    for digit in range(10):
        answer = json.loads(
            clients.predict(digits, (root / f"examples/digits/samples/{digit}.png").read_bytes(), version)
        )
        assert answer["class"] == str(digit)
        assert answer["probability"] == max(answer["probabilities"].values()) > 0.5
        assert sum(answer["probabilities"].values()) == pytest.approx(1, abs=1e-4)


def test_eager_and_scripted_agree(clients: Clients, digits: str, root: Path) -> None:
    image = (root / "examples/digits/samples/5.png").read_bytes()
    eager, scripted = (json.loads(clients.predict(digits, image, version)) for version in ("1.0", "2.0"))
    assert eager["probabilities"] == pytest.approx(scripted["probabilities"], abs=1e-4)


def test_what_is_no_image_is_refused_with_a_reason(clients: Clients, digits: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        clients.predict(digits, b"no image")
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "not an image" in refused.value.details()


def test_text_comes_character_by_character(clients: Clients, text_stream: str) -> None:
    pieces = clients.stream(text_stream, b'{"prompt": "Tyger Tyger", "max_tokens": 16}')
    assert pieces == [bytes([code]) for code in b" burning bright,"]


def test_a_unary_call_gets_the_whole_text(clients: Clients, text_stream: str) -> None:
    assert clients.predict(text_stream, b"Tyger Tyger").startswith(b" burning bright,\nIn the forests of the night:")


def test_the_same_seed_draws_the_same_text(clients: Clients, text_stream: str) -> None:
    drawn = [
        clients.predict(text_stream, json.dumps({"prompt": "The", "temperature": 1.5, "seed": seed}).encode())
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("request_text", "reason"),
    [
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens"),
        ('{"prompt": "a", "temperature": -1}', "temperature"),
        ('{"prompt": 1}', "prompt"),
        ('{"prompt": "a", "tokens": 3}', "Unknown keys: tokens"),
        ('{"prompt": ', "JSON"),
    ],
)
def test_a_senseless_request_is_refused(clients: Clients, text_stream: str, request_text: str, reason: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        clients.stream(text_stream, request_text.encode())
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert reason in refused.value.details()


def test_openais_clients_get_as_much_as_they_ask_for(clients: Clients, text_stream: str) -> None:
    answer = clients.openai(prompt=["Tyger Tyger", "{"], max_tokens=16)
    assert answer["choices"][0]["text"] == " burning bright," and len(answer["choices"][1]["text"]) == 16
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    assert answer["usage"] == {"prompt_tokens": 12, "completion_tokens": 32, "total_tokens": 44}
    asked = {"prompt": "Tyger Tyger", "stream": True, "stream_options": {"include_usage": True}}
    *events, ended, usage = clients.openai(**asked, max_tokens=9)
    assert [event["choices"][0]["text"] for event in events] == list(" burning ")
    assert ended["choices"][0]["finish_reason"] == "length" and usage["usage"]["completion_tokens"] == 9
    stopped = clients.openai(prompt="Tyger Tyger", stop="bright", stream=True)
    assert "".join(event["choices"][0]["text"] for event in stopped) == " burning "
    refused = clients.openai(prompt="a", max_tokens=2001)
    assert "max_tokens is a whole number from 1 to 2000" in refused["error"]["message"]


def test_a_client_that_leaves_frees_the_worker(clients: Clients, text_stream: str) -> None:
    """The longest text is cancelled after its first characters; the only worker answers the next request."""
    long = clients.request(text_stream, b'{"prompt": "I", "max_tokens": 2000}')
    responses = clients.inference.StreamPredictions(long, timeout=CALL_S_MAX)
    next(responses)
    responses.cancel()
    assert clients.predict(text_stream, b'{"prompt": "Tyger Tyger", "max_tokens": 3}') == b" bu"


def test_hello_stream(clients: Clients) -> None:
    clients.register("hello_stream.mar")
    assert clients.stream("hello_stream", b"x") == [b"intermediate_response"] * 3 + [b"hello world "]


def test_the_densenet161_walk(clients: Clients) -> None:
    """Register, infer, unregister, with the narrow network of the same depth."""
    photo = io.BytesIO()
    Image.radial_gradient("L").convert("RGB").resize((300, 260)).save(photo, "JPEG")
    clients.register("densenet161.mar")
    answer = json.loads(clients.predict("densenet161", photo.getvalue()))
    assert len(answer) == 5 and all(label.startswith("class ") for label in answer)
    assert list(answer.values()) == sorted(answer.values(), reverse=True)
    gone = clients.management.UnregisterModel(management_pb2.UnregisterModelRequest(model_name="densenet161"))
    assert 'Model "densenet161" unregistered' in gone.msg
    with pytest.raises(grpc.RpcError) as missing:
        clients.predict("densenet161", photo.getvalue())
    assert missing.value.code() == grpc.StatusCode.NOT_FOUND
