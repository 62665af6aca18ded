"""A model's files: their description, the unpacking of an archive, and the reading of its manifest and configuration.

Every value from an archive is checked. `path` is the archive (its name in errors), `file` a file of it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import yaml

from ts_frontend.config.files import read_file
from ts_frontend.errors import ArchiveNotFound
from ts_frontend.graphs.graph import Ensemble
from ts_frontend.graphs.inference_graph import InferenceGraph
from ts_frontend.models.extraction import (
    OUTLINE_BYTES_MAX,
    Check,
    ExtractLimits,
    extract,
    not_unpacked,
    refusal,
    safe_parts,
)
from ts_frontend.models.signature import Signature
from ts_frontend.models.store.http import Pin, Stamp, Stop, digest
from ts_frontend.scheduling.batcher import Priorities
from ts_frontend.tasks import owned
from ts_frontend.workers.resources import Needs

_log = logging.getLogger(__name__)
#: The configuration's name, and the suffixes of files of weights, where no manifest names them.
CONFIG_FILE = "model-config.yaml"
WEIGHTS = frozenset({".pt", ".pth", ".bin", ".safetensors", ".ckpt", ".onnx", ".pt2", ".npz"})
#: The suffix of a language model's file, which is a model by itself.
GGUF = ".gguf"
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_TEXT_BYTES_MAX = OUTLINE_BYTES_MAX
_YAML_NODES_MAX = 100_000
#: Of a number in YAML: longer ones have no text in JSON, or take seconds to read.
_NUMBER_CHARS_MAX = 1000
_NUMBERS = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})


class PackedFiles:
    """The files of the archive `path`, which lie in `directory` (`PARENT/<32 hex>`) while they are needed. `pin`: the
    digest of the archive. The methods block, apart from `needed`."""

    def __init__(self, path: Path, parent: Path, limits: ExtractLimits, pin: Pin | None = None) -> None:
        self.directory = parent / secrets.token_hex(16)
        self._path, self._limits, self._pin = path, limits, pin
        self._stamp = self._now()
        self._lock = threading.Lock()
        self._whole = False
        self._removed = Stop()
        self._unpacking: asyncio.Task[None] | None = None

    @property
    def whole(self) -> bool:
        return self._whole

    def outline(self, stop: Stop | None = None) -> None:
        """Unpacks the files that describe the model, and names the others (`extract`). The sizes of files are those in
        the archive's entries. Raises as `unpack`."""
        with self._lock:
            self._whole = self._unpacked(stop or self._removed, outline=True)

    def unpack(self, stop: Stop | None = None) -> None:
        """Unpacks all files, unless they are there. Raises ArchiveNotFound; InvalidArchive, also for an archive that
        was changed since it was opened; ServeError (disk); Stopped once `stop` is set, or they are removed."""
        with self._lock:
            if not self._whole:
                shutil.rmtree(self.directory, ignore_errors=True)
                self._whole = self._unpacked(stop or self._removed, outline=False)

    async def needed(self) -> None:
        """Unpacks all files, once for all who ask for them at a time. A caller may leave. Raises as `unpack`."""
        if self._whole:
            return
        if self._unpacking is None or self._unpacking.done():
            self._unpacking = owned(asyncio.to_thread(self.unpack))
        await asyncio.shield(self._unpacking)

    def put_away(self) -> None:
        """Deletes the files until they are needed. Never fails."""
        with self._lock:
            self._whole = False
            shutil.rmtree(self.directory, ignore_errors=True)

    def remove(self) -> None:
        """Deletes the files for good. Never fails."""
        self._removed.set("the model was removed")
        self.put_away()

    def _now(self) -> Stamp:
        try:
            return Stamp.of(self._path.stat())
        except OSError as error:
            raise ArchiveNotFound(f"Model not found at: {self._path} ({error.strerror})") from error

    def _unpacked(self, stop: Stop, *, outline: bool) -> bool:
        self._now()

        def check(file: IO[bytes]) -> bool:
            self._check(file, stop)
            return self._pin is not None

        return unpack_to(self._path, self.directory, self._limits, stop, outline=outline, check=check)

    def _check(self, file: IO[bytes], stop: Stop) -> None:
        """Raises InvalidArchive unless the opened file is the one that was registered, with the pinned digest."""
        now = Stamp.of(os.fstat(file.fileno()))
        if not now.is_like(self._stamp):
            raise refusal(self._path, "it was changed since the model was registered: register the model again")
        if self._pin is None or now == self._pin.stamp:
            return
        if (found := digest(file, stop)) != self._pin.sha256:
            raise refusal(self._path, f"its SHA-256 is {found}, not {self._pin.sha256}")
        self._pin = Pin(found, now)


