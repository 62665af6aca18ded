"""`mlserver.settings`: the contents of model-settings.json and settings.json."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pydantic

from .types import MetadataTensor


class ModelParameters(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", validate_assignment=True)
    uri: str | None = None
    version: str | None = None
    environment_path: str | None = None
    environment_tarball: str | None = None
    inference_pool_gid: str | None = None
    autogenerate_inference_pool_gid: bool = False
    format: str | None = None
    content_type: str | None = None
    extra: dict[str, Any] | None = {}


class ModelSettings(pydantic.BaseModel):
    """`implementation` is the class; its text is imported when it is asked for, from the model's folder first."""

    model_config = pydantic.ConfigDict(validate_assignment=True, protected_namespaces=())
    name: str = ""
    platform: str = ""
    versions: list[str] = []
    inputs: list[MetadataTensor] = []
    outputs: list[MetadataTensor] = []
    parallel_workers: int | None = None
    warm_workers: bool = False
    max_batch_size: int = 0
    max_batch_time: float = 0.0
    cache_enabled: bool = False
    implementation_: str
    parameters: ModelParameters | None = None
    _implementation: Any = None
    _source: str | None = None

    def __init__(self, **values: Any) -> None:
        """`_source`: the file that the settings were read from."""
        source = values.pop("_source", None)
        wanted = values.pop("implementation", None) or values.get("implementation_")
        super().__init__(**{**values, "implementation_": _path(wanted)})
        self._source = source
        self.implementation = wanted

    @classmethod
    def parse_file(cls, path: Any, **_: Any) -> ModelSettings:
        found = json.loads(Path(path).read_bytes())
        return cls(**found, _source=str(path))

    @classmethod
    def model_validate(cls, obj: Any, **_: Any) -> ModelSettings:
        return obj if isinstance(obj, cls) else cls(**obj)

    @property
    def version(self) -> str | None:
        return self.parameters.version if self.parameters is not None else None

    @property
    def implementation(self) -> Any:
        found = self._implementation
        return _imported(self.implementation_, self._source) if found is None else found

    @implementation.setter
    def implementation(self, value: Any) -> None:
        self.implementation_ = _path(value)
        self._implementation = None if isinstance(value, str) else value


def _path(implementation: Any) -> Any:
    is_class = isinstance(implementation, type)
    return f"{implementation.__module__}.{implementation.__name__}" if is_class else implementation


def _imported(path: str, source: str | None) -> Any:
    module, _, name = path.rpartition(".")
    if not module:
        raise ImportError(f"implementation {path!r} is not the path of a class: package.module.Class")
    folder = os.path.dirname(source) if source else None
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    found = importlib.import_module(module)
    try:
        return getattr(found, name)
    except AttributeError:
        raise ImportError(f"implementation {path!r}: module {module} has no {name}") from None


class Settings(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", validate_assignment=True)
    debug: bool = False
    parallel_workers: int = 1
    server_name: str = "mlserver"
    server_version: str = "1.7.1"
    extensions: list[str] = []
    host: str = "0.0.0.0"
    http_port: int = 8080
    grpc_port: int = 8081
    metrics_port: int = 8082
