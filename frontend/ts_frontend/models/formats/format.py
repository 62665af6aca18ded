"""The interface of a model format: it detects its files, and opens them as archives; and TorchServe's own format, the
archives as of 0.12, packed or as a folder: all files at the root, and MAR-INF/MANIFEST.json."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ts_frontend.models.archive import (
    CONFIG_FILE,
    WEIGHTS,
    Archive,
    file_name,
    member,
    read_config,
    read_manifest,
    read_text,
    refusal,
    text,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model to open. `path`: the given path, for errors; `directory`: the root of the files, a copy
    unpacked for this model if `owned`. `name` and `config_text` (a configuration in the format's own form) replace
    those in the files. `hub`: the name of the hub's repository that has them. `argv` and `cwd`: a program's arguments
    and working directory, None for its own directory."""

    path: Path
    directory: Path
    owned: bool = False
    name: str = ""
    config_text: str | None = None
    argv: Sequence[str] = ()
    cwd: Path | None = None
    hub: str = ""


class StoredModel(NamedTuple):
    """A model version in a store whose name is known without opening it. `path`: from the store's root."""

    path: str
    name: str
    version: str


class ModelFormat(ABC):
    """The layout of one system's models. The server makes one object of each (`formats.known_formats`). All methods but
    `named` block: they are called in threads, except those that only read opened archives."""

    #: NAME of the worker's module `ts.compat.NAME` that runs the handlers, "" for TorchServe's handlers.
    adapter: ClassVar[str] = ""
    #: A directory holds several versions. Model repositories and load calls serve all of them, register calls the last.
    versioned: ClassVar[bool] = False
    #: Models may lie in any subfolder of a model store, or be the store itself.
    nested: ClassVar[bool] = False
    #: A model store may itself be one model, served from the start when no models are named.
    alone: ClassVar[bool] = False
    #: Repositories of Hugging Face's hub are opened, and nothing in them runs here.
    of_hub: ClassVar[bool] = False
    #: Files without a name of their own may serve several models: `named` says which.
    several: ClassVar[bool] = False
    #: Handlers get tensors in another form from JSON than from gRPC.
    by_dialect: ClassVar[bool] = False

    @property
    def assumed(self) -> bool:
        """Whether this is the format of a directory without any format's sign that didn't come out of an archive."""
        return False

    @property
    def exclusive(self) -> bool:
        """Whether folders of a store without any format's sign are ignored."""
        return False

    @abstractmethod
    def matches(self, path: Path) -> bool:
        """Whether the file or directory shows the format's sign. A missing path is no error."""

    def claims(self, path: Path) -> bool:
        """Whether a file or directory that shows the sign can be nothing else."""
        return self.matches(path)

    def holds(self, folder: Path) -> bool:
        """Whether a folder that shows the sign is no model but has several, each in a file."""
        return False

    @abstractmethod
    def open(self, files: ModelFiles) -> list[Archive]:
        """The versions in the files, in ascending order; only one, unless the format is `versioned`. Raises
        InvalidArchive, InvalidArgument, OSError."""

    def stored(self, root: Path, path: str) -> StoredModel | None:
        """The model at `root/path` (only for a `nested` format), None when its files can't be read."""
        return None

    def default_version(self, archives: Sequence[Archive]) -> str | None:
        """The default version among all served versions of a name; None keeps the present default, the first registered
        version or the one set by a call."""
        return None

    def prepared(self, archive: Archive) -> Archive:
        """The archive with the server configuration's settings for its adapter. Raises ConfigError."""
        return archive

    async def named(self, archive: Archive) -> list[Archive]:
        """The archive under each of its models' names if it has several and no name; else itself. Raises ServeError."""
        return [archive]


_MANIFEST = Path("MAR-INF", "MANIFEST.json")
_ADAPTER = re.compile(r"[a-z_]*")
#: Defaults for a folder without a manifest.
HANDLER_FILE, MODEL_FILE = "handler.py", "model.py"
_HANDLE = re.compile(r"^\s*(async\s+)?def handle\(", re.MULTILINE)
_RUNTIMES = ("python", "python3")


