"""The script behind `make run ONCE=1`, on ports of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support import module_of

#: What `make run` prints in front of the script's lines.
INSTALLING_LINES = 3


@pytest.fixture
def quickstart(root: Path) -> ModuleType:
    return module_of(root / "ts_scripts/quickstart.py")


def test_the_first_five_minutes(root: Path, tmp_path: Path, clean_env: dict[str, str]) -> None:
    """A server starts, answers one image and one text, prints the next steps, and leaves nothing behind."""
    command = [sys.executable, str(root / "ts_scripts/quickstart.py"), "--once", "--free-ports"]
    env = {**clean_env, "TMPDIR": str(tmp_path), "HOME": str(tmp_path / "home")}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Model server started." in done.stdout
    assert '"class": "3"' in done.stdout
    assert "burning bright" in done.stdout
    assert "torchserve predict digits" in done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) <= 40 - INSTALLING_LINES, done.stdout
    usual = [re.sub(r" --([a-z]+-)?port \d+", "", line).replace(str(tmp_path), "/tmp") for line in lines]
    assert max(map(len, usual)) <= 100, done.stdout
    assert not list(tmp_path.iterdir()), "files were left in the temporary folder"


def planned(root: Path, target: str, venv: Path, *more: str) -> str:
    """What make would run for a target without an environment."""
    command = ["make", "--dry-run", target, f"VENV={venv}", f"PYTHON={sys.executable}", *more]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


def test_make_run_installs_what_running_needs(root: Path, tmp_path: Path) -> None:
    """Its first run says one line per step, and installs neither the developers' tools nor what other examples need;
    the tests get all."""
    to_run, to_test = planned(root, "run", tmp_path / "venv"), planned(root, "test", tmp_path / "venv")
    assert "pip" in to_run and "[dev]" not in to_run
    assert "[dev]" in to_test
    installs = [line for line in (to_run + to_test).splitlines() if "-m pip install" in line]
    assert installs and all(" -qq " in line for line in installs)
    assert to_run.count('\necho "== [') == INSTALLING_LINES


def test_make_run_uses_the_environment_of_the_tests(root: Path, tmp_path: Path) -> None:
    """Stamps as `make test` leaves them: nothing is installed again."""
    venv = tmp_path / "venv"
    venv.mkdir()
    for stamp in (".torch_spec", ".torch_installed", ".installed_to_run", ".installed"):
        (venv / stamp).write_text("torch==2.13.0\n" if stamp == ".torch_spec" else "")
    same_torch = f"--old-file={venv / '.torch_spec'}"  # a dry run doesn't compare the words in it
    assert "-m pip" not in planned(root, "run", venv, same_torch)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.long
def test_it_serves_until_it_is_told_to_end(
    root: Path, tmp_path: Path, clean_env: dict[str, str], number: signal.Signals
) -> None:
    """Ctrl-C, which a terminal sends to the whole group, and SIGTERM stop the server and leave nothing behind."""
    command = [sys.executable, str(root / "ts_scripts/quickstart.py"), "--free-ports"]
    env = {**clean_env, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        assert run.stdout is not None
        printed = ""
        for line in run.stdout:
            printed += line
            if line.startswith("Serving."):
                os.killpg(run.pid, number)
    assert run.returncode == 0, printed
    assert printed.rstrip().endswith("TorchServe has stopped.")
    assert not list(tmp_path.iterdir())


def test_a_taken_port_is_said_and_another_one_used(quickstart: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        usual = other.getsockname()[1]
        quickstart.LISTENERS = (("grpc_inference_port", usual, "gRPC inference"),)
        chosen = quickstart.choose_ports()
    assert chosen["grpc_inference_port"] != usual
    assert f"Port {usual} (gRPC inference) is taken" in capsys.readouterr().out


def test_a_wrong_answer_fails(quickstart: ModuleType) -> None:
    quickstart.check_class('{"class": "3"}')
    quickstart.check_continuation(" burning bright,\nIn the forests of the night:\nWhat")
    with pytest.raises(quickstart.Wrong, match="answers 7 for an image of 3"):
        quickstart.check_class('{"class": "7"}')
    with pytest.raises(quickstart.Wrong, match="begin with"):
        quickstart.check_continuation(" burning")


def test_a_client_that_fails_fails_the_run(quickstart: ModuleType) -> None:
    nobody = quickstart.free_port(set())
    with pytest.raises(quickstart.Wrong, match="ended with status 1"):
        quickstart.client(quickstart.Ports(nobody, nobody), "infer", "digits", quickstart.IMAGE, "--timeout", "5")
