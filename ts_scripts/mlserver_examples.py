"""Serves the unchanged example folders of MLServer's documentation with MLServer and with this server, sends the same
requests to both, and compares the answers.

Usage: python ts_scripts/mlserver_examples.py EXAMPLES [NAME...]

EXAMPLES is the folder docs-gb/examples of MLServer's repository. The interpreter has to have this project, mlserver and
the runtimes of the examples (`pip install mlserver mlserver-sklearn mlserver-xgboost …`). An example whose runtime is
not installed is named and left out. Exits 1 if an answer differs.

Both get requests for the metadata, then each request over HTTP and over gRPC, and the streams of an example. The
deviations in docs/mlserver.md don't count: generated ids, versions of models that name none and those of metadata,
headers of events, and a text inside a list.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc

START_S_MAX, ANSWER_S_MAX = 180.0, 60.0
OURS = "import sys; from ts_frontend.cli.main import main; sys.exit(main())"
THEIRS = "from mlserver.cli import main; main()"
TEXT = "hello world \N{GRINNING FACE}"


class Case(NamedTuple):
    """An example. `modules`: the imports of its runtime; `requests`: the model, its version, and the request or the
    name of its file; `streams`: the requests go to `infer_stream`; `made`: a file that the example's own program has
    to make first."""

    folder: str
    modules: tuple[str, ...]
    requests: tuple[tuple[str, str, Any], ...]
    streams: bool = False
    made: str = ""


def tensor(name: str, shape: Sequence[int], datatype: str, data: Any, content_type: str = "") -> dict[str, Any]:
    parameters = {"parameters": {"content_type": content_type}} if content_type else {}
    return {"name": name, "shape": list(shape), "datatype": datatype, "data": data, **parameters}


def asking(*tensors: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"inputs": list(tensors), **more}


def rows(name: str, *values: Sequence[float]) -> dict[str, Any]:
    return asking(tensor(name, (len(values), len(values[0])), "FP32", [list(one) for one in values]))


DIGIT = asking(tensor("predict", (1, 64), "FP32", [float(index % 17) for index in range(64)]))
#: Two mushrooms with 126 features each.
MUSHROOMS = rows("predict", [float(index % 3 == 0) for index in range(126)], [0.0] * 126)
#: A wine of the training data, by column.
WINE = (
    ("fixed acidity", 7.4),
    ("volatile acidity", 0.7),
    ("citric acid", 0.0),
    ("residual sugar", 1.9),
    ("chlorides", 0.076),
    ("free sulfur dioxide", 11.0),
    ("total sulfur dioxide", 34.0),
    ("density", 0.9978),
    ("pH", 3.51),
    ("sulphates", 0.56),
    ("alcohol", 9.4),
)
SAID = json.dumps({"name": "Foo Bar", "message": "Hello"})
CASES = (
    Case(
        "sklearn",
        ("mlserver_sklearn",),
        (("mnist-svm", "v0.1.0", DIGIT), ("mnist-svm", "", DIGIT)),
    ),
    Case("xgboost", ("mlserver_xgboost",), (("mushroom-xgboost", "v0.1.0", MUSHROOMS),)),
    Case(
        "lightgbm",
        ("mlserver_lightgbm",),
        (("iris-lgb", "v0.1.0", rows("predict-prob", [6.1, 2.8, 4.7, 1.2], [5.7, 3.8, 1.7, 0.3])),),
    ),
    Case("catboost", ("mlserver_catboost",), (("catboost", "v0.1.0", rows("predict-prob", list(range(10)))),)),
    Case(
        "custom",
        ("numpyro",),
        (("numpyro-divorce", "", asking(tensor("marriage", (1,), "FP64", [28.0], "np"))),),
    ),
    Case(
        "custom-json",
        (),
        (("json-hello-world", "", asking(tensor("echo_request", (len(SAID),), "BYTES", [SAID], "str"))),),
    ),
    Case(
        "content-type",
        ("PIL",),
        tuple(
            ("content-type-example", "", request)
            for request in (
                asking(
                    tensor("parameters-np", (2, 2), "INT32", [1, 2, 3, 4], "np"),
                    tensor("parameters-str", (1,), "BYTES", TEXT, "str"),
                ),
                asking(
                    tensor("metadata-np", (2, 2), "INT32", [1, 2, 3, 4]),
                    tensor("metadata-str", (11,), "BYTES", TEXT),
                ),
                asking(tensor("image-int32", (8, 8), "INT32", [1, 0] * 32, "img")),
                asking(tensor("image-bytes", (8, 8), "BYTES", "10" * 32, "img")),
                asking(
                    tensor("parameters-np", (2, 2), "INT32", [1, 2, 3, 4], "np"),
                    tensor("parameters-str", (2, 11), "BYTES", [TEXT, "bye bye"], "str"),
                    parameters={"content_type": "pd"},
                ),
            )
        ),
    ),
    Case(
        "mlflow",
        ("mlserver_mlflow",),
        tuple(
            ("wine-classifier", "", asking(*(tensor(name, shape, datatype, [value]) for name, value in WINE), **more))
            for shape, datatype, more in (
                ((1,), "FP32", {"parameters": {"content_type": "pd"}}),
                ((1, 1), "FP64", {"parameters": {"content_type": "pd"}}),
                ((1,), "FP32", {}),
            )
        ),
        made="mlruns",
    ),
    Case("streaming", (), (("text-model", "", "generate-request.json"),), streams=True),
    Case(
        "model-repository",
        ("mlserver_sklearn", "mlserver_xgboost"),
        (("mnist-svm", "", DIGIT), ("mushroom-xgboost", "v0.1.0", MUSHROOMS)),
    ),
    Case(
        "mms",
        ("mlserver_sklearn", "mlserver_xgboost"),
        (("mnist-svm", "v0.1.0", DIGIT), ("mushroom-xgboost", "", MUSHROOMS)),
    ),
)


# --- the two servers


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


class Server:
    """A server on the ports `http` and `grpc` of the loopback address."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.http, self.grpc, metrics = free_ports(3)
        self.log = folder.parent / "log"
        ports = {"HTTP_PORT": self.http, "GRPC_PORT": self.grpc, "METRICS_PORT": metrics}
        env = {**os.environ, "MLSERVER_HOST": "127.0.0.1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(folder.parent)}
        env |= {f"MLSERVER_{name}": str(port) for name, port in ports.items()}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command, str(folder)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=folder.parent,
                start_new_session=True,
            )

    def wait(self, model: str) -> None:
        """Waits until the model is ready. Raises TimeoutError with the end of the log."""
        end_s = time.monotonic() + START_S_MAX
        while time.monotonic() < end_s and self.process.poll() is None:
            with contextlib.suppress(OSError):
                if self.get(f"/v2/models/{model}/ready")["status"] == 200:
                    return
            time.sleep(0.2)
        raise TimeoutError(f"{model} was not ready: {self.log.read_text(errors='replace')[-3000:]}")

    def get(self, path: str, body: Any = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S_MAX) as answer:
                return {"status": answer.status, "body": answer.read().decode()}
        except urllib.error.HTTPError as error:
            return {"status": error.code, "body": error.read().decode()}

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def serving(command: Sequence[str], source: Path, models: Sequence[str]) -> Iterator[Server]:
    """Serves a copy of the models, because MLServer may write into their folder."""
    with tempfile.TemporaryDirectory(prefix="mlserver-example-") as directory:
        folder = Path(directory) / source.name
        shutil.copytree(source, folder)
        server = Server(command, folder)
        try:
            for model in models:
                server.wait(model)
            yield server
        finally:
            server.stop()


