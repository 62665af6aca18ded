"""Servers with real workers on free ports, and what their tests share: models, certificates, messages.

None of it is in conftest.py, which pytest imports under a name of its own: a test's import would make a second copy,
with templates that nobody ends.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx._config
import httpx._transports.default
import psutil

import ts.version
from support import GUARD_S, http_call, openssl
from ts.protocol import open_inference_pb2 as tensors
from ts.runtime.forkserver import MORE_PRELOADED, PRELOADED, PRELOADED_WITH_TORCH
from ts.runtime.process import THREAD_VARIABLES
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub
from ts_frontend.protos.management_pb2 import (
    DescribeModelRequest,
    RegisterModelRequest,
    ScaleWorkerRequest,
    UnregisterModelRequest,
)
from ts_frontend.protos.management_pb2_grpc import ManagementAPIsServiceStub
from warm_start import FORKSERVER, Program, Template, family, forkservers

ARCHIVES = Path(__file__).parent / "archives"
COMMAND = (sys.executable, "-c", "import sys; from ts_frontend.cli.main import main; sys.exit(main())")

# Calls of httpx that name no limit have 5 s, which a busy machine may take for any of them.
for each in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, each, GUARD_S)

#: What workers with Hugging Face's models import: seven seconds of computing for each of them.
TRANSFORMERS = ("torch", "transformers.generation.utils", "transformers.models.auto.modeling_auto")

#: Variables, as pairs.
Pairs = tuple[tuple[str, str], ...]


@functools.cache
def forkserver_template(more: Pairs = (), modules: tuple[str, ...] = ()) -> Template:
    """The process that the servers' forkservers are forked from. It has NumPy too, which takes six times as long as all
    else that a worker of a model with tensors does before it is ready."""
    package_root = str(Path(ts.version.__file__).parents[1])
    environ = {**os.environ, **dict(more)}
    path = os.pathsep.join(part for part in (package_root, environ.get("PYTHONPATH", "")) if part)
    env = {**environ, "PYTHONPATH": path, **dict.fromkeys(THREAD_VARIABLES, "1")}  # forked with a single thread
    return _kept(Template(f"{FORKSERVER}:main", *PRELOADED, *MORE_PRELOADED, *modules, env=env, is_main=True))


@functools.cache
def server_template(more: Pairs = (), modules: tuple[str, ...] = ()) -> Template:
    """The process that servers are forked from. `more`: variables at the import of all modules, among them `modules`,
    which the servers' workers have imported."""
    template = Template(
        "ts_frontend.cli.main:main",
        "ts_frontend.server",
        "grpc.aio",
        "uvloop",
        "encodings.idna",
        "encodings.utf_8_sig",
        "ts_frontend.grpc.call",
        "ts_frontend.listeners.serving",
        env={**os.environ, **dict(more)},
        forkservers=forkserver_template(more, modules) if sys.platform == "linux" else None,
    )
    return _kept(template)


_templates: list[Template] = []


def _kept(template: Template) -> Template:
    """Until `close_templates`, which ends the servers' before the forkservers'."""
    _templates.insert(0, template)
    return template


def close_templates() -> None:
    for template in _templates:
        template.close()


