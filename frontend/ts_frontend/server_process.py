"""The server's process: its logs, its event loop, the signals that end it, and what it tells whoever started it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from typing import Any

from ts_frontend.config import ServerConfig, forget_secrets
from ts_frontend.errors import ServeError
from ts_frontend.last_resort import end_within
from ts_frontend.launch import STARTED
from ts_frontend.report import Report
from ts_frontend.server import Server
from ts_frontend.telemetry.logs import Logs, setup_logs

log = logging.getLogger(__name__)

LOGS_FLUSH_S = 2.0
#: Requests may take drain_timeout_s to end, then workers the same; what else a stop does takes less than this.
STOP_MARGIN_S = 30.0


def main(config: ServerConfig, report_ready_fd: int | None = None) -> int:
    """Runs a server until SIGTERM or SIGINT; the process's exit status.

    `report_ready_fd` gets one line of JSON: `{"ready": true, "listening": {name: address}, "warnings": [text]}`, or
    `{"ready": false, "error": text}`, and is closed.
    """
    report = Report(report_ready_fd)
    forget_secrets()
    if os.getpid() == 1:  # whose signals count only when they are handled
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    try:
        logs = setup_logs(config)
    except (OSError, ServeError, ValueError) as error:
        where = " Set LOG_LOCATION to a directory that can be written." if isinstance(error, OSError) else ""
        report.failed(f"Logs can't be opened: {error}.{where}")
        return 1
    try:
        _run_loop(_run(config, logs, report))
        return 0
    except (OSError, ServeError, RuntimeError, ValueError) as error:
        log.error("%s", error, exc_info=not isinstance(error, (OSError, ServeError)))
        report.failed(str(error))
        return 1
    finally:
        logs.close()


def _run_loop(work: Coroutine[Any, Any, None]) -> None:
    if sys.platform == "win32":
        asyncio.run(work)
    else:
        import uvloop

        uvloop.run(work)


async def _run(config: ServerConfig, logs: Logs, report: Report) -> None:
    server = Server(config, logs)
    loop = asyncio.get_running_loop()
    stopping: list[threading.Timer] = []

    def stop() -> None:
        if not stopping:
            stopping.append(end_within(2 * config.drain_timeout_s + STOP_MARGIN_S))
        server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)

    def on_ready(listening: dict[str, str], failures: list[str]) -> None:
        for name, address in listening.items():
            log.info("%s listens on %s", name, address)
        logs.flush(LOGS_FLUSH_S)  # who waits for STARTED finds the addresses above it
        print(f"{STARTED}\n", end="", flush=True)  # in one piece: the log's thread writes there too
        report.ready(listening, failures)

    await server.run(on_ready, report.progress)
    report.failed("it was asked to stop before it was ready")  # nothing, when it has reported that it is