# --- questions


def answers(server: Server, case: Case, folder: Path) -> dict[str, Any]:
    """The answers by request."""
    found: dict[str, Any] = {}
    for number, (model, version, request) in enumerate(case.requests):
        path = f"/v2/models/{model}" + (f"/versions/{version}" if version else "")
        body = json.loads((folder / request).read_text()) if isinstance(request, str) else request
        found[f"{model} metadata"] = parsed(server.get(path))
        if case.streams:
            found[f"{model} {number} events"] = events(server.get(f"{path}/infer_stream", body))
        else:
            found[f"{model} {number} HTTP"] = parsed(server.get(f"{path}/infer", body))
            found[f"{model} {number} gRPC"] = over_grpc(server, model, version, body)
    return found


def parsed(answer: dict[str, Any]) -> dict[str, Any]:
    return {"status": answer["status"], "json": json.loads(answer["body"])}


def events(answer: dict[str, Any]) -> dict[str, Any]:
    pieces = re.findall(r"^data: (.*?)\r?$", answer["body"], re.MULTILINE)
    return {"status": answer["status"], "json": [json.loads(one) for one in pieces]}


def flat(data: Any) -> Iterator[Any]:
    if isinstance(data, list):
        for one in data:
            yield from flat(one)
    else:
        yield data


