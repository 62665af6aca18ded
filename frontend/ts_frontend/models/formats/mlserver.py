"""MLServer's models: a folder with a model-settings.json, anywhere in a store; each version has a folder of its own."""

from __future__ import annotations

import functools
import json
import logging
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ts.protocol.tasks import ARGUMENT, ARGUMENTS, RESULTS
from ts_frontend.config.files import read_file
from ts_frontend.config.foreign.mlserver import (
    HUGGING_FACE,
    MEMBERS,
    PACKAGE,
    PARAMETERS,
    MLServerDefaults,
    hugging_face,
)
from ts_frontend.config.kinds import is_hub_name, nearest
from ts_frontend.config.parameters import WORKERS_MAX
from ts_frontend.errors import InvalidArgument
from ts_frontend.models.archive import Archive, read_text, refusal
from ts_frontend.models.formats.format import ModelFiles, ModelFormat, StoredModel
from ts_frontend.models.inspection import module_may_need_torch
from ts_frontend.models.settings import Signature, specs_of

log = logging.getLogger(__name__)

FILE = "model-settings.json"
#: The least similarity (difflib's ratio) at which an unknown key counts as a misspelt one.
LIKENESS_MIN = 0.85
#: The version of a model that declares none.
NO_VERSION = "1.0"
#: Python's JSON parser accepts infinity and NaN.
_NUMBER_MAX = 2**31 - 1


