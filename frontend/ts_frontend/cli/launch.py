"""Starting and stopping a server from the command line: the only module apart from workers/launchers.py that starts a
process.

A server reports to its launcher through a pipe: JSON lines, `{"progress": TEXT}` any number of times, then once
`{"ready": true, "listening": {NAME: ADDRESS}, "warnings": [TEXT]}` or `{"ready": false, "error": TEXT}`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO

import psutil

from ts.protocol.text import printable_lines
from ts_frontend.authorization.authorization import remove_left_behind
from ts_frontend.config.files import LOG_MODE
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import ServeError
from ts_frontend.process import exits_when_terminated, pid_path, remove_orphan, restart_path, running_server

#: The first argument of a server's process: TorchServe's class, by which SageMaker's toolkit and scripts find it.
MODEL_SERVER = "org.pytorch.serve.ModelServer"
#: Removes "" from sys.path, so that a directory `ts` where the server starts isn't imported.
COMMAND = (
    sys.executable,
    "-c",
    "import sys; sys.path[:] = filter(None, sys.path); del sys.argv[1]; "
    "from ts_frontend.cli.main import main; sys.exit(main()) # torchserve",
    MODEL_SERVER,
)
CONSOLE_FILE = "console.log"
_TAIL_LINES = 15
_TICK_S = 0.2


#: TorchServe's distributions, which install commands and packages of the same names.
RIVALS = tuple(
    name + suffix
    for name in ("torchserve", "torch-model-archiver", "torch-workflow-archiver")
    for suffix in ("", "-nightly")
)


def rivals(path: Sequence[str] | None = None) -> list[str]:
    """The installed distributions among RIVALS, each with its version. `path`: the directories to look in, by default
    this Python's. Only these names are looked up: listing all packages, as `torchserve doctor` does, takes longer."""
    found = []
    for name in RIVALS:
        places = list(sys.path if path is None else path)
        one = next(iter(importlib.metadata.distributions(name=name, path=places)), None)
        if one is not None:
            found.append(f"{name} {one.version}")
    return found


def rivals_told(found: Sequence[str]) -> str:
    """One line for the start, "" if none is installed."""
    if not found:
        return ""
    are = "is" if len(found) == 1 else "are"
    return (
        f"{', '.join(found)} {are} installed alongside this server, with commands and packages of the same names: "
        "torchserve doctor says what to do"
    )


class ServerNotStarted(ServeError):
    """The server didn't start, or didn't stop; the message says why."""

    remedy = "Read the reason and the last lines of the log in the message."


@dataclass(slots=True)
class StatusLine:
    """A status line that is overwritten on a terminal; separate lines where there is no terminal."""

    stream: TextIO
    _shown: str = ""

    def show(self, text: str) -> None:
        if text == self._shown:
            return
        if self.stream.isatty():
            self.stream.write(f"\r\x1b[K{text}")
            self.stream.flush()
        self._shown = text

    def clear(self) -> None:
        if self._shown and self.stream.isatty():
            self.stream.write("\r\x1b[K")
            self.stream.flush()
        self._shown = ""


def listening_lines(listening: Mapping[str, str]) -> list[str]:
    width = max(map(len, listening), default=0)
    return [f"  {name:<{width}}  {address}" for name, address in listening.items()]


# --- in the server's process


def serve(config: ServerConfig, run: Callable[[ServerConfig, int | None], int], ready_fd: int | None) -> int:
    """Run the server until it ends; returns its exit code. `run` prints STARTED, and reports to a descriptor that it
    closes. Without a launcher's `ready_fd`, the report is printed here; `torchserve dev` has its warnings in the log,
    which the terminal shows.
    """
    if ready_fd is not None:
        return run(config, ready_fd)
    read, write = os.pipe()
    warned = config.dev_model is None
    announcer = threading.Thread(target=_announce, args=(read, warned), name="announce", daemon=True)
    announcer.start()
    code = run(config, write)
    announcer.join(timeout=1)
    return code


