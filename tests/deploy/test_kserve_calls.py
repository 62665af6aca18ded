"""The end-to-end tests of KServe that use TorchServe, as calls to the command lines of their containers, with KServe's
own clients and its own Python server for the transformers: test_torchserve.py, test_transformer.py,
test_raw_transformer.py and test_collocation.py of its folder test/e2e. The models lie in /mnt/models as the storage
initializer leaves them: config/config.properties and model-store/mnist.mar."""

from __future__ import annotations

import base64
import io
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from deploy.conftest import KSERVE_CONFIG, Pod, is_ready
from e2e.servers import Serving
from model_archiver import ModelArchiver, ModelArchiverConfig
from support import GUARD_S, free_port, module_of, until

pytestmark = pytest.mark.external

PROGRAMS = Path(__file__).parents[1] / "e2e" / "clients" / "programs"
SIDE, MEAN, DEVIATION = 28, 0.1307, 0.3081
#: The files of TorchServe's example for MNIST: a class of a network, its weights, and a handler that answers digits.
NETWORK = '''
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    """Pixels [N, 1, 28, 28] to the logits of ten digits."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.last = nn.Linear(8 * 13 * 13, 10)

    def forward(self, pixels):
        return self.last(functional.max_pool2d(self.conv(pixels).relu(), 2).flatten(1))
'''
HANDLER = f"""
import torch
from ts.torch_handler.image_classifier import ImageClassifier


class DigitClassifier(ImageClassifier):
    @staticmethod
    def image_processing(image):
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(1, image.height, image.width)
        return (pixels / 255 - {MEAN}) / {DEVIATION}

    def postprocess(self, data):
        return data.argmax(1).tolist()
"""
#: The container of a collocated predictor, which no runtime gives its arguments. The image of the test, TorchServe 0.9,
#: knew no keys; since 0.11.1 TorchServe needs the last argument, too.
BARE = [
    "torchserve",
    "--start",
    "--model-store=/mnt/models/model-store",
    "--ts-config=/mnt/models/config/config.properties",
    "--disable-token-auth",
]


def drawn(digit: int) -> Image.Image:
    """The digit in white on black, as MNIST has it."""
    image = Image.new("L", (SIDE, SIDE))
    ImageDraw.Draw(image).text((8, 0), str(digit), fill=255, font=ImageFont.load_default(22))
    return image


def normalised(image: Image.Image) -> torch.Tensor:
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(1, SIDE, SIDE)
    return (pixels / 255 - MEAN) / DEVIATION


def encoded(digit: int) -> str:
    written = io.BytesIO()
    drawn(digit).save(written, "PNG")
    return base64.b64encode(written.getvalue()).decode()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mnist.mar, whose network has learned the drawn digits under noise."""
    folder = tmp_path_factory.mktemp("mnist")
    (folder / "mnist.py").write_text(NETWORK)
    (folder / "mnist_handler.py").write_text(HANDLER)
    torch.manual_seed(0)
    network = module_of(folder / "mnist.py").Net()
    digits = torch.stack([normalised(drawn(digit)) for digit in range(10)])
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(40):
        optimizer.zero_grad()
        noisy = digits + torch.randn_like(digits) / 2
        torch.nn.functional.cross_entropy(network(noisy), torch.arange(10)).backward()
        optimizer.step()
    torch.save(network.state_dict(), folder / "mnist_cnn.pt")
    config = ModelArchiverConfig(
        *("mnist", str(folder / "mnist_handler.py"), "1.0"),
        model_file=str(folder / "mnist.py"),
        serialized_file=str(folder / "mnist_cnn.pt"),
        export_path=str(folder),
    )
    ModelArchiver.generate_model_archive(config)
    return folder / "mnist.mar"


@pytest.fixture
def mnist(archive: Path, tmp_path: Path) -> Pod:
    """The runtime's pod, with the folder of KServe's example in /mnt/models."""
    pod = Pod("kserve/kserve-torchrelay", tmp_path)
    models = tmp_path / "mnt" / "models"
    config = KSERVE_CONFIG.replace('"marName":"doubling"', '"marName":"mnist.mar"').replace("doubling", "mnist")
    (models / "config" / "config.properties").write_text(pod.here(config))
    (models / "model-store" / archive.name).write_bytes(archive.read_bytes())
    return pod


Ask = Callable[[str, int, Any], dict[str, Any]]


@pytest.fixture
def ask(client_python: Callable[[str], Path], client_env: dict[str, str]) -> Ask:
    """`ask(protocol, port, body)`: whether KServe's client finds the model ready, and its answer's data."""

    def called(protocol: str, port: int, body: Any) -> dict[str, Any]:
        command = [str(client_python("kserve")), str(PROGRAMS / "kserve_inference_service.py")]
        command += [protocol, f"127.0.0.1:{port}", "mnist"]
        done = subprocess.run(
            command, input=json.dumps(body), env=client_env, capture_output=True, text=True, timeout=GUARD_S
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    return called


@pytest.fixture
def transformer(
    client_python: Callable[[str], Path], client_env: dict[str, str], tmp_path: Path
) -> Iterator[Callable[..., None]]:
    """`transformer(*arguments)` starts KServe's Python server with a transformer."""
    running: list[subprocess.Popen[bytes]] = []
    output = tmp_path / "transformer.txt"

    def begin(*arguments: str) -> None:
        command = [str(client_python("kserve")), str(PROGRAMS / "kserve_transformer.py"), *arguments]
        with output.open("wb") as out:
            running.append(subprocess.Popen(command, env=client_env, stdout=out, stderr=subprocess.STDOUT))

    yield begin
    for process in running:
        process.terminate()
        assert process.wait(GUARD_S) == 0, output.read_text()


