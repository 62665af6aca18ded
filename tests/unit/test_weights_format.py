"""The files that count as a model's weights without an archive, their adapters, and a store of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import InvalidArchive
from ts_frontend.models.archive import Archive
from ts_frontend.models.formats.format import ModelFiles
from ts_frontend.models.formats.formats import Formats, known_formats
from ts_frontend.models.formats.triton import TritonFormat
from ts_frontend.models.formats.weights import WeightsFormat
from ts_frontend.models.store.store import ModelStore

NAMED = json.dumps({"architectures": ["BertModel"]})


def folder(place: Path, *names: str, **texts: str) -> Path:
    """A folder with empty files of these names, and files with these texts."""
    place.mkdir()
    for name in names:
        (place / name).write_text(NAMED if name == "config.json" else "")
    for name, text in texts.items():
        (place / f"{name}.py").write_text(text)
    return place


def opened(path: Path, work_dir: Path) -> Archive:
    return Formats((WeightsFormat(),)).open(path, work_dir)


@pytest.mark.parametrize(
    ("names", "kind", "files"),
    [
        (["model.pt"], "torchscript", ["model.pt"]),
        (["model.pt", "README.md", ".cache"], "torchscript", ["model.pt"]),
        (["any.pth"], "torchscript", ["any.pth"]),
        (["model.pt2"], "exported", ["model.pt2"]),
        (["model.onnx", "requirements.txt"], "onnx", ["model.onnx"]),
        (["model.pt", "model.py"], "class", ["model.pt"]),
        (["a.safetensors", "b.safetensors", "model.py"], "class", ["a.safetensors", "b.safetensors"]),
        (["model.safetensors", "config.json", "tokenizer.json"], "transformers", ["model.safetensors"]),
        (["model.safetensors", "config.json", "pytorch_model.bin", "own.py"], "transformers", ["model.safetensors"]),
        (["pytorch_model.bin", "config.json"], "transformers", ["pytorch_model.bin"]),
    ],
)
def test_what_runs_a_folder(names: list[str], kind: str, files: list[str], tmp_path: Path) -> None:
    found = opened(folder(tmp_path / "net", *names), tmp_path)
    assert (found.name, found.adapter, found.adapter_settings["kind"]) == ("net", "weights", kind)
    assert [Path(one).name for one in found.adapter_settings["files"]] == files
    assert found.adapter_settings["torch"] is (kind != "onnx")
    assert found.requirements_file == ("requirements.txt" if "requirements.txt" in names else None)


@pytest.mark.parametrize(
    "names",
    [
        ["model.pt", "handler.py"],
        ["model.pt", "other.pt"],
        ["model.pt", "digits.mar"],
        ["model.pt", "model.safetensors"],
        ["pytorch_model.bin"],
        ["README.md"],
        [],
    ],
)
def test_what_is_none(names: list[str], tmp_path: Path) -> None:
    assert not WeightsFormat().matches(folder(tmp_path / "net", *names))
    assert not WeightsFormat().matches(tmp_path / "missing")


def test_a_configured_handler_gets_the_folder(tmp_path: Path) -> None:
    place = folder(tmp_path / "net", "model.pth")
    config = ServerConfig(default_service_handler="/handlers/mine.py")
    formats = known_formats(config, env={}, work_dir=tmp_path, gpus=0)
    assert (formats.open(place, tmp_path).adapter, formats.is_alone(place)) == ("", False)
    assert formats.open(place / "model.pth", tmp_path).adapter == "weights", "a file is no archive without a handler"


def test_a_state_without_its_class_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidArchive, match=r"model\.safetensors has weights but no model: put a model\.py"):
        opened(folder(tmp_path / "net", "model.safetensors"), tmp_path)
    bare = folder(tmp_path / "bare", "model.safetensors")
    (bare / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(InvalidArchive, match="it names no architectures"):
        opened(bare, tmp_path)


def test_a_download_that_did_not_end_is_refused(tmp_path: Path) -> None:
    parts = [f"model-0000{one}-of-00003.safetensors" for one in (1, 2, 3)]
    whole = folder(tmp_path / "whole", "config.json", "model.safetensors.index.json", *parts)
    assert [Path(one).name for one in opened(whole, tmp_path).adapter_settings["files"]] == parts
    with pytest.raises(
        InvalidArchive, match=r"entry '\S+03-of\S+': one of 3 parts of the weights, of which 1 are there"
    ):
        opened(folder(tmp_path / "net", "config.json", parts[2]), tmp_path)


def test_weights_that_change_other_weights_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidArchive, match=r"adapter_model\.safetensors is an adapter for another model.*merge_and_"):
        opened(folder(tmp_path / "net", "adapter_model.safetensors", "adapter_config.json"), tmp_path)


def test_a_file_is_a_model_of_its_name(tmp_path: Path) -> None:
    found = opened(folder(tmp_path / "store", "one.onnx", "two.pt") / "one.onnx", tmp_path)
    assert (found.name, found.dir, found.adapter_settings["kind"]) == ("one", tmp_path / "store", "onnx")


def test_a_configuration_beside_it_counts(tmp_path: Path) -> None:
    place = folder(tmp_path / "net", "model.onnx")
    (place / "model-config.yaml").write_text("minWorkers: 2\n")
    assert opened(place, tmp_path).config == {"minWorkers": 2}


def test_a_store_may_be_the_model(tmp_path: Path) -> None:
    store = ModelStore(folder(tmp_path / "models", "model.onnx"), formats=Formats((WeightsFormat(),)))
    assert store.alone and store.names() == ["."] == [store.only()]
    other = ModelStore(folder(tmp_path / "several", "a.onnx", "b.onnx"), formats=Formats((WeightsFormat(),)))
    assert not other.alone and other.names() == []


def test_a_version_of_a_triton_repository_may_be_a_program(tmp_path: Path) -> None:
    folder(tmp_path / "net")
    folder(tmp_path / "net" / "1", "model.pt2")
    (archive,) = TritonFormat(0).open(ModelFiles(tmp_path / "net", tmp_path / "net"))
    assert archive.adapter_settings["backend"] == "pytorch"
    assert archive.adapter_settings["model_file"].endswith("net/1/model.pt2")
    (tmp_path / "net" / "1" / "model.pt").touch()
    (archive,) = TritonFormat(0).open(ModelFiles(tmp_path / "net", tmp_path / "net"))
    assert archive.adapter_settings["model_file"].endswith("net/1/model.pt"), "TorchScript's name is Triton's default"
