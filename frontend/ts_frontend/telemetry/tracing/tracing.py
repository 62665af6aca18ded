"""OpenTelemetry traces, where they are asked for: whether they are, and what the doors and models need of them.

OpenTelemetry's packages are an extra (`otel`), imported only when there is somewhere to send spans to.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from ts_frontend.config.kinds import ConfigError
from ts_frontend.config.table import ServerConfig
from ts_frontend.grpc.call import Method
from ts_frontend.http.request import AsgiApp
from ts_frontend.job import Job, Ledger
from ts_frontend.telemetry.metrics.samples import Family
from ts_frontend.telemetry.tracing.sampling import COUNT, LEVEL, RATE, Sampling
from ts_frontend.telemetry.tracing.settings import PACKAGES, endpoint, named, protocol_of, wanted

log = logging.getLogger(__name__)


class Tracing(Protocol):
    """Makes spans (`ts_frontend.telemetry.tracing.traces.Traces`)."""

    @property
    def sampling(self) -> Sampling:
        """Which requests to models get some."""

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
        log.warning("%s is set, and no traces are made. %s", named(config.environment), text)
        return None
    from ts_frontend.telemetry.tracing.export import Export
    from ts_frontend.telemetry.tracing.traces import Traces

    export = Export(protocol, endpoint(config.otlp_endpoint, protocol), config.environment)
    where = config.otlp_endpoint or config.environment[named(config.environment)]
    log.info("Traces go to %s (OTLP, %s)", where, protocol)
    return Traces(export, sampling_of(config, on=True))


def sampling_of(config: ServerConfig, *, on: bool) -> Sampling:
    """Trace settings as the server starts with them."""
    given = {LEVEL: config.trace_level, RATE: config.trace_rate, COUNT: config.trace_count}
    return Sampling(on, {name: (str(value).upper(),) for name, value in given.items() if value is not None})


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
