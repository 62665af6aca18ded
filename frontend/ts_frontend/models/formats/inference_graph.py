"""A manifest of KServe's InferenceGraph: a YAML file whose steps are models of this server."""

from __future__ import annotations

from pathlib import Path

import yaml

from ts_frontend.config.files import read_text
from ts_frontend.errors import InvalidArgument
from ts_frontend.graphs.inference_graph import KIND, inference_graph
from ts_frontend.models.archive import Archive, parse_config
from ts_frontend.models.formats.format import ModelFiles, ModelFormat

_BYTES_MAX = 1 << 20
_SUFFIXES = (".yaml", ".yml")


class InferenceGraphFormat(ModelFormat):
    def matches(self, path: Path) -> bool:
        return path.suffix in _SUFFIXES and path.is_file() and f"kind: {KIND}" in read_text(path, _BYTES_MAX)

    def open(self, files: ModelFiles) -> list[Archive]:
        path = files.path
        try:
            graph = inference_graph(parse_config(read_text(path, _BYTES_MAX)), path.name)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"{path.name} is not usable as YAML: {error}") from None
        name = graph.name or path.stem
        return [
            Archive(
                dir=path.parent,
                name=name,
                manifest={"model": {"modelName": name, "modelVersion": "1.0"}},
                graph=graph,
            )
        ]
