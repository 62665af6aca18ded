"""Making archives from Python."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_archiver_error import ModelArchiverError
from model_archiver.packing import FORMATS, Stamp, gather, pack, split_handler
from ts.version import __version__

#: The allowed model names.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.]*")
_RUNTIMES = ("python", "python3", "LSP")


class ModelArchiver:
    """`ModelArchiver.generate_model_archive(ModelArchiverConfig(...))`, as in TorchServe."""

    @staticmethod
    def generate_model_archive(config: ModelArchiverConfig) -> Path:
        """Makes the archive and returns its path. Raises ModelArchiverError, OSError."""
        config = _checked(config)
        target = archive_path(config)
        if os.path.lexists(target) and not config.force:
            raise ModelArchiverError(f"{target} is already there. Use --force (-f) to replace it.")
        target.parent.mkdir(parents=True, exist_ok=True)
        files = gather(config, target)
        stamp = Stamp.now()
        manifest = json.dumps(manifest_of(config, stamp), indent=2) + "\n"
        pack(
            {**files, "MAR-INF/MANIFEST.json": manifest.encode()},
            target,
            config.archive_format,
            stamp,
            config.model_name,
        )
        return target


def _checked(config: ModelArchiverConfig) -> ModelArchiverConfig:
    if not NAME.fullmatch(str(config.model_name)):
        raise ModelArchiverError(
            f"--model-name {config.model_name!r} is not allowed: letters, digits, '_', '-' and '.', "
            "and the first a letter or a digit"
        )
    archive_format, runtime = _plain(config.archive_format), _plain(config.runtime)
    if archive_format not in FORMATS:
        raise ModelArchiverError(f"--archive-format {archive_format!r} is unknown; there are {', '.join(FORMATS)}")
    if runtime not in _RUNTIMES:
        raise ModelArchiverError(f"--runtime {runtime!r} is unknown; there are {', '.join(_RUNTIMES)}")
    if not config.handler or not str(config.version):
        raise ModelArchiverError("a handler and a version are needed")
    return dataclasses.replace(config, archive_format=archive_format, runtime=runtime)


def _plain(value: Any) -> str:
    """The text of an option that callers may give as an enumeration's member."""
    return str(getattr(value, "value", value))


def archive_path(config: ModelArchiverConfig) -> Path:
    suffix, _ = FORMATS[config.archive_format]
    return Path(config.export_path) / f"{config.model_name}{suffix}"


def manifest_of(config: ModelArchiverConfig, stamp: Stamp) -> dict[str, Any]:
    """The contents of MAR-INF/MANIFEST.json. Files have their names in the archive, all at its root."""
    file, function = split_handler(str(config.handler))
    handler = Path(file).name + (f":{function}" if function else "")
    model = {
        "modelName": config.model_name,
        "serializedFile": _base_name(config.serialized_file),
        "handler": handler,
        "modelFile": _base_name(config.model_file),
        "modelVersion": str(config.version),
        "requirementsFile": _base_name(config.requirements_file),
        "configFile": _base_name(config.config_file),
    }
    return {
        "createdOn": str(stamp),
        "runtime": config.runtime,
        "model": {key: value for key, value in model.items() if value is not None},
        "archiverVersion": __version__,
    }


def _base_name(path: str | None) -> str | None:
    return Path(path).name if path else None
