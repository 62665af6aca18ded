"""The metrics that `metrics.yaml` declares for handlers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ts.metrics.metric_cache_abstract import MetricCacheAbstract
from ts.metrics.metric_cache_errors import (
    MetricsCacheIOError,
    MetricsCacheKeyError,
    MetricsCachePyYamlError,
    MetricsCacheTypeError,
)
from ts.metrics.metric_type_enum import MetricTypes

DEFAULT_FILE = Path(__file__).parent.parent / "configs" / "metrics.yaml"


def _parse(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MetricsCacheIOError(f"metrics file {path} can't be read: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise MetricsCachePyYamlError(f"metrics file {path} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise MetricsCachePyYamlError(f"metrics file {path} holds no mapping")
    return content


class MetricsCacheYamlImpl(MetricCacheAbstract):
    """`initialize_cache` declares the metrics that the file's `model_metrics` lists.

    `config_file_path`: None is the file that comes with the server. Raises MetricsCacheIOError,
    MetricsCachePyYamlError.
    """

    def __init__(self, config_file_path: str | Path | None = None, model_name: str | None = None) -> None:
        super().__init__(config_file_path or DEFAULT_FILE, model_name)
        self._content = _parse(self.config_file_path)

    def initialize_cache(self) -> None:
        """Declare the file's metrics. Raises MetricsCacheKeyError without a `model_metrics` section,
        MetricsCacheTypeError for an invalid entry."""
        section = self._parse_metrics_section()
        if not section:
            raise MetricsCacheKeyError(
                f"metrics file {self.config_file_path} has nothing in its `model_metrics` section"
            )
        for kind, entries in section.items():
            self._declare_all(kind, entries or [])

    def _parse_metrics_section(self, key: str = "model_metrics") -> dict[str, Any]:
        if key not in self._content:
            raise MetricsCacheKeyError(f"metrics file {self.config_file_path} has no `{key}` section")
        section: dict[str, Any] = self._content[key]
        return section

    def _declare_all(self, kind: str, entries: list[dict[str, Any]]) -> None:
        try:
            metric_type = MetricTypes(kind)
        except ValueError:
            names = ", ".join(known.value for known in MetricTypes)
            raise MetricsCacheTypeError(f"{self.config_file_path}: no metric type {kind!r}, only {names}") from None
        for entry in entries:
            try:
                definition = entry["name"], entry["unit"], entry["dimensions"]
            except (KeyError, TypeError) as error:
                message = f"{self.config_file_path}: {entry!r} needs name, unit and dimensions"
                raise MetricsCacheKeyError(message) from error
            self.add_metric_to_cache(*definition, metric_type)
