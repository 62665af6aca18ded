"""Programs written for aiSSEMBLE's and KServe's servers, run unchanged: the program's process becomes the server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from e2e.servers import LoggedProcess, write_model
from support import GUARD_S, free_port, http_call
from ts.compat import start as start_module
from ts.compat.kserve_api.messages import InferInput, InferRequest
from ts.compat.kserve_api.predictor import (
    GRPC_V2,
    V1,
    V2,
    WAITED_FOR_UNTIL_S,
    Predictor,
    PredictorConfig,
    forwarded,
)
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from ts.utils.util import PredictionException

PROGRAMS = Path(__file__).parents[1] / "data" / "programs"
RUN = [sys.executable, "-m", "ts.compat.run"]


class Program(LoggedProcess):
    """A running program; `command` is put before its file, `first` is its first line."""

    def __init__(
        self,
        directory: Path,
        text: str,
        *argv: str,
        command: list[str],
        properties: str = "preload_torch=false",
        first: str = "",
        **environ: str,
    ) -> None:
        super().__init__()
        self.directory = directory
        (directory / "config.properties").write_text(f"{properties}\n")
        source = (PROGRAMS / (text if "." in text else f"{text}.txt")).read_text()
        (directory / "main.py").write_text(f"{first}\n{source}" if first else source)
        known = {name: value for name, value in os.environ.items() if not name.startswith(("TS_", "KSERVE_", "KRAUS"))}
        tmp = directory / "tmp"
        tmp.mkdir()
        env = known | {"KSERVE_HTTP_PORT": "0", "KSERVE_GRPC_PORT": "0", "TMPDIR": str(tmp)} | environ
        piped: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.follow(subprocess.Popen([*command, "main.py", *argv], cwd=directory, env=env, **piped))

    def port(self, name: str) -> int:
        self.wait_for_log(f"{name} listens on")
        return super().port(name)

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
        answer = http_call(self.port("http_inference"), method, path, data, headers)
        return answer.status, answer.value(), answer.headers

    def infer(self, model: str, name: str, data: list[Any], datatype: str = "FP32") -> tuple[int, Any]:
        tensor = {"name": name, "shape": [len(data)], "datatype": datatype, "data": data}
        return self.ask(f"/v2/models/{model}/infer", {"inputs": [tensor]})[:2]


Start = Callable[..., Program]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    running: list[Program] = []

    def started(text: str, *argv: str, command: list[str] = RUN, **environ: str) -> Program:
        program = Program(tmp_path_factory.mktemp("program"), text, *argv, command=command, **environ)
        running.append(program)
        return program

    yield started
    for program in running:
        program.terminate()


@pytest.fixture(scope="module")
def scaling(start: Start) -> Program:
    program = start(
        *("handler_program", "--times=3", "--workers=2", "--enable-docs-url=true"),
        KSERVE_ACCESS_LOG_FORMAT="asked %(m)s %(U)s -> %(s)s",
    )
    program.wait_for_log("of scaling_1.0 is ready", 2)
    return program


@pytest.fixture(scope="module")
def predictors(start: Start) -> Program:
    program = start("predictors_program", "--model_name", "plain")
    for name in ("plain", "waiting"):
        program.wait_for_log(f"of {name}_1.0 is ready")
    return program


@pytest.fixture
def stub(scaling: Program) -> Iterator[GRPCInferenceServiceStub]:
    with grpc.insecure_channel(f"127.0.0.1:{scaling.port('grpc_inference')}") as channel:
        yield GRPCInferenceServiceStub(channel)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of a virtual environment in which the imports were made to work."""
    directory = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True, timeout=GUARD_S)
    python = str(directory / "bin" / "python")
    subprocess.run([python, "-m", "ts.compat.install"], check=True, timeout=GUARD_S, env=installed())
    return python


def installed() -> dict[str, str]:
    """The packages of this Python, for the interpreter of an environment without them: also our folders, which an
    editable installation doesn't put on the path."""
    own = {str(Path(str(find_spec(name).origin)).parents[1]) for name in ("ts", "ts_frontend")}  # type: ignore[union-attr]
    return os.environ | {"PYTHONPATH": os.pathsep.join([*own, *(one for one in sys.path if one)])}