def _announce(read: int, warned: bool) -> None:
    """Print the server's reports, until it has reported the outcome of its start; with `warned` also its warnings."""
    with os.fdopen(read) as lines:
        for message in map(json.loads, lines):
            if message.get("ready"):
                print("\n".join(listening_lines(message["listening"])), flush=True)
                if warned:
                    warn(message.get("warnings", ()))
                break
            if "error" in message:
                print(printable_lines(f"The server did not start: {message['error']}"), file=sys.stderr, flush=True)
                break


def warn(texts: Iterable[str]) -> None:
    for text in texts:
        print(printable_lines(text), file=sys.stderr, flush=True)


def refuse(ready_fd: int | None, error: str) -> None:
    """Report to the launcher, if there is one, why no server was started."""
    if ready_fd is not None:
        with contextlib.suppress(OSError):
            os.write(ready_fd, json.dumps({"ready": False, "error": error}).encode() + b"\n")


# --- in the launcher's process


class Started(NamedTuple):
    """A ready server: its listening addresses by name, and its warnings, such as models that it started without."""

    listening: Mapping[str, str]
    warnings: Sequence[str]


def start(
    config: ServerConfig, words: Sequence[str], timeout_s: float | None, command: Sequence[str] = COMMAND
) -> Started:
    """Start a server that outlives this process, with these command-line words, and wait until it is ready. The server
    writes its console log to our standard output, unless config.console_log is off. SIGTERM and SIGINT that come
    before it is ready end it too.

    :raises ServerNotStarted: it reported an error, died, or took longer than `timeout_s`; it is no longer running.
    """
    status = StatusLine(sys.stderr)
    read, write = os.pipe()
    console = _console(config)
    log = config.log_location / "ts_log.log"
    log_bytes = log.stat().st_size if log.is_file() else 0
    with contextlib.ExitStack() as files, exits_when_terminated():
        output = files.enter_context(console.open("w")) if console else None
        process = _spawn([*command, *words, "--ready-fd", str(write)], write, output)
        os.close(write)
        messages = files.enter_context(os.fdopen(read, "rb", buffering=0))
        try:
            return _wait_ready(process, messages, status, timeout_s)
        except ServerNotStarted as error:
            _end(process)
            raise ServerNotStarted(error.message + _tail((console, 0), (log, log_bytes))) from None
        except BaseException:
            _end(process)
            raise
        finally:
            status.clear()


def _console(config: ServerConfig) -> Path | None:
    """The file for output of a server without console_log that isn't in its logs: tracebacks, messages of C libraries.
    None: this process's standard output, also if the file can't be written. A pipe is not used, since its reader
    would wait for the server's end."""
    if config.console_log:
        return None
    file = config.log_location / CONSOLE_FILE
    try:
        config.log_location.mkdir(parents=True, exist_ok=True)
        file.touch(LOG_MODE)
    except OSError as error:  # the server reports it itself, for all its logs, where anybody can read it
        if not stat.S_ISFIFO(os.fstat(1).st_mode):
            return None
        print(f"{file} can't be written ({error.strerror}): what the server prints is lost", file=sys.stderr)
        return Path(os.devnull)
    return file


def _spawn(command: Sequence[str], write: int, output: IO[str] | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(write,), start_new_session=True
    )


def _wait_ready(
    process: subprocess.Popen[bytes] | psutil.Process, messages: IO[bytes], status: StatusLine, timeout_s: float | None
) -> Started:
    began_s, latest = time.monotonic(), "starting"
    for message in _messages(messages):
        elapsed_s = time.monotonic() - began_s
        if timeout_s is not None and elapsed_s > timeout_s:
            raise ServerNotStarted(f"The server was not ready within {timeout_s:g} s")
        if message is None:
            if isinstance(process, psutil.Process) and (not process.is_running() or _is_zombie(process)):
                break
            status.show(f"TorchServe: {latest} … {elapsed_s:.0f} s")
        elif message.get("ready"):
            return Started(message["listening"], message.get("warnings", ()))
        elif "error" in message:
            raise ServerNotStarted(f"The server did not start: {message['error']}")
        else:
            latest = str(message.get("progress", latest))
    how = "" if isinstance(process, psutil.Process) else f": {_ending(process.wait())}"
    raise ServerNotStarted(f"The server ended while it started{how}")


