"""Starting and stopping with real processes: messages, exit codes, the pid file, nothing left behind."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support import GUARD_S, end_server, until
from ts_frontend import process
from warm_start import Template

STAND_IN = Path(__file__).with_name("launcher_stand_in.py")


class Shell:
    """A directory, with a temporary directory of its own, in which commands run. Those that end are forked; the servers
    that they start are executed."""

    def __init__(self, place: Path, commands: Template) -> None:
        self.place = place
        self.commands = commands
        (place / "store").mkdir()
        (place / "tmp").mkdir()
        self.pid_file = place / "tmp" / ".model_server.pid"
        self.runs = 0
        self.environ = {**os.environ, "TMPDIR": str(place / "tmp"), "PYTHONUNBUFFERED": "1"}

    def run(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Output goes to a file of its own: a server in the background keeps it."""
        self.runs += 1
        output = self.place / f"output{self.runs}.txt"
        with (
            output.open("w") as file,
            self.commands.start(
                words, cwd=self.place, env=self.environ | environ, stdout=file.fileno(), stderr=subprocess.STDOUT
            ) as command,
        ):
            status = command.wait(GUARD_S)
        return subprocess.CompletedProcess(words, status, output.read_text())

    def start(self, what: str, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run("--start", "--model-store", "store", "--models", what, *words)

    def foreground(self, what: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(STAND_IN), "--foreground", "--model-store", "store", "--models", what],
            cwd=self.place,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def server(self) -> psutil.Process:
        return psutil.Process(int(self.pid_file.read_text()))


@pytest.fixture(scope="module")
def commands() -> Iterator[Template]:
    template = Template("launcher_stand_in:command", "launcher_stand_in", path=STAND_IN.parent, options=["-u"])
    yield template
    template.close()


@pytest.fixture
def shell(tmp_path: Path, commands: Template) -> Iterator[Shell]:
    shell = Shell(tmp_path, commands)
    yield shell
    end_server(shell.pid_file, str(STAND_IN))


def test_start_and_stop(shell: Shell) -> None:
    started = shell.start("ready")
    assert started.returncode == 0, started.stdout
    assert started.stdout.startswith("Model server started.\n  grpc_inference  127.0.0.1:1\n")
    server = shell.server()
    assert os.getsid(server.pid) == server.pid
    assert shell.pid_file.stat().st_mode & 0o777 == 0o600

    again = shell.start("ready")
    assert again.returncode == 1
    assert f"TorchServe is already running, and {shell.pid_file} is its pid file" in again.stdout
    assert "--work-dir" in again.stdout and "--stop" not in again.stdout, "it would stop the first server"

    stopped = shell.run("--stop")
    assert (stopped.returncode, stopped.stdout) == (0, "TorchServe has stopped.\n")
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
    assert not shell.pid_file.exists()


def test_the_command_that_stops_a_server_stops_no_other(shell: Shell) -> None:
    """Not that of the usual directory, when the variable was set for this command alone."""
    place = shell.place / "it's"
    place.mkdir()
    started = shell.run("--start", "--model-store", "store", "--models", "ready", TMPDIR=str(place))
    told = started.stdout.partition("stop it with: ")[2].splitlines()[0]
    variable, *command = shlex.split(told)
    assert (variable, command) == (f"TMPDIR={place}", ["torchserve", "--stop"])
    assert shell.run("--stop").stdout == "TorchServe is not currently running.\n"
    assert shell.run("--stop", TMPDIR=variable.partition("=")[2]).stdout == "TorchServe has stopped.\n"


def test_a_misspelt_setting_is_told_on_the_terminal_while_a_file_gets_the_log(shell: Shell) -> None:
    (shell.place / "config.properties").write_text("job_queue_sise=3\n")
    command = [sys.executable, str(STAND_IN), "--start", "--model-store", "store", "--models", "ready"]
    reading, terminal = pty.openpty()
    with (shell.place / "log.txt").open("w") as file:
        subprocess.run(command, cwd=shell.place, env=shell.environ, stdout=file, stderr=terminal, check=True)
    said = os.read(reading, 65536).decode()
    for fd in (reading, terminal):
        os.close(fd)
    assert "job_queue_sise (config.properties:1): there is no such setting; did you mean job_queue_size?" in said


def test_stop_tells_that_the_temporary_directory_cannot_be_used(shell: Shell) -> None:
    """The pid file is then looked for elsewhere, where the server may not be, or another may."""
    stopped = shell.run("--stop", TMPDIR="/no/such", TEMP=str(shell.place / "tmp"))
    warning = f"TMPDIR = /no/such: no file can be written there; {shell.place / 'tmp'} is used, also for the pid file\n"
    assert (stopped.returncode, stopped.stdout) == (0, f"{warning}TorchServe is not currently running.\n")
    elsewhere = shell.run("--stop", "--work-dir", str(shell.place / "tmp"), TMPDIR="/no/such", TEMP=str(shell.place))
    assert elsewhere.stdout == "TorchServe is not currently running.\n"


def test_stop_returns_when_the_server_has_ended_though_nobody_asks_its_exit_code(shell: Shell) -> None:
    process = shell.foreground("ready")
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "Model server started.\n"
        stopped = shell.run("--stop")  # this test is the server's parent and hasn't waited for it
        assert (stopped.returncode, stopped.stdout) == (0, "TorchServe has stopped.\n")


def test_no_flag_starts_and_words_work_too(shell: Shell) -> None:
    assert shell.run("--model-store", "store", "--models", "ready").returncode == 0
    assert shell.run("stop").stdout == "TorchServe has stopped.\n"
    assert shell.run("start", "--model-store", "store", "--models", "ready").returncode == 0


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_foreground_tells_when_ready_drains_and_gives_its_exit_code(shell: Shell, signal_number: int) -> None:
    process = shell.foreground("ready")
    assert process.stdout is not None
    assert process.stdout.readline() == "Model server started.\n"
    assert process.stdout.readline() == "  grpc_inference  127.0.0.1:1\n"
    assert shell.pid_file.read_text() == str(process.pid)
    process.send_signal(signal_number)
    output, _ = process.communicate(timeout=GUARD_S)
    assert "drained" in output
    assert process.returncode == 7
    assert not shell.pid_file.exists()


def test_a_reported_error_is_the_reason(shell: Shell) -> None:
    started = shell.start("refuse")
    assert started.returncode == 1
    assert "The server did not start: port 1 is taken" in started.stdout
    assert not shell.pid_file.exists()


def test_an_earlier_servers_log_is_no_reason(shell: Shell) -> None:
    log = shell.place / "logs" / "ts_log.log"
    log.parent.mkdir()
    log.write_text("of an earlier server\n")
    started = shell.start("refuse", "--set", "console_log=false")
    assert (started.returncode, "of an earlier server" in started.stdout) == (1, False)


def test_a_server_that_dies_while_starting_shows_its_last_words(shell: Shell) -> None:
    started = shell.start("die", "--set", "console_log=false")
    assert started.returncode == 1
    assert "The server ended while it started: exit code 3" in started.stdout
    assert "  last words" in started.stdout
    assert (shell.place / "logs" / "console.log").stat().st_mode & 0o777 == 0o640


def test_a_server_that_never_reports_is_ended(shell: Shell) -> None:
    started = shell.start("mute", "--timeout", "2")
    assert started.returncode == 1
    assert "not ready within 2 s" in started.stdout
    assert not shell.pid_file.exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_launcher_that_is_ended_while_the_server_starts_leaves_no_server(
    shell: Shell, number: int, status: int
) -> None:
    """`timeout 60 torchserve --start`, and a service manager that gives up."""
    command = [sys.executable, str(STAND_IN), "--start", "--model-store", "store", "--models", "mute"]
    with subprocess.Popen(command, cwd=shell.place, env=shell.environ) as launcher:
        until(lambda: shell.pid_file.is_file() and shell.pid_file.read_text())
        server = shell.server()
        launcher.send_signal(number)
        assert launcher.wait(GUARD_S) == status
        assert not server.is_running()
        assert not shell.pid_file.exists()


@pytest.mark.parametrize("left", [pytest.param(str(os.getpid()), id="another program's"), "nonsense"])
def test_a_pid_file_without_a_server_is_removed(shell: Shell, left: str) -> None:
    """Also when some other process has that id now."""
    shell.pid_file.write_text(left)
    stopped = shell.run("--stop")
    assert stopped.stdout == "Removing orphan pid file.\nTorchServe is not currently running.\n"
    shell.pid_file.write_text(left)
    started = shell.start("ready")
    assert started.returncode == 0
    assert "Removing orphan pid file." in started.stdout


def test_a_killed_server_does_not_block_the_next(shell: Shell) -> None:
    shell.start("ready")
    server = shell.server()
    server.kill()
    server.wait(GUARD_S)
    assert shell.start("ready").returncode == 0


@pytest.fixture
def other() -> Iterator[psutil.Process]:
    """A process that is no server."""
    with psutil.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        assert process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        process.kill()


def test_a_process_that_only_has_the_number_of_a_server_is_not_stopped(shell: Shell, other: psutil.Process) -> None:
    """In a directory that containers share, the lock is that of another container's server, and so is the number."""
    shell.pid_file.write_text(str(other.pid))
    with shell.pid_file.open() as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        assert shell.run("--stop").stdout == "TorchServe is not currently running.\n"
        assert shell.pid_file.exists()


@pytest.mark.parametrize("ours", [True, False])
def test_without_locks_the_number_of_another_process_is_no_server(
    tmp_path: Path, other: psutil.Process, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers that keep /tmp give the same small numbers again, and some file systems have no locks."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    path = tmp_path / ".model_server.pid"
    path.write_text(str(os.getpid() if ours else other.pid))
    assert process.running_server(path) is None
    with process.claimed(path):
        assert path.read_text() == str(os.getpid())
    path.write_text(str(other.pid))
    assert process.remove_orphan(path) and not path.exists()
    with subprocess.Popen(["tail", "-f", "--retry", str(path)], stderr=subprocess.PIPE) as holder:
        path.write_text(str(holder.pid))
        until(lambda: process.running_server(path))
        with pytest.raises(process.AlreadyRunning), process.claimed(path):
            pass
        assert not process.remove_orphan(path) and path.exists()
        holder.kill()


def test_a_link_in_place_of_the_pid_file_is_not_followed(shell: Shell) -> None:
    victim = shell.place / "victim"
    victim.write_text("precious")
    shell.pid_file.symlink_to(victim)
    started = shell.start("ready")
    assert started.returncode == 1
    assert "is a link" in started.stdout
    assert victim.read_text() == "precious"
    shell.pid_file.unlink()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--model-store", "store", "--workflow-store", "no"], 1, "--workflow-store directory not found: no"),
        (["--model-store", "store", "--log-config", "no"], 1, "--log-config file not found: {place}/no"),
        (["--model-store", "store", "--cpp-log-config", "no"], 1, "--cpp-log-config file not found: {place}/no"),
        (["--start", "--stop"], 2, "not allowed with"),
    ],
)
def test_refusals(shell: Shell, words: list[str], code: int, says: str) -> None:
    done = shell.run(*words)
    assert says.format(place=shell.place) in done.stdout
    assert done.returncode == code
    assert not shell.pid_file.exists()


