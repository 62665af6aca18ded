"""Making archives from Python."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from model_archiver.manifest_components.manifest import Manifest, RuntimeType
from model_archiver.manifest_components.model import Model
from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_archiver_error import ModelArchiverError
from model_archiver.packing import FORMATS, NAME, NAME_RULE, Stamp, gather, pack

_RUNTIMES = [one.value for one in RuntimeType]


class ModelArchiver:
    """`ModelArchiver.generate_model_archive(ModelArchiverConfig(...))`, as in TorchServe."""

    @staticmethod
    def generate_model_archive(config: ModelArchiverConfig) -> Path:
        """Makes the archive and returns its path. Raises ModelArchiverError, OSError."""
        config = _checked(config)
        suffix, _ = FORMATS[config.archive_format]
        target = Path(config.export_path) / f"{config.model_name}{suffix}"
        if os.path.lexists(target) and not config.force:
            raise ModelArchiverError(f"{target} is already there. Use --force (-f) to replace it.")
        target.parent.mkdir(parents=True, exist_ok=True)
        files = gather(config, target)
        stamp = Stamp.now()
        manifest = f"{Manifest(config.runtime, Model.of(config), stamp)}\n".encode()
        pack({**files, "MAR-INF/MANIFEST.json": manifest}, target, config.archive_format, stamp, config.model_name)
        return target


def _checked(config: ModelArchiverConfig) -> ModelArchiverConfig:
    if not NAME.fullmatch(str(config.model_name)):
        raise ModelArchiverError(f"--model-name {config.model_name!r} is not allowed: {NAME_RULE}")
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
