"""KServe's own transformer examples, run unchanged from a checkout of its repository, before a predictor of this
server's.

KSERVE_PYTHON names the checkout's folder `python`. The image transformers import torchvision, which has no build for
torch without CUDA on package indexes: here its usual build is installed without its dependencies. Its transforms are
Python and need none of its compiled operators; two of those have to be declared for the package to be imported."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import torch

from support import GUARD_S, until
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

EXAMPLES = Path(os.environ.get("KSERVE_PYTHON", "/nowhere"))
pytestmark = [
    pytest.mark.external,
    pytest.mark.skipif(
        not (EXAMPLES / "custom_transformer" / "model.py").is_file(),
        reason="KSERVE_PYTHON names no folder `python` of a checkout of KServe",
    ),
]
PREDICTOR = '''
"""Answers with the mean of each image, and BERT's logits for a span of two tokens."""
import numpy
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer


class Mean(Model):
    def load(self):
        self.ready = True
        return True

    def predict(self, payload, headers=None):
        if not isinstance(payload, InferRequest):
            return {"predictions": [float(numpy.mean(one["data"])) for one in payload["instances"]]}
        values = payload.inputs[0].as_numpy().mean(axis=(1, 2, 3), dtype="float32")
        output = InferOutput(name="OUTPUT__0", shape=list(values.shape), datatype="FP32")
        output.set_data_from_numpy(values)
        return InferResponse(payload.id or "", self.name, [output])


class Span(Mean):
    def predict(self, payload, headers=None):
        ids = payload.get_input_by_name("input_ids").as_numpy()
        assert ids.shape == (1, 128) and ids.dtype == "int32"
        begin = int(numpy.flatnonzero(ids[0] == SEPARATOR)[0]) + 1
        outputs = []
        for name, place in (("end_logits", begin + 1), ("start_logits", begin)):
            logits = numpy.zeros((1, 128), "float32")
            logits[0, place] = 20
            outputs.append(InferOutput(name=name, shape=[1, 128], datatype="FP32"))
            outputs[-1].set_data_from_numpy(logits)
        return InferResponse(payload.id or "", self.name, outputs)


