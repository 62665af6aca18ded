"""The real server through the real command, and the models that it restores."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support import GUARD_S, end_server
from ts_frontend.cli.launch import COMMAND, MODEL_SERVER
from ts_frontend.config.snapshot import Snapshot, SnapshotFiles

STORE = Path(__file__).parents[2] / "model_store"


class Place:
    """A working directory and a temporary one, where `torchserve` runs with free ports."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "tmp").mkdir()
        self.environ = {**os.environ, "TMPDIR": str(directory / "tmp")}

    def torchserve(self, *words: str, merged: bool = False) -> subprocess.CompletedProcess[str]:
        """`merged`: standard error is in the output, as on a terminal."""
        return subprocess.run(
            [*COMMAND, *words],
            cwd=self.directory,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            text=True,
            timeout=GUARD_S,
            check=False,
        )

    def start(self, *words: str, merged: bool = False) -> subprocess.CompletedProcess[str]:
        ports = [f"--set=grpc_{api}_port=0" for api in ("inference", "management")]
        ports += [f"--set={api}_address=http://127.0.0.1:0" for api in ("inference", "management", "metrics")]
        more = ("--set=console_log=false", "--set=preload_torch=false", *words)
        return self.torchserve("--start", "--model-store", str(STORE), *ports, *more, merged=merged)

    def log(self) -> str:
        return (self.directory / "logs" / "ts_log.log").read_text()

    def snapshot(self) -> Snapshot:
        found, skipped = SnapshotFiles(self.directory / "logs" / "config").newest()
        assert found is not None
        assert not skipped
        return found.snapshot


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    end_server(tmp_path / "tmp" / ".model_server.pid", "torchserve")


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def test_all_loads_every_archive_and_nothing_hidden(place: Place) -> None:
    """And logs go where the environment says, all five files from the start on."""
    store = _made(place.directory / "store")
    for name in ("one.mar", "two.model", "not_an_archive.txt"):
        (store / name).write_bytes((STORE / "hello_stream.mar").read_bytes())
    _made(store / ".hidden")
    place.environ |= {"LOG_LOCATION": "elsewhere", "METRICS_LOCATION": "numbers"}
    started = place.start("--models", "ALL", "--model-store", str(store), "--set=default_workers_per_model=1", "--ncs")
    assert started.returncode == 0, started.stderr
    log = (place.directory / "elsewhere" / "ts_log.log").read_text()
    assert sorted(re.findall(r"Model (\S+) \S+ added", log)) == ["hello_stream"] and "two.model" in started.stderr
    logs = ["access_log.log", "model_log.log", "ts_log.log"]
    assert sorted(path.name for path in (place.directory / "elsewhere").glob("*.log") if path.name in logs) == logs
    metrics = {path.name for path in (place.directory / "numbers").iterdir()}
    assert {"model_metrics.log", "ts_metrics.log"} <= metrics
    # AWS's toolkit looks for TorchServe's class among the arguments of all processes: exactly one has it.
    server = psutil.Process(int((place.directory / "tmp" / ".model_server.pid").read_text()))
    known = [one for one in (server, *server.children(recursive=True)) if MODEL_SERVER in one.cmdline()]
    assert known == [server]


def test_a_model_that_cannot_be_loaded_is_told_at_the_terminal(place: Place) -> None:
    started = place.start("--models", "nothere.mar", merged=True)
    assert started.returncode == 0
    assert started.stdout.startswith("Model server started.")
    first, last = started.stdout.splitlines()[-2:]
    assert first.startswith("Failed to load model: nothere.mar: Model not found at: nothere.mar. The model store /")
    assert "hello_stream.mar" in first
    assert last == "1 of 1 was not loaded; --exit-on-error ends such a start"