class TorchServeFormat(ModelFormat):
    """Also the format of archives without a manifest, which get a default name, version and handler."""

    def matches(self, path: Path) -> bool:
        return (path / _MANIFEST).exists()

    def open(self, files: ModelFiles) -> list[Archive]:
        path, directory = files.path, files.directory
        manifest = read_manifest(path, directory / _MANIFEST)
        if not manifest:
            log.warning("%s has no %s: name, version and handler are defaults", path.name, _MANIFEST)
        model = member(path, manifest, "model", _MANIFEST)
        config_file = file_name(path, model, "configFile", _MANIFEST)
        archive = Archive(
            dir=directory,
            name=text(path, model, "modelName", _MANIFEST),
            version=_version(path, model),
            manifest=manifest,
            handler=text(path, model, "handler", _MANIFEST),
            model_file=file_name(path, model, "modelFile", _MANIFEST),
            serialized_file=file_name(path, model, "serializedFile", _MANIFEST),
            requirements_file=file_name(path, model, "requirementsFile", _MANIFEST),
            config_file=config_file,
            config=read_config(path, directory / config_file) if config_file else {},
            adapter=_adapter(path, model),
            adapter_settings=member(path, model, "adapterSettings", _MANIFEST),
            runtime=_runtime(path, manifest),
        )
        return [archive]


def bare(path: Path) -> Archive:
    """The model of a handler's file, or of a folder with one, that was not made by the archiver. Its parts are found by
    name: model-config.yaml, model.py, and the only file of weights. Raises InvalidArchive."""
    folder = path if path.is_dir() else path.parent
    handler = path.name if path.is_file() else _handler_in(folder)
    stem = handler.removesuffix(".py")
    weights = [one.name for one in sorted(folder.iterdir()) if one.suffix in WEIGHTS]
    model = {
        "modelName": re.sub(r"\W", "_", folder.name if stem == "handler" else stem, flags=re.ASCII) or "model",
        "modelVersion": "1.0",
        "handler": handler,
    }
    if len(weights) == 1:
        model["serializedFile"] = weights[0]
    if handler != MODEL_FILE and (folder / MODEL_FILE).is_file():
        model["modelFile"] = MODEL_FILE
    if (folder / CONFIG_FILE).is_file():
        model["configFile"] = CONFIG_FILE
    return Archive(
        dir=folder,
        name=model["modelName"],
        manifest={"runtime": "python", "model": model},
        handler=handler,
        model_file=model.get("modelFile"),
        serialized_file=model.get("serializedFile"),
        config_file=model.get("configFile"),
        config=read_config(path, folder / CONFIG_FILE) if "configFile" in model else {},
        remembered=False,
    )


def _handler_in(folder: Path) -> str:
    """The file of a folder that has the handler: handler.py, or the only one that defines `handle`."""
    if (folder / HANDLER_FILE).is_file():
        return HANDLER_FILE
    files = sorted(folder.glob("*.py"))
    found = [one.name for one in files if _HANDLE.search(read_text(folder, one) or "")] or [one.name for one in files]
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} are candidates ({', '.join(found)}): name one" if found else "there is no Python file"
    raise refusal(folder, f"no handler is found: no {HANDLER_FILE}, no MAR-INF, and {what}")


def _adapter(path: Path, model: dict[str, Any]) -> str:
    """The adapter of a handler written for another server, "" for TorchServe's."""
    found = text(path, model, "adapter", _MANIFEST) or ""
    if not _ADAPTER.fullmatch(found):
        raise refusal(path, f"{found!r} is not the name of an adapter")
    return found


def _version(path: Path, model: dict[str, Any]) -> str:
    """The version as text; a hand-written manifest may have a number."""
    value = model.get("modelVersion")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return text(path, model, "modelVersion", _MANIFEST) or "1.0"


def _runtime(path: Path, manifest: dict[str, Any]) -> str:
    runtime = text(path, manifest, "runtime", _MANIFEST) or "python"
    if runtime == "LSP":
        raise refusal(path, "made for TorchServe's C++ backend (runtime LSP), which this server doesn't have")
    if runtime not in _RUNTIMES:
        raise refusal(path, f"runtime {runtime!a} is unknown: it must be one of {', '.join(_RUNTIMES)}")
    return runtime