def over_grpc(server: Server, model: str, version: str, body: dict[str, Any]) -> dict[str, Any]:
    from mlserver import types
    from mlserver.grpc import converters, dataplane_pb2_grpc

    tensors = [
        {**one, "data": [value.encode() if isinstance(value, str) else value for value in flat(one["data"])]}
        for one in body["inputs"]
    ]
    request = types.InferenceRequest.model_validate({**body, "inputs": tensors})
    message = converters.ModelInferRequestConverter.from_types(request, model_name=model, model_version=version or None)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        try:
            answer = dataplane_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=ANSWER_S_MAX)
        except grpc.RpcError as error:
            return {"status": error.code().name, "json": None}
    return {
        "status": "OK",
        "json": json.loads(converters.ModelInferResponseConverter.to_types(answer).model_dump_json()),
    }


# --- comparing


def differences(theirs: Any, ours: Any, where: str = "") -> Iterator[str]:
    """The differences. A null or empty value equals a missing key, and all failures are equal."""
    if not where and not {theirs["status"], ours["status"]} & {200, "OK"}:
        return
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in sorted({*theirs, *ours}):
            left, right = theirs.get(key), ours.get(key)
            unnamed = key == "model_version" and not left
            if unnamed or key in ("id", "versions") or not (left or right) or only_headers(left):
                continue
            yield from differences(left, right, f"{where}.{key}")
    elif where.endswith(".data") and isinstance(theirs, str) and ours == [theirs]:
        return
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for index, (left, right) in enumerate(zip(theirs, ours, strict=True)):
            yield from differences(left, right, f"{where}[{index}]")
    elif isinstance(theirs, float) and isinstance(ours, (int, float)):
        if not math.isclose(theirs, ours, rel_tol=1e-6, abs_tol=1e-9):
            yield f"{where}: {theirs} there, {ours} here"
    elif theirs != ours:
        yield f"{where}: {theirs!r} there, {ours!r} here"


def only_headers(found: Any) -> bool:
    return isinstance(found, dict) and set(found) == {"headers"}


def compare(case: Case, folder: Path) -> list[str]:
    models = sorted({model for model, _, _ in case.requests})
    with serving(["-c", THEIRS, "start"], folder, models) as server:
        theirs = answers(server, case, folder)
    management, grpc_management = free_ports(2)
    ours_command = ["-c", OURS, "--start", "--foreground", "--profile", "mlserver"]
    ours_command += ["--set", f"management_address=http://127.0.0.1:{management}"]
    ours_command += ["--set", f"grpc_management_port={grpc_management}", "--model-store"]
    with serving(ours_command, folder, models) as server:
        ours = answers(server, case, folder)
    return [f"{name}{line}" for name in theirs for line in differences(theirs[name], ours[name])]


def main() -> None:
    parser = argparse.ArgumentParser(description="MLServer's example folders on both servers.")
    parser.add_argument("examples", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *(case.folder for case in CASES)])
    given = parser.parse_args()
    if importlib.util.find_spec("mlserver") is None:
        sys.exit("mlserver is not installed in this interpreter's environment: pip install mlserver")
    failed = False
    for case in CASES:
        if given.names and case.folder not in given.names:
            continue
        missing = [name for name in case.modules if importlib.util.find_spec(name) is None]
        if missing:
            print(f"{case.folder:20} left out: {', '.join(missing)} is not installed", flush=True)
            continue
        if case.made and not (given.examples / case.folder / case.made).exists():
            print(f"{case.folder:20} left out: its program hasn't made {case.made} yet", flush=True)
            continue
        try:
            found = compare(case, given.examples / case.folder)
        except (TimeoutError, OSError) as error:
            found = [str(error)]
        print(f"{case.folder:20} {'the same' if not found else 'DIFFERENT'}", flush=True)
        for line in found:
            print(f"    {line}")
        failed |= bool(found)
    sys.exit(failed)


if __name__ == "__main__":
    main()