def test_the_readmes_program_runs_as_it_is(start: Start, environment: str) -> None:
    """`python main.py --http_port=…` in a virtual environment. Promises 003-01, 003-05, 003-06, 003-07, 003-09,
    003-10."""
    port = free_port()
    program = start(
        "aissemble_readme", f"--http_port={port}", command=[environment], PYTHONPATH=installed()["PYTHONPATH"]
    )
    program.wait_for_log("of my_model_1.0 is ready")
    assert program.port("http_inference") == port
    assert program.infer("my_model", "input", [1.0]) == (
        200,
        {"model_name": "my_model", "model_version": "1.0", "id": "id", "outputs": []},
    )
    tensors = [[{"name": name, "datatype": "FP32", "shape": [1]}] for name in ("input", "output")]
    metadata = {"name": "my_model", "versions": ["1.0"], "platform": "python"}
    assert program.ask("/v2/models/my_model")[1] == metadata | {"inputs": tensors[0], "outputs": tensors[1]}
    assert program.ask("/v2/models/my_model/ready")[:2] == (200, {"name": "my_model", "ready": True})
    first = psutil.Process(program.process.pid)
    assert "ts_frontend.cli.program" in " ".join(first.cmdline()), "the program's process is the server"
    left = [*first.children(recursive=True)]
    assert program.terminate() == 0
    assert not psutil.wait_procs(left, timeout=GUARD_S)[1]
    assert not list(program.directory.glob("tmp/*")), "nothing is left behind"


def test_requests_reach_the_object_that_the_program_made(scaling: Program) -> None:
    assert scaling.infer("scaling", "x", [1, 2.5])[1]["outputs"] == [
        {"name": "scaled", "datatype": "FP32", "shape": [1, 2], "data": [3.0, 7.5]}
    ]
    assert scaling.infer("scaling", "t", ["ab"], "BYTES")[1]["outputs"][0]["data"] == ["AB"]


def test_each_worker_has_its_own_object_and_has_loaded_it(scaling: Program) -> None:
    """Promise 003-13."""
    pids = set()
    for _ in range(200):
        pid, loaded_in = scaling.infer("scaling", "pid", [1])[1]["outputs"][0]["data"]
        assert pid == loaded_in
        pids.add(pid)
        if len(pids) == 2:
            break
    assert len(pids) >= 1 and scaling.process.pid not in pids
    workers = re.findall(r"Worker \d+ of scaling_1.0 is ready \(pid (\d+)\)", scaling.log)
    assert pids <= set(map(int, workers)) and len(workers) == 2


def test_grpc_clients_get_the_same(scaling: Program, stub: GRPCInferenceServiceStub) -> None:
    metadata = stub.ModelMetadata(pb.ModelMetadataRequest(name="scaling"), timeout=GUARD_S)
    assert (metadata.platform, metadata.outputs[0].name, list(metadata.outputs[0].shape)) == ("ours", "scaled", [1, -1])
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", shape=[1], datatype="FP32")
    tensor.contents.fp32_contents.append(2)
    request = pb.ModelInferRequest(model_name="scaling", inputs=[tensor])
    answers = [stub.ModelInfer.future(request, timeout=GUARD_S) for _ in range(8)]
    assert all(list(one.result().outputs[0].contents.fp32_contents) == [6.0] for one in answers)


def test_what_a_handler_gets_wrong_is_its_own(scaling: Program) -> None:
    status, answer = scaling.infer("scaling", "bad", [1])
    assert (status, "output ('bad'): Shape mismatch - declared [3] , but got [1]" in answer["error"]) == (500, True)
    assert scaling.infer("scaling", "raise", [1])[0] == 500
    assert scaling.infer("scaling", "x", [1])[0] == 200


def test_kserves_paths(scaling: Program) -> None:
    assert scaling.ask("/")[:2] == (200, {"status": "alive"})
    assert scaling.ask("/v1/models")[1] == scaling.ask("/v2/models")[1] == {"models": ["scaling"]}
    assert scaling.ask("/v1/models/scaling")[:2] == (200, {"name": "scaling", "ready": True})
    assert scaling.ask("/v1/models/nope")[0] == 404
    assert scaling.ask("/v2/health/live")[1]["live"] and scaling.ask("/v2/health/ready")[1]["ready"]


