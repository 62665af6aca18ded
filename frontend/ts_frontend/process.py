"""The server's process: event loop, signals, forced exit, the report to the launcher, pid file and directories."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import faulthandler
import fcntl
import gc
import json
import logging
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import psutil

from ts.protocol.memory import keep_freed
from ts_frontend.config.checks import secured
from ts_frontend.config.kinds import ConfigError, bucket_of, lies_elsewhere
from ts_frontend.config.load import HANDED_OVER, forget_secrets, handed_over, located
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import ServeError
from ts_frontend.listeners.descriptors import few_open_files, raise_open_files
from ts_frontend.tasks import owned, watched
from ts_frontend.telemetry.logging.logs import setup_logs
from ts_frontend.telemetry.logging.writer import Logs
from ts_frontend.workers.spawning import StartedForkserver, first_forkserver

if TYPE_CHECKING:
    from ts_frontend.server import Server

log = logging.getLogger(__name__)

T = TypeVar("T")

STARTED = "Model server started."
LOGS_FLUSH_S = 2.0
#: The longest stop in seconds, besides drain_grace_s and drain_timeout_s.
STOP_MARGIN_S = 30.0
#: A second signal counts when it comes later than this: `timeout` signals its child and then the group, and terminals
#: and `docker run` do likewise.
AGAIN_S_MIN = 1.0
#: Seconds for cancelled tasks to end, and then for the interpreter.
TASKS_END_S_MAX = 2.0
EXIT_S_MAX = 5.0
#: The exit status of a server that didn't stop in time (sysexits.h, EX_SOFTWARE).
STUCK_STATUS = 70


def main(config: ServerConfig, report_ready_fd: int | None = None, check: Callable[[], object] | None = None) -> int:
    """Runs a server until SIGTERM, SIGINT or SIGHUP; returns the exit status. The process ends with it within
    EXIT_S_MAX seconds of the return, even if threads are stuck. At SIGUSR2 the server is replaced by one that reads its
    settings anew, unless `check` says that they can't be used (a ServeError).

    `report_ready_fd` gets one line of JSON: `{"ready": true, "listening": {name: address}, "warnings": [text]}`, or
    `{"ready": false, "error": text}`, and is closed.
    """
    report = StartReport(report_ready_fd)
    if hasattr(signal, "SIGUSR2"):  # it has no effect before the server is ready to be replaced
        signal.signal(signal.SIGUSR2, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
    left = handed_over()
    forget_secrets()
    raise_open_files()
    short = few_open_files()
    keeper = None
    if config.frontends > 1:
        from ts_frontend.frontends.keeper import Keeper  # one frontend needs none

        keeper = Keeper(_as_keeper, partial(_sibling, config))
    if os.getpid() == 1:  # the kernel passes signals to the first process only if they are handled
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    try:
        logs = setup_logs(config)
    except (ServeError, ValueError) as error:
        report.failed(f"Logs can't be opened: {error}.")
        return 1
    if short:
        log.warning("%s", short)
    leaves: dict[str, Any] | None = None
    try:
        forkserver = first_forkserver(config, left.get("forkserver"))
        server_of = partial(_server, config, logs, forkserver, left.get("sockets", {}), keeper=keeper)
        status, leaves = _run_loop(_run(config, logs, report, server_of, check))
    except (OSError, ServeError, RuntimeError, ValueError) as error:
        log.error("%s", error, exc_info=not isinstance(error, (OSError, ServeError)))
        report.failed(f"{error}. {short}" if short else str(error))
        status = 1
    finally:
        logs.close()
    if leaves is not None:
        _become_successor(config, leaves)
    leave_within(EXIT_S_MAX, status)
    return status


def _become_successor(config: ServerConfig, leaves: Mapping[str, Any]) -> NoReturn:
    """Runs this process's command anew in it. The command that waits for its report gets it."""
    words = list(sys.orig_argv)
    if "--ready-fd" in words:
        at = words.index("--ready-fd")
        del words[at : at + 2]
    if (fd := _restart_report(config.work_dir)) is not None:
        os.set_inheritable(fd, True)
        words += ["--ready-fd", str(fd)]
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})  # else it ends the process until that handles it
    os.execve(sys.executable, words, {**config.environment, HANDED_OVER: json.dumps(leaves)})


