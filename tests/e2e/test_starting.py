"""The start: a stop is obeyed in every phase of it, independent steps run concurrently, and a model that can't be
loaded stops no other."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support import GUARD_S, until
from ts_frontend.config.snapshot import SnapshotFiles, SnapshotKind, VersionState

#: What nobody waits for to end by itself.
FOREVER_S = 100_000
BLOCKING = f"""
import pathlib, time
pathlib.Path(MARK).touch()
time.sleep({FOREVER_S})
"""
ANSWERING = """
def handle(data, context):
    return None if data is None else ["here"] * len(data)
"""
TRITON = """
import pathlib, time

class TritonPythonModel:
    def initialize(self, args):
        times = pathlib.Path(TIMES)
        with times.open("a") as file:
            file.write(f"begin {args['model_name']} {time.monotonic()}\\n")
        time.sleep(2)
        with times.open("a") as file:
            file.write(f"end {args['model_name']} {time.monotonic()}\\n")

    def execute(self, requests):
        return []
"""
CONFIG = """
backend: "python"
input [ { name: "in" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "out" data_type: TYPE_STRING dims: [ -1 ] } ]
"""


def triton_model(repository: Path, name: str, text: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "1" / "model.py").write_text(text)
    (repository / name / "config.pbtxt").write_text(CONFIG)


def archive(path: Path, name: str, handler: str = ANSWERING, version: str = "1.0", **files: bytes) -> Path:
    """A .mar with a handler and more files."""
    model = {"modelName": name, "handler": "handler.py", "modelVersion": version}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as mar:
        mar.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
        mar.writestr("handler.py", handler)
        for file, content in files.items():
            mar.writestr(file, content)
    return path


def endless_archive(path: Path) -> Path:
    """A file of 64 GiB in an archive of 64 MB: nobody has finished unpacking it when a test looks."""
    part = bytes(64 << 20)
    packed = gzip.compress(part, 1)
    header = tarfile.TarInfo("zeros")
    header.size = 1024 * len(part)
    with path.open("wb") as file:
        file.write(gzip.compress(header.tobuf(tarfile.GNU_FORMAT)))
        for _ in range(1024):
            file.write(packed)
    return path


@contextlib.contextmanager
def deaf_server() -> Iterator[tuple[str, threading.Event]]:
    """A URL whose server takes connections and never answers, and whether it was asked."""
    asked, connections = threading.Event(), []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connections.append(listener.accept()[0])
                    asked.set()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(GUARD_S)
            for connection in connections:
                connection.close()


def stops_at_once(server: Any, *, started: bool = False) -> None:
    """SIGTERM ends the server and all its processes, and no temporary file is left. The obstacles to the start in these
    tests would last for a day."""
    children = server.processes()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0, server.log
    assert ("Model server started." in server.log) is started, server.log
    _, alive = psutil.wait_procs(children, timeout=GUARD_S)
    assert not alive, alive
    assert temporary_files(server.directory) <= {"ENVIRONMENT.lock"}


def temporary_files(directory: Path) -> set[str]:
    """The names of all temporary files; a virtual environment's lock may stay."""
    found = [path for path in (directory / "tmp").rglob("*") if not path.name.startswith("torchrelay-environments-")]
    return {re.sub(r"^[0-9a-f]{32}", "ENVIRONMENT", path.name) for path in found}


def marked(text: str, mark: Path) -> str:
    return text.replace("MARK", repr(str(mark)))


# --- a stop in each phase


