"""A model's directory in a Triton repository: which versions it has, and what each is as an archive. Blocking."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ts.protocol.model_config_pb2 import ModelConfig
from ts_frontend.errors import InvalidArchive, InvalidArgument, ModelNotFound
from ts_frontend.models import mlserver_model
from ts_frontend.models.archive import Archive
from ts_frontend.models.extraction import create_file, safe_parts
from ts_frontend.repository import config as configs

CONFIG_FILE = "config.pbtxt"
CONFIG_BYTES_MAX = 4 << 20
#: Of those that a request brings.
FILES_MAX = 1000
_VERSION = re.compile(r"[1-9][0-9]*")
_NAME = re.compile(r"[^/\\\0]+")


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A model as it lies there. `versions` are those that its policy asks for; `stamp` changes when its files do."""

    name: str
    path: Path
    config: ModelConfig
    backend: str
    versions: tuple[int, ...]
    stamp: tuple[tuple[str, int, int], ...]

    def archive(self, version: int, gpus: int) -> Archive:
        """One version, ready to be registered. `gpus`: how many there are to place workers on."""
        config, directory = self.config, self.path / str(version)
        return Archive(
            dir=directory,
            owned=False,
            name=self.name,
            version=str(version),
            manifest={"model": {"modelName": self.name, "modelVersion": str(version)}},
            handler=config.default_model_filename,
            config=configs.worker_settings(config, gpus),
            adapter="triton",
            adapter_settings=self._adapter_settings(directory, gpus),
            signature=configs.signature(config),
            ranking=configs.ranking(config),
            completed=partial(_completed, gpus),
            remembered=False,
        )

    def _adapter_settings(self, directory: Path, gpus: int) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "config": configs.as_json(configs.placed(self.config, gpus)),
            "model_file": str(directory / self.config.default_model_filename),
            "model_repository": str(self.path.parent),
            "labels": self._labels(),
        }

    def _labels(self) -> dict[str, list[str]]:
        """The texts of classes, by output: a line each. InvalidArgument for a file that isn't there."""
        files = {one.name: self.path / one.label_filename for one in self.config.output if one.label_filename}
        for file in files.values():
            if not file.resolve().is_relative_to(self.path.resolve()) or not file.is_file():
                raise InvalidArgument(f"label_filename: there is no {file} in the model's directory")
        return {name: _text(file).splitlines() for name, file in files.items()}


def _completed(gpus: int, archive: Archive, found: dict[str, Any]) -> Archive:
    """The archive with the configuration `found` in the place of its own. InvalidArgument."""
    config = configs.from_json(found, f"the configuration that model {archive.name!r} has completed")
    return replace(
        archive,
        config=configs.worker_settings(config, gpus),
        adapter_settings={**archive.adapter_settings, "config": configs.as_json(configs.placed(config, gpus))},
        signature=configs.signature(config),
    )


def names(repository: Path) -> list[str]:
    """The models of a repository: its directories, hidden ones left out."""
    return sorted(one.name for one in repository.iterdir() if one.is_dir() and not one.name.startswith("."))


def find(repositories: Sequence[Path], name: str) -> Path:
    """Where the model lies. ModelNotFound; InvalidArgument when several repositories have it, or for a bad name."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise InvalidArgument(f"{name!r} is no name of a model")
    found = [path / name for path in repositories if (path / name).is_dir()]
    if not found:
        raise ModelNotFound(name)
    if len(found) > 1:
        raise InvalidArgument(f"model {name!r} is in several repositories: {', '.join(map(str, found))}")
    return found[0]


def is_model(path: Path) -> bool:
    """Whether a directory from elsewhere is a model in this layout: it has a configuration or a version, and no sign
    of another. Raises OSError."""
    if not path.is_dir() or (path / "MAR-INF").exists() or (path / mlserver_model.FILE).exists():
        return False
    return (path / CONFIG_FILE).is_file() or bool(_versions(path))


def read(path: Path, config_text: str | None = None, name: str = "") -> ModelDirectory:
    """The model in the directory `path`, whose name it has unless `name` is given; `config_text` instead of its
    config.pbtxt. InvalidArgument, naming the file and what is wrong."""
    source = f"{path.name}/{CONFIG_FILE}" if config_text is None else "load parameter 'config'"
    text = _text(path / CONFIG_FILE) if config_text is None else config_text
    config = configs.parse(text, source)
    if name:
        config.name = ""  # of a directory from elsewhere the caller's name counts
    name = name or path.name
    config = configs.checked(config, name, source)
    versions = _versions(path)
    if not versions:
        raise InvalidArgument(f"model {name!r} has no version: there is no directory with a number in {path}")
    wanted = configs.chosen(config, versions)
    if not wanted:
        have = ", ".join(map(str, versions))
        raise InvalidArgument(f"model {name!r}: its version_policy takes none of the versions that are there: {have}")
    backend = configs.backend_of(config, source) or _backend(path / str(wanted[-1]))
    full = configs.completed(config, name, backend)
    for version in wanted:
        _check_file(path / str(version), full.default_model_filename)
    return ModelDirectory(name, path, full, backend, tuple(wanted), stamp(path))


def write(files: Mapping[str, bytes], directory: Path) -> None:
    """Puts files into an empty directory, by their paths there. InvalidArgument, naming the path and what is wrong;
    OSError. Blocking."""
    if len(files) > FILES_MAX:
        raise InvalidArgument(f"a model may have {FILES_MAX} files in a request, not {len(files)}")
    for name, content in files.items():
        try:
            parts = safe_parts(directory, name)
            with create_file(directory, directory, parts, name, 0) as file:
                file.write(content)
        except InvalidArchive as error:
            raise InvalidArgument(f"load parameter {f'file:{name}'!r}: {error.message.partition(': ')[2]}") from None


def _text(file: Path) -> str:
    """ "" when there is no such file: the model's own directory says enough."""
    try:
        if file.stat().st_size > CONFIG_BYTES_MAX:
            raise InvalidArgument(f"{file} is larger than {CONFIG_BYTES_MAX} bytes")
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{file} can't be read: {error}") from None


def _versions(path: Path) -> list[int]:
    return sorted(int(one.name) for one in path.iterdir() if one.is_dir() and _VERSION.fullmatch(one.name))


def _backend(directory: Path) -> str:
    """By the model's file, when the configuration doesn't say it."""
    for backend, file in configs.MODEL_FILES.items():
        if (directory / file).is_file():
            return backend
    files = ", ".join(configs.MODEL_FILES.values())
    raise InvalidArgument(f"{directory} has none of {files}, and the configuration names no backend")


def _check_file(directory: Path, name: str) -> None:
    file = directory / name
    if not file.exists():
        raise InvalidArgument(f"there is no {name} in {directory}")
    if not file.resolve().is_relative_to(directory.parent.resolve()):
        raise InvalidArgument(f"{file} leads out of the model's directory")


def stamp(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of all files."""
    found = []
    for one in sorted(path.rglob("*")):
        if one.is_file() and "__pycache__" not in one.parts:
            status = one.stat()
            found.append((str(one.relative_to(path)), status.st_size, status.st_mtime_ns))
    return tuple(found)
