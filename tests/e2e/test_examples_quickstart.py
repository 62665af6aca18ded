"""The script behind `make run ONCE=1`, on ports of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support import module_of


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
    assert not list(tmp_path.iterdir()), "files were left in the temporary folder"


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