def test_a_stop_while_accelerators_are_looked_for(start, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nsleep {FOREVER_S}\n")
    (tools / "nvidia-smi").chmod(0o755)
    server = start(wait=False, number_of_gpu="", env={"PATH": f"{tools}:{os.environ['PATH']}"})
    until((tmp_path / "asked").exists)
    stops_at_once(server)


def test_a_stop_while_an_archive_is_downloaded(start, store):
    before = sorted(store.iterdir())
    with deaf_server() as (url, asked):
        server = start("--models", f"far={url}/far.mar", wait=False, allowed_urls=".*")
        assert asked.wait(GUARD_S)
        stops_at_once(server)
    assert sorted(store.iterdir()) == before


def test_a_stop_while_packages_are_installed(start, store, write):
    with deaf_server() as (url, asked):
        write("needy", ANSWERING, config="useVenv: true\n")
        (store / "needy" / "requirements.txt").write_text(f"--index-url {url}/simple\nnot-there-at-all\n")
        manifest = store / "needy" / "MAR-INF" / "MANIFEST.json"
        tree = json.loads(manifest.read_text())
        tree["model"]["requirementsFile"] = "requirements.txt"
        manifest.write_text(json.dumps(tree))
        server = start("--models", "needy", wait=False, env={"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"})
        assert asked.wait(GUARD_S), server.log
        stops_at_once(server)


def unpacking(directory: Path) -> bool:
    return any(path.stat().st_size > 64 << 20 for path in directory.glob("tmp/*/models/.partial-*/zeros"))


def test_a_stop_while_an_archive_is_unpacked(start, store, tmp_path):
    endless_archive(store / "endless.tar.gz")
    server = start("--models", "endless.tar.gz", wait=False, extract_ratio_max=1e9)
    until(lambda: unpacking(tmp_path))
    stops_at_once(server)


def test_a_stop_while_a_snapshot_is_restored(start, store, tmp_path):
    """A file that an earlier start downloaded is still there for the next one."""
    endless_archive(store / "endless.tar.gz")
    state = VersionState("endless.tar.gz", True, 1, 1, url="http://127.0.0.1:1/endless.tar.gz")
    SnapshotFiles(tmp_path / "logs" / "config").write(SnapshotKind.SHUTDOWN, {"endless": {"1.0": state}}, {})
    server = start(wait=False, snapshots=True, extract_ratio_max=1e9)
    until(lambda: unpacking(tmp_path))
    stops_at_once(server)
    assert (store / "endless.tar.gz").exists()
    found, _ = SnapshotFiles(tmp_path / "logs" / "config").newest()
    assert found is not None and "endless" in found.snapshot.models


def test_a_stop_while_a_program_says_which_models_it_has(start, tmp_path):
    program = tmp_path / "main.py"
    program.write_text(marked(BLOCKING, tmp_path / "asked"))
    server = start("--program", str(program), wait=False)
    until((tmp_path / "asked").exists)
    stops_at_once(server)


@pytest.mark.parametrize("exit_on_error", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_stop_while_workers_load(start, write, tmp_path, exit_on_error):
    write("blocking", marked(BLOCKING, tmp_path / "loads") + ANSWERING)
    server = start("--models", "blocking", wait=False, exit_on_error=exit_on_error, default_workers_per_model=2)
    until((tmp_path / "loads").exists)
    if not exit_on_error:
        server.wait_started()
    stops_at_once(server, started=not exit_on_error)


@pytest.mark.parametrize(
    "mode", [*(pytest.param(mode, marks=pytest.mark.long) for mode in ("none", "poll")), "explicit"]
)
def test_a_stop_while_a_repository_is_loaded(start, tmp_path, mode):
    repository = tmp_path / "repository"
    for name in ("one", "two", "three"):
        triton_model(repository, name, marked(BLOCKING, tmp_path / name))
    arguments = ["--model-repository", str(repository), "--model-control-mode", mode]
    server = start(*arguments, *(["--load-model", "*"] if mode == "explicit" else []), wait=False)
    for name in ("one", "two", "three"):
        until((tmp_path / name).exists)
    stops_at_once(server)


def test_a_stop_while_a_model_is_loaded_that_appeared_in_a_repository(start, tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()
    arguments = ["--model-repository", str(repository), "--model-control-mode", "poll"]
    server = start(*arguments, repository_poll_secs=0.1)
    triton_model(repository, "late", marked(BLOCKING, tmp_path / "late"))
    until((tmp_path / "late").exists)
    stops_at_once(server, started=True)


# --- side by side


def spans(file: Path) -> list[tuple[float, float]]:
    """When each model began and ended to load, by its own clock."""
    lines = [line.split() for line in file.read_text().splitlines()]
    begun = {name: float(when) for word, name, when in lines if word == "begin"}
    return sorted((begun[name], float(when)) for word, name, when in lines if word == "end")


@pytest.mark.parametrize("at_once", [pytest.param(1, marks=pytest.mark.long), 4])
def test_models_of_a_repository_load_side_by_side(start, tmp_path, at_once):
    repository, times = tmp_path / "repository", tmp_path / "times"
    for name in ("one", "two", "three"):
        triton_model(repository, name, TRITON.replace("TIMES", repr(str(times))))
    start("--model-repository", str(repository), loads_at_once_max=at_once)
    found = spans(times)
    assert len(found) == 3
    if at_once == 1:
        assert all(end <= begin for (_, end), (begin, _) in zip(found, found[1:], strict=False))
    else:
        assert max(begin for begin, _ in found) < min(end for _, end in found), "they didn't load at the same time"


def test_programs_are_asked_side_by_side(start, tmp_path):
    """Each goes on when the other has begun, too."""
    words = []
    for name, other in (("one", "two"), ("two", "one")):
        program = tmp_path / f"{name}.py"
        program.write_text(
            "import pathlib, time\n"
            f"pathlib.Path({str(tmp_path / name)!r}).touch()\n"
            f"while not pathlib.Path({str(tmp_path / other)!r}).exists():\n    time.sleep(0.01)\n"
            "from kserve import Model, ModelServer\n"
            f"model = Model({name!r})\nmodel.ready = True\nModelServer().start([model])\n"
        )
        words += ["--program", str(program)]
    server = start(*words, default_workers_per_model=1)
    listed = httpx.get(f"{server.http_management}/models").json()["models"]
    assert [model["modelName"] for model in listed] == ["one", "two"]


@pytest.mark.long
def test_the_first_that_was_named_is_the_default_though_it_takes_longer(start, store):
    archive(store / "slow.mar", "pair", version="1.0", zeros=bytes(256 << 20))
    archive(store / "quick.mar", "pair", version="2.0")
    archive(store / "again.mar", "pair", version="1.0")
    server = start("--models", "slow.mar", "quick.mar", "again.mar", extract_ratio_max=1e9, default_workers_per_model=1)
    described = httpx.get(f"{server.http_management}/models/pair/all").json()
    assert sorted((one["modelVersion"], one["modelUrl"]) for one in described) == [
        ("1.0", "slow.mar"),
        ("2.0", "quick.mar"),
    ]
    assert httpx.get(f"{server.http_management}/models/pair").json()[0]["modelVersion"] == "1.0"
    assert "Failed to load model: again.mar: Model version 1.0 is already registered for model pair" in server.log


# --- one that can't be loaded


def test_a_damaged_archive_of_a_snapshot_is_set_aside_and_the_rest_starts(start, store):
    archive(store / "sound.mar", "sound")
    damaged = archive(store / "damaged.mar", "damaged")
    whole = damaged.read_bytes()
    server = start(snapshots=True)
    for name in ("sound", "damaged"):
        server.register(f"{name}.mar")
    server.scale("damaged", 2)
    assert server.terminate() == 0
    damaged.write_bytes(whole[: len(whole) // 2])

    server = start(snapshots=True)
    assert "Model damaged, version 1.0 of the snapshot is set aside, it can't be loaded" in server.log
    assert "Put damaged.mar back into the model store" in server.log
    until(lambda: server.worker_pids("sound"))
    assert server.predict("sound", {}) == b"here"
    assert damaged.read_bytes() == whole[: len(whole) // 2]
    assert server.terminate() == 0

    refused = start(wait=False, snapshots=True, exit_on_error=True)
    assert refused.wait() == 1
    assert "Model damaged, version 1.0" in refused.log and "exit_on_error is on" in refused.log

    damaged.write_bytes(whole)
    server = start(snapshots=True)
    until(lambda: len(server.worker_pids("damaged")) == 2)
    assert server.predict("damaged", {}) == b"here"


def test_a_downloaded_archive_that_cannot_be_restored_stays_in_the_store(start, store, tmp_path):
    away = archive(tmp_path / "away.mar", "away")
    server = start(snapshots=True, allowed_urls="file://.*")
    server.register(f"file://{away}")
    assert server.terminate() == 0
    kept = (store / "away.mar").read_bytes()
    (store / "away.mar").write_bytes(kept[:100])
    server = start(snapshots=True, allowed_urls="file://.*")
    assert "Model away, version 1.0 of the snapshot is set aside" in server.log
    assert server.terminate() == 0
    assert (store / "away.mar").read_bytes() == kept[:100]
    (store / "away.mar").write_bytes(kept)
    server = start(snapshots=True, allowed_urls="file://.*")
    until(lambda: server.worker_pids("away"))
    server.unregister("away")
    until(lambda: not (store / "away.mar").exists())  # what was downloaded goes with its model, as ever


def test_a_broken_model_of_a_repository_stops_no_other(start, tmp_path):
    repository = tmp_path / "repository"
    for name, text in (("broken", "raise RuntimeError('not today')"), ("sound", TRITON.replace("time.sleep(2)", "0"))):
        triton_model(repository, name, text.replace("TIMES", repr(str(tmp_path / "times"))))
    triton_model(repository, "odd", "")
    (repository / "odd" / "config.pbtxt").write_bytes(b"\xff\xfe\x00")
    server = start("--model-repository", str(repository))
    assert httpx.get(f"{server.http}/v2/models/sound/ready").status_code == 200
    for name in ("broken", "odd"):
        assert f"Failed to load model: {name}" in server.log
    refused = start("--model-repository", str(repository), wait=False, exit_on_error=True)
    assert refused.wait() == 1


# --- what a killed server leaves


def unpacked(directory: Path) -> set[Path]:
    return set((directory / "tmp").glob("torchrelay-server-*"))


def test_what_a_killed_server_unpacked_is_removed_by_the_next_and_nobody_elses(start, store, tmp_path):
    archive(store / "packed.mar", "packed")
    running = start("--models", "packed.mar", default_workers_per_model=1)
    (its,) = unpacked(tmp_path)
    (tmp_path / "other").mkdir()  # for its pid file
    other = {"TMPDIR": str(tmp_path / "other")}
    killed = start("--models", "packed.mar", default_workers_per_model=1, env=other)
    (left,) = unpacked(tmp_path) - {its}
    assert list(left.glob("models/*/handler.py"))
    children = killed.processes()
    killed.process.kill()
    killed.wait()
    psutil.wait_procs(children, timeout=GUARD_S)
    assert left in unpacked(tmp_path)
    start(env=other)
    until(lambda: left not in unpacked(tmp_path), "it goes while the next one starts")
    assert its in unpacked(tmp_path) and list(its.glob("models/*/handler.py"))
    running.scale("packed", 2)
    assert running.predict("packed", {}) == b"here"


def test_a_start_without_open_files_says_what_it_needs_and_has(
    tmp_path: Path, store: Path, clean_env: dict[str, str]
) -> None:
    """Before it fails, in the log, and with the failure."""
    command = [sys.executable, "-m", "ts.model_server", "--foreground", "--model-store", str(store), "--ncs"]
    limited = ["sh", "-c", 'ulimit -n 26; exec "$@"', "sh", *command]
    done = subprocess.run(
        limited,
        cwd=tmp_path,
        env={**clean_env, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    assert done.returncode == 1
    said = "26 open files are allowed: the server itself needs 64"
    assert "Too many open files" in done.stderr and said in done.stderr
    log = (tmp_path / "logs" / "ts_log.log").read_text()
    assert said in log.splitlines()[0]
