"""A folder with a model-settings.json, as MLServer's models have: what it says, as an archive. Blocking."""

from __future__ import annotations

import functools
import json
import os
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ts_frontend.config.foreign.mlserver import MLServerDefaults
from ts_frontend.errors import InvalidArgument
from ts_frontend.models.extraction import refusal
from ts_frontend.models.manifest import read_text
from ts_frontend.models.signature import Signature, specs_of

FILE = "model-settings.json"
#: What runs them.
ADAPTER = "mlserver_runtime"
#: The version of a model that names none.
NO_VERSION = "1.0"
#: Folders inside the store that are looked at: MLServer's models may lie at any depth.
DEPTH_MAX = 8
#: JSON has infinity and NaN for Python.
_NUMBER_MAX = 2**31 - 1
_MANIFEST = Path("MAR-INF", "MANIFEST.json")


def is_one(directory: Path) -> bool:
    return (directory / FILE).is_file()


def in_store(root: Path, names: list[str], defaults: MLServerDefaults) -> list[str]:
    """What of a store can be loaded, by paths from `root`: of its archives and folders (`names`), those that have a
    model-settings.json in them instead of the folder around; "." is the store itself."""
    found = {name: below(root, name) for name in names}
    known = [path for paths in found.values() for path in paths]
    if is_one(root) or defaults.is_model and not known:
        known.append(".")
    others = [
        name for name, paths in found.items() if not paths and _counts(root / name, "." in known or defaults.only)
    ]
    return sorted({*known, *others})


def _counts(path: Path, marked: bool) -> bool:
    """Whether a folder without model-settings.json is a model; `marked`: only with an archive's manifest."""
    return not marked or (path / _MANIFEST).exists() or path.suffix == ".mar"


def below(root: Path, name: str) -> list[str]:
    """The folders of MLServer's models in `root/name` or its subfolders, by their paths from `root`; none in an
    archive's folder."""
    directory = root / name
    if not directory.is_dir() or (directory / _MANIFEST).exists():
        return []
    found = []
    for folder, folders, files in os.walk(directory):
        path = Path(folder)
        depth = len(path.relative_to(directory).parts)
        folders[:] = [one for one in folders if not one.startswith(".") and depth < DEPTH_MAX]
        if FILE in files:
            found.append(str(path.relative_to(root)))
    return found


class Known(NamedTuple):
    """A model of a store: `path` from its root, and what its model-settings.json calls it."""

    path: str
    name: str
    version: str


def known(root: Path, paths: Iterable[str], defaults: MLServerDefaults) -> list[Known]:
    """Those of `paths` that are MLServer's and can be read."""
    found = []
    for path in paths:
        directory = (root / path).resolve()
        try:
            own = json.loads((directory / FILE).read_bytes()) if is_one(directory) else {} if path == "." else None
            if isinstance(own, dict):
                settings = with_defaults(own, defaults.model)
                version = (settings.get("parameters") or {}).get("version") or NO_VERSION
                found.append(Known(path, str(settings.get("name") or directory.name), str(version)))
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
    return found


def newest(versions: Iterable[tuple[str, bool]]) -> str:
    """The version that requests mean which name none: one without a version before all others, then the highest number
    or, where they aren't all numbers, text. Each with whether the model itself says it."""

    def compare(one: tuple[str, bool], other: tuple[str, bool]) -> int:
        if not (one[1] and other[1]):
            return other[1] - one[1]
        try:
            return int(one[0]) - int(other[0])
        except ValueError:
            return (one[0] > other[0]) - (one[0] < other[0])

    return max(versions, key=functools.cmp_to_key(compare))[0]


def described(path: Path, directory: Path, owned: bool, defaults: MLServerDefaults) -> dict[str, Any]:
    """The fields of an `Archive`, but for `dir` and `owned`. Raises InvalidArchive; `path` is its name in errors."""
    own = is_one(directory)
    settings = with_defaults(_settings(path, directory) if own else {}, defaults.model)
    parameters = _mapping(path, settings, "parameters")
    for key in ("environment_tarball", "environment_path"):
        if parameters.get(key):
            raise refusal(path, f"{key} is not supported: list the packages in a requirements.txt and useVenv", FILE)
    implementation = settings.get("implementation")
    if not isinstance(implementation, str) or "." not in implementation:
        raise refusal(
            path, f"implementation is the path of a class, package.module.Class, not {implementation!r}", FILE
        )
    return {
        "name": str(settings.get("name") or "") or (None if owned else directory.name),
        "version": str(parameters.get("version") or NO_VERSION),
        "manifest": {"runtime": "python", "model": {"handler": implementation}},
        "handler": implementation,
        "requirements_file": "requirements.txt" if (directory / "requirements.txt").is_file() else None,
        "config": _config(path, settings),
        "adapter": ADAPTER,
        "adapter_settings": {
            "model_settings": str(directory / FILE) if own else "",
            "defaults": dict(defaults.model),
            "server_name": defaults.server_name,
            "versioned": bool(parameters.get("version")),
        },
        "remembered": own,
        "signature": _signature(path, settings),
    }


def with_defaults(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with what they leave out. Those of `parameters` are told apart."""
    found = {**defaults, **settings}
    ours, theirs = settings.get("parameters") or {}, defaults.get("parameters") or {}
    if theirs and isinstance(ours, dict):
        found["parameters"] = {**theirs, **ours}
    return found


def _settings(path: Path, directory: Path) -> dict[str, Any]:
    text = read_text(path, directory / FILE)
    try:
        found = json.loads(text or "")
    except (ValueError, RecursionError) as error:
        raise refusal(path, f"not valid JSON: {error}", FILE) from error
    if not isinstance(found, dict):
        raise refusal(path, f"a JSON object, not {type(found).__name__}", FILE)
    return found


def _mapping(path: Path, settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = settings.get(key) or {}
    if not isinstance(found, dict):
        raise refusal(path, f"{key} is an object, not {found!r}", FILE)
    return found


def _config(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """As a model-config.yaml says it. Batches are made when there is both a size and a time, as in MLServer."""
    found: dict[str, Any] = {}
    size = _number(path, settings, "max_batch_size")
    delay_s = _number(path, settings, "max_batch_time")
    if size > 1 and delay_s > 0:
        found |= {"batchSize": int(size), "maxBatchDelay": max(1, round(delay_s * 1000))}
    workers = _number(path, settings, "parallel_workers")
    if workers:
        found["minWorkers"] = int(workers)
    return found


def _number(path: Path, settings: Mapping[str, Any], key: str) -> float:
    found = settings.get(key) or 0
    if not isinstance(found, (int, float)) or not 0 <= found <= _NUMBER_MAX:
        raise refusal(path, f"{key} is a number from 0 to {_NUMBER_MAX}, not {reprlib.repr(found)}", FILE)
    return found


def _signature(path: Path, settings: Mapping[str, Any]) -> Signature:
    try:
        inputs, outputs = (specs_of(settings.get(key), key) for key in ("inputs", "outputs"))
    except InvalidArgument as error:
        raise refusal(path, error.message, FILE) from error
    content_type = (settings.get("parameters") or {}).get("content_type")
    metadata = {"content_type": str(content_type)} if content_type else {}
    return Signature(str(settings.get("platform") or ""), inputs, outputs, metadata=metadata)