class MLServerFormat(ModelFormat):
    """`defaults`: values for the keys that a model-settings.json leaves out; with an `implementation` among them, a
    directory needs no such file. `store`: an import path for the models inside it; `start_dir`: an import path for all
    models, the directory in which MLServer's command was run. `language`: opens the models of its Hugging Face runtime,
    unless that is installed, with the workers' environment `environ`; `hub`: fetches a repository of the hub."""

    adapter = "mlserver_runtime"
    nested = True
    by_dialect = True

    def __init__(
        self,
        defaults: MLServerDefaults,
        store: Path | None = None,
        start_dir: Path | None = None,
        language: ModelFormat | None = None,
        hub: Callable[[str], Path] | None = None,
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._defaults = defaults
        self._language, self._hub, self._environ = language, hub, environ
        self._store = None if store is None else store.absolute()
        self._start_dir = start_dir

    @property
    def assumed(self) -> bool:
        return self._defaults.is_model

    @property
    def exclusive(self) -> bool:
        return self._defaults.only

    def matches(self, path: Path) -> bool:
        return (path / FILE).is_file()

    def open(self, files: ModelFiles) -> list[Archive]:
        path, directory = files.path, files.directory
        own = self.matches(directory)
        settings = with_defaults(_settings(path, directory) if own else {}, self._defaults.model)
        parameters = _mapping(path, settings, "parameters")
        for key, meant in (*_misspelt(settings, MEMBERS), *_misspelt(parameters, PARAMETERS)):
            log.warning("%s of %s: there is no %s%s", FILE, path.name, key, meant)
        for key in ("environment_tarball", "environment_path"):
            if parameters.get(key):
                reason = f"{key} is not supported: list the packages in a requirements.txt and useVenv"
                raise refusal(path, reason, FILE)
        implementation = settings.get("implementation")
        if not isinstance(implementation, str) or "." not in implementation:
            reason = f"implementation is the path of a class, package.module.Class, not {implementation!r}"
            raise refusal(path, reason, FILE)
        if implementation in HUGGING_FACE and self._language is not None and not find_spec(PACKAGE):
            return [self._language_model(files, settings, parameters, self._language)]
        python_path = self._python_path(path)
        folders = (directory, *map(Path, python_path))
        archive = Archive(
            dir=directory,
            name=str(settings.get("name") or "") or (None if files.owned else directory.name),
            version=str(parameters.get("version") or NO_VERSION),
            manifest={"runtime": "python", "model": {"handler": implementation}},
            handler=implementation,
            requirements_file="requirements.txt" if (directory / "requirements.txt").is_file() else None,
            config=_config(path, settings),
            adapter=self.adapter,
            adapter_settings={
                "model_settings": str(directory / FILE) if own else "",
                "defaults": dict(self._defaults.model),
                "server_name": self._defaults.server_name,
                "versioned": bool(parameters.get("version")),
                "python_path": python_path,
                "torch": module_may_need_torch(implementation.rpartition(".")[0], folders),
            },
            remembered=own,
            signature=_signature(path, settings),
        )
        return [archive]

    def _language_model(
        self, files: ModelFiles, settings: Mapping[str, Any], parameters: Mapping[str, Any], language: ModelFormat
    ) -> Archive:
        """The model of MLServer's Hugging Face runtime as a language model. Raises InvalidArchive."""
        extra = parameters.get("extra") or {}
        try:
            found = hugging_face(extra if isinstance(extra, dict) else {}, self._environ)
        except (InvalidArgument, ValueError) as error:
            raise refusal(files.path, f"extra: {getattr(error, 'message', error)}", FILE) from None
        place = found.place or str(parameters.get("uri") or "")
        folder, hub = (files.directory / place).resolve(), ""
        if not folder.exists() and is_hub_name(place) and self._hub is not None:
            folder, hub = self._hub(f"hf://{place}"), place.partition("@")[0].rpartition("/")[2]
        if not language.matches(folder):
            raise refusal(files.path, f"there is no language model at {place or folder}", FILE)
        text = json.dumps(found.settings)
        (opened,) = language.open(ModelFiles(folder, folder, hub=hub, config_text=text))
        own = str(settings.get("name") or "") or files.directory.name
        return replace(
            opened,
            name=None if files.owned and not settings.get("name") else own,
            version=str(parameters.get("version") or NO_VERSION),
            config={**_with_args(opened.config), **found.config},
            remembered=self.matches(files.directory),
        )

    def _python_path(self, path: Path) -> list[str]:
        """Import paths besides the model's own folder: the root of its store (as after `mlserver start DIR`), and the
        directory in which MLServer's command was run."""
        store, found = self._store, []
        if store is not None and (
            path.absolute().is_relative_to(store) or path.resolve().is_relative_to(store.resolve())
        ):
            found.append(str(store))
        return found + ([str(self._start_dir)] if self._start_dir is not None else [])

    def stored(self, root: Path, path: str) -> StoredModel | None:
        directory = (root / path).resolve()
        try:
            own = json.loads(read_file(directory / FILE)) if self.matches(directory) else {}
            if not isinstance(own, dict):
                return None
            settings = with_defaults(own, self._defaults.model)
            version = (settings.get("parameters") or {}).get("version") or NO_VERSION
            return StoredModel(path, str(settings.get("name") or directory.name), str(version))
        except (OSError, ValueError, AttributeError, RecursionError):
            return None

    def default_version(self, archives: Sequence[Archive]) -> str | None:
        """The newest version, regardless of the order of loading."""
        return newest((one.version, bool(one.adapter_settings.get("versioned"))) for one in archives)


def _with_args(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the tensors of the Hugging Face runtime besides the language model's own."""
    declared = config.get("openInference")
    if not isinstance(declared, dict) or not isinstance(declared.get("inputs"), list):  # the folder's own
        return dict(config)
    inputs = [
        *({"name": name, "datatype": "BYTES", "shape": [-1]} for name in (ARGUMENT, *ARGUMENTS)),
        *declared["inputs"],
    ]
    outputs = [{"name": RESULTS, "datatype": "BYTES", "shape": [-1, 1]}, *declared["outputs"]]
    inputs = [{**one, "optional": True} for one in inputs]
    return {**config, "openInference": {**declared, "inputs": inputs, "outputs": outputs}}


def newest(versions: Iterable[tuple[str, bool]]) -> str:
    """The default version: the highest number or, if they aren't all numbers, the last in alphabetical order; one
    without a version comes first of all. Each is given with whether the model itself declares it."""

    def compare(one: tuple[str, bool], other: tuple[str, bool]) -> int:
        if not (one[1] and other[1]):
            return other[1] - one[1]
        try:
            return int(one[0]) - int(other[0])
        except ValueError:
            return (one[0] > other[0]) - (one[0] < other[0])

    return max(versions, key=functools.cmp_to_key(compare))[0]


def with_defaults(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, completed from `defaults`; the keys of `parameters` are merged one by one."""
    found = {**defaults, **settings}
    ours, theirs = settings.get("parameters") or {}, defaults.get("parameters") or {}
    if theirs and isinstance(ours, dict):
        found["parameters"] = {**theirs, **ours}
    return found


def _misspelt(settings: Mapping[str, Any], known: Iterable[str]) -> list[tuple[str, str]]:
    """The unknown keys that resemble a known one, each with that one; other keys may be the runtime's."""
    names = frozenset(known)
    found = [(key, nearest(key, names, LIKENESS_MIN)) for key in settings if key not in names]
    return [(key, meant) for key, meant in found if meant]


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
    """The settings as keys of a model-config.yaml. As in MLServer, batches need both a size and a time."""
    found: dict[str, Any] = {}
    size = _number(path, settings, "max_batch_size")
    delay_s = _number(path, settings, "max_batch_time")
    if size > 1 and delay_s > 0:
        found |= {"batchSize": int(size), "maxBatchDelay": max(1, round(delay_s * 1000))}
    workers = _number(path, settings, "parallel_workers")
    if workers > WORKERS_MAX:
        raise refusal(path, f"parallel_workers is {int(workers)}, and a model has at most {WORKERS_MAX} workers", FILE)
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
