"""The wheel has everything: built, unpacked where nothing of the checkout can be seen, and used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

IMPORTS = """
import importlib, json, pkgutil, sys
sys.path[:0] = [sys.argv[1]]
import ts, ts_frontend, model_archiver
for package in (ts, ts_frontend, model_archiver):
    assert package.__file__.startswith(sys.argv[1]), package.__file__
from ts_frontend.protos import inference_pb2, inference_pb2_grpc, management_pb2, management_pb2_grpc
assert inference_pb2.PredictionsRequest(model_name="m", input={"data": b"1"}).SerializeToString()
assert inference_pb2_grpc.InferenceAPIsServiceStub and management_pb2_grpc.ManagementAPIsServiceStub
names = [m.name for p in (ts_frontend, model_archiver) for m in pkgutil.walk_packages(p.__path__, p.__name__ + ".")]
needs_ray = "ts_frontend.workers.cluster.bridge"  # a process of its own, with the extra `ray`
assert needs_ray in names
for name in names:
    if not name.endswith("__main__") and name != needs_ray:
        importlib.import_module(name)
assert not {"torch", "ray"} & sys.modules.keys()
print(len(names))
"""

PRINTED = """
import json, setuptools, distutils.core
made = distutils.core.run_setup("setup.py", stop_after="init").metadata
print(json.dumps({"addresses": made.project_urls, "text": made.long_description}))
"""


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = copy_of_tracked_files(root, tmp_path_factory.mktemp("source"))
    command = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out), str(source)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def copy_of_tracked_files(root: Path, target: Path) -> Path:
    """The files that go into the wheel, copied, so that the build leaves nothing in the checkout."""
    kept = ["frontend", "worker", "protos", "setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"]
    subprocess.run(["cp", "-r", *(str(root / name) for name in kept), str(target)], check=True)
    return target


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(target)
    return target


def test_the_wheel_is_torchrelay_for_every_python_3(wheel: Path) -> None:
    assert wheel.name.startswith("torchrelay-") and wheel.name.endswith("-py3-none-any.whl")


def test_code_data_and_types_are_in(wheel: Path, root: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        packed = set(opened.namelist())
    for top, prefix in (("worker", "ts"), ("frontend", "ts_frontend"), ("frontend", "model_archiver")):
        for file in (root / top / prefix).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                assert str(file.relative_to(root / top)) in packed


def test_the_commands_and_the_licence_are_in(unpacked: Path) -> None:
    info = next(unpacked.glob("*.dist-info"))
    entries = (info / "entry_points.txt").read_text()
    assert "torchserve = " in entries and "torch-model-archiver = " in entries
    assert (info / "licenses" / "LICENSE").read_text().lstrip().startswith("Apache License")


def test_what_a_package_index_shows(unpacked: Path) -> None:
    """No link leads to a file that only a checkout has; the Pythons and the purpose are named."""
    told = (next(unpacked.glob("*.dist-info")) / "METADATA").read_text()
    assert (
        "# torchrelay" in told and "docs/differences.md" in told and "Description-Content-Type: text/markdown" in told
    )
    assert not re.findall(r"\]\((?!https?://|#)[^)]*\)", told.partition("# torchrelay")[2])
    for version in ("3.11", "3.12", "3.13", "3.14"):
        assert f"Classifier: Programming Language :: Python :: {version}\n" in told
    assert "Keywords: torchserve,pytorch" in told and "Classifier: Topic ::" in told


def set_up(root: Path, repository: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs this interpreter where setup.py is, for a release from `repository`."""
    env = {**os.environ, "TORCHRELAY_REPOSITORY": repository}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)


def test_a_release_has_the_addresses_of_its_repository(root: Path) -> None:
    made = json.loads(set_up(root, "https://git.example/us/torchrelay/", "-c", PRINTED).stdout)
    assert made["addresses"]["Source"] == "https://git.example/us/torchrelay"
    assert made["addresses"]["Changelog"] == "https://git.example/us/torchrelay/blob/HEAD/CHANGELOG.md"
    links = re.findall(r"\]\(https://git\.example/us/torchrelay/blob/HEAD/([^)#]*)", made["text"])
    assert len(links) > 20 and all((root / link).exists() for link in links)
    assert not re.findall(r"\]\((?!https?://|#)[^)]*\)", made["text"])
    refused = set_up(root, "torchrelay", "setup.py", "--version")
    assert refused.returncode and "https://HOST/OWNER/NAME" in refused.stderr


def test_an_editable_install_cannot_be_compiled(root: Path, tmp_path: Path) -> None:
    """Extensions beside the sources would be older than these after the next change."""
    env = {**os.environ, "TORCHRELAY_COMPILE": "1"}
    command = [sys.executable, "-W", "ignore", "setup.py", "build_ext", "--inplace"]
    source = copy_of_tracked_files(root, tmp_path)
    done = subprocess.run(command, cwd=source, env=env, capture_output=True, text=True)
    assert done.returncode and "an editable install has no compiled form. Use `pip install .`" in done.stderr


@pytest.mark.slow
def test_the_readmes_line_puts_it_in_torchserves_place(wheel: Path, root: Path, tmp_path: Path) -> None:
    """In an environment with TorchServe, as AWS's image has it."""
    (line,) = re.findall(r"^RUN (pip uninstall .*)$", (root / "README.md").read_text(), re.MULTILINE)
    env, constraint = tmp_path / "env", tmp_path / "constraint"
    constraint.write_text(f"torchrelay @ {wheel.as_uri()}\n")
    subprocess.run([sys.executable, "-m", "venv", env], check=True)

    def said(command: str) -> str:
        path = f"{env / 'bin'}:{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "PIP_CONSTRAINT": str(constraint), "PIP_QUIET": "2"}
        done = subprocess.run(["sh", "-euc", command], env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    said("pip install torchserve==0.12.0 torch-model-archiver")
    assert list(env.rglob("model-server.jar"))
    said(line)
    assert not list(env.rglob("model-server.jar"))
    assert "torchrelay" in said("torchserve --version") and "--export-path" in said("torch-model-archiver --help")
    said("pip check && python -c 'from ts_frontend.cli.launch import rivals; assert not rivals(), rivals()'")


def test_everything_imports_from_the_wheel_alone(unpacked: Path, tmp_path: Path) -> None:
    """In isolated mode, with the installed packages but without the checkout; no module needs torch to be imported."""
    packages = sysconfig.get_paths()["purelib"]
    start = f"import sys; sys.path.append({packages!r})\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", start + IMPORTS, str(unpacked)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
