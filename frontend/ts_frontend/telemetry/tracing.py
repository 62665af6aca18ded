"""OpenTelemetry traces, where they are asked for: whether they are, and what the doors and models need of them.

OpenTelemetry's packages are an extra (`otel`), imported only when there is somewhere to send spans to.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol
from urllib.parse import urlsplit

from ts_frontend.config import ConfigError, ServerConfig
from ts_frontend.ingress.asgi import AsgiApp
from ts_frontend.ingress.call import Method
from ts_frontend.job import Job, Ledger
from ts_frontend.telemetry.metrics_samples import Family

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
GRPC, HTTP = "grpc", "http/protobuf"
PACKAGES = {
    GRPC: "opentelemetry.exporter.otlp.proto.grpc",
    HTTP: "opentelemetry.exporter.otlp.proto.http",
}
TRACES_PATH = "/v1/traces"


class Tracing(Protocol):
    """Makes spans (`ts_frontend.telemetry.traces.Traces`)."""

    def method(self, method: Method) -> Method:
        """The method, with a span for each of its calls; a health method as it is."""

    def http(self, app: AsgiApp, paths: Sequence[str]) -> AsgiApp:
        """The application, with a span for each request; `paths`: the templates that name them."""

    def ledger(self, name: str, version: str) -> Ledger:
        """For the jobs of one model version: their time in the queue and on a worker become spans."""

    def jobs(self, new_job: Callable[..., Job]) -> Callable[..., Job]:
        """The same, but that handlers get the span's context in the header `traceparent`."""

    def families(self) -> list[Family]:
        """What became of the spans, for the metrics."""

    async def close(self) -> None:
        """Sends what there is, for a few seconds at most."""


def open_tracing(config: ServerConfig) -> Tracing | None:
    """What makes spans, None when none are wanted. Raises ConfigError where they are asked for and can't be made."""
    if not wanted(config.otlp_endpoint, config.environment):
        return None
    protocol = protocol_of(config.environment)
    if not _installed("opentelemetry.sdk") or not _installed(PACKAGES[protocol]):
        text = "Traces need OpenTelemetry's packages: pip install torchrelay[otel]"
        if config.otlp_endpoint:
            raise ConfigError(f"otlp_endpoint is set. {text}")
        log.warning("%s is set, and no traces are made. %s", _named(config.environment), text)
        return None
    from ts_frontend.telemetry.trace_export import Export
    from ts_frontend.telemetry.traces import Traces

    export = Export(protocol, endpoint(config.otlp_endpoint, protocol), config.environment)
    where = config.otlp_endpoint or config.environment[_named(config.environment)]
    log.info("Traces go to %s (OTLP, %s)", where, protocol)
    return Traces(export)


def wanted(own: str | None, environ: Mapping[str, str]) -> bool:
    """Whether somebody said where spans go, and nobody that there shall be none."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if "otlp" not in exporters.split(","):
        if exporters != "none":
            log.warning("OTEL_TRACES_EXPORTER=%s: no traces are made, they can go over otlp only", exporters)
        return False
    return bool(own or _named(environ))


def _named(environ: Mapping[str, str]) -> str:
    """The variable that says where spans go, "" for none."""
    return next((name for name in ENDPOINTS if environ.get(name, "").strip()), "")


def protocol_of(environ: Mapping[str, str]) -> str:
    """GRPC or HTTP. Raises ConfigError for others."""
    found = next((environ[name].strip() for name in PROTOCOLS if environ.get(name, "").strip()), HTTP)
    if found not in PACKAGES:
        raise ConfigError(f"The OTLP protocol {found!r} ({' or '.join(PROTOCOLS)}): use {HTTP} or {GRPC}")
    return found


def endpoint(own: str | None, protocol: str) -> str | None:
    """Where the exporter sends spans, None: it looks into the environment. Over HTTP, a URL without a path is a
    collector's base. Raises ConfigError for what isn't a URL."""
    if own is None:
        return None
    parts = urlsplit(own)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"otlp_endpoint = {own}: write a URL such as http://127.0.0.1:4318")
    return own.rstrip("/") + TRACES_PATH if protocol == HTTP and parts.path in ("", "/") else own


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