def _run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` in an event loop, which is closed afterwards unless a task outlives its cancellation."""
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
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    _, stuck = await asyncio.wait(left, timeout=TASKS_END_S_MAX) if left else (left, set())
    for task in stuck:
        log.warning("A task did not end at the shutdown: %s", task.get_coro())
    return not stuck


def _server(
    config: ServerConfig,
    logs: Logs,
    forkserver: StartedForkserver | None,
    sockets: Mapping[str, Sequence[int]],
    **more: Any,
) -> Server:
    return _imported()(config, logs, forkserver=forkserver, left_sockets=sockets, **more)


def _imported() -> type[Server]:
    gc.disable()  # modules stay alive: collecting among them would only take time
    from ts_frontend.server import Server  # commands that only look for a running server needn't import all of this

    gc.freeze()
    gc.enable()
    return Server


async def _run(
    config: ServerConfig,
    logs: Logs,
    report: StartReport,
    server_of: Callable[[], Server],
    check: Callable[[], object] | None,
) -> tuple[int, dict[str, Any] | None]:
    """Runs the server. Returns the exit status: 0, or that of a process ended by the second signal; and what it leaves
    to the one that replaces it, None for none."""
    server = server_of()
    keep_freed()
    signals = StopSignals(server, config.drain_grace_s + config.drain_timeout_s + STOP_MARGIN_S, config.work_dir, check)

    def on_ready(listening: dict[str, str], failures: list[str]) -> None:
        if short := few_open_files():
            failures = [*failures, short]
        for name, address in listening.items():
            log.info("%s listens on %s", name, address)
        logs.flush(LOGS_FLUSH_S)  # the addresses are printed before STARTED
        print(f"{STARTED}\n", end="", flush=True)  # in one piece: the log's thread writes there too
        report.ready(listening, failures)

    running = owned(server.run(on_ready, report.progress))
    signals.watch(running)
    try:
        await running
    except asyncio.CancelledError:
        if not signals.status:
            raise
    report.failed("it was asked to stop before it was ready")  # does nothing after the report of a success
    return signals.status, None if signals.status else server.left


# --- a sibling of the lead


def _as_keeper() -> None:
    """The lead gets the signals, and tells its siblings; ended ones need no wait."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _imported()


def _sibling(config: ServerConfig, number: int, line_fd: int, sockets: Mapping[str, Sequence[int]]) -> int:
    """Runs the frontend `number`, as `frontends.keeper` forks it; returns its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    own = f"frontend{number}"
    config = replace(
        config,
        frontend=number,
        snapshot=None,
        ncs=True,
        shared_snapshot=None,
        exit_on_error=False,
        log_location=config.log_location / own,
        metrics_location=None if config.metrics_location is None else config.metrics_location / own,
    )
    logs = setup_logs(config)
    try:
        forkserver = first_forkserver(config, None)
        status = _run_loop(_run_sibling(config, logs, forkserver, line_fd, sockets))
    finally:
        logs.close()
    leave_within(EXIT_S_MAX, status)
    return status


async def _run_sibling(
    config: ServerConfig,
    logs: Logs,
    forkserver: StartedForkserver | None,
    line_fd: int,
    sockets: Mapping[str, Sequence[int]],
) -> int:
    from ts_frontend.frontends.sibling import Sibling

    orphaned = asyncio.Event()
    sibling = Sibling(config, socket.socket(fileno=line_fd), orphaned.set)
    orphan = owned(orphaned.wait())
    begun = owned(sibling.begun())
    await asyncio.wait({begun, orphan}, return_when=asyncio.FIRST_COMPLETED)
    if not begun.done():
        begun.cancel()
        return 1
    server = _server(config, logs, forkserver, sockets, sibling=sibling)
    keep_freed()
    running = owned(server.run(lambda *_: sibling.serves(server.stop), lambda _: None))
    await asyncio.wait({running, orphan}, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        log.error("The lead has ended: this frontend ends, too.")
        end_within(EXIT_S_MAX)
        running.cancel()
        await asyncio.wait({running})
        return 1
    orphan.cancel()
    if (error := running.exception()) is not None:
        sibling.failed(str(error))
        await sibling.flush()
        raise error
    return 0


# --- signals


class StopSignals:
    """The signals that stop a running server. The first SIGTERM, SIGINT or SIGHUP drains it within `limit_s` seconds; a
    second SIGTERM or SIGINT ends it at once, with `status` 128 plus the signal's number. SIGUSR2 replaces it."""

    def __init__(
        self, server: Server, limit_s: float, work_dir: Path | None = None, check: Callable[[], object] | None = None
    ) -> None:
        self._server = server
        self._limit_s = limit_s
        self._work_dir, self._check = work_dir, check
        self._begun_s = 0.0
        self._watchdog: threading.Timer | None = None
        self.status = 0

    def watch(self, running: asyncio.Task[None]) -> None:
        """Handles signals from now on. SIGHUP means that the terminal has gone. It doesn't end a server that was
        started with SIGHUP ignored (nohup), or a daemon, which leads a session without a terminal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked, number, running)
        if hasattr(signal, "SIGUSR2"):
            loop.add_signal_handler(signal.SIGUSR2, lambda: watched(self._replace(), "The server's replacement"))
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, _ignore_hangup if _is_daemon() else self._drain)

    def _asked(self, number: signal.Signals, running: asyncio.Task[None]) -> None:
        if self._watchdog is None:
            self._drain()
        elif self._server.left is not None:
            log.info("%s: the server ends, and isn't replaced", number.name)
            self._server.left = None
        elif time.monotonic() - self._begun_s >= AGAIN_S_MIN and not self.status:
            log.warning("Second %s: requests that still run are ended now", number.name)
            self.status = 128 + number
            running.cancel()

    def _drain(self, *, leave: bool = False) -> None:
        if self._watchdog is None:
            self._begun_s = time.monotonic()
            self._watchdog = end_within(self._limit_s)
            self._server.stop(leave=leave)

    async def _replace(self) -> None:
        """Drains the server for one that replaces it, if it could start."""
        refusal = "" if self._server.serving else "it has not started yet"
        if self._check is None:
            refusal = "it was started in another way than by torchserve --start"
        elif not refusal:
            try:
                await asyncio.to_thread(self._check)
            except ServeError as error:
                refusal = error.message
        if not refusal:
            log.info("SIGUSR2: the server is replaced; new connections wait for its successor")
            self._drain(leave=True)
            return
        log.error("SIGUSR2: the server goes on as it is: %s", refusal)
        StartReport(_restart_report(self._work_dir)).failed(refusal)


def _is_daemon() -> bool:
    if os.getsid(0) != os.getpid():
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return True
    return False


def _ignore_hangup() -> None:
    log.info("SIGHUP ignored: the server reloads certificates, keys and models by itself")


@contextlib.contextmanager
def exits_when_terminated() -> Iterator[None]:
    """While the block runs, SIGTERM raises SystemExit in it, with status 128 plus the signal's number, as Ctrl-C raises
    KeyboardInterrupt. Outside the main thread, which gets all signals, nothing changes."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --- the last resort


def end_within(limit_s: float) -> threading.Timer:
    """Ends the process in `limit_s` seconds at the latest, with all stacks on standard error and status 70, even if
    threads are stuck; `cancel()` once it has stopped by itself. Workers end with their server."""

    def end() -> None:
        print(f"The server did not stop in {limit_s:g} s, and is ended. Stacks of its threads:", file=sys.stderr)
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.flush()
        os._exit(STUCK_STATUS)

    return _started(limit_s, end)


def leave_within(limit_s: float, status: int) -> threading.Timer:
    """Ends the process with that status in `limit_s` seconds at the latest: threads that don't end can't keep it."""
    return _started(limit_s, lambda: os._exit(status))


def _started(limit_s: float, end: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    return timer


# --- the report to the launcher


class StartReport:
    """Lines of JSON for the launcher: the progress of the start, and once its outcome. `fd` None: no launcher."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def progress(self, text: str) -> None:
        """Reports the present step of the start."""
        if self._fd is not None:
            self._send(self._fd, {"progress": text})

    def ready(self, listening: dict[str, str], warnings: list[str]) -> None:
        self._write({"ready": True, "listening": listening, "warnings": warnings})

    def failed(self, error: str) -> None:
        self._write({"ready": False, "error": error})

    def _write(self, value: dict[str, Any]) -> None:
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        self._send(fd, value)
        os.close(fd)

    def _send(self, fd: int, value: dict[str, Any]) -> None:
        try:
            os.write(fd, json.dumps(value).encode() + b"\n")
        except BrokenPipeError:
            log.warning("The launcher left before the server was ready")


# --- the pid file

_PID_FLAGS = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class PidFileError(ServeError):
    """The pid file can't be used, or another server holds it; the message names the remedy."""

    remedy = "Delete the file, or name another place with `--work-dir`."


class AlreadyRunning(PidFileError):
    remedy = "`--work-dir` and ports of its own start a second server beside the first."

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"TorchServe is already running, and {path} is its pid file. A second server beside it needs a directory "
            "(--work-dir) and ports of its own."
        )


def pid_path(work_dir: Path | None = None) -> Path:
    """The path of the pid file. Raises PidFileError when there is no directory that can be written."""
    try:
        return (work_dir or Path(tempfile.gettempdir())) / ".model_server.pid"
    except FileNotFoundError as error:
        raise PidFileError(f"{error.strerror}. Set TMPDIR to a directory that can be written.") from None


def restart_path(work_dir: Path | None = None) -> Path:
    """The named pipe where the command that restarts a server waits for its report. Raises as `pid_path`."""
    return pid_path(work_dir).with_suffix(".restart")


def _restart_report(work_dir: Path | None) -> int | None:
    """The end of the named pipe for a report, None if no command of this user waits there."""
    try:
        fd = os.open(restart_path(work_dir), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    status = os.fstat(fd)
    if stat.S_ISFIFO(status.st_mode) and status.st_uid == os.getuid():
        return fd
    os.close(fd)
    return None


def running_server(path: Path) -> psutil.Process | None:
    """The server that holds the file, other than this process; None when there is none. A process object keeps its
    identity when ids are reused. The number may be that of a process that isn't the server: one that has it again after
    a restart of the container, or, in a directory that containers share, one of this container.

    :raises PidFileError: the file is a link, or another user's.
    """
    handle = _opened(path)
    if handle is None:
        return None
    with contextlib.closing(os.fdopen(handle)) as file:
        text = file.read().strip()
        if not _held(handle) or not text.isascii() or not text.isdigit() or int(text) == os.getpid():
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(text))
            return process if _has_open(process, path) and _held(handle) else None
    return None


def _has_open(process: psutil.Process, path: Path) -> bool:
    """Whether the process has the file open, as the server that wrote it has; True if this can't be seen."""
    try:
        return os.path.realpath(path) in [one.path for one in process.open_files()]
    except psutil.AccessDenied:
        return True


def remove_orphan(path: Path) -> bool:
    """Remove the file when no server holds it. True when there was one."""
    handle = _opened(path)
    if handle is None:
        return False
    try:
        if _locked(handle, path):
            path.unlink(missing_ok=True)
            return True
        return False
    finally:
        os.close(handle)


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Makes this process the server while the block runs; the file has its id, mode 600.

    :raises AlreadyRunning: another server is.
    :raises PidFileError: the file is a link, or another user's.
    """
    handle = _claim(path)
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _claim(path: Path) -> int:
    while True:
        handle = _opened(path, os.O_CREAT)
        assert handle is not None
        if not _locked(handle, path):
            os.close(handle)
            raise AlreadyRunning(path)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.lstat(path)):
                return handle
        os.close(handle)  # removed between open and lock


def _opened(path: Path, more: int = 0) -> int | None:
    """The open file, checked to be ours; None when it isn't there."""
    try:
        handle = os.open(path, _PID_FLAGS | more, 0o600)
    except FileNotFoundError:
        return None
    except OSError as error:
        what = "is a link" if error.errno == errno.ELOOP else f"can't be opened: {error.strerror}"
        raise PidFileError(f"{path} {what}. Remove it, or set TMPDIR to a directory of your own.") from None
    if os.fstat(handle).st_uid != os.getuid():
        os.close(handle)
        raise PidFileError(f"{path} belongs to another user. Set TMPDIR to a directory of your own.")
    return handle


def _locked(handle: int, path: Path) -> bool:
    """Takes the lock; False when a server has it, or, on a file system without locks, the process in the file."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return running_server(path) is None
    return True


def _held(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(handle, fcntl.LOCK_UN)
    return False


# --- the working directory, and the files that settings name


def prepare(config: ServerConfig) -> None:
    """Makes the directories that a server with these settings writes to, and checks that the files they name exist.

    :raises ConfigError: with TorchServe's message if it has one.
    """
    if config.work_dir is not None:
        _make_places(config, config.work_dir)
    served = (config.model_store, *config.model_repository, *config.program.lines, config.dev_model)
    elsewhere = any(lies_elsewhere(one.rpartition("=")[2]) for one in config.load_models)  # they need no store
    if not elsewhere and not any(one is not None for one in served):
        raise ConfigError("Missing mandatory parameter --model-store (or --model-repository)")
    for directory in config.model_repository:
        if bucket_of(directory) is None:
            _check_place(config, "model_repository", "directory", directory)
        elif config.model_control_mode == "poll":
            raise ConfigError(f"model_control_mode is poll, and {bucket_of(directory)} isn't read again: use explicit")
    for key in ("model_store", "workflow_store"):
        assumed = elsewhere and config.sources.get(key, "").startswith(("profile", "as "))
        if not assumed:
            _check_place(config, key, "directory", getattr(config, key))
    for key in ("log_config", "certificate_file", "private_key_file", "client_ca_file", "metrics_config"):
        _check_place(config, key, "file", getattr(config, key))
    if any(secured(config)):
        import_module("ts_frontend.listeners.certificates").check_certificates(config)
    if not config.temp_dir.is_dir():
        raise ConfigError(f"Invalid temp directory: {config.temp_dir}, please check TEMP environment variable.")


def _make_places(config: ServerConfig, work_dir: Path) -> None:
    """The directories of `work_dir`, for this user alone. Temporary files of this process go there, too."""
    for place in (work_dir, config.temp_dir):
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            name = config.sources.get("work_dir", "work_dir")
            raise ConfigError(f"{name} {work_dir}: {place} can't be made: {error.strerror}") from None
    tempfile.tempdir = str(config.temp_dir.absolute())


def _check_place(config: ServerConfig, key: str, what: str, path: Path | None) -> None:
    if path is None or (path.is_dir() if what == "directory" else path.is_file()):
        return
    source = config.sources.get(key, "default")
    name = source if source.startswith("--") else f"{key} ({source})"
    raise ConfigError(f"{name} {what} not found: {located(path) if what == 'directory' else path.absolute()}")
