"""`ts.launcher` and `ts.model_server`: the `torchserve` command from Python, with a real server."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import GUARD_S
from ts import launcher

STORE = Path(__file__).parents[2] / "model_store"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a config file whose ports are free ones."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    ports = [f"grpc_{api}_port=0" for api in ("inference", "management")]
    ports += [f"{api}_address=http://127.0.0.1:0" for api in ("inference", "management", "metrics")]
    (tmp_path / "server.properties").write_text("\n".join([*ports, "number_of_gpu=0", "default_workers_per_model=1"]))
    yield tmp_path
    launcher.stop()


def test_a_server_is_started_asked_and_stopped(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = launcher.start(
        model_store=str(STORE),
        snapshot_file="server.properties",
        no_config_snapshots=True,
        disable_token=True,
        models="first=hello_stream.mar",
        enable_model_api=True,
    )
    said = capfd.readouterr().out
    assert "TorchServe is not currently running." in said, "it stops what runs before"
    assert "\nModel server started.\n" in said
    further = iter(lambda: lines.get(timeout=GUARD_S), None)
    matches = (re.search(r"http_management +\S+:(\d+)", line) for line in further)  # the command's words come after it
    url = f"http://127.0.0.1:{next(match[1] for match in matches if match)}"

    registered = launcher.register_model("second", "hello_stream.mar", management_url=url)
    assert registered.ok and registered.status_code == 200, registered.text
    assert registered.json() == {"status": 'Model "second" Version: 1.0 registered with 1 initial workers'}
    refused = launcher.register_model_with_params((("url", "nowhere.mar"),), management_url=url)
    assert refused.status_code == 404 and refused.json()["code"] == 404
    with pytest.raises(RuntimeError, match="404"):
        refused.raise_for_status()

    launcher.stop()
    assert any("Model second 1.0 added" in line for line in further), "the queue has what came after the start"
    assert "TorchServe has stopped." in capfd.readouterr().out


def test_a_server_that_does_not_start_has_said_why_and_ended(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As with TorchServe's: the call returns, and who reads the queue finds its end."""
    lines = launcher.start(model_store="nowhere", snapshot_file="server.properties")
    assert lines.get(timeout=GUARD_S) is None and lines.empty()
    said = capfd.readouterr().out
    assert "--model-store directory not found: nowhere" in said
    assert re.search(r"^torchserve ended with exit code [1-9]", said, re.MULTILINE)


@pytest.mark.parametrize(("words", "code", "says"), [(["--version"], 0, "0.12.0"), (["--nonsense"], 2, "unrecognized")])
def test_the_entry_point_is_the_command(place: Path, words: list[str], code: int, says: str) -> None:
    program = "import sys; from ts.model_server import start; start(); print('returned')"
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=GUARD_S, check=False
    )
    assert done.returncode == code
    assert says in done.stdout + done.stderr
    assert ("returned" in done.stdout) == (code == 0)
