"""The compiled form as it is installed: the compiled modules, and the fallback if they can't be loaded."""

from __future__ import annotations

import configparser
import importlib
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import pytest

import ts.version
from ts.protocol.frames import Failed

pytestmark = [
    pytest.mark.compiled_form,
    pytest.mark.skipif(not ts.version.is_compiled(), reason="needs the compiled form: make test-compiled"),
]

SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
PACKAGE = Path(ts.version.__file__).parent
#: A handler that says which files its worker runs.
HANDLER = """
import json, sys

def handle(data, context):
    found = {name: module.__file__ for name, module in sys.modules.items() if name.startswith("ts.")}
    return None if data is None else [json.dumps(found)]
"""
IMPORTED = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
print(json.dumps([importlib.import_module(name).__file__ for name in sys.argv[2:]]))
"""


@pytest.fixture(scope="module")
def listed(root: Path) -> list[str]:
    settings = configparser.ConfigParser(delimiters=("=",))
    settings.read(root / "setup.cfg")
    return settings["torchrelay:compiled"]["modules"].split()


def imported(python: str, folder: Path, modules: list[str]) -> list[Path]:
    """The files of modules of the package in this folder, which sees nothing else but Python's library."""
    command = [python, "-I", "-S", "-c", IMPORTED, str(folder), *modules]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Path(file) for file in json.loads(done.stdout)]


def copied(folder: Path, suffix: str = SUFFIX) -> Path:
    """The package alone, with extensions of that suffix."""
    shutil.copytree(PACKAGE, folder / "ts", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (folder / "ts").rglob(f"*{SUFFIX}"):
        file.rename(file.with_name(file.name.removesuffix(SUFFIX) + suffix))
    return folder


def test_the_listed_modules_are_compiled_and_their_sources_installed(listed: list[str], root: Path) -> None:
    assert ts.version.is_compiled()
    for name in listed:
        spec = importlib.import_module(name).__spec__
        assert spec is not None and isinstance(spec.loader, ExtensionFileLoader), name
        source = Path(*name.split(".")).with_suffix(".py")
        folder = root / ("worker" if source.parts[0] == "ts" else "frontend")
        assert (PACKAGE.parent / source).read_bytes() == (folder / source).read_bytes()
    extensions = [one for package in ("ts", "ts_frontend") for one in (PACKAGE.parent / package).rglob(f"*{SUFFIX}")]
    assert len(extensions) == len(listed) + 1, "one file each, and the library"


def test_the_package_alone_has_all_it_needs(listed: list[str], tmp_path: Path) -> None:
    """As nodes of a cluster get it."""
    pure = [name for name in listed if name.startswith("ts.protocol.")]
    files = imported(sys.executable, copied(tmp_path), pure)
    assert [file.name for file in files] == [f"{name.rpartition('.')[2]}{SUFFIX}" for name in pure]


def other_pythons() -> list[str]:
    found = (shutil.which(f"python3.{minor}") for minor in range(11, 15) if minor != sys.version_info.minor)
    return [one for one in found if one and subprocess.run([one, "-c", "pass"], capture_output=True).returncode == 0]


def test_another_python_runs_the_sources(
    listed: list[str], tmp_path: Path, start_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To this Python, the extensions are such of another: it passes over them. Where there are others, they do too."""
    other = re.sub(r"\d+", "299", SUFFIX, count=1)
    folder = copied(tmp_path / "site", other)
    assert (folder / "ts" / "protocol" / f"frames{other}").exists() and other != SUFFIX
    (tmp_path / "mine.py").write_text(HANDLER)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    worker = start_worker("mine.py", model_dir=str(tmp_path))
    files = {name: Path(file) for name, file in worker.json(b"x").items()}
    assert files["ts.runtime.running"] == folder / "ts" / "runtime" / "running.py"
    assert {file.suffix for file in files.values()} == {".py"}
    assert worker.stop() == 0
    pure = [name for name in listed if name.startswith("ts.protocol.")]
    for python in other_pythons():
        assert {file.suffix for file in imported(python, PACKAGE.parent, pure)} == {".py"}


def test_a_worker_runs_the_compiled_runtime(tmp_path: Path, start_worker: Any) -> None:
    (tmp_path / "mine.py").write_text(HANDLER)
    files = start_worker("mine.py", model_dir=str(tmp_path)).json(b"x")
    for name in ("ts.runtime.running", "ts.runtime.worker", "ts.protocol.decoder"):
        assert files[name].endswith(SUFFIX), files[name]


def test_a_handlers_failure_names_the_handlers_line(tmp_path: Path, start_worker: Any) -> None:
    """Compiled modules stand in tracebacks under other names than their files have."""
    text = "def handle(data, context):\n    return None if data is None else [data[0]['no']]\n"
    (tmp_path / "mine.py").write_text(text)
    worker = start_worker("mine.py", model_dir=str(tmp_path), debug_errors=True)
    failed = worker.ask(b"x")
    assert isinstance(failed, Failed)
    assert failed.message == "Prediction failed: KeyError: 'no' (mine.py, line 2, in handle)"
    assert "ts/runtime" not in failed.traceback