def test_a_temp_that_is_no_directory(shell: Shell) -> None:
    done = shell.run("--model-store", "store", TEMP="/nowhere")
    assert done.returncode == 1
    assert "Invalid temp directory: /nowhere, please check TEMP environment variable." in done.stdout


def test_the_model_store_may_come_from_the_config_file(shell: Shell) -> None:
    (shell.place / "config.properties").write_text("model_store=store\nload_models=ready\n")
    assert shell.run("--start").returncode == 0


def test_a_foreign_package_where_the_server_starts_is_not_taken_for_ours(shell: Shell) -> None:
    (shell.place / "ts").mkdir()
    (shell.place / "ts" / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import json, sys; sys.path.pop(0); from ts_frontend.cli.launch import COMMAND; print(json.dumps(COMMAND))",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=GUARD_S,
    )
    version = subprocess.run(
        [*json.loads(done.stdout), "--version"], cwd=shell.place, capture_output=True, text=True, check=False
    )
    assert (version.returncode, version.stdout) == (0, "TorchServe Version is 0.12.0\n")


def test_the_server_keeps_writing_to_the_output_of_its_start(shell: Shell) -> None:
    """Scripts read it until `Model server started.`, and go on reading the server's log."""
    command = [sys.executable, str(STAND_IN), "--start", "--model-store", "store", "--models", "ready"]
    command += ["--set", "console_log=true"]
    with subprocess.Popen(
        command, cwd=shell.place, env=shell.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as start:
        assert start.stdout is not None
        assert any(line == "Model server started.\n" for line in start.stdout)
        assert start.wait(GUARD_S) == 0
        shell.run("--stop")
        assert "drained\n" in start.stdout.readlines()


def test_a_pipe_ends_with_the_command(shell: Shell) -> None:
    """`torchserve --start | cat` doesn't wait for the server's end; a file gets the log as in TorchServe."""
    command = [sys.executable, str(STAND_IN), "--start", "--model-store", "store", "--models", "ready"]
    with subprocess.Popen(
        command, cwd=shell.place, env=shell.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as start:
        assert start.stdout is not None
        assert "Model server started.\n" in start.stdout.readlines(), "all of it, while the server runs"
        assert start.wait(GUARD_S) == 0
    assert "stopped" in shell.run("--stop").stdout
    with (shell.place / "out.txt").open("w") as file:
        subprocess.run(command, cwd=shell.place, env=shell.environ, stdout=file, stderr=file, check=True)
    shell.run("--stop")
    assert "drained\n" in (shell.place / "out.txt").read_text()


def test_ts_config_of_the_environment_wins(shell: Shell) -> None:
    (shell.place / "flag.properties").write_text("load_models=die\n")
    (shell.place / "named.properties").write_text("load_models=ready\n")
    words = ("--start", "--model-store", "store", "--ts-config", "flag.properties")
    assert shell.run(*words, TS_CONFIG_FILE="named.properties").returncode == 0
