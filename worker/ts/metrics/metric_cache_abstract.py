"""The base of a cache of metrics that reads their declarations from a file, for formats of one's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from ts.metrics.metric_cache import MetricCache


class MetricCacheAbstract(MetricCache, ABC):
    """Metrics by type and name, declared by `config_file_path`."""

    def __init__(self, config_file_path: str | Path, model_name: str | None = None) -> None:
        super().__init__(model_name)
        self.config_file_path = Path(config_file_path)

    @abstractmethod
    def initialize_cache(self) -> None:
        """Declare the file's metrics, with `add_metric_to_cache`."""
