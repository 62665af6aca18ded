"""The models of hosting platforms: a folder with SageMaker's `code/inference.py`, MLflow's folder with `MLmodel`, and
Azure's `score.py` with `init` and `run`. Built-in handlers run them (docs/platforms.md)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ts_frontend.config.files import read_text
from ts_frontend.models.archive import CONFIG_FILE, Archive, read_config
from ts_frontend.models.formats.format import ModelFiles, ModelFormat
from ts_frontend.models.handler_imports import starts_a_server

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
