"""A model with an interpreter and packages of its own (`useVenv`)."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import grpc
import pytest

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
WHEEL = "greeting-1.0-py3-none-any.whl"


def write_wheel(path: Path) -> None:
    """The smallest package that pip installs without building anything."""
    info = "greeting-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("greeting.py", "WORD = 'hello'\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def require(store: Path, model: str, requirement: str) -> None:
    """Gives a model of the store a requirements file."""
    (store / model / "requirements.txt").write_text(f"{requirement}\n")
    manifest = store / model / "MAR-INF" / "MANIFEST.json"
    tree = json.loads(manifest.read_text())
    tree["model"]["requirementsFile"] = "requirements.txt"
    manifest.write_text(json.dumps(tree))


def test_a_model_gets_its_own_packages_and_nobody_else_does(start, write, store):
    write("own", TELLING, config="useVenv: true\n")
    write_wheel(store / "own" / WHEEL)
    require(store, "own", f"./{WHEEL}")
    write("plain", TELLING)
    server = start()
    server.register("own")
    server.register("plain")
    word, prefix = json.loads(server.predict("own", {}))
    other, others_prefix = json.loads(server.predict("plain", {}))
    assert (word, other) == ("hello", None) and prefix != others_prefix
    assert server.describe("own")["useVenv"] is True
    server.unregister("own")
    assert not Path(prefix).exists()


def test_what_cannot_be_installed_is_said_and_nothing_is_registered(start, write, store):
    write("own", TELLING, config="useVenv: true\n")
    require(store, "own", "./nowhere-1.0-py3-none-any.whl")
    server = start()
    with pytest.raises(grpc.RpcError) as refused:
        server.register("own")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Virtual environment creation failed for model own" in refused.value.details()
    assert "nowhere-1.0" in refused.value.details()
    with pytest.raises(grpc.RpcError):
        server.describe("own")
