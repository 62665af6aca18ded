"""The server's process: its logs, its event loop, the signals that end it, and what it tells whoever started it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any

from ts_frontend.config import ServerConfig, forget_secrets
from ts_frontend.errors import ServeError
from ts_frontend.last_resort import end_within, leave_within
from ts_frontend.launch import STARTED
from ts_frontend.report import Report
from ts_frontend.server import Server
from ts_frontend.tasks import owned
from ts_frontend.telemetry.logs import Logs, setup_logs

log = logging.getLogger(__name__)

LOGS_FLUSH_S = 2.0
#: What a stop does beside waiting for drain_grace_s and drain_timeout_s takes less than this.
STOP_MARGIN_S = 30.0
#: `timeout` signals its child and then the group, terminals and `docker run` do likewise: who means a second signal
#: sends it later than this.
AGAIN_S_MIN = 1.0
#: How long tasks that were cancelled may take to end, and then the interpreter.
TASKS_END_S_MAX = 2.0
EXIT_S_MAX = 5.0


def main(config: ServerConfig, report_ready_fd: int | None = None) -> int:
    """Runs a server until SIGTERM, SIGINT or SIGHUP; the process's exit status, with which it ends within EXIT_S_MAX
    seconds of the return, whatever its threads do.

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
        status = _run_loop(_run(config, logs, report))
    except (OSError, ServeError, RuntimeError, ValueError) as error:
        log.error("%s", error, exc_info=not isinstance(error, (OSError, ServeError)))
        report.failed(str(error))
        status = 1
    finally:
        logs.close()
    leave_within(EXIT_S_MAX, status)
    return status


def _run_loop(work: Coroutine[Any, Any, int]) -> int:
    """Runs `work` in an event loop that is closed afterwards, unless a task outlives its cancellation: an engine that
    waits for clients does."""
    if sys.platform == "win32":
        return asyncio.run(work)
    import uvloop

    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(work)
    finally:
        if loop.run_until_complete(_end_tasks()):
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


async def _end_tasks() -> bool:
    """Whether all tasks but this one have ended."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    _, stuck = await asyncio.wait(left, timeout=TASKS_END_S_MAX) if left else (left, set())
    for task in stuck:
        log.warning("Left behind at the end: %s", task.get_coro())
    return not stuck


async def _run(config: ServerConfig, logs: Logs, report: Report) -> int:
    """The exit status: 0, or that of a process ended by the second signal."""
    server = Server(config, logs)
    stopping = Stopping(server, config.drain_grace_s + config.drain_timeout_s + STOP_MARGIN_S)

    def on_ready(listening: dict[str, str], failures: list[str]) -> None:
        for name, address in listening.items():
            log.info("%s listens on %s", name, address)
        logs.flush(LOGS_FLUSH_S)  # who waits for STARTED finds the addresses above it
        print(f"{STARTED}\n", end="", flush=True)  # in one piece: the log's thread writes there too
        report.ready(listening, failures)

    running = owned(server.run(on_ready, report.progress))
    stopping.watch(running)
    try:
        await running
    except asyncio.CancelledError:
        if not stopping.status:
            raise
    report.failed("it was asked to stop before it was ready")  # nothing, when it has reported that it is
    return stopping.status


class Stopping:
    """What signals do to a running server. The first SIGTERM, SIGINT or SIGHUP drains it, within `limit_s` seconds; a
    second SIGTERM or SIGINT ends it at once, with `status` 128 and the signal's number."""

    def __init__(self, server: Server, limit_s: float) -> None:
        self._server = server
        self._limit_s = limit_s
        self._begun_s = 0.0
        self._watchdog: threading.Timer | None = None
        self.status = 0

    def watch(self, running: asyncio.Task[None]) -> None:
        """SIGHUP says that the terminal has gone; whoever started us with it ignored (nohup) wants us to outlive that.
        A daemon, which leads a session without a terminal, has none that could go, and goes on, too."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked, number, running)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, _nothing if _is_daemon() else self._drain)

    def _asked(self, number: signal.Signals, running: asyncio.Task[None]) -> None:
        if self._watchdog is None:
            self._drain()
        elif time.monotonic() - self._begun_s >= AGAIN_S_MIN and not self.status:
            log.warning("%s came again: what is still running is ended now", number.name)
            self.status = 128 + number
            running.cancel()

    def _drain(self) -> None:
        if self._watchdog is None:
            self._begun_s = time.monotonic()
            self._watchdog = end_within(self._limit_s)
            self._server.stop()


def _is_daemon() -> bool:
    if os.getsid(0) != os.getpid():
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return True
    return False


def _nothing() -> None:
    log.info("SIGHUP: nothing to do; certificates, keys and models are looked after without it")