def test_the_page_about_the_api_loads_nothing_from_elsewhere(scaling: Program, predictors: Program) -> None:
    """Promise 003-17; off is tested below."""
    for program in (scaling, predictors):  # by an argument, and by the program's own ModelServer(…)
        for path in ("/docs", "/v2/docs"):
            status, page, headers = program.ask(path)
            assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
            assert "/v2/models/{model_name}/infer" in page
            assert "//" not in page and "default-src 'self'" in headers["content-security-policy"]
            for file in re.findall(r'(?:src|href)="(/console/[^"]+)"', page):
                assert program.ask(file)[0] == 200, file
    assert scaling.ask("/openapi.json")[1] == scaling.ask("/v2/docs/dataplane.json")[1]
    paths = scaling.ask("/openapi.json")[1]["paths"]
    assert {"/v2/models/{model_name}/infer", "/v2/health/live", "/v1/models/{model_name}:predict"} <= set(paths)


def test_a_line_for_each_request(scaling: Program) -> None:
    """Promises 003-18, 003-19."""
    before = scaling.count_of("preprocess_ms: ")
    scaling.ask("/v2/models/scaling/infer", {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]})
    scaling.wait_for_log("preprocess_ms: ", before + 1)
    line = next(line for line in reversed(scaling.lines) if "preprocess_ms" in line)
    assert re.search(
        r"requestId: \S+, preprocess_ms: [\d.]+, explain_ms: [\d.]+, predict_ms: [\d.]+, postprocess", line
    )
    scaling.wait_for_log("asked POST /v2/models/scaling/infer -> 200")


@pytest.mark.long
def test_nothing_of_it_when_it_is_off(start: Start) -> None:
    """Promises 003-07, 003-16, 003-17, 003-18: a model that isn't loaded is not ready."""
    program = start(
        *("handler_program", "--unloaded", "--enable_grpc=false", "--enable_latency_logging", "false"),
        KSERVE_GRPC_PORT=str(free_port()),
    )
    program.wait_for_log("Model server started.")
    program.wait_for_log("model_load('scaling') of its handler returned False")
    assert program.lines[0] == "loaded: False"
    assert program.ask("/v2/models/scaling/ready")[:2] == (503, {"name": "scaling", "ready": False})
    assert program.ask("/v1/models/scaling")[0] == 503
    assert program.ask("/docs")[0] == 404
    assert "grpc_inference listens" not in program.log
    assert program.ask("/v2/health/live")[0] == 200


@pytest.mark.long
def test_archives_and_repositories_beside_a_program(start: Start, tmp_path: Path) -> None:
    """Options before the program are the server's, those behind it both's."""
    store, repository = tmp_path / "store", tmp_path / "repository"
    for name in ("upper", "other"):
        write_model(store, name, "def handle(data, context):\n    return ['row' for row in data or ()]\n")
    (repository / "one" / "1").mkdir(parents=True)
    (repository / "one" / "1" / "model.py").write_text(
        "class TritonPythonModel:\n    def execute(self, requests):\n        return [None for one in requests]\n"
    )
    command = [*RUN, "--model_store", str(store)]
    program = start(
        *("handler_program", "--times=3", f"--model-repository={repository}", "--models", "upper"), command=command
    )
    program.wait_for_log("of scaling_1.0 is ready")
    program.wait_for_log("of upper_1.0 is ready")
    assert program.infer("scaling", "x", [1])[1]["outputs"][0]["data"] == [3.0]
    assert program.ask("/predictions/upper", "abc")[1] == "row"
    assert program.ask("/v1/models")[1] == {"models": ["one", "scaling", "upper"]}
    assert program.ask("/v2/repository/models/other/load", {})[0] == 400, "others may not load what they like"


def test_properties_of_krausening(start: Start, tmp_path: Path) -> None:
    """Promises 003-20, 003-21; every option and source in test_kserve_options.py."""
    port = free_port()
    (tmp_path / "oip.properties").write_text(f"kserve_http_port={port}\nkserve_enable_latency_logging=false\n")
    program = start("aissemble_readme", KRAUSENING_BASE=str(tmp_path), KSERVE_MAX_THREADS="9", AUTH_ENABLED="true")
    program.wait_for_log("http_inference listens on")
    assert program.port("http_inference") != port, "the environment is stronger"
    assert "max_threads (environment KSERVE_MAX_THREADS) has no effect: any number of calls" in program.log
    assert "AUTH_ENABLED (auth_enabled): aiSSEMBLE's KServe server asks for no tokens" in program.log
    program.wait_for_log("of my_model_1.0 is ready")
    assert program.infer("my_model", "input", [1.0])[0] == 200
    assert "preprocess_ms" not in program.log


