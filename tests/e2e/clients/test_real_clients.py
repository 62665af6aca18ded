"""The clients of other systems, each from an environment of its own, against one server: one gRPC port, one HTTP port,
TorchServe archives, a Triton repository and a runtime of MLServer's side by side. First each alone, then all at
once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.external

HERE = Path(__file__).parent
RUNTIME = HERE.parents[1] / "handlers" / "mlserver" / "text"
GUARD_S = 240
LLM_CONFIG = """
# config.pbtxt
name: "llm_model"
backend: "python"
max_batch_size: 8

input [
  {
    name: "text_input"
    data_type: TYPE_STRING
    dims: [ -1 ]
  }
]

output [
  {
    name: "text_output"
    data_type: TYPE_STRING
    dims: [ -1 ]
  }
]
"""
LLM_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
        upper = np.array([[text.decode().upper() for text in row] for row in texts], dtype=object)
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("text_output", upper)])
"""

#: Says how many tokens (words) it has read and given.
COUNTED = """
from ts.tensors.types import InferenceResponse, Tensor

def answer(row):
    words = bytes(row["data"]).decode().split()
    given = words[: row.request.parameters.get("max_tokens", 16)]
    said = {"prompt_tokens": len(words), "completion_tokens": len(given)}
    return InferenceResponse([Tensor.of("text", " ".join(given))], parameters=said)

def handle(data, context):
    return None if data is None else [answer(row) for row in data]
"""


class Program(NamedTuple):
    """A file of programs/, its environment ("": this one), the arguments after the addresses, and its output."""

    file: str
    environment: str
    arguments: tuple[str, ...] = ()
    said: str = ""


PROGRAMS = (
    Program("triton_grpc.py", "mlserver", said="triton grpc ok"),
    Program("triton_http.py", "mlserver", said="triton http ok"),
    Program("triton_loading.py", "mlserver", said="triton loading ok"),
    Program("triton_beside_ours.py", "mlserver", ("ours",), "beside ours ok"),
    Program("triton_beside_ours.py", "mlserver", ("theirs",), "beside ours ok"),
    Program("kserve_clients.py", "kserve", said="kserve ok"),
    Program("mlserver_clients.py", "mlserver", said="mlserver ok"),
    Program("openai_client.py", "kserve", said="openai ok"),
    Program("grpcurl_calls.py", "grpcurl", said="grpcurl ok"),
    Program("torchserve_stubs.py", "", said="torchserve ok"),
)


@pytest.fixture(scope="module")
def everybody(
    tmp_path_factory: pytest.TempPathFactory,
    serving: Callable[..., Any],
    stocked: Callable[[Path], Path],
    write_to: Callable[..., str],
) -> Iterator[Any]:
    """One server for all of them."""
    directory: Path = tmp_path_factory.mktemp("everybody")
    store = stocked(directory)
    write_to(store, "text-model", (store / "words" / "handler.py").read_text())
    write_to(store, "counted", COUNTED)
    shutil.copytree(RUNTIME, store / "runtime")
    settings_file = store / "runtime" / "model-settings.json"
    settings_file.write_text(settings_file.read_text().replace('"text-model"', '"runtime"'))
    repository = directory / "model_repository"
    (repository / "llm_model" / "1").mkdir(parents=True)
    (repository / "llm_model" / "config.pbtxt").write_text(LLM_CONFIG)
    (repository / "llm_model" / "1" / "model.py").write_text(LLM_MODEL)
    # Without it, bodies for models that declare no tensors go to the handler as they are, as TorchServe does it.
    settings = {"ts_open_inference_protocol": "true"}
    more = ["--model-control-mode", "explicit", "--load-model", "llm_model"]
    with serving(directory, store, settings, ["--ncs", "--model-repository", str(repository), *more]) as server:
        for name in ("sum", "same", "upper", "words", "text-model", "counted", "runtime"):
            server.register(name)
        yield server


class Started:
    """A program that runs."""

    def __init__(
        self, program: Program, python: Path, server: Any, env: dict[str, str], folder: Path | None = None
    ) -> None:
        self.program = program
        words = [str(python), str(HERE / "programs" / program.file), server.inference, server.http, *program.arguments]
        self._process = subprocess.Popen(
            words, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def check(self) -> None:
        """It must end well, with its last word."""
        out = self.output()
        assert out.splitlines()[-1:] == [self.program.said], out

    def output(self) -> str:
        """The program's output; it must end with status 0."""
        out, err = self._process.communicate(timeout=GUARD_S)
        assert self._process.returncode == 0, f"{self.program.file}: {out}{err}"
        return out

    def end(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=GUARD_S)


Begin = Callable[..., Started]


@pytest.fixture
def begin(everybody: Any, root: Path, client_python: Any, client_env: dict[str, str]) -> Iterator[Begin]:
    """`begin(program)` starts it. The one that imports our stubs beside others finds them, and nothing else of ours."""

    running: list[Started] = []

    def start(program: Program, folder: Path | None = None) -> Started:
        python = client_python(program.environment) if program.environment else Path(sys.executable)
        ours = f"{root / 'frontend'}:{root / 'worker'}"
        needed = not program.environment or "beside" in program.file
        env = {**client_env, "PYTHONPATH": ours} if needed else client_env
        running.append(Started(program, python, everybody, env, folder))
        return running[-1]

    yield start
    for one in running:
        one.end()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: "-".join((one.file.removesuffix(".py"), *one.arguments)))
def test_alone(begin: Begin, program: Program) -> None:
    """Promises 000-01, 000-07, 000-08, 000-11, 000-13, 000-14, 000-15, 000-16, 000-17, 000-18, 000-21, 001-01, 001-02,
    001-03, 001-04, 001-28, 004-08, 004-09, 004-10, 004-11, 004-12, 004-13, 004-14, 004-15, 004-16."""
    begin(program).check()


def test_all_at_once(begin: Begin) -> None:
    """Promises 000-23, 001-03."""
    for running in [begin(program) for program in PROGRAMS]:
        running.check()


DOCUMENTS = Path(__file__).parents[2] / "data" / "documents"


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_document_mlserver(begin: Begin, number: int, tmp_path: Path) -> None:
    """Promises 004-12, 004-13, 004-14, 004-15, 004-16."""
    said = "['one ']\n['two ']\n" if number in (3, 5) else "['one two ']\n"
    arguments = (str(DOCUMENTS / "mlserver"), str(number))
    assert begin(Program("documents_mlserver.py", "mlserver", arguments), tmp_path).output() == said


def test_document_max(begin: Begin, tmp_path: Path) -> None:
    """Promises 000-13, 000-14, 000-15, 000-16, 000-17."""
    output = begin(Program("documents_max.py", "grpcurl", (str(DOCUMENTS / "max"), "3")), tmp_path).output()
    first, done, command, *rest = output.splitlines()
    assert (first, done, rest[-1]) == ("Response : What is life? ... WHAT IS LIFE?", "Done", "Done")
    assert command.startswith("Command error ") and "nobody" in output