def code_of_readiness(port: int) -> int:
    """0: nobody listens there yet."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/v1/models/mnist", timeout=GUARD_S).status_code
    except httpx.ConnectError:
        return 0


V1 = {"instances": [{"data": encoded(2), "target": 0}]}
TENSOR = {"name": "input-0", "shape": [1, SIDE, SIDE], "datatype": "FP32", "data": normalised(drawn(1)).tolist()}
V2 = {"id": "d3b15cad", "inputs": [TENSOR]}
FOR_TRANSFORMERS = {"instances": [{"image": {"b64": encoded(2)}}]}


@pytest.mark.parametrize(
    ("protocol", "envelope", "inside", "body", "digit"),
    [("v1", "kserve", 8080, V1, 2), ("v2", "kservev2", 8080, V2, 1), ("grpc-v2", "kservev2", 8081, V1, 2)],
    ids=["v1", "v2", "grpc-v2"],
)
def test_a_predictor_answers(
    protocol: str,
    envelope: str,
    inside: int,
    body: Any,
    digit: int,
    mnist: Pod,
    serve: Callable[[Pod], Serving],
    ask: Ask,
) -> None:
    """test_torchserve.py, with the envelope that KServe sets for the protocol version."""
    mnist.environment["TS_SERVICE_ENVELOPE"] = envelope
    serve(mnist)
    is_ready(mnist)
    assert ask(protocol, mnist.port(inside), body) == {"ready": True, "data": [digit]}


def test_a_transformer_calls_the_predictor_of_another_pod(
    mnist: Pod, serve: Callable[[Pod], Serving], ask: Ask, transformer: Callable[..., None]
) -> None:
    """test_transformer.py and test_raw_transformer.py, with the arguments that KServe adds."""
    serve(mnist)
    is_ready(mnist)
    port = free_port()
    transformer(
        *("--model_name", "mnist", "--predictor_host", f"localhost:{mnist.port(8080)}", "--http_port", str(port)),
        f"--grpc_port={free_port()}",
    )
    until(lambda: code_of_readiness(port) == 200)
    assert ask("v1", port, FOR_TRANSFORMERS) == {"ready": True, "data": [2]}


@pytest.mark.parametrize("container", ["custom", "runtime"])
def test_a_transformer_in_the_pod_of_its_predictor(
    container: str, mnist: Pod, serve: Callable[[Pod], Serving], ask: Ask, transformer: Callable[..., None]
) -> None:
    """test_collocation.py. The transformer is ready once the predictor, at the port of config.properties, is. It takes
    8080 and 8081 beside a container of one's own, which must leave them."""
    http, grpc = (8080, 8081) if container == "custom" else (8090, 8091)
    if container == "custom":
        mnist.words = [mnist.here(word) for word in BARE]
        mnist.environment = {"TS_SERVICE_ENVELOPE": "kserve"}
    transformer(
        *("--model_name=mnist", f"--http_port={mnist.port(http)}", f"--grpc_port={mnist.port(grpc)}"),
        *(f"--predictor_host=localhost:{mnist.port(8085)}", "--enable_predictor_health_check"),
    )
    until(lambda: code_of_readiness(mnist.port(http)) == 503)
    server = serve(mnist)
    until(lambda: code_of_readiness(mnist.port(http)) == 200, lambda: server.log)
    assert ask("v1", mnist.port(http), FOR_TRANSFORMERS) == {"ready": True, "data": [2]}
    listening = psutil.Process(server.process.pid).net_connections("tcp")
    ports = {one.laddr.port for one in listening if one.status == psutil.CONN_LISTEN}
    wanted = {8085, 8082, 7070, 7071} | (set() if container == "custom" else {8080, 8081})
    assert ports == {mnist.port(inside) for inside in wanted}