@pytest.mark.long
def test_a_program_started_by_its_modules_name(start: Start, tmp_path: Path) -> None:
    """With relative imports, in a package."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "line.py").write_text((PROGRAMS.parents[2] / "examples/aissemble/main.py").read_text())
    shims = Path(start_module.__file__).with_name("shims")
    (package / "program.py").write_text(
        f"import sys; sys.path.append({str(shims)!r})\n"
        "from .line import AissembleOIPKServe, Line\n"
        "service = AissembleOIPKServe('other', Line())\nservice.load()\nservice.start_server()\n"
    )
    path = f"{tmp_path}{os.pathsep}{installed()['PYTHONPATH']}"
    program = start("aissemble_readme", command=[sys.executable, "-m", "package.program"], PYTHONPATH=path)
    program.wait_for_log("of other_1.0 is ready")
    assert program.infer("other", "x", [3])[1]["outputs"][0]["data"] == [7.0]


def test_a_program_without_a_file(tmp_path: Path) -> None:
    code = "from ts.compat.start import serve; serve('aissemble', {}, {})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=GUARD_S)
    assert done.returncode == 1 and "put it into one, instead of python -c" in done.stderr


def test_the_example(start: Start) -> None:
    """Promise 003-23."""
    program = start("../../../examples/aissemble/main.py")
    program.wait_for_log("of line_1.0 is ready")
    assert program.infer("line", "x", [3, 4])[1]["outputs"][0]["data"] == [7.0, 9.0]
    assert program.ask("/v1/models/line:predict", {"instances": [3, 4]})[1] == {"predictions": [7.0, 9.0]}


# --- with other systems' packages

CHECKED = """
import json
import sys

from aissemble_open_inference_protocol_shared.types.dataplane import InferenceRequest

for line in sys.stdin:
    data, shape, datatype = json.loads(line)
    tensor = {"name": "x", "shape": shape, "datatype": datatype, "data": data}
    try:
        InferenceRequest.model_validate({"inputs": [tensor]}).validate_oip()
        print("result: ok")
    except (TypeError, ValueError) as error:
        print(f"result: {type(error).__name__}: {error}")
"""
TENSORS: list[tuple[Any, list[int], str]] = [
    ([1.0, 2.0], [2], "FP32"),
    ([1.0, 2.0], [3], "FP32"),
    ([[1, 2], [3, 4]], [2, 2], "INT8"),
    ([[1, 2], [3, 4]], [4], "INT8"),
    ([[1, 2], [3, 4]], [1, 4], "INT8"),
    ([[1, 2], [3]], [3, 1], "INT8"),
    ([[1, 2]], [-1, 2], "INT64"),
    ([1, 2], [-1, 2], "INT64"),
    ([1, 2], [2], "FP32"),
    (["a"], [1], "INT32"),
    (["a", "b"], [2], "BYTES"),
    ([1], [1], "BYTES"),
    ([True, 1], [2], "BOOL"),
    ([True], [1], "UINT8"),
    (3.5, [], "FP64"),
    ([[[1.0], [2.0]]], [1, 2, 1], "FP16"),
]
CLIENTS = """
import asyncio
import sys

GRPC, HTTP = sys.argv[1:3]
sys.argv[1:] = []

from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig


def request(model):
    return InferRequest(infer_inputs=[InferInput("x", [2], "FP32", data=[1.0, 2.0])], model_name=model, request_id="r")


async def main():
    grpc = InferenceGRPCClient(GRPC)
    assert await grpc.is_server_live() and await grpc.is_server_ready() and await grpc.is_model_ready("plain")
    answer = await grpc.infer(request("plain"))
    assert list(answer.outputs[0].data) == [30.0], answer
    await grpc.close()
    second = InferenceRESTClient(RESTConfig(protocol="v2", timeout=60))
    assert await second.is_server_live(HTTP) and await second.is_server_ready(HTTP)
    assert await second.is_model_ready(HTTP, "plain")
    answer = await second.infer(HTTP, request("plain"), model_name="plain")
    assert (answer.id, answer.model_name, list(answer.outputs[0].data)) == ("r", "plain", [30.0]), answer
    await second.close()
    first = InferenceRESTClient(RESTConfig(protocol="v1", timeout=60))
    assert await first.is_server_live(HTTP) and await first.is_model_ready(HTTP, "plain")
    assert (await first.infer(HTTP, {"instances": [1]}, model_name="plain"))["predictions"] == [2]
    assert await first.explain(HTTP, "plain", {"instances": [1]}) == {"explanations": [2]}
    await first.close()


