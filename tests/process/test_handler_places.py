"""The places of handlers, the imports of processes that they start, old kinds of handlers, a worker that listens."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import GUARD_S
from ts.protocol.decoder import Decoder
from ts.protocol.frames import Chunk, Input, Item, Load, Message, Predict, Ready, Stop, encode_bytes

IN_A_FOLDER = """
import subprocess
import sys

import beside
import at_the_root


def handle(data, context):
    if data is None:
        return None
    told = subprocess.run([sys.executable, "-c", "import beside, at_the_root; print('found')"], capture_output=True)
    return [told.stdout.decode().strip() + beside.WORD + at_the_root.WORD] * len(data)
"""
OLD_SERVICE = """
class Service:
    def __init__(self):
        self.initialized = False

    def initialize(self, context):
        self.initialized = True

    def handle(self, data, context):
        return [f"served {len(data)}"] * len(data)


_service = Service()


def handle(data, context):
    if not _service.initialized:
        _service.initialize(context)
    if data is None:
        return None
    return _service.handle(data, context)
"""
MODEL_SERVICE = """
from ts.model_service.model_service import SingleNodeService


class Sum(SingleNodeService):
    def _inference(self, data):
        return sum(data[0])
"""
WITH_HELPERS = """
class Settings:
    word = "helped"


class Handler:
    def handle(self, data, context):
        return [Settings.word] * len(data)
"""


@pytest.mark.parametrize("handler", ["src/inside.py", "src/inside", "src/inside.py:handle"])
def test_a_handler_in_a_folder_of_the_archive(start_worker: Any, tmp_path: Path, handler: str) -> None:
    """It can import modules next to it and at the root, and so can processes that it starts."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "inside.py").write_text(IN_A_FOLDER)
    (tmp_path / "src" / "beside.py").write_text("WORD = ' beside'\n")
    (tmp_path / "at_the_root.py").write_text("WORD = ' root'\n")
    assert start_worker(handler, model_dir=str(tmp_path)).ask(b"x") == b"found beside root"


def test_a_handlers_file_with_a_dot_in_its_name(start_worker: Any, tmp_path: Path) -> None:
    (tmp_path / "handler.v2.py").write_text("def handle(data, context):\n    return ['second'] * len(data or [])\n")
    for handler in ("handler.v2.py", "handler.v2.py:handle"):
        assert start_worker(handler, model_dir=str(tmp_path)).ask(b"x") == b"second"


def test_a_service_object_behind_a_function(start_worker: Any, tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(OLD_SERVICE)
    assert start_worker("old.py:handle", model_dir=str(tmp_path)).ask(b"x") == b"served 1"


def test_a_model_service(start_worker: Any, tmp_path: Path) -> None:
    (tmp_path / "summing.py").write_text(MODEL_SERVICE)
    signature = {"input_type": "application/json", "inputs": [{"data_name": "numbers"}]}
    (tmp_path / "signature.json").write_text(json.dumps(signature))
    worker = start_worker("summing.py", model_dir=str(tmp_path), manifest={"Model": {"Signature": "signature.json"}})
    assert worker.ask([Input("numbers", "", b"[1, 2, 3]")]) == b"6"


def test_helper_classes_may_stand_beside_the_handler(start_worker: Any, tmp_path: Path) -> None:
    (tmp_path / "helped.py").write_text(WITH_HELPERS)
    assert start_worker("helped.py", model_dir=str(tmp_path)).ask(b"x") == b"helped"


class Listening:
    """`python -m ts.model_service_worker`, and a connection to it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "worker.9000"
        argv = [sys.executable, "-m", "ts.model_service_worker", "--sock-type", "unix", "--sock-name", str(self.path)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.lines = [self.process.stdout.readline().strip() for _ in range(3)]
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(GUARD_S)
        self.sock.connect(str(self.path))
        self.decoder = Decoder(1 << 20)

    def ask(self, message: Message) -> Message:
        self.sock.sendall(encode_bytes(message))
        while not (found := self.decoder.feed(self.sock.recv(65536))):
            pass
        return found[0]


def test_a_worker_that_listens(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(OLD_SERVICE)
    worker = Listening(tmp_path)
    with worker.process, worker.sock:
        assert worker.lines[1] == "Torch worker started."
        settings = {"model_name": "m", "model_dir": str(tmp_path), "handler": "old.py", "batch_size": 1}
        assert isinstance(worker.ask(Load(settings)), Ready)
        answer = worker.ask(Predict(1, [Item(1, "id", math.inf, (), [Input("data", "", b"x")])]))
        assert isinstance(answer, Chunk) and bytes(answer.data) == b"served 1"
        worker.sock.sendall(encode_bytes(Stop()))
        assert worker.process.wait(GUARD_S) == 0
    assert not worker.path.exists()
