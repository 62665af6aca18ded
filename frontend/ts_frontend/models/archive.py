"""A model's files: unpacked from an archive or used where they lie, with what manifest and configuration say.

Layout as in TorchServe 0.12: everything at the root, `MAR-INF/MANIFEST.json` beside it.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from ts_frontend.config.foreign.mlserver import MLServerDefaults
from ts_frontend.errors import ArchiveNotFound, ServeError
from ts_frontend.models.extraction import ExtractLimits, extract, refusal
from ts_frontend.models.formats import mlserver as mlserver_model
from ts_frontend.models.formats import program as program_model
from ts_frontend.models.manifest import file_name, member, read_manifest, read_text, text
from ts_frontend.models.signature import Signature
from ts_frontend.models.store.http import Stop
from ts_frontend.scheduling.batcher import Priorities

__all__ = ["Archive", "ExtractLimits", "open_archive"]

_log = logging.getLogger(__name__)
_MANIFEST = Path("MAR-INF", "MANIFEST.json")
_YAML_NODES_MAX = 100_000
_ADAPTER = re.compile(r"[a-z_]*")
_RUNTIMES = ("python", "python3")


@dataclass(frozen=True, slots=True)
class Archive:
    """An opened archive. File names are relative to `dir`; `manifest` and `config` are {} where there is none.
    `adapter` names what runs a handler written for another server (`ts.compat.NAME`), which gets `adapter_settings`;
    `signature` is what the files declare of its tensors beside `config`; `completed` makes of the configuration that a
    loaded handler has completed the archive that says as much; `priorities`: its requests have priorities, or a limited
    time to wait;
    `remembered` is False for what a restart finds again by itself, and no snapshot has."""

    dir: Path
    owned: bool
    name: str | None = None
    version: str = "1.0"
    manifest: dict[str, Any] = field(default_factory=dict)
    handler: str | None = None
    model_file: str | None = None
    serialized_file: str | None = None
    requirements_file: str | None = None
    config_file: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    runtime: str = "python"
    adapter: str = ""
    adapter_settings: dict[str, Any] = field(default_factory=dict)
    signature: Signature | None = None
    priorities: Priorities | None = None
    completed: Callable[[Archive, dict[str, Any]], Archive] | None = None
    remembered: bool = True

    def remove(self) -> None:
        """Deletes the unpacked copy; a directory that was only linked stays. Blocking, never fails."""
        if self.owned:
            shutil.rmtree(self.dir, ignore_errors=True)


def open_archive(
    path: Path,
    work_dir: Path,
    limits: ExtractLimits = ExtractLimits(),  # noqa: B008 (frozen)
    mlserver: MLServerDefaults = MLServerDefaults(),  # noqa: B008 (frozen)
    stop: Stop | None = None,
) -> Archive:
    """Opens the archive file or model directory at `path`. Blocking.

    A file is unpacked to `work_dir/models/<32 hex>`, which appears only when it's complete; a directory is used where
    it lies, and so is a program. Raises ArchiveNotFound, InvalidArchive, ServeError (disk); Stopped once `stop` is set.
    """
    if path.suffix == program_model.SUFFIX and path.is_file():
        return Archive(dir=path.resolve().parent, owned=False, **program_model.described(path.resolve()))
    if path.is_dir():
        return _describe(path, _root_of(path.resolve()), mlserver, owned=False)
    if not path.is_file():
        raise ArchiveNotFound(f"Model not found at: {path}")
    target = unpack(path, work_dir / "models", limits, stop)
    try:
        return _describe(path, target, mlserver, owned=True)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def open_program(path: Path, argv: Sequence[str], directory: Path) -> Archive:
    """A program that the operator names, with its arguments and the directory where it is run; a folder with one, or a
    model's folder, where they say that themselves. No snapshot has it. Blocking. Raises ArchiveNotFound,
    InvalidArchive."""
    program = path.absolute()
    if path.is_dir():
        if not program_model.is_program(path):
            return replace(_describe(path, _root_of(path.resolve()), MLServerDefaults(), owned=False), remembered=False)
        program /= program_model.FILE
    elif not program_model.is_program(path):
        raise ArchiveNotFound(f"Program not found at: {path}")
    described = program_model.described(program, argv, directory)
    return Archive(dir=program.parent, owned=False, remembered=False, **described)


def unpack(path: Path, directory: Path, limits: ExtractLimits, stop: Stop | None = None) -> Path:
    """The files of an archive, unpacked to `directory/<32 hex>`. Blocking. Raises InvalidArchive, ServeError (disk);
    Stopped once `stop` is set."""
    name = secrets.token_hex(16)
    target, partial = directory / name, directory / f".partial-{name}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        partial.mkdir(mode=0o700)
        extract(path, partial, limits, stop)
        os.rename(_root_of(partial), target)
    except OSError as error:
        raise ServeError(f"Could not unpack {path} to {directory}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _root_of(directory: Path) -> Path:
    """Where the model's files begin: the only subdirectory, if there's nothing else (a .tar.gz has one)."""
    entries = list(directory.iterdir())
    if len(entries) == 1 and entries[0].is_dir() and not entries[0].is_symlink() and entries[0].name != "MAR-INF":
        return entries[0]
    return directory


def _describe(path: Path, directory: Path, mlserver: MLServerDefaults, *, owned: bool) -> Archive:
    """Reads what the files in `directory` say; `path` is the archive's name in errors."""
    if not (directory / _MANIFEST).exists():
        if mlserver_model.is_one(directory) or (mlserver.is_model and not owned):
            return Archive(dir=directory, owned=owned, **mlserver_model.described(path, directory, owned, mlserver))
        if program_model.is_one(directory):
            program = directory / program_model.FILE
            return Archive(dir=directory, owned=owned, **program_model.described(program))
    manifest = read_manifest(path, directory / _MANIFEST)
    if not manifest:
        _log.warning("%s has no %s: name, version and handler are defaults", path.name, _MANIFEST)
    model = member(path, manifest, "model", _MANIFEST)
    config_file = file_name(path, model, "configFile", _MANIFEST)
    return Archive(
        dir=directory,
        owned=owned,
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


def _adapter(path: Path, model: dict[str, Any]) -> str:
    """What runs a handler that is written for another server, "" for TorchServe's."""
    found = text(path, model, "adapter", _MANIFEST) or ""
    if not _ADAPTER.fullmatch(found):
        raise refusal(path, f"{found!r} is no name of an adapter")
    return found


def _version(path: Path, model: dict[str, Any]) -> str:
    """The version as text: hand-written manifests have numbers there."""
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


def read_config(path: Path, file: Path) -> dict[str, Any]:
    """The mapping in a YAML file of an archive, {} when it isn't there. Raises InvalidArchive."""
    content = read_text(path, file)
    if content is None:
        _log.warning("%s: its manifest names the configuration %s, which isn't there", path.name, file.name)
        return {}
    try:
        return parse_config(content)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise refusal(path, f"not usable as YAML: {error}", file.name) from error


def parse_config(text: str) -> dict[str, Any]:
    """The mapping in a model-config.yaml. Raises yaml.YAMLError, ValueError, RecursionError.

    Plain YAML types only. Aliases may not blow the document up: each counts as what it stands for.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}
        if _size(node, {}) > _YAML_NODES_MAX:
            raise ValueError(f"more than {_YAML_NODES_MAX} values with all aliases written out")
        value = loader.construct_document(node)
    finally:
        loader.dispose()
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"must be keys with values, not {type(value).__name__}")
    return value


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """How many nodes there are below `node` and in it, aliases written out; `known` is by id, 0 while open.

    Long texts count as several: an alias can repeat them too.
    """
    if (size := known.get(id(node))) is not None:
        if size == 0:
            raise ValueError("an alias stands inside what it names")
        return size
    known[id(node)] = 0
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    own = 1 + len(node.value) // 100 if isinstance(node, yaml.ScalarNode) else 1
    size = known[id(node)] = own + sum(_size(child, known) for child in children)
    return size
