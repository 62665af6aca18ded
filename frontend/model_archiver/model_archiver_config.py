"""The options for making an archive."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class ModelArchiverConfig:
    """The options of `torch-model-archiver`, under the names TorchServe's users know.

    `extra_files`: a comma list as on the command line, or a sequence of paths. Paths may be `str` or `os.PathLike`.
    """

    model_name: str
    handler: str
    version: str
    serialized_file: str | None = None
    model_file: str | None = None
    extra_files: str | Sequence[str] | None = None
    runtime: str = "python"
    export_path: str = field(default_factory=os.getcwd)
    archive_format: str = "default"
    force: bool = False
    requirements_file: str | None = None
    config_file: str | None = None
    preserve_structure: bool = False

    @classmethod
    def from_args(cls, args: Any) -> ModelArchiverConfig:
        """Made from any object with attributes of these names; missing attributes have their defaults."""
        return cls(**{entry.name: getattr(args, entry.name) for entry in fields(cls) if hasattr(args, entry.name)})