class LoggedProcess:
    """A running process whose output is read as it comes. `log`: its output so far."""

    process: Program | subprocess.Popen[str]

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()

    def follow(self, process: Program | subprocess.Popen[str]) -> None:
        self.process = process
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def count_of(self, text: str) -> int:
        return sum(text in line for line in self.lines)

    def wait_for_log(self, text: str, count: int = 1, timeout_s: float = GUARD_S) -> None:
        """Returns when `text` has been logged `count` times, which has to be before the output ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self.count_of(text) >= count, timeout_s)
        assert self.count_of(text) >= count, f"{text!r} was not logged:\n{self.log}"

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def port(self, name: str) -> int:
        match = re.search(rf"{name} listens on \S+:(\d+)", self.log)
        return int(match[1]) if match else 0

    def terminate(self) -> int:
        """SIGTERM; the exit status once it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        status = self.process.wait(GUARD_S)
        self._reader.join(GUARD_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


class Serving(LoggedProcess):
    """A running server. `log`: its output so far. `settings` may have `env`, further variables, `command`, which
    replaces `torchserve` and finds a config.properties, and `preloaded`, modules that its workers have imported: torch,
    if they preload it. A server without a command or variables of the interpreter, or with `preloaded` and a
    PYTHONPATH, is forked with its modules imported (warm_start.py), unless it is `executed`."""

    def __init__(
        self,
        directory: Path,
        store: Path | None,
        settings: dict[str, object],
        arguments: list[str],
        *,
        executed: bool = False,
    ) -> None:
        self.directory = directory
        self.store = store
        super().__init__()
        more_env: dict[str, str] = dict(settings.pop("env", {}))  # type: ignore[call-overload]
        instead: Any = settings.pop("command", None)
        with_torch = PRELOADED_WITH_TORCH if settings.get("preload_torch") == "true" else ()
        preloaded: Any = settings.pop("preloaded", with_torch)
        config = {
            "grpc_inference_port": 0,
            "grpc_management_port": 0,
            "inference_address": "http://127.0.0.1:0",
            "management_address": "http://127.0.0.1:0",
            "metrics_address": "http://127.0.0.1:0",
            "temp_dir": directory / "tmp",
            "log_location": directory / "logs",
            "number_of_gpu": 0,
            "preload_torch": "false",  # 2 s of computing a server; a model that needs torch imports it
        } | settings
        (directory / "tmp").mkdir(exist_ok=True)
        file = directory / "config.properties"
        file.write_text("".join(f"{key}={value}\n" for key, value in config.items()))
        words = ["--start", "--foreground", "--ts-config", str(file)]
        words += [*(["--model-store", str(store)] if store else []), *arguments]
        env = {key: value for key, value in os.environ.items() if not key.startswith("TS_")} | {
            "TMPDIR": str(directory / "tmp")
        }
        env |= more_env
        others = [name for name in more_env if name.startswith("PYTHON") and not (preloaded and name == "PYTHONPATH")]
        if executed or instead or others:
            command = instead or [*COMMAND, *words]
            piped: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            self.follow(subprocess.Popen(command, cwd=directory, env=env, **piped))
        else:
            template = server_template(tuple(more_env.items()), preloaded) if preloaded else server_template()
            self.follow(template.start(words, cwd=directory, env=env, stderr=subprocess.STDOUT))

    def wait_started(self) -> Serving:
        """Returns when it has printed its start message and its addresses."""
        self.wait_for_log("Model server started.")
        self.wait_for_log("http_management listens on")
        return self

    def __enter__(self) -> Serving:
        """Waits for its start; its end comes with the end of the block."""
        try:
            return self.wait_started()
        except BaseException:
            self.terminate()
            raise

    def __exit__(self, *_: object) -> None:
        self.terminate()

    @property
    def inference(self) -> str:
        return f"127.0.0.1:{self.port('grpc_inference')}"

    @property
    def management(self) -> str:
        return f"127.0.0.1:{self.port('grpc_management')}"

    @property
    def http(self) -> str:
        """The address of the HTTP inference API."""
        return f"http://127.0.0.1:{self.port('http_inference')}"

    @property
    def http_management(self) -> str:
        return f"http://127.0.0.1:{self.port('http_management')}"

    def processes(self) -> list[psutil.Process]:
        """Its forkserver, its workers, and whatever else it has started and is running."""
        return family(self.process.pid)

    def forkservers(self) -> set[int]:
        """The processes that its workers are forked from."""
        return forkservers(self.process.pid)

    # --- calls

    def predict(self, model: str, value: object, *, version: str = "", timeout: float = GUARD_S) -> bytes:
        with grpc.insecure_channel(self.inference) as channel:
            request = request_for(model, value, version)
            return bytes(InferenceAPIsServiceStub(channel).Predictions(request, timeout=timeout).prediction)

    def stream(self, model: str, value: object) -> list[bytes]:
        with grpc.insecure_channel(self.inference) as channel:
            stub = InferenceAPIsServiceStub(channel)
            return [answer.prediction for answer in stub.StreamPredictions(request_for(model, value), timeout=GUARD_S)]

    def manage(self, method: str, request: Any) -> str:
        with grpc.insecure_channel(self.management) as channel:
            return str(getattr(ManagementAPIsServiceStub(channel), method)(request, timeout=GUARD_S).msg)

    def register(self, url: str, **more: Any) -> str:
        more = {"initial_workers": 1, "synchronous": True} | more
        return self.manage("RegisterModel", RegisterModelRequest(url=url, **more))

    def scale(self, model: str, count: int, **more: Any) -> str:
        request = ScaleWorkerRequest(model_name=model, min_worker=count, **({"synchronous": True} | more))
        return self.manage("ScaleWorker", request)

    def unregister(self, model: str, version: str = "") -> str:
        return self.manage("UnregisterModel", UnregisterModelRequest(model_name=model, model_version=version))

    def describe(self, model: str, version: str = "") -> dict[str, Any]:
        request = DescribeModelRequest(model_name=model, model_version=version)
        return dict(json.loads(self.manage("DescribeModel", request))[0])

    def worker_pids(self, model: str) -> list[int]:
        return [worker["pid"] for worker in self.describe(model)["workers"] if worker["status"] == "READY"]

    def scraped(self) -> str:
        """The page of the metrics API."""
        self.wait_for_log("http_metrics listens")
        return http_call(self.port("http_metrics"), "GET", "/metrics").body.decode()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels; 0 when there is none."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [line for line in self.scraped().splitlines() if line.startswith(f"{name}{{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(one in line for one in wanted))


def text_request(model: str, text: str | bytes, name: str = "data", **more: Any) -> tensors.ModelInferRequest:
    """A raw tensor of one text. `more`: of the request."""
    data = text.encode() if isinstance(text, str) else text
    tensor = tensors.ModelInferRequest.InferInputTensor(name=name, datatype="BYTES", shape=[1])
    raw = len(data).to_bytes(4, "little") + data
    return tensors.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[raw], **more)


def text_of(answer: tensors.ModelInferResponse) -> str:
    """The only text of an answer, raw or typed."""
    (tensor,) = answer.outputs
    (raw,) = answer.raw_output_contents or [b"0000" + tensor.contents.bytes_contents[0]]
    return raw[4:].decode()


KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


#: The names of this machine in certificates.
NAMES = "subjectAltName=IP:127.0.0.1,IP:::1,DNS:localhost"


def issue(folder: Path, name: str, days: int = 60) -> None:
    """`name`.key and `name`.crt for this machine, signed by the folder's authority; negative days: expired."""
    openssl(folder, "req", *KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
    (folder / "extensions").write_text(f"{NAMES}\n")
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "extensions", "-days", str(days))
    openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.crt")


def request_for(model: str, value: object, version: str = "") -> PredictionsRequest:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return PredictionsRequest(model_name=model, model_version=version, input={"data": data})


def write_model(
    store: Path, name: str, source: Path | str, *, version: str = "1.0", config: str = "", directory: str = ""
) -> str:
    """Makes a directory model in the store from a handler's file or text; its name there."""
    target = store / (directory or name)
    (target / "MAR-INF").mkdir(parents=True)
    if isinstance(source, Path):
        shutil.copy(source, target / "handler.py")
    else:
        (target / "handler.py").write_text(source)
    model = {"modelName": name, "handler": "handler.py", "modelVersion": version}
    if config:
        (target / "model-config.yaml").write_text(config)
        model["configFile"] = "model-config.yaml"
    (target / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"runtime": "python", "model": model}))
    return target.name


def probe_store(directory: Path) -> Path:
    """A model store with the model `probe` alone."""
    write_model(directory / "store", "probe", ARCHIVES / "probe" / "handler.py")
    return directory / "store"


Start = Callable[..., Serving]
