"""JSON of the older metrics."""

from __future__ import annotations

import json
from typing import Any

from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric


class MetricEncoder(json.JSONEncoder):
    """`json.dumps(metric, cls=MetricEncoder)` writes a Metric or Dimension as its `to_dict()`."""

    def default(self, o: Any) -> Any:
        return o.to_dict() if isinstance(o, Metric | Dimension) else super().default(o)

    def iterencode(self, o: Any, _one_shot: bool = False) -> Any:
        return super().iterencode(o.to_dict() if isinstance(o, Dimension) else o, _one_shot)