asyncio.run(main())
print("result: ok")
"""


def results(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("result: ") for line in done.stdout.splitlines() if line.startswith("result: ")]


@pytest.mark.external
def test_the_checks_are_those_of_aissemble(
    client_python: Callable[[str], Path], client_env: dict[str, str], tmp_path: Path
) -> None:
    cases = "\n".join(map(json.dumps, TENSORS))
    shims = str(Path(start_module.__file__).with_name("shims"))
    found = []
    for python, env in (
        (str(client_python("kserve")), client_env),
        (sys.executable, installed() | {"PYTHONPATH": f"{shims}{os.pathsep}{installed()['PYTHONPATH']}"}),
    ):
        done = subprocess.run(
            [python, "-c", CHECKED], input=cases, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=GUARD_S
        )
        found.append(results(done))
    assert found[0] == found[1] and len(found[0]) == len(TENSORS)


@pytest.mark.external
def test_aissembles_own_types_are_used_where_they_are_installed(
    start: Start, client_python: Callable[[str], Path]
) -> None:
    python = str(client_python("kserve"))
    program = start("handler_program", command=[python, *RUN[1:]], PYTHONPATH=installed()["PYTHONPATH"])
    program.wait_for_log("of scaling_1.0 is ready")
    (output,) = program.infer("scaling", "where", [1])[1]["outputs"]
    assert output["data"] == ["aissemble_open_inference_protocol_shared.types.dataplane pydantic.main"]
    assert program.infer("scaling", "x", [2])[1]["outputs"][0]["data"] == [2.0]
    assert program.infer("scaling", "bad", [1])[0] == 500


@pytest.mark.external
def test_kserves_clients_ask_a_program(
    predictors: Program, client_python: Callable[[str], Path], client_env: dict[str, str], tmp_path: Path
) -> None:
    """REST with both protocols, and gRPC."""
    addresses = [
        f"127.0.0.1:{predictors.port('grpc_inference')}",
        f"http://127.0.0.1:{predictors.port('http_inference')}",
    ]
    done = subprocess.run(
        [str(client_python("kserve")), "-c", CLIENTS, *addresses],
        env=client_env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2 * GUARD_S,
    )
    assert results(done) == ["ok"]


# --- KServe's predictors


def test_predictors_over_v1(predictors: Program) -> None:
    status, answer, headers = predictors.ask(
        "/v1/models/plain:predict", {"instances": [1, 2]}, **{"User-Agent": "curl/8"}
    )
    assert (status, answer) == (200, {"predictions": [2, 4], "agent": "curl"})
    assert headers["content-type"] == "application/json"
    assert predictors.ask("/v1/models/waiting:predict", {"instances": [1, 2]})[1] == {"predictions": [2, 1]}
    assert predictors.ask("/v1/models/plain:explain", {"instances": [1]})[1] == {"explanations": [2]}
    assert predictors.ask("/v1/models/waiting:explain", {"instances": [1]})[0] == 501
    assert predictors.ask("/v1/models/plain:predict", {"instances": [0]})[:2] == (400, {"error": "no zeros"})
    assert predictors.ask("/v1/models/plain:predict", {"instances": 0})[0] == 400


@pytest.mark.parametrize(
    ("properties", "first", "is_imported"),
    [("", "", False), ("preload_torch=true", "", True), ("", "import torch", True)],
)
@pytest.mark.long
def test_torch_is_imported_ahead_only_for_programs_that_import_it(
    start: Start, properties: str, first: str, is_imported: bool
) -> None:
    program = start("predictors_program", "--model_name", "plain", properties=properties, first=first)
    program.wait_for_log("of plain_1.0 is ready")
    words = [one.cmdline() for one in psutil.Process(program.process.pid).children()]
    (forkserver,) = [one for one in words if "ts.runtime.forkserver" in one]
    assert ("--plain" not in forkserver) is is_imported


def test_cloud_events(predictors: Program) -> None:
    event = {"specversion": "1.0", "id": "1", "type": "t", "source": "s", "data": {"instances": [3]}}
    structured = predictors.ask("/v1/models/plain:predict", event, **{"Content-Type": "application/cloudevents+json"})
    binary = predictors.ask("/v1/models/plain:predict", event["data"], **{"ce-id": "1", "ce-specversion": "1.0"})
    for status, answer, headers in (structured, binary):
        assert (status, answer["predictions"]) == (200, [6])
        assert headers["ce-source"] == "io.kserve.inference.plain"


def test_the_steps_of_a_predictor_are_logged(predictors: Program) -> None:
    predictors.ask("/v1/models/waiting:predict", {"instances": [1]})
    predictors.wait_for_log("W-9001-waiting_1.0-stdout MODEL_LOG - requestId: ")


# --- transformers


@pytest.fixture
def predictor(predictors: Program) -> Callable[..., Predictor]:
    """The predictor as a transformer asks it by a protocol."""

    def made(protocol: str, **more: Any) -> Predictor:
        api = "grpc_inference" if protocol == GRPC_V2 else "http_inference"
        return Predictor(PredictorConfig(f"127.0.0.1:{predictors.port(api)}", protocol, **more))

    return made


def tensors(*values: float) -> InferRequest:
    return InferRequest("plain", [InferInput("x", [len(values)], "FP32", list(values))], "7")


@pytest.mark.parametrize("protocol", [V2, GRPC_V2])
async def test_a_predictor_is_asked_with_tensors(protocol: str, predictor: Callable[..., Predictor]) -> None:
    asked = predictor(protocol)
    for _ in range(3):  # over one connection
        answer = await asked.predict("plain", tensors(1, 2), None)
        assert (answer.id, answer.outputs[0].name, answer.outputs[0].as_numpy().tolist()) == ("7", "sum", [30.0])
    with pytest.raises(PredictionException) as failed:
        await asked.predict("missing", tensors(1), None)
    assert failed.value.error_code == 404 and "missing" in failed.value.message
    await asked.close()


def test_a_predictor_is_asked_by_v1_with_the_headers_that_go_on(
    predictor: Callable[..., Predictor], predictors: Program
) -> None:
    async def scenario() -> None:
        asked = predictor(V1)
        together = [asked.predict("plain", {"instances": [one]}, None) for one in range(1, 6)]
        assert [one["predictions"] for one in await asyncio.gather(*together)] == [[2], [4], [6], [8], [10]]
        assert await asked.explain("plain", {"instances": [1]}, None) == {"explanations": [2]}
        with pytest.raises(PredictionException) as failed:
            await asked.predict("plain", {"instances": [0]}, None)
        assert (failed.value.error_code, failed.value.message) == (400, "no zeros")
        await asked.predict("waiting", {"instances": [1]}, {"X-Request-Id": "one-of-many", "host": "elsewhere"})
        predictors.wait_for_log("requestId: one-of-many")
        await asked.close()

    asyncio.run(scenario())
    given = {"Traceparent": "00-a-b-01", "cookie": "no", "Authorization": "Bearer k", "body": {"content-type": "x"}}
    assert forwarded(given) == {"authorization": "Bearer k", "traceparent": "00-a-b-01"}


@pytest.mark.parametrize("protocol", [V1, V2, GRPC_V2])
def test_a_predictor_that_is_not_there_is_503_and_one_too_slow_504(protocol: str) -> None:
    """A port where nobody listens, and one where somebody does who never answers."""

    async def status(port: int) -> int:
        asked = Predictor(PredictorConfig(f"127.0.0.1:{port}", protocol))
        WAITED_FOR_UNTIL_S.set(time.monotonic() + (0.3 if port == silent else GUARD_S))
        payload = {"instances": [1]} if protocol == V1 else tensors(1)
        with pytest.raises(PredictionException) as failed:
            await asked.predict("plain", payload, None)
        await asked.close()
        return failed.value.error_code

    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = listener.getsockname()[1]
        found = asyncio.run(status(silent))
        assert found == 504 or (protocol == GRPC_V2 and found == 503), "for gRPC, who speaks no HTTP/2 isn't there"
    assert asyncio.run(status(free_port())) == 503


@pytest.mark.long
def test_a_transformer_in_front_of_a_predictor(start: Start, predictors: Program) -> None:
    host = f"127.0.0.1:{predictors.port('grpc_inference')}"
    transformer = start(
        "transformer_program", "--model_name=plain", f"--predictor_host={host}", "--predictor_protocol=grpc-v2"
    )
    transformer.wait_for_log("of plain_1.0 is ready")
    assert transformer.ask("/v1/models/plain:predict", {"instances": [10, 20]})[:2] == (200, {"predictions": [30.0]})
    status, answer = transformer.infer("plain", "x", [1.0, 2.0])
    assert (status, answer["outputs"][0]["data"]) == (200, [30.0])
