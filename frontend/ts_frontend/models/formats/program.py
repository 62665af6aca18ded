"""Models that are programs, scripts and manifests of platforms: programs that start an aiSSEMBLE or KServe server
(docs/aissemble.md), run up to that start to learn their models; a manifest of KServe's InferenceGraph, a YAML file
whose steps are models of this server; a folder with SageMaker's `code/inference.py`, MLflow's folder with `MLmodel`,
and Azure's `score.py` with `init` and `run`, which built-in handlers run (docs/platforms.md)."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import yaml

from ts_frontend.config.files import read_text
from ts_frontend.config.foreign import kserve
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import InvalidArchive, InvalidArgument
from ts_frontend.graphs.inference_graph import KIND, inference_graph
from ts_frontend.models.archive import CONFIG_FILE, Archive, parse_config, read_config
from ts_frontend.models.formats.format import ModelFiles, ModelFormat
from ts_frontend.models.inspection import may_need_torch, starts_a_server
from ts_frontend.workers.launchers import run_tool

#: The file that makes a folder a program, when it shows no other format's sign.
FILE = "main.py"
SUFFIX = ".py"
SHOWN_LINES = 15
SHOWN_CHARS_MAX = 4000
#: Blanks and "" leave sys.path, so that a directory named `ts` where the program runs isn't imported instead of ours.
_CODE = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from ts.compat.program import list_models; list_models(sys.argv[1:]) # torchserve"
)


class ProgramFormat(ModelFormat):
    """A Python file, or a folder with a main.py that imports one of their servers. `env`: a worker's environment;
    `work_dir`: for the model lists that programs write when they are run."""

    adapter = "program"
    several = True

    def __init__(self, config: ServerConfig, env: Mapping[str, str], work_dir: Path) -> None:
        self._config, self._env, self._work_dir = config, env, work_dir

    def matches(self, path: Path) -> bool:
        if path.suffix == SUFFIX and path.is_file():
            return True
        return starts_a_server(path / FILE)

    def claims(self, path: Path) -> bool:
        """Any Python file may be run as a program; one that imports neither server may be a handler as well."""
        return starts_a_server(path) if path.is_file() else self.matches(path)

    def open(self, files: ModelFiles) -> list[Archive]:
        """The archive has no name: the program defines its models' names."""
        itself = files.path.suffix == SUFFIX and files.path.parent == files.directory
        program = files.path if itself else files.directory / FILE
        folder = program.parent
        archive = Archive(
            dir=files.directory,
            manifest={"runtime": "python", "model": {"handler": program.name}},
            handler=program.name,
            requirements_file="requirements.txt" if (folder / "requirements.txt").is_file() else None,
            adapter=self.adapter,
            adapter_settings={
                "program": str(program),
                "module": "",
                "argv": list(files.argv),
                "path": [str(folder)],
                "directory": str(files.cwd or folder),
                "stand_in": True,
                "torch": may_need_torch(folder, program.name),
            },
        )
        return [archive]

    def prepared(self, archive: Archive) -> Archive:
        """The archive with the setting of the request log: from its options, the environment or oip.properties."""
        settings = archive.adapter_settings
        if "latency_logging" in settings:
            return archive
        environ = self._config.environment
        found = kserve.value_of("enable_latency_logging", settings["argv"], environ, kserve.read(environ))
        return replace(archive, adapter_settings=settings | {"latency_logging": bool(found)})

    async def named(self, archive: Archive) -> list[Archive]:
        """The archive under the name of each model of the program, with whether the program imports torch before its
        server's start. InvalidArchive, with the end of the program's output, when it doesn't start a server."""
        if archive.name is not None:
            return [archive]
        settings, last = archive.adapter_settings, deque[str](maxlen=SHOWN_LINES)
        timeout_s = self._config.default_startup_timeout
        with tempfile.TemporaryDirectory(dir=self._work_dir, prefix="asked-") as scratch:
            result = Path(scratch, "models.json")
            argv = [sys.executable, "-c", _CODE, str(result), settings["program"], *settings["argv"]]
            status = await run_tool(argv, Path(settings["directory"]), timeout_s, last.append, env=self._env)
            if status is None:
                last.append(f"it took longer than {timeout_s:g} s (default_startup_timeout) and was ended")
            elif found := await asyncio.to_thread(_read, result):
                told = json.loads(found)
                settings = settings | {"torch": told["torch"]}
                names = _checked(told["models"], settings["program"])
                return [replace(archive, name=name, adapter_settings=settings) for name in names]
        text = "\n".join(last)[-SHOWN_CHARS_MAX:]
        raise InvalidArchive(f"{settings['program']} ended before it started its server: {text or f'status {status}'}")


