"""ModelService: a handler in the form of MXNet's model server, with one request at a time and a signature file."""

from __future__ import annotations

import ast
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from ts.context import Context


class ModelService(ABC):
    """Subclasses implement `inference`. The archive's manifest names a signature (`Model: {Signature: FILE}`), a
    JSON object with `input_type` and `inputs: [{data_name}]`."""

    def __init__(
        self,
        model_name: str | None = None,
        model_dir: str | None = None,
        manifest: dict[str, Any] | None = None,
        gpu: int | None = None,
    ) -> None:
        self.ctx: Context | None = None
        self._context: Context | None = None
        self._signature: dict[str, Any] = {}

    def initialize(self, context: Context) -> None:
        """Reads the signature. Raises ValueError without one."""
        self._context = context
        manifest = context.manifest or {}
        name = (manifest.get("Model") or manifest.get("model") or {}).get("Signature")
        path = Path(context.system_properties["model_dir"], name or "signature.json")
        if not path.is_file():
            raise ValueError(f"Signature file is not found: {path}")
        self._signature = json.loads(path.read_text(encoding="utf-8"))

    @abstractmethod
    def inference(self, data: list[Any]) -> Any:
        """The answer to a list with one input."""

    def ping(self) -> Any:
        """The service's health; None unless a subclass reports it."""
        return None

    def signature(self) -> dict[str, Any]:
        return self._signature

    def handle(self, data: Any, context: Context) -> list[Any]:
        """The first request's answer: its input is the field that the signature names, else `body` or `data`."""
        row = data[0]
        names = (self._signature["inputs"][0]["data_name"], "body", "data")
        value = next((row[name] for name in names if row.get(name) is not None), None)
        if self._signature.get("input_type") == "application/json" and isinstance(value, bytes | bytearray):
            value = ast.literal_eval(value.decode("utf-8"))
        result = self.inference([value])
        return result if isinstance(result, list) else [result]


class SingleNodeService(ModelService):
    """A service of three steps: subclasses implement `_inference`, and if need be `_preprocess`, `_postprocess`."""

    def inference(self, data: list[Any]) -> Any:
        return self._postprocess(self._inference(self._preprocess(data)))

    @abstractmethod
    def _inference(self, data: Any) -> Any:
        """The model's output."""

    def _preprocess(self, data: Any) -> Any:
        return data

    def _postprocess(self, data: Any) -> Any:
        return data
