"""OpenTelemetry traces: whether they are enabled, and the parts of them that listeners and models use; their settings:
the collector, as `otlp_endpoint` or OpenTelemetry's variables name it, and Triton's for which requests are traced
(level, rate, count).

Triton's settings apply after OpenTelemetry's sampler, and only to requests that it selects. Models without settings of
their own are counted together. OpenTelemetry's packages are an extra (`otel`), imported only when there is a collector
to send spans to.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ts_frontend.config.kinds import ConfigError
from ts_frontend.config.table import ServerConfig

if TYPE_CHECKING:
    from ts_frontend.telemetry.tracing.spans import Traces

log = logging.getLogger(__name__)


ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
GRPC, HTTP = "grpc", "http/protobuf"
#: The packages of the exporters.
PACKAGES = {
    GRPC: "opentelemetry.exporter.otlp.proto.grpc",
    HTTP: "opentelemetry.exporter.otlp.proto.http",
}
TRACES_PATH = "/v1/traces"


def wanted(own: str | None, environ: Mapping[str, str]) -> bool:
    """Whether a collector is configured, and tracing isn't disabled."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if "otlp" not in exporters.split(","):
        if exporters != "none":
            log.warning("OTEL_TRACES_EXPORTER=%s: no traces are made, they can go over otlp only", exporters)
        return False
    return bool(own or named(environ))


def named(environ: Mapping[str, str]) -> str:
    """The variable that names the collector, "" for none."""
    return next((name for name in ENDPOINTS if environ.get(name, "").strip()), "")


def protocol_of(environ: Mapping[str, str]) -> str:
    """GRPC or HTTP. Raises ConfigError for others."""
    found = next((environ[name].strip() for name in PROTOCOLS if environ.get(name, "").strip()), HTTP)
    if found not in PACKAGES:
        raise ConfigError(f"The OTLP protocol {found!r} ({' or '.join(PROTOCOLS)}): use {HTTP} or {GRPC}")
    return found


def endpoint(own: str | None, protocol: str) -> str | None:
    """The URL to which the exporter sends spans, None: it reads the environment. Over HTTP, a URL without a path is a
    collector's base URL. Raises ConfigError if it isn't a URL."""
    if own is None:
        return None
    parts = urlsplit(own)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"otlp_endpoint = {own}: write a URL such as http://127.0.0.1:4318")
    return own.rstrip("/") + TRACES_PATH if protocol == HTTP and parts.path in ("", "/") else own


LEVEL, RATE, COUNT = "trace_level", "trace_rate", "trace_count"
OFF, UNLIMITED = "OFF", -1
#: The defaults, with and without a collector.
_ON: Mapping[str, tuple[str, ...]] = {
    LEVEL: ("TIMESTAMPS",),
    RATE: ("1",),
    COUNT: ("-1",),
    "log_frequency": ("0",),
    "trace_file": ("",),
    "trace_mode": ("opentelemetry",),
}
_NONE: Mapping[str, tuple[str, ...]] = {**_ON, LEVEL: (OFF,), RATE: ("1000",), "trace_mode": ("triton",)}


class Scope:
    """Settings of the server or of a model, and the counts of requests seen and traced under them."""

    __slots__ = ("own", "seen", "traced")

    def __init__(self, own: Mapping[str, tuple[str, ...]]) -> None:
        self.own = dict(own)
        self.seen = self.traced = 0

    def restart(self) -> None:
        self.seen = self.traced = 0


class Sampling:
    """`on`: whether there is a collector; `given`: the server's settings at its start."""

    def __init__(self, on: bool, given: Mapping[str, tuple[str, ...]]) -> None:
        self._defaults = _ON if on else _NONE
        self._server = Scope(given)
        self._models: dict[str, Scope] = {}

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._defaults)

    def read(self, model: str = "") -> dict[str, list[str]]:
        scope = self._models.get(model, self._server)
        found = {**self._defaults, **self._server.own, **scope.own}
        count = int(found[COUNT][0])
        left = count if count == UNLIMITED else max(0, count - scope.traced)
        return {name: list(values) for name, values in (found | {COUNT: (str(left),)}).items()}

    def change(self, given: Mapping[str, Sequence[str]], model: str = "") -> None:
        """Changes settings; an empty list resets one to the server's, or to the default. Counting begins again."""
        scope = self._models.setdefault(model, Scope({})) if model else self._server
        for name, values in given.items():
            if values:
                scope.own[name] = tuple(values)
            else:
                scope.own.pop(name, None)
        if model and not scope.own:
            del self._models[model]
        for one in (scope,) if model else (scope, *self._models.values()):
            one.restart()

    def wanted(self, model: str, continued: bool) -> bool:
        """Whether the next request to this model is traced. A client's trace goes on regardless of the rate."""
        scope = self._models.get(model, self._server)
        found = {**self._defaults, **self._server.own, **scope.own}
        if OFF in found[LEVEL]:
            return False
        if not continued:
            scope.seen += 1
            if scope.seen % max(1, int(found[RATE][0])):
                return False
        count = int(found[COUNT][0])
        if UNLIMITED < count <= scope.traced:
            return False
        scope.traced += 1
        return True


def open_tracing(config: ServerConfig) -> Traces | None:
    """The maker of spans, None when tracing is off. Raises ConfigError when it is requested and not possible."""
    if not wanted(config.otlp_endpoint, config.environment):
        return None
    protocol = protocol_of(config.environment)
    if not _installed("opentelemetry.sdk") or not _installed(PACKAGES[protocol]):
        text = "Traces need OpenTelemetry's packages: pip install torchrelay[otel]"
        if config.otlp_endpoint:
            raise ConfigError(f"otlp_endpoint is set. {text}")
        log.warning("%s is set, and no traces are made. %s", named(config.environment), text)
        return None
    from ts_frontend.telemetry.tracing.spans import Export, Traces

    export = Export(PACKAGES[protocol], endpoint(config.otlp_endpoint, protocol), config.environment)
    where = config.otlp_endpoint or config.environment[named(config.environment)]
    log.info("Traces go to %s (OTLP, %s)", where, protocol)
    return Traces(export, sampling_of(config, on=True))


def sampling_of(config: ServerConfig, *, on: bool) -> Sampling:
    given = {LEVEL: config.trace_level, RATE: config.trace_rate, COUNT: config.trace_count}
    return Sampling(on, {name: (str(value).upper(),) for name, value in given.items() if value is not None})


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
