"""The model of `torchserve dev`: the kind of its folder, the watched files, and the messages for its author."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ts.runtime.handlers import HandlerNotUsable, entry_point_of
from ts_frontend.cli import dev
from ts_frontend.config.kinds import ConfigError
from ts_frontend.errors import ArchiveNotFound, InvalidArchive
from ts_frontend.models.formats.formats import Formats
from ts_frontend.models.reloading import changes, look

HANDLE = "def handle(data, context):\n    return data\n"


def folder_of(place: Path, **files: str) -> Path:
    """A folder with these files; `_` in a name stands for the dot of its suffix."""
    place.mkdir()
    for name, text in files.items():
        (place / ".".join(name.rsplit("_", 1))).write_text(text)
    return place


def test_a_file_is_the_handler_of_its_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "my-model", echo_py=HANDLE, model_py="", weights_pt="")
    (folder / "model-config.yaml").write_text("batchSize: 3\n")
    archive = Formats().open_unpacked(folder / "echo.py")
    assert (archive.dir, archive.packed, archive.remembered) == (folder, None, False)
    assert (archive.name, archive.handler, archive.config) == ("echo", "echo.py", {"batchSize": 3})
    assert archive.manifest["model"]["serializedFile"] == archive.serialized_file == "weights.pt"
    assert archive.manifest["model"]["modelFile"] == archive.model_file == "model.py"


@pytest.mark.parametrize(
    ("files", "handler"),
    [
        ({"handler_py": "", "other_py": HANDLE}, "handler.py"),
        ({"mine_py": HANDLE, "parts_py": "x = 1"}, "mine.py"),
        ({"only_py": "def predict(x): ..."}, "only.py"),
    ],
)
def test_a_folder_has_its_handler_in_the_file_that_shows_one(
    tmp_path: Path, files: dict[str, str], handler: str
) -> None:
    archive = Formats().open_unpacked(folder_of(tmp_path / "digits-2", **files))
    assert archive.handler == handler
    assert archive.name == ("digits_2" if handler == "handler.py" else handler.removesuffix(".py"))
    assert archive.serialized_file is None


def test_a_folder_with_several_or_no_handlers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArchive, match=r"2 are candidates \(a\.py, b\.py\): name one"):
        Formats().open_unpacked(folder_of(tmp_path / "two", a_py=HANDLE, b_py=HANDLE))
    with pytest.raises(InvalidArchive, match="there is no Python file"):
        Formats().open_unpacked(folder_of(tmp_path / "none"))
    with pytest.raises(ArchiveNotFound, match="nowhere"):
        Formats().open_unpacked(tmp_path / "nowhere")


def test_a_folder_with_a_manifest_is_what_that_says(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", other_py=HANDLE)
    (folder / "MAR-INF").mkdir()
    (folder / "MAR-INF" / "MANIFEST.json").write_text('{"model": {"modelName": "named", "handler": "other.py"}}')
    archive = Formats().open_unpacked(folder)
    assert (archive.name, archive.handler, archive.packed) == ("named", "other.py", None)


def test_code_configuration_and_weights_are_watched(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", a_py="", notes_txt="", weights_pt="", written_json="")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "a.py").touch()
    (folder / "parts").mkdir()
    (folder / "parts" / "b.py").touch()
    before = look(folder)
    assert [os.path.relpath(path, folder) for path in sorted(before)] == ["a.py", "parts/b.py", "weights.pt"]
    (folder / "a.py").write_text("changed = 1")
    (folder / "parts" / "b.py").unlink()
    (folder / "new.yaml").touch()
    (folder / "written.json").write_text("{}")
    found = [os.path.relpath(path, folder) for path in changes(before, look(folder))]
    assert found == ["a.py", "new.yaml", "parts/b.py"]
    assert list(look(folder / "weights.pt")) == [str(folder / "weights.pt")]


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def test_a_file_with_only_predict_is_told_what_to_write(importable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (importable / "only_predict.py").write_text("def predict(value):\n    return value\n")
    with pytest.raises(HandlerNotUsable, match="has a function predict") as told:
        entry_point_of("only_predict.py", str(importable))
    monkeypatch.delitem(sys.modules, "only_predict")
    (importable / "only_predict.py").write_text("def predict(value):\n    return [value]\n" + written(told.value))
    handle: Any
    handle, _ = entry_point_of("only_predict.py", str(importable))
    assert handle([{"data": 1}, {"body": 2}], None) == [[1], [2]], "what it is told to write works"
    monkeypatch.delitem(sys.modules, "only_predict")


def test_a_network_is_told_what_to_write(importable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("torch")
    module.nn = SimpleNamespace(Module=type("Module", (), {}))
    monkeypatch.setitem(sys.modules, "torch", module)
    (importable / "only_network.py").write_text("import torch\n\nclass Net(torch.nn.Module):\n    pass\n")
    with pytest.raises(HandlerNotUsable, match=r"only_network\.py has a torch\.nn\.Module, Net") as told:
        entry_point_of("only_network.py", str(importable))
    monkeypatch.delitem(sys.modules, "only_network")
    with (importable / "only_network.py").open("a") as file:
        file.write(written(told.value))
    handle, _ = entry_point_of("only_network.py", str(importable))
    assert callable(handle)
    monkeypatch.delitem(sys.modules, "only_network")


def written(hint: HandlerNotUsable) -> str:
    """The code in a hint."""
    return "\n" + "\n".join(line.removeprefix("    ") for line in str(hint).partition("Add:\n")[2].splitlines()) + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py"], r"nowhere\.py: there is no such file or folder"),
        ([__file__, "--host", "0.0.0.0"], "serves only this machine: "),
    ],
)
def test_what_the_command_refuses(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dev.main(words, lambda config, fd: 0)


def test_a_debugger_that_is_not_installed_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="-m pip install debugpy"):
        dev.main([__file__, "--debugpy", "5678"], lambda config, fd: 0)
