"""Models with packages of their own (`useVenv`, `install_py_dep_per_model`)."""

from __future__ import annotations

import json
import os
import shutil
import urllib.error
import urllib.request
from importlib.metadata import version as installed
from pathlib import Path

import grpc
import pytest

from support import write_wheel

pytestmark = pytest.mark.long

TELLING = """
import json, sys

def handle(data, context):
    try:
        import greeting
        word = greeting.WORD
    except ImportError:
        word = None
    import yaml  # one of the server's packages
    return [json.dumps([word, sys.prefix])] * len(data or [])
"""
TORCH = installed("torch")
WHEEL = "greeting-1.0-py3-none-any.whl"


def require(store: Path, model: str, requirement: str) -> None:
    """Gives a model of the store a requirements file."""
    (store / model / "requirements.txt").write_text(f"{requirement}\n")
    manifest = store / model / "MAR-INF" / "MANIFEST.json"
    tree = json.loads(manifest.read_text())
    tree["model"]["requirementsFile"] = "requirements.txt"
    manifest.write_text(json.dumps(tree))


def test_a_model_gets_its_own_packages_and_nobody_else_does(start, write, store):
    """Two versions share one environment, and the next server has it still."""
    for folder, version in (("own", "1.0"), ("own2", "2.0")):
        write("own", TELLING, config="useVenv: true\nminWorkers: 2\n", directory=folder, version=version)
        write_wheel(store / folder / WHEEL)
        require(store, folder, f"./{WHEEL}")
    write("plain", TELLING)
    server = start()
    for folder in ("own", "own2", "plain"):
        server.register(folder)
    word, prefix = json.loads(server.predict("own", {}))
    other, others_prefix = json.loads(server.predict("plain", {}))
    assert (word, other) == ("hello", None) and prefix != others_prefix
    assert json.loads(server.predict("own", {}, version="2.0")) == ["hello", prefix]
    assert server.describe("own")["useVenv"] is True
    assert server.log.count("Making a virtual environment") == 1
    server.unregister("own", "2.0")
    server.terminate()
    again = start("--models", "own")
    assert json.loads(again.predict("own", {})) == ["hello", prefix]
    assert "Making a virtual environment" not in again.log
    assert f"Model own uses the virtual environment {prefix}." in again.log


def test_requirements_of_every_model_with_install_py_dep_per_model(start, write, store, tmp_path):
    """pip gets its settings from the environment, as an offline installation has them."""
    (tmp_path / "wheels").mkdir()
    write_wheel(tmp_path / "wheels" / WHEEL)
    for model in ("own", "plain"):
        write(model, TELLING)
    require(store, "own", "greeting")
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels")}
    server = start(install_py_dep_per_model="true", environments_dir=tmp_path / "kept", env=offline)
    for model in ("own", "plain"):
        server.register(model)
    assert json.loads(server.predict("own", {}))[0] == "hello"
    assert json.loads(server.predict("plain", {}))[0] is None
    assert "Model own: Successfully installed greeting-1.0" in server.log
    assert len(list((tmp_path / "kept").glob("*.json"))) == 1
    left = sorted(path.name for path in (store / "own").iterdir() if path.name != "__pycache__")
    assert left == ["MAR-INF", "handler.py", "requirements.txt"]
    shutil.rmtree(tmp_path / "wheels")


def test_requirements_are_left_alone_by_default(start, write, store):
    write("own", TELLING)
    require(store, "own", "./nowhere-1.0-py3-none-any.whl")
    server = start()
    server.register("own")
    assert json.loads(server.predict("own", {}))[0] is None


def test_what_cannot_be_installed_is_said_and_nothing_is_registered(start, write, store):
    write("own", TELLING, config="useVenv: true\n")
    require(store, "own", "./nowhere-1.0-py3-none-any.whl")
    server = start()
    with pytest.raises(grpc.RpcError) as refused:
        server.register("own")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Custom pip package installation failed for model own" in refused.value.details()
    request = urllib.request.Request(f"{server.http_management}/models?url=own", method="POST")
    with pytest.raises(urllib.error.HTTPError) as answered, urllib.request.urlopen(request, timeout=60):
        pass
    with answered.value as answer:
        body = json.loads(answer.read())
        assert (answer.status, body["type"]) == (400, "ModelException")
    assert "nowhere-1.0" in body["message"]
    with pytest.raises(grpc.RpcError):
        server.describe("own")


@pytest.fixture
def newer(write, store: Path) -> Path:
    """A model with packages of its own, and the folder of wheels that has a newer torch and yaml than the server."""
    write(
        "own", TELLING.replace("import yaml", "import torch, yaml; word = [word, torch.__version__, yaml.__version__]")
    )
    wheels = store / "own" / "wheels"
    wheels.mkdir()
    for name in ("torch-99.0", "pyyaml-99.0", "greeting-1.0"):
        write_wheel(wheels / f"{name}-py3-none-any.whl")
    write_wheel(wheels / "needy-1.0-py3-none-any.whl", "torch>=99")
    return wheels


@pytest.mark.parametrize("line", ["torch", "torch>=2", f"torch=={TORCH}"])
def test_what_is_installed_and_satisfies_a_line_stays(start, store, newer, line):
    require(store, "own", f"--no-index\n--find-links wheels\n{line}\npyyaml\ngreeting")
    server = start(install_py_dep_per_model="true", env={"PIP_CONFIG_FILE": os.devnull})
    server.register("own")
    assert json.loads(server.predict("own", {}))[0] == ["hello", TORCH, installed("pyyaml")]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("torch>=99", "requested torch>=99"),
        ("needy", "needy 1.0 depends on torch>=99"),
        ("./wheels/torch-99.0-py3-none-any.whl", "requirements.txt: './wheels/torch-99.0-py3-none-any.whl'"),
        (
            "torch @ https://nowhere.invalid/torch-99.0-py3-none-any.whl",
            "requirements.txt: 'torch @ https://nowhere.invalid/",
        ),
        ("-r wheels/more.txt", "more.txt: 'https://nowhere.invalid/torch-99.0-py3-none-any.whl'"),
    ],
)
def test_a_line_that_needs_another_torch_is_refused_before_it_is_downloaded(start, store, newer, line, named):
    (newer / "more.txt").write_text("https://nowhere.invalid/torch-99.0-py3-none-any.whl\n")
    require(store, "own", f"--no-index\n--find-links wheels\n{line}")
    server = start(install_py_dep_per_model="true")
    with pytest.raises(grpc.RpcError) as refused:
        server.register("own")
    told = refused.value.details()
    assert named in told and f"the server has torch {TORCH}" in told
    assert "Model own: Collecting torch@" not in server.log and "Model own: Downloading" not in server.log
