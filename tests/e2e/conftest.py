"""A real server with real workers on free ports, and real clients."""

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx._config
import httpx._transports.default
import psutil
import pytest

import ts.version
from redis_server import Redis
from support import GUARD_S, http_call
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
    """Until the session's end, which ends the servers' before the forkservers'."""
    _templates.insert(0, template)
    return template


def pytest_collection_finish(session: pytest.Session) -> None:
    """Processes side by side share the usual templates, which begin to import before the first server is started."""
    if any(ARCHIVES.parent in item.path.parents for item in session.items):
        server_template()
        if session.config.getoption("--processes") > 1:
            server_template((), PRELOADED_WITH_TORCH)


def pytest_sessionfinish() -> None:
    for template in _templates:
        template.close()


@pytest.fixture(scope="session", autouse=True)
def authorities_are_read_once() -> Iterator[None]:
    """httpx reads all certificate authorities for each client, and each call without one makes a client: 40 ms of
    computing for a request that takes two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx._transports.default, "create_ssl_context", functools.cache(httpx.create_ssl_context))
        yield


class Serving:
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
        self.lines: list[str] = []
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
        self.process: Program | subprocess.Popen[str]
        others = [name for name in more_env if name.startswith("PYTHON") and not (preloaded and name == "PYTHONPATH")]
        if executed or instead or others:
            command = instead or [*COMMAND, *words]
            self.process = subprocess.Popen(
                command, cwd=directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        else:
            template = server_template(tuple(more_env.items()), preloaded) if preloaded else server_template()
            self.process = template.start(words, cwd=directory, env=env, stderr=subprocess.STDOUT)
        self._started = self._ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._started |= "Model server started." in line
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_started(self) -> Serving:
        """Returns when it has printed its start message and its addresses."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or (self._started and self.port("http_management")), GUARD_S)
        assert self._started and self.port("http_management"), self.log
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

    def wait_for_log(self, text: str, count: int = 1, timeout_s: float = GUARD_S) -> None:
        """Returns when `text` has been logged `count` times."""
        with self._changed:
            found = self._changed.wait_for(lambda: sum(text in line for line in self.lines) >= count, timeout_s)
        assert found, f"{text!r} was not logged:\n{self.log}"

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def port(self, name: str) -> int:
        match = re.search(rf"{name} listens on \S+:(\d+)", self.log)
        return int(match[1]) if match else 0

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

    # --- its end

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


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
#: The names of this machine in certificates.
NAMES = "subjectAltName=IP:127.0.0.1,IP:::1,DNS:localhost"


def issue(folder: Path, name: str, days: int = 60) -> None:
    """`name`.key and `name`.crt for this machine, signed by the folder's authority; negative days: expired."""
    openssl(folder, "req", *KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
    (folder / "extensions").write_text(f"{NAMES}\n")
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "extensions", "-days", str(days))
    openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.crt")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority (`ca`), `server` and `client`, which it has signed, and `own`, which signed itself."""
    folder = tmp_path_factory.mktemp("certificates")
    openssl(
        folder, "req", "-x509", *KEY, "-subj", "/CN=authority", "-days", "60", "-keyout", "ca.key", "-out", "ca.crt"
    )
    own = ("-subj", "/CN=localhost", "-addext", NAMES, "-days", "60", "-keyout", "own.key", "-out", "own.crt")
    openssl(folder, "req", "-x509", *KEY, *own)
    for name in ("server", "client"):
        issue(folder, name)
    return folder


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


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A model store with the test's models as directories."""
    path = tmp_path / "store"
    path.mkdir()
    for archive in sorted(ARCHIVES.iterdir()):
        write_model(path, archive.name, archive / "handler.py")
    return path


@pytest.fixture
def write(store: Path) -> Callable[..., str]:
    """`write(name, handler's file or text, version=, config=, directory=)` adds a model to the store."""
    return lambda name, source, **more: write_model(store, name, source, **more)