@dataclass(frozen=True, slots=True)
class Archive:
    """An opened archive. File names are relative to `dir`; `manifest` and `config` are {} when the file is missing.
    `packed`: the files of a packed archive, unpacked when they are needed; None for a directory.

    `adapter`: the module that runs a handler written for another server (`ts.compat.NAME`), with `adapter_settings`.
    `signature`: the tensors that the model's files declare outside `config`. `completed`: returns the archive with the
    configuration that the loaded handler has completed. `priorities`: the priority levels and queue timeouts of
    requests. `needs`: what a worker takes of the rate limiter's resources, of each group of workers that differs.
    `graph`: the steps of a model without a handler. `handler_settings`: stronger than the section
    `handler` of the configuration. `remembered`: False for an archive that each start finds by itself, so that no
    snapshot lists it."""

    dir: Path
    packed: PackedFiles | None = None
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
    needs: tuple[Needs, ...] = ()
    graph: Ensemble | InferenceGraph | None = None
    completed: Callable[[Archive, dict[str, Any]], Archive] | None = None
    handler_settings: dict[str, Any] = field(default_factory=dict)
    remembered: bool = True

    def remove(self) -> None:
        """Deletes the unpacked files; a directory that was only linked stays. Blocking, never fails."""
        if self.packed is not None:
            self.packed.remove()


def unpack(
    path: Path, directory: Path, limits: ExtractLimits, stop: Stop | None = None, pin: Pin | None = None
) -> Path:
    """The files of an archive, unpacked to `directory/<32 hex>`. Blocking. Raises ArchiveNotFound, InvalidArchive,
    ServeError (disk); Stopped once `stop` is set."""
    packed = PackedFiles(path, directory, limits, pin)
    packed.unpack(stop)
    return packed.directory


def unpack_to(
    path: Path,
    target: Path,
    limits: ExtractLimits,
    stop: Stop | None = None,
    *,
    outline: bool = False,
    check: Check | None = None,
) -> bool:
    """Unpacks an archive to `target`, which appears only when it's complete, or has the `outline` (`extract`); True
    when all files are there. Blocking. Raises as `unpack`."""
    partial = target.with_name(f".partial-{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(mode=0o700)
        whole = extract(path, partial, limits, stop, outline=outline, check=check)
        os.rename(root_of(partial), target)
    except OSError as error:
        raise not_unpacked(path, target.parent, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return whole


def root_of(directory: Path) -> Path:
    """Where the model's files begin: the only subdirectory, if there's nothing else (a .tar.gz has one)."""
    entries = list(directory.iterdir())
    if len(entries) == 1 and entries[0].is_dir() and not entries[0].is_symlink() and entries[0].name != "MAR-INF":
        return entries[0]
    return directory


def is_gguf(name: str) -> bool:
    """Whether a file of this name is a language model, or the first part of one."""
    return name.endswith(GGUF) and not _LATER_PART.search(name)


def real(path: Path) -> Path:
    """The path without links. A link to a language model's file stays, whose name says what it is: in caches that of
    the target is a digest."""
    return path.parent.resolve() / path.name if is_gguf(path.name) and path.is_file() else path.resolve()


def read_manifest(path: Path, file: Path) -> dict[str, Any]:
    """The JSON object in `file`, {} when it isn't there."""
    content = read_text(path, file)
    if content is None:
        return {}
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise refusal(path, f"not JSON: {error}", f"{file.parent.name}/{file.name}") from error
    if not isinstance(manifest, dict):
        raise refusal(path, "must be a JSON object", f"{file.parent.name}/{file.name}")
    return manifest


def read_text(path: Path, file: Path) -> str | None:
    """A small text file (UTF-8, byte order mark allowed), None if it isn't there."""
    try:
        return read_file(file, _TEXT_BYTES_MAX).decode("utf-8-sig")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise refusal(path, f"not UTF-8: {error}", file.name) from error
    except OSError as error:
        raise refusal(path, f"can't be read: {error.strerror}", file.name) from error


def member(path: Path, manifest: dict[str, Any], key: str, file: Path) -> dict[str, Any]:
    value = manifest.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refusal(path, f"{key!r} must be an object, not {value!r}", str(file))
    return value


def text(path: Path, values: dict[str, Any], key: str, file: Path) -> str | None:
    """A text of the manifest; absent, null and "" are None."""
    value = values.get(key)
    if value is not None and not isinstance(value, str):
        raise refusal(path, f"{key!r} must be a text, not {value!r}", str(file))
    return value or None


def file_name(path: Path, values: dict[str, Any], key: str, file: Path) -> str | None:
    """A file the manifest names: it must lie inside the archive. A missing one is the handler's business."""
    name = text(path, values, key, file)
    return "/".join(safe_parts(path, name)) or None if name else None


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

    Plain YAML types only. Aliases may not blow the document up: each counts as the value it refers to.
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
    """The number of nodes below `node` and in it, aliases written out; `known` is by id, 0 while open. Raises
    ValueError for numbers that are too long.

    Long texts count as several: an alias can repeat them too.
    """
    if (size := known.get(id(node))) is not None:
        if size == 0:
            raise ValueError("an alias stands inside what it names")
        return size
    if node.tag in _NUMBERS and len(node.value) > _NUMBER_CHARS_MAX:
        raise ValueError(f"a number of {len(node.value)} characters, at most {_NUMBER_CHARS_MAX} are possible")
    known[id(node)] = 0
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    own = 1 + len(node.value) // 100 if isinstance(node, yaml.ScalarNode) else 1
    size = known[id(node)] = own + sum(_size(child, known) for child in children)
    return size
