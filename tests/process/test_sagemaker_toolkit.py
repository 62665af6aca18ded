"""AWS's toolkit for SageMaker (sagemaker-pytorch-inference), unchanged, starts this server, and TorchServe 0.12.

The toolkit looks for its server among all processes, and writes a file into /etc: each container here has namespaces
of its own, with an /etc of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy
import psutil
import pytest
import torch

from support import GUARD_S, free_port, until

MAIN = "from sagemaker_pytorch_serving_container.serving import main; main()"
#: The shell stays when the toolkit has ended, so that the test sees which processes are left.
CONTAINER = """
mkdir etc && mount --rbind /etc etc && mount -t tmpfs none /etc && ln -s "$PWD"/etc/* /etc || exit
rm -f /etc/sagemaker-ts.properties
"$@"
echo "the toolkit's status: $?"
read -r line
"""
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
#: SageMaker kills a container so long after its SIGTERM.
KILLED_AFTER_S = 30
SUITE_PACKAGES = Path(sysconfig.get_path("purelib"))
HAS_NAMESPACES = shutil.which("unshare") is not None and subprocess.run([*UNSHARE, "true"]).returncode == 0
pytestmark = [
    pytest.mark.external,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.skipif(not HAS_NAMESPACES, reason="needs namespaces of users, mounts and processes (unshare)"),
]

JSON, CSV, NPY, NPZ = "application/json", "text/csv", "application/x-npy", "application/x-npz"
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
MODEL_FN = """
import os
import torch

def model_fn(model_dir):
    return torch.jit.load(os.path.join(model_dir, "model.pth"))
"""
STEPS = f"""{MODEL_FN}
from sagemaker_inference import decoder

def input_fn(data, content_type):
    if content_type == "{NPZ}":
        return torch.tensor(decoder.decode(data, content_type).todense())
    return torch.tensor([float(word) for word in data.split("|")])

def predict_fn(data, model):
    return model(data) + 1

def output_fn(prediction, accept):
    return "|".join(str(value) for value in prediction.flatten().tolist()), "text/x-bars"
"""
TRANSFORM = f"""{MODEL_FN}
import json

def transform_fn(model, data, content_type, accept, context):
    given = context.get_request_header(0, "{ATTRIBUTES}")
    context.set_response_header(0, "{ATTRIBUTES}", f"seen={{given}}")
    if data == "fail":
        raise ValueError("no such thing")
    return json.dumps({{"type": content_type, "accept": accept, "is": model(torch.tensor([2.0])).tolist()}})
"""


class Halves(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5


class Call(NamedTuple):
    """A call and its answer; `theirs`: what differs in TorchServe's answer, and `why`. A dictionary is JSON, without
    the spaces that it is written with; a text ends before its traceback."""

    method: str
    path: str
    body: Any
    headers: dict[str, str]
    answer: Any
    status: int = 200
    kind: str = JSON
    attributes: str = ""
    theirs: dict[str, Any] = {}
    why: str = ""


def npy(*values: float, dtype: str = "float32") -> bytes:
    file = BytesIO()
    numpy.save(file, numpy.array(values, dtype=dtype))
    return file.getvalue()


def npz(values: list[list[float]]) -> bytes:
    """A sparse matrix as scipy saves it: by rows."""
    full = numpy.array(values, dtype="float32")
    rows, columns = full.nonzero()
    starts = numpy.searchsorted(rows, numpy.arange(len(full) + 1)).astype("int32")
    parts = {"indices": columns.astype("int32"), "indptr": starts, "format": b"csr", "shape": full.shape}
    file = BytesIO()
    numpy.savez(file, data=full[rows, columns], **parts)  # type: ignore[arg-type]
    return file.getvalue()


def kinds(content: str, accept: str = "") -> dict[str, str]:
    return {"Content-Type": content, **({"Accept": accept} if accept else {})}


def unsupported(kind: str) -> str:
    return f"Content type {kind} is not supported by this framework."


def absent(name: str, here: str) -> dict[str, Any]:
    """What differs in an answer about an unknown model, in the form of `Call`'s last fields."""
    said = {"code": 404, "type": "ModelNotFoundException", "message": f"Model not found: {name}"}
    return {
        "answer": {**said, "message": f"{said['message']}. Models here: {here}."},
        "status": 404,
        "theirs": {"answer": said},
        "why": "this server names the models that it has",
    }


def done(text: str) -> dict[str, str]:
    return {"status": text}


def listed(*names: str) -> dict[str, Any]:
    return {"models": [{"modelName": name, "modelUrl": f"PLACE/ml/models/{name}"} for name in names]}


def registered(name: str) -> Call:
    body = {"model_name": name, "url": f"PLACE/ml/models/{name}"}
    said = f'Model "{name}" Version: 1.0 registered with 1 initial workers'
    return Call("POST", "/models", body, kinds(JSON), done(said))


RAISED: dict[str, Any] = {
    "status": 500,
    "kind": "application/octet-stream",
    "theirs": {"kind": ""},
    "why": "TorchServe sends no content type with the bytes of a handler that has set none",
}
INVOKE = "/invocations"
SINGLE = [
    Call("GET", "/ping", None, {}, done("Healthy")),
    Call("POST", INVOKE, b"[1, 2]", kinds(JSON), "[0.5, 1.0]"),
    Call("POST", INVOKE, b"[1, 2]", kinds(JSON, "*/*"), "[0.5, 1.0]"),
    Call("POST", INVOKE, b"[1, 2]", kinds(JSON, CSV), "0.5\n1.0\n", kind=CSV),
    Call("POST", INVOKE, b"1,2\n3,4", kinds(CSV, CSV), "0.5,1.0\n1.5,2.0\n", kind=CSV),
    Call("POST", INVOKE, b"1,2\n3,4", kinds(CSV), "[[0.5, 1.0], [1.5, 2.0]]"),
    Call("POST", INVOKE, npy(1, 2), kinds(NPY, NPY), npy(0.5, 1, dtype="float64"), kind=NPY),
    Call("POST", INVOKE, npy(1, 2), kinds(NPY, "x/y"), unsupported("x/y"), **RAISED),
    Call("POST", INVOKE, b"a", kinds("x/y"), unsupported("x/y"), **RAISED),
    Call("POST", INVOKE, b"a", kinds(JSON), "Expecting value: line 1 column 1 (char 0)", **RAISED),
    Call("POST", INVOKE, b"[1]", {}, unsupported("None"), **RAISED),
]
TAKEN = {
    "code": 409,
    "type": "ConflictStatusException",
    "message": "Model version 1.0 is already registered for model plain",
}
GONE = {"code": 404, "type": "ModelNotFoundException", "message": "Model not found at: PLACE/ml/models/nope"}
SEEN = {"type": CSV, "accept": "x/y", "is": [1.0]}
SEVERAL = [
    Call("GET", "/ping", None, {}, done("Healthy")),
    Call("GET", "/models", None, {}, listed()),
    *map(registered, ("plain", "steps", "whole")),
    registered("plain")._replace(answer=TAKEN, status=409),
    registered("nope")._replace(answer=GONE, status=404),
    Call("GET", "/models", None, {}, listed("plain", "steps", "whole")),
    Call("POST", "/models/plain/invoke", b"[1, 2]", kinds(JSON), "[0.5, 1.0]"),
    Call("POST", "/models/steps/invoke", b"1|2", kinds(CSV), "1.5|2.0", kind="text/x-bars"),
    Call("POST", "/models/steps/invoke", npz([[0, 2], [4, 0]]), kinds(NPZ), "1.0|2.0|3.0|1.0", kind="text/x-bars"),
    Call(
        "POST",
        "/models/whole/invoke",
        b"a",
        {**kinds(CSV, "x/y"), ATTRIBUTES: "t"},
        SEEN,
        kind="x/y",
        attributes="seen=t",
    ),
    Call(
        "POST",
        "/models/whole/invoke",
        b"fail",
        {**kinds(CSV), ATTRIBUTES: "t"},
        "no such thing",
        attributes="seen=t",
        **RAISED,
    ),
    Call("POST", "/models/nope/invoke", b"[1]", kinds(JSON), **absent("nope", "plain, steps, whole")),
    Call("DELETE", "/models/steps", None, {}, done('Model "steps" unregistered')),
    Call("POST", "/models/steps/invoke", b"1|2", kinds(CSV), **absent("steps", "plain, whole")),
    Call("GET", "/models/steps", None, {}, **absent("steps", "plain, whole")),
    Call("DELETE", "/models/steps", None, {}, **absent("steps", "plain, whole")),
    registered("steps"),
    Call("POST", "/models/steps/invoke", b"3", kinds(CSV), "2.5", kind="text/x-bars"),
    Call("GET", "/models", None, {}, listed("plain", "steps", "whole")),
]


