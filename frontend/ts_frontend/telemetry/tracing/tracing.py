"""OpenTelemetry traces: whether they are enabled, and the parts of them that listeners and models use.

OpenTelemetry's packages are an extra (`otel`), imported only when there is a collector to send spans to.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

from ts_frontend.config.kinds import ConfigError
from ts_frontend.config.table import ServerConfig
from ts_frontend.telemetry.tracing.settings import (
    COUNT,
    LEVEL,
    PACKAGES,
    RATE,
    Sampling,
    endpoint,
    named,
    protocol_of,
    wanted,
)

if TYPE_CHECKING:
    from ts_frontend.telemetry.tracing.spans import Traces

log = logging.getLogger(__name__)


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
    from ts_frontend.telemetry.tracing.export import Export
    from ts_frontend.telemetry.tracing.spans import Traces

    export = Export(protocol, endpoint(config.otlp_endpoint, protocol), config.environment)
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
