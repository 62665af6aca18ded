"""The report of `torchserve doctor` about a machine with faults, and about one without."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ts_frontend.cli import main as cli
from ts_frontend.config.table import ServerConfig
from ts_frontend.diagnosis import doctor
from ts_frontend.diagnosis.doctor import Brought
from ts_frontend.diagnosis.report import Section
from ts_frontend.listeners.sockets import Listener
from ts_frontend.workers.resources import Inventory

GB = 10**9
HERE = Path(sys.executable).parent / "torchserve"
#: What a process with torch says of it.
TORCH = {
    "version": "2.9",
    "cuda": None,
    "devices": 0,
    "threads": 4,
    "folder": "/torch",
    "modules": 9,
    "compiled_at_each_start": 0,
}


def said(section: Section) -> list[tuple[str, str, str]]:
    return [(one.severity.value, one.about, one.text) for one in section.findings]


def only(section: Section) -> tuple[str, str]:
    """The severity and text of its one finding."""
    ((severity, _, text),) = said(section)
    return severity, text


# --- Python and its packages


def test_a_python_without_optimisation_is_told() -> None:
    section = Section("")
    doctor.python(section, "'--enable-optimizations' '--with-lto'", without_gil=False)
    doctor.python(section, "'--enable-shared'", without_gil=True)
    assert [one[0] for one in said(section)] == ["ok", "warning", "warning"]
    texts = "\n".join(text for _, _, text in said(section))
    assert "built without PGO and LTO" in texts and "the GIL" in texts


@pytest.mark.parametrize(
    ("brought", "words"),
    [
        (
            Brought("torchserve", ("torchserve",), ("ts",), "/site"),
            "torchserve (in /site) brings torchserve, ts as this",
        ),
        (
            Brought("torch-model-archiver", ("torch-model-archiver",), ("model_archiver",)),
            "pip uninstall torch-model-a",
        ),
    ],
)
def test_another_distribution_with_our_names_is_in_the_way(brought: Brought, words: str) -> None:
    section = Section("")
    own = Brought("torchrelay", doctor.COMMANDS, doctor.PACKAGES)
    doctor.packages_in_the_way(section, [own, brought], str(HERE), str(HERE))
    assert only(section)[0] == "warning" and words in only(section)[1]


def test_nothing_is_in_the_way_of_our_own() -> None:
    section = Section("")
    doctor.packages_in_the_way(section, [Brought("torchrelay", ("torchserve",), ("ts",))], str(HERE), str(HERE))
    assert only(section)[0] == "ok"


def test_another_ts_and_another_command_on_the_path_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ts").mkdir()
    (tmp_path / "ts" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    command = tmp_path / "torchserve"
    command.touch()
    section = Section("")
    doctor.packages_in_the_way(section, [], "/usr/bin/other-torchserve", str(command))
    doctor.packages_in_the_way(section, [], None, str(command))
    texts = "\n".join(text for _, _, text in said(section))
    assert f"{tmp_path}/ts is another package ts" in texts
    assert f"torchserve on the PATH is /usr/bin/other-torchserve, and this Python's is {command}" in texts
    assert f"no torchserve is on the PATH: add {tmp_path}" in texts


# --- torch and devices


@pytest.mark.parametrize(
    ("cuda", "devices", "inventory", "severity", "words"),
    [
        (None, 0, Inventory(), "ok", "no GPU: workers run on the CPU"),
        ("12.6", 2, Inventory("cuda", 2), "ok", "2 of kind cuda"),
        (None, 0, Inventory("cuda", 1), "error", "this build of torch has no CUDA"),
        ("12.6", 0, Inventory("cuda", 1), "error", "CUDA doesn't start"),
        ("12.6", 1, Inventory(), "warning", "nvidia-smi is missing"),
    ],
)
def test_what_torch_sees_is_compared_with_what_the_server_places_on(
    cuda: str | None, devices: int, inventory: Inventory, severity: str, words: str
) -> None:
    section = Section("")
    doctor.torch(section, {**TORCH, "cuda": cuda, "devices": devices}, inventory)
    (_, _, version), (found, _, text) = said(section)
    assert version.startswith("2.9, built ") and "4 threads" in version
    assert found == severity and words in text


@pytest.mark.parametrize(("environment", "told"), [({}, False), ({"PYTHONDONTWRITEBYTECODE": "1"}, True)])
def test_a_torch_without_bytecode_is_told(tmp_path: Path, environment: dict[str, str], told: bool) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "from . import cuda, version\n__version__ = '2.9'\ndef get_num_threads(): return 4\n"
    )
    (tmp_path / "torch" / "cuda.py").write_text("def is_available(): return False\n")
    (tmp_path / "torch" / "version.py").write_text("cuda = None\n")
    env = {"PYTHONPATH": str(tmp_path), "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode"), **environment}
    printed = subprocess.run([sys.executable, "-c", doctor._TORCH], env=env, check=True, capture_output=True).stdout
    section = Section("")
    doctor.torch(section, json.loads(printed), Inventory())
    warnings = [text for severity, _, text in said(section) if severity == "warning"]
    assert bool(warnings) is told
    assert not told or f"-m compileall -q {tmp_path / 'torch'}`" in warnings[0]


# --- the server's places


def test_a_port_in_use_is_told_with_its_holder_unless_that_is_the_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listener = Listener("http_inference", "127.0.0.1", taken.getsockname()[1], {})
        stranger, server, free = Section(""), Section(""), Section("")
        doctor.ports(stranger, [listener], None)
        doctor.ports(server, [listener], os.getpid())
    doctor.ports(free, [Listener("grpc_inference", "127.0.0.1", 0, {})], None)
    severity, text = only(stranger)
    assert severity == "error" and f"(process {os.getpid()})" in text and "--http-port" in text
    assert only(server) == ("ok", f"http_inference 127.0.0.1:{listener.port}: the running server has it")
    assert only(free) == ("ok", "grpc_inference takes a free one")


def test_the_folder_of_a_unix_socket_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "file.sock").touch()
    found = Section("")
    for path in (tmp_path / "new.sock", tmp_path / "absent" / "new.sock", tmp_path / "file.sock"):
        doctor.ports(found, [Listener("http_inference", "", 0, {}, path=str(path))], None)
    assert [one[0] for one in said(found)] == ["ok", "error", "error"]


def test_a_stale_pid_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ".model_server.pid"
    config = ServerConfig(work_dir=tmp_path)
    for content, words in ((None, "no server runs here"), ("4000000", "is left over: no server has it any more")):
        if content is not None:
            path.write_text(content)
        section = Section("")
        assert doctor._running(section, config) is None
        assert words in only(section)[1]
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # A server is another process, which has the file open.
        with subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[file.fileno()]
        ) as server:
            path.write_text(str(server.pid))
            section = Section("")
            assert doctor._running(section, config) == server.pid
            server.kill()
    assert only(section) == ("ok", f"a server runs as process {server.pid} ({path})")


def test_a_directory_that_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bad, good = Section(""), Section("")
    doctor.directory(bad, "temp_dir", tmp_path / "file" / "tmp")
    doctor.directory(good, "log_location", tmp_path / "made" / "later")
    assert only(bad)[0] == "error" and only(bad)[1].endswith("Set TMPDIR, or --work-dir for all files")
    assert only(good)[0] in ("ok", "warning") and not (tmp_path / "made").exists()


def test_limits_have_advice() -> None:
    low, high = Section(""), Section("")
    doctor.limits(low, 256, GB // 2, 8 * GB)
    doctor.limits(high, 65536, 6 * GB, 8 * GB)
    texts = [text for _, _, text in said(low)]
    assert "ulimit -n 65536" in texts[0] and "500 MB of 8.0 GB are free" in texts[1]
    assert [one[0] for one in said(low) + said(high)] == ["warning", "warning", "ok", "ok"]


# --- the report


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "m.mar").touch()
    lines = [f"{api}_address=http://127.0.0.1:0" for api in ("inference", "management", "metrics")]
    lines += ["grpc_inference_port=0", "grpc_management_port=0", "number_of_gpu=0", "preload_torch=false"]
    (tmp_path / "config.properties").write_text("\n".join(lines))
    return tmp_path


def examined(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    status = cli.main(["doctor", "--json", *words])
    return status, json.loads(capsys.readouterr().out)


def test_the_command_reports_settings_and_makes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(folder.rglob("*"))
    status, report = examined(capsys, "--model-store", "store", "--work-dir", "new")
    titles = [section["title"] for section in report["sections"]]
    expected = ["Settings", "Python", "Torch and devices", "Server", "Directories", "Models", "Limits"]
    assert (status, report["errors"], titles) == (0, 0, expected), report
    assert "store has m.mar." in report["sections"][5]["findings"][0]["text"]
    assert sorted(folder.rglob("*")) == before