@pytest.fixture(scope="session")
def model_writer() -> Callable[..., str]:
    """`model_writer(store, name, source, config=, …)`, for tests with a store of their own."""
    return write_model


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    found = Redis(tmp_path)
    yield found
    found.end()


@pytest.fixture(scope="session")
def probe_handler() -> Path:
    return ARCHIVES / "probe" / "handler.py"


@pytest.fixture(scope="session")
def write_to() -> Callable[..., str]:
    """`write_to(store, name, handler's file or text, …)`: `write` for a store of the test's own."""
    return write_model


@pytest.fixture(scope="session")
def serving() -> type[Serving]:
    """For tests that start a server of their own: `serving(directory, store, settings, arguments)`."""
    return Serving


@pytest.fixture(scope="session")
def torchserve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`torchserve(*words)`: the command with these words, which start no server, forked like a server. `env`: its
    environment, this one's by default; `code`: the exit status that it must have, any by default."""
    file = tmp_path_factory.mktemp("torchserve") / "stderr.txt"

    def run(
        *words: str, env: Mapping[str, str] | None = None, code: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        with file.open("w+") as stderr, server_template().start(words, env=env, stderr=stderr.fileno()) as program:
            done = program.stdout.read(), program.wait(GUARD_S)
            stderr.seek(0)
            found = subprocess.CompletedProcess(words, done[1], done[0], stderr.read())
        assert code is None or found.returncode == code, found
        return found

    return run


@pytest.fixture(scope="session")
def client_command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`client_command(directory, *words, **variables)`: `torchserve` with these words, which start no server, forked
    like a server; standard error is in its output."""

    def run(directory: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("TS_", "TORCHSERVE_"))}
        asked = server_template().start(words, cwd=directory, env=env | variables, stderr=subprocess.STDOUT)
        with asked as program:
            printed = program.stdout.read()
            return subprocess.CompletedProcess(words, program.wait(), printed)

    return run


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One server with the model `probe` for tests that leave it as they found it."""
    directory = tmp_path_factory.mktemp("shared")
    store = directory / "store"
    store.mkdir()
    write_model(store, "probe", ARCHIVES / "probe" / "handler.py")
    write_model(store, "generating", ARCHIVES / "generating" / "handler.py", config="batchSize: 4\n")
    with Serving(directory, store, {}, ["--ncs"]) as server:
        server.register("probe")
        yield server


@pytest.fixture(scope="session")
def server_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[Serving]]:
    """`with server_of({name: (handler's file or text, config)}, **settings) as server:` a running server that has
    these models, each with a worker."""

    @contextmanager
    def running(models: Mapping[str, tuple[Path | str, str]], **settings: object) -> Iterator[Serving]:
        directory = tmp_path_factory.mktemp("server")
        store = directory / "store"
        store.mkdir()
        for name, (source, config) in models.items():
            write_model(store, name, source, config=config)
        with Serving(directory, store, settings, ["--ncs"]) as server:
            for name in models:
                server.register(name)
            yield server

    return running


Start = Callable[..., Serving]


@pytest.fixture
def start(tmp_path: Path, store: Path) -> Iterator[Start]:
    """Starts servers, the `executed` ones in a new interpreter; at the end they are stopped, and nothing of them may be
    left."""
    servers: list[Serving] = []

    def begin(*arguments: str, wait: bool = True, executed: bool = False, **settings: object) -> Serving:
        if "--ncs" not in arguments and "snapshots" not in settings:
            arguments = (*arguments, "--ncs")
        settings.pop("snapshots", None)
        server = Serving(tmp_path, store, settings, list(arguments), executed=executed)
        servers.append(server)
        return server.wait_started() if wait else server

    yield begin
    for server in servers:
        processes = server.processes()
        try:
            assert server.terminate() in (0, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL, 1), server.log
        finally:
            server.process.kill()
            _, alive = psutil.wait_procs(processes, timeout=GUARD_S)
        assert not alive, f"left behind: {alive}"