def _read(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


def _checked(names: list[str], program: str) -> list[str]:
    if not names:
        raise InvalidArchive(f"{program} starts its server without a model")
    return names


CODE, INFERENCE, MLMODEL = "code", "inference.py", "MLmodel"
_SCRIPT_BYTES_MAX = 1 << 20
_FUNCTION = re.compile(r"^(?:async )?def (\w+)\(", re.MULTILINE)
_OF_SAGEMAKER = frozenset({"model_fn", "input_fn", "predict_fn", "output_fn", "transform_fn"})


class _Script(NamedTuple):
    handler: str
    requirements: Path


class ScriptFormat(ModelFormat):
    """`program`: the name of SageMaker's script (SAGEMAKER_PROGRAM). `handled`: the server has a handler for folders
    that name none (default_service_handler), such as AWS's toolkit, which gets them instead."""

    alone = True

    def __init__(self, program: str = "", handled: bool = False) -> None:
        self._program = f"{program.removesuffix('.py')}.py" if program else INFERENCE
        self._handled = handled

    def matches(self, path: Path) -> bool:
        return not self._handled and self._script(path) is not None

    def _script(self, path: Path) -> _Script | None:
        if path.is_file():
            if path.suffix == ".py" and _is_azures(path):
                return _Script("score_script", path.parent / "requirements.txt")
            return None
        for folder in (path / CODE, path):
            file = folder / self._program
            if file.is_file() and (folder.name == CODE or _OF_SAGEMAKER & _functions(file)):
                return _Script("inference_script", folder / "requirements.txt")
        if (path / MLMODEL).is_file():
            return _Script("mlflow_model", path / "requirements.txt")
        return None

    def open(self, files: ModelFiles) -> list[Archive]:
        place = files.path if files.path.is_file() and not files.owned else files.directory
        found = self._script(place)
        assert found is not None, place
        directory = files.directory
        configured = (directory / CONFIG_FILE).is_file()
        name = re.sub(r"[^\w.-]", "_", place.stem if place.is_file() else directory.name, flags=re.ASCII) or "model"
        own = {"modelFile": place.name} if place.is_file() else {}
        archive = Archive(
            dir=directory,
            name=name,
            manifest={"runtime": "python", "model": {"modelName": name, "handler": found.handler, **own}},
            handler=found.handler,
            model_file=own.get("modelFile"),
            requirements_file=str(found.requirements.relative_to(directory)) if found.requirements.is_file() else None,
            config_file=CONFIG_FILE if configured else None,
            config=read_config(files.path, directory / CONFIG_FILE) if configured else {},
        )
        return [archive]


def _is_azures(file: Path) -> bool:
    """Whether a Python file has init and run, and is neither a handler nor a program."""
    found = _functions(file)
    return {"init", "run"} <= found and "handle" not in found and not starts_a_server(file)


def _functions(file: Path) -> set[str]:
    try:
        return set(_FUNCTION.findall(read_text(file, _SCRIPT_BYTES_MAX)))
    except (OSError, UnicodeDecodeError):
        return set()


_BYTES_MAX = 1 << 20
_SUFFIXES = (".yaml", ".yml")


class InferenceGraphFormat(ModelFormat):
    def matches(self, path: Path) -> bool:
        return path.suffix in _SUFFIXES and path.is_file() and f"kind: {KIND}" in read_text(path, _BYTES_MAX)

    def open(self, files: ModelFiles) -> list[Archive]:
        path = files.path
        try:
            graph = inference_graph(parse_config(read_text(path, _BYTES_MAX)), path.name)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"{path.name} is not usable as YAML: {error}") from None
        name = graph.name or path.stem
        return [
            Archive(
                dir=path.parent, name=name, manifest={"model": {"modelName": name, "modelVersion": "1.0"}}, graph=graph
            )
        ]
