"""The metrics of a server from its settings."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import ts.version
from ts_frontend.config import ServerConfig
from ts_frontend.telemetry.logs import Logs
from ts_frontend.telemetry.metrics import MetricsRegistry
from ts_frontend.telemetry.metrics_definitions import read_definitions
from ts_frontend.telemetry.metrics_system import RunCommand, SystemMetrics, command_line
from ts_frontend.workers.process import tool_output

#: The directory `system_metrics_cmd` runs in, as TorchServe's: a relative path in it starts with `ts/`.
PACKAGE_PARENT = Path(ts.version.__file__).parents[1]
DEFAULT_FILE = PACKAGE_PARENT / "ts" / "configs" / "metrics.yaml"
COMMAND_S_MAX = 30.0


def open_metrics(config: ServerConfig, logs: Logs) -> MetricsRegistry:
    """An empty registry, joined to the logs. Raises ConfigError for a metrics_config that can't be used."""
    definitions = read_definitions(config.metrics_config or DEFAULT_FILE)
    registry = MetricsRegistry(
        definitions, config.metrics_mode, platform.node(), auto_detect=config.model_metrics_auto_detect
    )
    logs.every_period(registry.event_log.portions)
    return registry


def system_metrics(
    config: ServerConfig,
    registry: MetricsRegistry,
    gpu_count: int,
    env: Mapping[str, str],
    pids: Callable[[], Iterable[int]],
) -> SystemMetrics | None:
    """What samples the machine, None when that is turned off. `env`: of the metrics command; `pids`: of the workers."""
    if config.disable_system_metrics:
        return None
    command = _command(config.system_metrics_cmd, env) if config.system_metrics_cmd else None
    return SystemMetrics(registry, config.metric_time_interval, gpu_count, command=command, pids=pids)


def _command(words: str, env: Mapping[str, str]) -> RunCommand:
    argv = command_line(sys.executable, words)

    async def run(pids: str) -> str | None:
        return await tool_output(argv, COMMAND_S_MAX, given=pids + "\n", env=env, cwd=PACKAGE_PARENT)

    return run
