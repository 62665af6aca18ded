"""TorchServe's archives, packed or as a folder: everything at the root, and MAR-INF/MANIFEST.json. As in 0.12."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from ts_frontend.models.archive import Archive, file_name, member, read_config, read_manifest, text
from ts_frontend.models.extraction import refusal
from ts_frontend.models.formats.format import ModelFiles, ModelFormat

_log = logging.getLogger(__name__)
_MANIFEST = Path("MAR-INF", "MANIFEST.json")
_ADAPTER = re.compile(r"[a-z_]*")
_RUNTIMES = ("python", "python3")


class TorchServeFormat(ModelFormat):
    """An archive without a manifest has this format, too, with default name, version and handler."""

    def matches(self, path: Path) -> bool:
        return (path / _MANIFEST).exists()

    def open(self, files: ModelFiles) -> list[Archive]:
        path, directory = files.path, files.directory
        manifest = read_manifest(path, directory / _MANIFEST)
        if not manifest:
            _log.warning("%s has no %s: name, version and handler are defaults", path.name, _MANIFEST)
        model = member(path, manifest, "model", _MANIFEST)
        config_file = file_name(path, model, "configFile", _MANIFEST)
        archive = Archive(
            dir=directory,
            owned=files.owned,
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


def _adapter(path: Path, model: dict[str, Any]) -> str:
    """The adapter of a handler written for another server, "" for TorchServe's."""
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
