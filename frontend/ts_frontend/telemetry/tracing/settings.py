"""Where traces go, as the setting and OpenTelemetry's own variables say it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from urllib.parse import urlsplit

from ts_frontend.config.kinds import ConfigError

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
GRPC, HTTP = "grpc", "http/protobuf"
PACKAGES = {
    GRPC: "opentelemetry.exporter.otlp.proto.grpc",
    HTTP: "opentelemetry.exporter.otlp.proto.http",
}
TRACES_PATH = "/v1/traces"


def wanted(own: str | None, environ: Mapping[str, str]) -> bool:
    """Whether somebody said where spans go, and nobody that there shall be none."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if "otlp" not in exporters.split(","):
        if exporters != "none":
            log.warning("OTEL_TRACES_EXPORTER=%s: no traces are made, they can go over otlp only", exporters)
        return False
    return bool(own or named(environ))


def named(environ: Mapping[str, str]) -> str:
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
