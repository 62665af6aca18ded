"""The files that count as a language model, and the engine that is chosen for them."""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from ts.runtime.handlers import context_of
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import InvalidArchive, UrlForbidden
from ts_frontend.models.archive import Archive
from ts_frontend.models.formats.formats import known_formats
from ts_frontend.models.formats.language import HANDLERS
from ts_frontend.models.store.store import ModelStore


@pytest.fixture(autouse=True)
def engines(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The packages of two engines can be found; nothing here imports them."""
    folder = tmp_path_factory.mktemp("packages")
    for name in ("xllamacpp", "transformers"):
        (folder / f"{name}.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(folder)
    return folder


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
    assert archive.config.items() >= {"minWorkers": 1, "maxWorkers": 1}.items()
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


def folder_of(place: Path, config: dict[str, Any], *names: str) -> Path:
    folder = place / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in names:
        (folder / name).touch()
    return folder


LLAMA = {"architectures": ["LlamaForCausalLM"]}
BERT = {"architectures": ["BertForSequenceClassification"]}


@pytest.mark.parametrize(
    ("config", "names", "handler"),
    [
        (LLAMA, ["model.safetensors"], "transformers_handler"),
        (LLAMA, ["model-00001-of-00002.safetensors"], "transformers_handler"),
        ({"architectures": ["GPT2LMHeadModel"]}, ["pytorch_model.bin"], "transformers_handler"),
        ({"architectures": ["T5ForConditionalGeneration"]}, ["model.safetensors"], "transformers_handler"),
        ({"architectures": ["BertModel"]}, ["model.safetensors", "modules.json"], "transformers_handler"),
        (BERT, ["model.safetensors"], "weights"),
        (BERT | {"id2label": {"0": "LABEL_0"}}, ["model.safetensors"], "transformers_handler"),
        (BERT, ["model.safetensors", "tokenizer.json"], "transformers_handler"),
        (BERT, ["model.safetensors", "tokenizer.json", "preprocessor_config.json"], "weights"),
        ({"architectures": ["BertForTokenClassification"]}, ["model.safetensors", "vocab.txt"], "transformers_handler"),
        ({"architectures": ["RobertaForMaskedLM"]}, ["model.safetensors", "vocab.txt"], "transformers_handler"),
        ({"architectures": ["BertForQuestionAnswering"]}, ["model.safetensors", "vocab.txt"], "transformers_handler"),
        ({"architectures": ["TapasForQuestionAnswering"]}, ["model.safetensors", "vocab.txt"], "weights"),
        ({"architectures": None}, ["model.safetensors"], ""),
        (LLAMA, ["model.gguf"], "llama_cpp_handler"),
    ],
)
def test_hugging_faces_configuration_decides(
    tmp_path: Path, config: dict[str, Any], names: list[str], handler: str
) -> None:
    folder = folder_of(tmp_path, config, *names)
    formats = known_formats(ServerConfig(), env={}, work_dir=tmp_path, gpus=0)
    if handler:
        assert formats.open(folder, tmp_path).handler == handler
    else:
        assert not any(one.handler in HANDLERS for one in [formats.open(folder, tmp_path)])


def test_a_named_task_decides_what_the_class_does_not(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"architectures": ["BertModel"]}, "model.safetensors")
    formats = known_formats(ServerConfig(), env={}, work_dir=tmp_path, gpus=0)
    assert formats.open(folder, tmp_path).handler == "weights"
    (folder / "model-config.yaml").write_text("handler: {task: fill-mask}\n")
    archive = formats.open(folder, tmp_path)
    assert (archive.handler, archive.handler_settings) == ("transformers_handler", {"task": "fill-mask"})
    assert [one["name"] for one in archive.config["openInference"]["outputs"]] == ["output"]
    (folder / "model-config.yaml").write_text("handler: [\n")
    with pytest.raises(InvalidArchive, match=r"model-config\.yaml.*not usable as YAML"):
        formats.open(folder, tmp_path)


def test_the_servers_task_is_stronger_than_the_class(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"architectures": ["BertModel"]}, "model.safetensors")
    config = ServerConfig(language_models={"task": "embeddings"})
    archive = known_formats(config, env={}, work_dir=tmp_path, gpus=0).open(folder, tmp_path)
    assert (archive.handler, archive.handler_settings) == ("transformers_handler", {"task": "embeddings"})


def test_a_missing_engine_is_named_with_what_installs_it(tmp_path: Path, engines: Path) -> None:
    (engines / "transformers.py").unlink()
    importlib.invalidate_caches()
    folder = folder_of(tmp_path, LLAMA, "model.safetensors")
    formats = known_formats(ServerConfig(), env={}, work_dir=tmp_path, gpus=0)
    with pytest.raises(
        InvalidArchive, match=r'transformers is not installed.*pip install "torchrelay\[transformers\]"'
    ):
        formats.open(folder, tmp_path)
    (folder / "requirements.txt").write_text("transformers\n")
    assert formats.open(folder, tmp_path).requirements_file == "requirements.txt"


def test_the_settings_name_another_engine(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, LLAMA, "model.safetensors")
    (folder / "model-config.yaml").write_text("handler:\n  engine: vllm\n")
    formats = known_formats(ServerConfig(), env={}, work_dir=tmp_path, gpus=0)
    with pytest.raises(InvalidArchive, match="engine vllm is not installed"):
        formats.open(folder, tmp_path)
    (folder / "model-config.yaml").write_text("handler:\n  engine: mine\n")
    with pytest.raises(InvalidArchive, match=r"engine is 'mine'; there are llama.cpp, transformers, vllm"):
        formats.open(folder, tmp_path)


@pytest.mark.parametrize("handler", sorted(HANDLERS))
def test_an_archive_with_such_a_handler_has_one_worker_and_its_tensors(tmp_path: Path, handler: str) -> None:
    folder = tmp_path / "llm"
    (folder / "MAR-INF").mkdir(parents=True)
    model = {"modelName": "llm", "handler": handler, "configFile": "model-config.yaml"}
    (folder / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"model": model}))
    (folder / "model-config.yaml").write_text("maxConcurrency: 7\n")
    formats = known_formats(ServerConfig(), env={}, work_dir=tmp_path, gpus=0)
    config = formats.open(folder, tmp_path).config
    assert (config["minWorkers"], config["maxWorkers"], config["maxConcurrency"]) == (1, 1, 7)
    assert config["openInference"]["platform"] == "language_model"
    (folder / "model-config.yaml").write_text("minWorkers: 2\nmaxWorkers: 3\n")
    config = formats.open(folder, tmp_path).config
    assert (config["minWorkers"], config["maxWorkers"]) == (2, 3)


def store_of(root: Path) -> ModelStore:
    return ModelStore(root, formats=known_formats(ServerConfig(model_store=root), env={}, work_dir=root, gpus=0))


def test_a_store_of_such_files_has_the_models_of_their_names(tmp_path: Path) -> None:
    for name in ("a.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", ".b.gguf", "m.mar"):
        (tmp_path / name).touch()
    store = store_of(tmp_path)
    assert not store.alone and store.names() == ["a.gguf", "big-00001-of-00002.gguf", "m.mar"]
    formats = known_formats(ServerConfig(), env={}, work_dir=tmp_path, gpus=0)
    assert [formats.open(tmp_path / name, tmp_path).name for name in store.names()[:2]] == ["a", "big"]
    assert not formats.is_model(tmp_path)


def test_a_store_with_one_such_file_is_the_model_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "chat v1.Q4_1.gguf").touch()
    config = ServerConfig(model_store=tmp_path)
    store = store_of(tmp_path)
    assert store.alone and store.names() == ["."] == [store.only()]
    assert known_formats(config, env={}, work_dir=tmp_path, gpus=0).open(tmp_path, tmp_path).name == "chat_v1.Q4_1"


def test_a_file_alone_in_its_folder_has_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "model-config.yaml").write_text("handler:\n  parallel: 8\n")
    formats = known_formats(ServerConfig(), env={}, work_dir=tmp_path, gpus=0)
    assert formats.open(tmp_path / "a.gguf", tmp_path).config["handler"] == {"parallel": 8}
    (tmp_path / "b.gguf").touch()
    assert "handler" not in formats.open(tmp_path / "a.gguf", tmp_path).config


def test_a_link_to_such_a_file_has_the_links_name(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0123abcd").touch()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "chat.gguf").symlink_to("../blobs/0123abcd")
    store = store_of(tmp_path / "store")
    fetched = asyncio.run(store.fetch("chat.gguf"))
    formats = known_formats(ServerConfig(), env={}, work_dir=tmp_path, gpus=0)
    for opened in (formats.open(fetched.path, tmp_path), formats.open_unpacked(fetched.path)):
        assert (opened.name, opened.dir, opened.serialized_file) == ("chat", tmp_path / "store", "chat.gguf")


def test_the_operator_names_a_file_outside_the_store(tmp_path: Path) -> None:
    (tmp_path / "chat.gguf").touch()
    (tmp_path / "store").mkdir()
    store, path = store_of(tmp_path / "store"), str(tmp_path / "chat.gguf")
    assert asyncio.run(store.fetch(path, named=True)).path == tmp_path / "chat.gguf"
    with pytest.raises(UrlForbidden):
        asyncio.run(store.fetch(path))


def with_settings(folder: Path, **settings: Any) -> Archive:
    config = ServerConfig(language_models=settings)
    return known_formats(config, env={}, work_dir=folder, gpus=0).open(folder, folder)


def test_the_servers_settings_are_stronger_and_in_the_engines_words(tmp_path: Path, engines: Path) -> None:
    folder = folder_of(tmp_path, LLAMA, "model.safetensors")
    (folder / "model-config.yaml").write_text("handler: {engine: transformers, dtype: float32}\n")
    given = {"dtype": "bfloat16", "maxModelLength": 100, "task": "text-generation", "trustRemoteCode": True}
    assert with_settings(folder, **given).handler_settings == given
    (engines / "vllm.py").touch()
    archive = with_settings(folder, engine="vllm", vllm_engine_config={"enforce_eager": True}, **given)
    assert archive.handler == "vllm_handler"
    assert archive.handler_settings == {
        "model_path": ".",
        "vllm_engine_config": {
            "enforce_eager": True,
            "dtype": "bfloat16",
            "max_model_len": 100,
            "trust_remote_code": True,
        },
    }
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "chat.gguf").touch()
    archive = with_settings(
        tmp_path / "gguf", maxModelLength=100, trustRemoteCode=True, task="embeddings", dtype="auto"
    )
    assert archive.handler_settings == {"contextTokens": 400, "embeddings": True}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"vllm_engine_config": {"tensor_parallel_size": 2}},
            "tensor_parallel_size is for the engine vllm; .*llama.cpp",
        ),
        ({"dtype": "bfloat16"}, "llama.cpp has no setting dtype"),
        ({"task": "fill-mask"}, "task is 'fill-mask'; llama.cpp has text-generation and embeddings"),
        ({"predictions": "raw_logits"}, "predictions is for the engine transformers; .*llama.cpp"),
        ({"task": "rerank"}, "llama.cpp has text-generation and embeddings"),
        ({"engine": "transformers"}, "transformers does not read .gguf"),
    ],
)
def test_what_an_engine_lacks_is_refused(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    (tmp_path / "chat.gguf").touch()
    with pytest.raises(InvalidArchive, match=says):
        with_settings(tmp_path, **settings)


def test_the_handler_finds_them_among_its_own(tmp_path: Path) -> None:
    (tmp_path / "model-config.yaml").write_text("batchSize: 2\nhandler: {dtype: float32, parallel: 8}\n")
    settings = {"model_dir": str(tmp_path), "handler_settings": {"dtype": "bfloat16"}}
    assert context_of(settings).model_yaml_config == {"handler": {"dtype": "bfloat16"}}
    found = context_of({**settings, "config_file": "model-config.yaml"}).model_yaml_config
    assert found == {"batchSize": 2, "handler": {"dtype": "bfloat16", "parallel": 8}}
