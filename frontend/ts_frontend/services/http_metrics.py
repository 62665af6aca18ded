"""The metrics API: `GET /metrics`, with `name[]` for some of them."""

from __future__ import annotations

from typing import Protocol
from urllib.parse import parse_qsl

from ts_frontend.ingress.http_call import HttpAnswer, HttpRequest, Serve
from ts_frontend.telemetry.metrics_text import CONTENT_TYPE

PATH = "/metrics"
FIELDS_MAX = 1000


class Readable(Protocol):
    """Who has the metrics (`ts_frontend.telemetry.metrics.MetricsRegistry`)."""

    def text(self, names: frozenset[str]) -> str: ...


class MetricsApp:
    """The route of the metrics API. As TorchServe's, it answers any method."""

    def __init__(self, registry: Readable) -> None:
        self._registry = registry

    def route(self, request: HttpRequest) -> Serve | None:
        return self.read if request.path.rstrip("/") == PATH else None

    async def read(self, request: HttpRequest) -> HttpAnswer:
        """The metrics as Prometheus's text; those that `name[]` names, or all."""
        body = self._registry.text(wanted(request.query)).encode("utf-8", "replace")
        return HttpAnswer(200, ((b"content-type", CONTENT_TYPE.encode()),), body)


def wanted(query: bytes) -> frozenset[str]:
    """The values of `name[]` in a query string; none: all metrics."""
    try:
        fields = parse_qsl(query.decode("utf-8", "replace"), max_num_fields=FIELDS_MAX)
    except ValueError:
        fields = []
    return frozenset(value for key, value in fields if key == "name[]")
