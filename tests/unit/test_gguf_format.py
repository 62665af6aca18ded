"""The files that count as a language model in llama.cpp's format."""

from __future__ import annotations

from pathlib import Path

import pytest

from ts_frontend.config.table import ServerConfig
from ts_frontend.models.formats.formats import known_formats


@pytest.mark.parametrize(
    ("names", "serialized"),
    [
        (["chat.gguf"], "chat.gguf"),
        (["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], "a-00001-of-00002.gguf"),
        (["a.gguf", "b.gguf"], None),  # the configuration names one
        (["chat.gguf", "config.json", "model.safetensors"], "chat.gguf"),
    ],
)
def test_a_folder_with_such_a_file_is_a_model(tmp_path: Path, names: list[str], serialized: str | None) -> None:
    folder = tmp_path / "chat"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    formats = known_formats(ServerConfig(), env={}, work_dir=tmp_path, gpus=0)
    archive = formats.open(folder, tmp_path)
    assert (archive.name, archive.handler, archive.serialized_file) == ("chat", "llama_cpp_handler", serialized)
    assert archive.config == {"minWorkers": 1, "maxWorkers": 1, "maxConcurrency": 4}
    if len(names) == 1:
        single = formats.open(folder / names[0], tmp_path)
        assert (single.name, single.handler, single.serialized_file) == ("chat", "llama_cpp_handler", names[0])


def test_its_configuration_is_stronger(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "model-config.yaml").write_text("maxConcurrency: 8\nhandler:\n  parallel: 8\n")
    archive = known_formats(ServerConfig(), env={}, work_dir=tmp_path, gpus=0).open(tmp_path, tmp_path)
    assert archive.config["maxConcurrency"] == 8 and archive.config["handler"] == {"parallel": 8}
    assert archive.config_file == "model-config.yaml"


def test_an_archive_with_such_a_file_is_an_archive(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "MAR-INF").mkdir()
    (tmp_path / "MAR-INF" / "MANIFEST.json").write_text('{"model": {"modelName": "m", "handler": "mine.py"}}')
    archive = known_formats(ServerConfig(), env={}, work_dir=tmp_path, gpus=0).open(tmp_path, tmp_path)
    assert archive.handler == "mine.py"