def _messages(pipe: IO[bytes]) -> Iterator[Mapping[str, Any] | None]:
    """The server's messages until it closes the pipe; None every _TICK_S without one."""
    pending = b""
    while True:
        if not select.select([pipe], [], [], _TICK_S)[0]:
            yield None
            continue
        data = pipe.read(65_536)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        yield from map(json.loads, lines)


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate the server, and kill it if it doesn't end."""
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(*files: tuple[Path | None, int]) -> str:
    """The last lines of the first of these files that has grown beyond its given size, that before the start."""
    for path, known_bytes in files:
        if path is not None and path.is_file():
            with path.open("rb") as file:
                file.seek(known_bytes if known_bytes <= path.stat().st_size else 0)
                lines = file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
            if lines:
                return f"\nThe end of {path}:\n" + "\n".join(f"  {line}" for line in lines)
    return ""


def stop(timeout_s: float, work_dir: Path | None = None) -> str:
    """Ask the running server to drain and end, wait for it, and return a message. `work_dir`: the server's setting.

    :raises ServerNotStarted: it still runs after `timeout_s`, or isn't ours to stop.
    """
    path = pid_path(work_dir)
    process = running_server(path)
    if process is None:
        orphan = remove_orphan(path)
        return ("Removing orphan pid file.\n" if orphan else "") + "TorchServe is not currently running."
    try:
        process.terminate()
        _wait_gone(process, timeout_s)
    except psutil.NoSuchProcess:
        return "TorchServe already stopped."
    except psutil.AccessDenied:
        raise ServerNotStarted(f"Process {process.pid} belongs to another user and can't be stopped.") from None
    remove_orphan(path)
    remove_left_behind(work_dir or Path.cwd())
    return "TorchServe has stopped."


def restart(timeout_s: float | None, work_dir: Path | None = None) -> Started:
    """Asks the running server to be replaced, in its process, by one with its command line, whose settings are read
    anew; waits until that is ready. `work_dir`: the server's setting.

    :raises ServerNotStarted: no server runs, its settings can't be used (it goes on then), or the new one has failed.
    """
    process = running_server(pid_path(work_dir))
    if process is None:
        raise ServerNotStarted("TorchServe is not currently running.")
    place = restart_path(work_dir)
    try:
        place.unlink(missing_ok=True)
        os.mkfifo(place, 0o600)
    except OSError as error:
        raise ServerNotStarted(f"{place} can't be made: {error.strerror}. Nothing was restarted.") from None
    try:
        with open(os.open(place, os.O_RDWR), "rb", buffering=0) as messages:  # also for writing: it has no end
            process.send_signal(signal.SIGUSR2)
            return _wait_ready(process, messages, StatusLine(sys.stderr), timeout_s)
    except psutil.AccessDenied:
        raise ServerNotStarted(f"Process {process.pid} belongs to another user and can't be restarted.") from None
    except psutil.NoSuchProcess:
        raise ServerNotStarted("TorchServe already stopped.") from None
    finally:
        place.unlink(missing_ok=True)


def _wait_gone(process: psutil.Process, timeout_s: float) -> None:
    status, began_s = StatusLine(sys.stderr), time.monotonic()
    while (elapsed_s := time.monotonic() - began_s) < timeout_s:
        try:
            process.wait(timeout=min(1.0, timeout_s - elapsed_s))
        except psutil.TimeoutExpired:
            if _is_zombie(process):  # ended, but not reaped by its parent (perhaps a container's first process)
                return status.clear()
            status.show(f"TorchServe: draining … {time.monotonic() - began_s:.0f} s")
        else:
            return status.clear()
    status.clear()
    raise ServerNotStarted(
        f"Stopping TorchServe took too long. Process {process.pid} still runs after {timeout_s:g} s."
    )


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