SEPARATOR = 102  # in BERT's vocabulary
ModelServer().start([Mean("cifar10"), Mean("custom"), Span("bert")])
'''
DECLARED = """
import torch

library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
#: The normalisation of the example for this model.
MEAN, DEVIATION = 0.1307, 0.3081


class Program:
    """A program of KServe's, run by this server."""

    def __init__(self, folder: Path, file: Path, argv: list[str], path: list[Path]) -> None:
        self.output, tmp = folder / "output", folder / "tmp"
        tmp.mkdir(parents=True)
        known = {name: value for name, value in os.environ.items() if not name.startswith(("TS_", "KSERVE_"))}
        own = {"TMPDIR": str(tmp), "PYTHONPATH": os.pathsep.join(map(str, [*path, *filter(None, sys.path)]))}
        command = [sys.executable, "-m", "ts.compat.run", file.name, "--http_port=0", "--grpc_port=0", *argv]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=file.parent, env=known | own, stdout=output, stderr=subprocess.STDOUT
            )

    def wait_for(self, text: str) -> str:
        """The output so far, once it contains `text`."""
        until(lambda: text in self.output.read_text() or self.process.poll() is not None, self.output.read_text)
        assert text in self.output.read_text(), self.output.read_text()
        return self.output.read_text()

    def address(self, api: str) -> str:
        found = re.search(rf"{api} listens on \S+:(\d+)", self.wait_for(f"{api} listens on"))
        assert found
        return f"127.0.0.1:{found[1]}"

    def predict(self, model: str, body: Any) -> Any:
        url = f"http://{self.address('http_inference')}/v1/models/{model}:predict"
        answer = httpx.post(url, json=body, timeout=GUARD_S)
        assert answer.status_code == 200, (answer.text, self.output.read_text())
        return answer.json()

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(GUARD_S) == 0, self.output.read_text()


@pytest.fixture(scope="module")
def torchvision(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders with torchvision of the installed torch's version."""
    place = tmp_path_factory.mktemp("torchvision")
    minor = int(torch.__version__.split(".")[1])
    packages = ["--no-deps", "--target", str(place / "package"), f"torchvision==0.{minor + 15}.*"]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *packages], check=True, timeout=10 * GUARD_S)
    (place / "declared").mkdir()
    (place / "declared" / "sitecustomize.py").write_text(DECLARED)
    return [place / "declared", place / "package"]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Program]]:
    running: list[Program] = []

    def started(file: Path, *argv: str, path: list[Path]) -> Program:
        running.append(Program(tmp_path_factory.mktemp("program"), file, list(argv), path))
        return running[-1]

    yield started
    for one in reversed(running):
        one.close()


@pytest.fixture(scope="module")
def predictor(start: Callable[..., Program], tmp_path_factory: pytest.TempPathFactory) -> Program:
    file = tmp_path_factory.mktemp("predictor") / "main.py"
    file.write_text(PREDICTOR)
    program = start(file, path=[])
    for name in ("cifar10", "custom", "bert"):
        program.wait_for(f"of {name}_1.0 is ready")
    return program


def words(predictor: Program, model: str, protocol: str) -> list[str]:
    host = predictor.address("grpc_inference" if protocol == "grpc-v2" else "http_inference")
    return [f"--model_name={model}", f"--predictor_host={host}", f"--predictor_protocol={protocol}"]


def image(level: int, side: int = 32) -> bytes:
    from PIL import Image

    written = io.BytesIO()
    Image.new("RGB", (side, side), (level, level, level)).save(written, "PNG")
    return written.getvalue()


@pytest.mark.parametrize("protocol", ["v1", "v2", "grpc-v2"])
def test_the_image_transformer(
    protocol: str, start: Callable[..., Program], predictor: Program, torchvision: list[Path]
) -> None:
    file = EXAMPLES / "custom_transformer" / "model.py"
    program = start(file, *words(predictor, "cifar10", protocol), path=torchvision)
    levels = (0, 51, 255)
    body = {"instances": [{"image": {"b64": base64.b64encode(image(level)).decode()}} for level in levels]}
    program.wait_for("of cifar10_1.0 is ready")
    found = program.predict("cifar10", body)["predictions"]
    assert np.allclose(found, [(level / 255 - MEAN) / DEVIATION for level in levels], atol=1e-4), found


def test_the_image_transformer_over_grpc(
    start: Callable[..., Program], predictor: Program, torchvision: list[Path]
) -> None:
    file = EXAMPLES / "custom_transformer" / "model_grpc.py"
    program = start(file, *words(predictor, "custom", "grpc-v2"), path=torchvision)
    program.wait_for("of custom_1.0 is ready")
    request = pb.ModelInferRequest(model_name="custom")
    request.inputs.add(name="x", datatype="BYTES", shape=[1]).contents.bytes_contents.append(image(255, 300))
    with grpc.insecure_channel(program.address("grpc_inference")) as channel:
        answer = GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=GUARD_S)
    white = np.mean((1 - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225]))
    (output,) = answer.outputs
    assert output.name == "OUTPUT__0" and np.allclose(output.contents.fp32_contents, white, atol=1e-4)


@pytest.mark.parametrize("protocol", ["v2", "grpc-v2"])
def test_the_tokenizer(protocol: str, start: Callable[..., Program], predictor: Program) -> None:
    pytest.importorskip("six")
    folder = EXAMPLES / "custom_tokenizer"
    program = start(
        folder / "transformer.py", *words(predictor, "bert", protocol), "--vocab_file", "vocab.txt", path=[]
    )
    program.wait_for("of bert_1.0 is ready")
    answer = program.predict("bert", {"instances": ["What was the Apollo program?"]})
    assert answer["predictions"] == "The Apollo" and answer["prob"] > 99, json.dumps(answer)
