"""Loads a handler as a worker does, for programs that run it in their own process: tests of handlers, notebooks."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from ts.runtime.handlers import entry_point_of, enveloped
from ts.service import Service


class ModelLoader(ABC):
    """Makes a Service of a model's folder."""

    @abstractmethod
    def load(self, *given: Any, **named: Any) -> Service:
        """Arguments as of `TsModelLoader.load`."""


class TsModelLoader(ModelLoader):
    """Puts `model_dir` first on `sys.path`, imports the handler and initialises it."""

    def load(
        self,
        model_name: str,
        model_dir: str,
        handler: str | None = None,
        gpu_id: int | None = None,
        batch_size: int | None = None,
        envelope: str | None = None,
        limit_max_image_pixels: bool | None = True,
        metrics_cache: Any = None,
    ) -> Service:
        """Loads the model in `model_dir`, its unpacked archive. `handler`: None for the manifest's. Raises
        ts.runtime.handlers.HandlerNotUsable (a ValueError); exceptions of the handler pass through."""
        manifest = read_manifest(Path(model_dir))
        if model_dir not in sys.path:
            sys.path.insert(0, model_dir)
        name = handler or str((manifest or {}).get("model", {}).get("handler") or "")
        entry, initialize = entry_point_of(name, model_dir)
        if envelope:
            entry = enveloped(entry, envelope)
        service = Service(
            model_name, model_dir, manifest, entry, gpu_id, batch_size, limit_max_image_pixels, metrics_cache
        )
        initialize(service.context)
        return service


class ModelLoaderFactory:
    """Gives the loader."""

    @staticmethod
    def get_model_loader() -> TsModelLoader:
        return TsModelLoader()


def read_manifest(model_dir: Path) -> dict[str, Any] | None:
    """The manifest in a model's folder, None without one. Raises ValueError if it isn't JSON."""
    path = model_dir / "MAR-INF" / "MANIFEST.json"
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else None