class Container:
    """The toolkit's process, and the server that it starts."""

    def __init__(self, place: Path, python: Path, packages: Path, env: dict[str, str]) -> None:
        self.place, self.log = place, place / "log"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        own = {
            "PATH": f"{python.parent}{os.pathsep}{env['PATH']}",
            "PYTHONPATH": str(packages),
            "TMPDIR": str(place),
            "TEMP": str(place),
            "SAGEMAKER_BASE_DIR": str(place / "ml"),
            "SAGEMAKER_BIND_TO_PORT": str(port),
        }
        command = [*UNSHARE, "sh", "-c", CONTAINER, "sh", str(python), "-c", MAIN]
        with self.log.open("wb") as log:
            self.outer = subprocess.Popen(
                command, cwd=place, env={**env, **own}, stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        until(self._is_ready, self.log.read_text)

    def _is_ready(self) -> bool:
        assert self.outer.poll() is None and "the toolkit's status" not in self.log.read_text(), self.log.read_text()
        try:
            return httpx.get(f"{self.url}/ping").status_code == 200
        except httpx.TransportError:
            return False

    def _left(self) -> list[psutil.Process]:
        """The running processes but for the shell, which gets what others leave."""
        (shell,) = psutil.Process(self.outer.pid).children()
        found = []
        for process in shell.children(recursive=True):
            try:
                found += [process] if process.status() != psutil.STATUS_ZOMBIE else []
            except psutil.NoSuchProcess:
                continue
        return found

    def ask(self, call: Call) -> Call:
        """The call with the answer that it got."""
        body = json.dumps(call.body).replace("PLACE", str(self.place)) if isinstance(call.body, dict) else call.body
        answer = httpx.request(call.method, self.url + call.path, content=body, headers=call.headers, timeout=GUARD_S)
        said: Any = answer.content
        if isinstance(call.answer, dict):
            said = json.loads(answer.text.replace(str(self.place), "PLACE"))
        elif isinstance(call.answer, str):
            said = answer.text if answer.status_code == 200 else answer.text.splitlines()[0]
        kind, attributes = answer.headers.get("Content-Type", ""), answer.headers.get(ATTRIBUTES, "")
        return call._replace(answer=said, status=answer.status_code, kind=kind, attributes=attributes)

    def describe(self, name: str) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/models/{name}").json()[0])

    def terminate(self) -> None:
        """SIGTERM to the toolkit, which is the container's command."""
        (toolkit,) = (process for process in self._left() if MAIN in words_of(process))
        toolkit.send_signal(signal.SIGTERM)
        until(lambda: not self._left(), lambda: f"{self._left()}\n{self.log.read_text()}", timeout_s=KILLED_AFTER_S)
        until(lambda: "the toolkit's status: 0" in self.log.read_text(), self.log.read_text)

    def close(self) -> None:
        self.outer.kill()
        self.outer.communicate(timeout=GUARD_S)


def words_of(process: psutil.Process) -> list[str]:
    """Its command line, [] if it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


Begin = Callable[[dict[str, str], dict[str, str]], Container]


@pytest.fixture(params=["here", "TorchServe"])
def begin(
    request: pytest.FixtureRequest, client_python: Callable[[str], Path], client_env: dict[str, str], tmp_path: Path
) -> Iterator[Begin]:
    """Starts the toolkit with scripts by the names of their models, and with variables."""
    theirs = request.param == "TorchServe"
    if theirs and shutil.which("java") is None:
        pytest.skip("TorchServe needs Java")
    if theirs and (SUITE_PACKAGES / "ts").exists():
        pytest.skip(
            "TorchServe gets torch from this environment, whose package ts must not be beside it: pip install -e"
        )
    python = client_python("torchserve" if theirs else "sagemaker")
    first, *more = until(four_in_a_row)
    ports = {"SAGEMAKER_SAFE_PORT_RANGE": f"{first}-{more[-1]}"}
    if theirs:
        names = ("TS_GRPC_INFERENCE_PORT", "TS_GRPC_MANAGEMENT_PORT", "TS_INITIAL_WORKER_PORT")
        ports = dict(zip(names, map(str, more), strict=True)) | {"TS_METRICS_ADDRESS": f"http://127.0.0.1:{first}"}
    running = []

    def start(scripts: dict[str, str], variables: dict[str, str]) -> Container:
        for name, script in scripts.items():
            folder = tmp_path / "ml" / name
            (folder / "code").mkdir(parents=True)
            torch.jit.script(Halves()).save(str(folder / "model.pth"))
            if script:
                (folder / "code" / "inference.py").write_text(script)
        env = {**client_env, **ports, **variables}
        client = python.parent.parent / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
        mine = (python, SUITE_PACKAGES) if theirs else (Path(sys.executable), client / "site-packages")
        running.append(Container(tmp_path, *mine, env))
        return running[-1]

    yield start
    for container in running:
        container.close()


def four_in_a_row() -> list[int]:
    ports = [free_port() for _ in range(4)]
    return ports if ports[-1] - ports[0] == 3 else []


@pytest.fixture
def expected(begin: Begin, request: pytest.FixtureRequest) -> Callable[[Call], Call]:
    theirs = "TorchServe" in request.node.name
    return lambda call: call._replace(**call.theirs) if theirs else call


def test_one_model(begin: Begin, expected: Callable[[Call], Call]) -> None:
    limits = {"BATCH_SIZE": 2, "MAX_BATCH_DELAY": 50, "MIN_WORKERS": 1, "MAX_WORKERS": 2, "RESPONSE_TIMEOUT": 90}
    container = begin({"model": MODEL_FN}, {f"SAGEMAKER_TS_{name}": str(value) for name, value in limits.items()})
    for call in SINGLE:
        assert container.ask(call) == expected(call)
    many = [Call("POST", INVOKE, f"[{2 * number}]".encode(), kinds(JSON), f"[{number}.0]") for number in range(20)]
    with ThreadPoolExecutor(8) as pool:
        # The toolkit sets the content type of a batch's first answer only.
        assert [(one.status, one.answer) for one in pool.map(container.ask, many)] == [
            (200, one.answer) for one in many
        ]
    found = container.describe("model")
    names = ("batchSize", "maxBatchDelay", "minWorkers", "maxWorkers", "responseTimeout")
    assert [found[name] for name in names] == list(limits.values())
    container.terminate()


def test_several_models(begin: Begin, expected: Callable[[Call], Call]) -> None:
    # The toolkit's file for several models lacks the line break after enable_model_api=true: without the variable, both
    # servers refuse to register.
    variables = {"SAGEMAKER_MULTI_MODEL": "true", "TS_ENABLE_MODEL_API": "true"}
    container = begin({"models/plain": "", "models/steps": STEPS, "models/whole": TRANSFORM}, variables)
    for call in SEVERAL:
        assert container.ask(call) == expected(call)
    container.terminate()
