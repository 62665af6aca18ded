"""`python -m` of Dynamo's frontend and MAX's server, in an environment where their imports were made to work: the
pages' commands as they stand, but for the port."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from support import GUARD_S, free_port, self_signed, until
from torchrelay_client import TLS, CallFailed, Client, Retry

BLOCKS = Path(__file__).parents[1] / "data" / "documents"
UPPER = """
def handle(data, context):
    return None if data is None else [bytes(*row.values()).decode().upper() for row in data]
"""
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", request.inputs()[0].as_numpy())])
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of such an environment."""
    directory = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True, timeout=GUARD_S)
    found = str(directory / "bin" / "python")
    subprocess.run([found, "-m", "ts.compat.install"], check=True, timeout=GUARD_S, env=installed())
    return found


def installed() -> dict[str, str]:
    """The packages of this Python, for an interpreter without them."""
    own = {str(Path(str(find_spec(name).origin)).parents[1]) for name in ("ts", "ts_frontend")}  # type: ignore[union-attr]
    return os.environ | {"PYTHONPATH": os.pathsep.join([*own, *(one for one in sys.path if one)])}


@pytest.fixture
def run(tmp_path: Path, python: str) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts `python -m …` in a folder whose config.properties has free ports for the listeners without a flag."""
    (tmp_path / "tmp").mkdir()
    free = "management_address=http://127.0.0.1:0\ngrpc_management_port=0\ndefault_workers_per_model=1\n"
    free += "inference_address=http://127.0.0.1:0\nmetrics_address=http://127.0.0.1:0\nncs=true\npreload_torch=false\n"
    (tmp_path / "config.properties").write_text(free)
    running: list[subprocess.Popen[bytes]] = []

    def begin(*words: str) -> subprocess.Popen[bytes]:
        env = installed() | {"TMPDIR": str(tmp_path / "tmp")}
        with (tmp_path / "output").open("w") as output:
            running.append(
                subprocess.Popen([python, *words], cwd=tmp_path, env=env, stdout=output, stderr=subprocess.STDOUT)
            )
        return running[-1]

    yield begin
    for process in running:
        process.send_signal(signal.SIGTERM)
        assert process.wait(GUARD_S) == 0, (tmp_path / "output").read_text()


def command(text: str, port: int) -> list[str]:
    """The page's command behind `python`, with a free port in the place of 8001."""
    (line,) = (line for line in text.replace("\\\n", " ").splitlines() if "dynamo.frontend" in line)
    return shlex.split(line.replace("8001", str(port)))[1:]


def container(text: str) -> str:
    (found,) = yaml.safe_load(text)["spec"]["predictor"]["containers"]
    return str(found["args"][0])


def ask(port: int, model: str, tls: Any = None) -> str:
    name = {"llm_model": "text_input"}.get(model, "prompt")
    with Client(f"localhost:{port}", tls=tls, retry=Retry(attempts_max=1000, most_s=0.3)) as client:
        return str(client.infer(model, {name: [["grün"]]}, idempotent=True, timeout_s=GUARD_S).text())


@pytest.mark.parametrize("number", [2, 5, 15])
@pytest.mark.long
def test_dynamos_commands(number: int, run: Callable[..., Any], tmp_path: Path) -> None:
    """Promises 001-11, 001-15, 001-16, 001-20, 001-29, 001-36, 001-37, 001-38, 001-39: with the page's model repository
    in the folder where it is started. Who can reach only this machine loads and unloads."""
    (tmp_path / "model_repository" / "llm_model" / "1").mkdir(parents=True)
    shutil.copy(BLOCKS / "dynamo" / "7.txt", tmp_path / "model_repository" / "llm_model" / "config.pbtxt")
    (tmp_path / "model_repository" / "llm_model" / "1" / "model.py").write_text(MODEL)
    self_signed(tmp_path)
    text, port = (BLOCKS / "dynamo" / f"{number}.txt").read_text(), free_port()
    words = command(container(text) if number == 5 else text, port)
    process = run(*words)
    tls = TLS(tmp_path / "server.crt") if "--use-tls" in words else None
    assert ask(port, "llm_model", tls) == "grün"
    assert process.poll() is None, "the command is the server"
    workers = 4.0 if "--grpc-workers" in words else 1.0
    place = f"{'https' if tls else 'http'}://localhost:{port}/metrics"
    trusted = ssl.create_default_context(cafile=tmp_path / "server.crt")
    shown = 'ts_ready_workers{model_name="llm_model",model_version="1",'
    until(lambda: re.search(rf"{re.escape(shown)}[^}}]*}} {workers}", httpx.get(place, verify=trusted).text), words)
    with Client(f"localhost:{port}", tls=tls) as client:
        if "--kserve-mode" in words:
            with pytest.raises(CallFailed, match="enable-model-api"):
                client.unload("llm_model")
        else:
            client.unload("llm_model")
            assert not client.model_ready("llm_model")
            client.load("llm_model")
        assert client.model_ready("llm_model")


def test_maxs_command(run: Callable[..., Any], tmp_path: Path, write_to: Callable[..., str]) -> None:
    """Promise 000-03: the program of the page's Bazel target, with its option."""
    (tmp_path / "model_store").mkdir()
    write_to(tmp_path / "model_store", "llama31", UPPER)
    port = free_port()
    words = shlex.split((BLOCKS / "max" / "1.txt").read_text().partition(" -- ")[2])
    run("-m", "max.serve.grpc_server", *words, f"--grpc-port={port}")
    assert ask(port, "llama31") == "GRÜN"


def test_an_installed_dynamo_wins(python: str, tmp_path: Path) -> None:
    (tmp_path / "dynamo" / "frontend").mkdir(parents=True)
    (tmp_path / "dynamo" / "frontend" / "__init__.py").touch()
    (tmp_path / "dynamo" / "frontend" / "__main__.py").write_text("print('the real one')")
    env = installed() | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{installed()['PYTHONPATH']}"}
    done = subprocess.run(
        [python, "-m", "dynamo.frontend"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=GUARD_S
    )
    assert re.fullmatch("the real one\n", done.stdout), done.stderr
