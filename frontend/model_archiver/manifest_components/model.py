"""The manifest's part about the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model_archiver.model_archiver_config import ModelArchiverConfig


class Model:
    """Files are named as they are in the archive, at its root."""

    def __init__(
        self,
        model_name: str,
        serialized_file: str | None,
        handler: str,
        model_file: str | None = None,
        model_version: str | None = None,
        extensions: Any = None,
        requirements_file: str | None = None,
        config_file: str | None = None,
    ) -> None:
        self.model_name = model_name
        self.serialized_file = _name(serialized_file)
        self.handler = Path(handler).name
        self.model_file = model_file
        self.model_version = model_version
        self.extensions = extensions
        self.requirements_file = requirements_file
        self.config_file = _name(config_file)
        self.model_dict = self.__to_dict__()

    @classmethod
    def of(cls, config: ModelArchiverConfig) -> Model:
        """The part about the archive that `config` describes."""
        return cls(
            config.model_name,
            config.serialized_file,
            config.handler,
            config.model_file,
            str(config.version),
            requirements_file=config.requirements_file,
            config_file=config.config_file,
        )

    def __to_dict__(self) -> dict[str, Any]:
        found = {
            "modelName": self.model_name,
            "serializedFile": self.serialized_file,
            "handler": self.handler,
            "modelFile": _name(self.model_file),
            "modelVersion": self.model_version,
            "extensions": self.extensions,
            "requirementsFile": _name(self.requirements_file),
            "configFile": self.config_file,
        }
        return {key: value for key, value in found.items() if value or key == "modelName"}

    def __str__(self) -> str:
        return json.dumps(self.model_dict)

    __repr__ = __str__


def _name(path: str | None) -> str | None:
    return Path(path).name if path else None
