"""The files that count as a language model, and the engine that is chosen for them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import InvalidArchive, UrlForbidden
from ts_frontend.models.archive import Archive
from ts_frontend.models.formats.formats import known_formats
from ts_frontend.models.formats.weights import HANDLERS
from ts_frontend.models.store.store import ModelStore


@pytest.fixture(autouse=True)
def engines(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The packages of two engines can be found; nothing here imports them."""
    folder = tmp_path_factory.mktemp("packages")
    for name in ("xllamacpp", "transformers"):
        (folder / f"{name}.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(folder)
    return folder


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


def test_the_settings_name_another_engine(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, LLAMA, "model.safetensors")
    (folder / "model-config.yaml").write_text("handler:\n  engine: vllm\n")
    formats = known_formats(ServerConfig(), env={}, work_dir=tmp_path, gpus=0)
    with pytest.raises(InvalidArchive, match="engine vllm is not installed"):
        formats.open(folder, tmp_path)
    (folder / "model-config.yaml").write_text("handler:\n  engine: mine\n")
    with pytest.raises(InvalidArchive, match=r"engine is 'mine'; there are llama.cpp, transformers, vllm"):
        formats.open(folder, tmp_path)


def store_of(root: Path) -> ModelStore:
    return ModelStore(root, formats=known_formats(ServerConfig(model_store=root), env={}, work_dir=root, gpus=0))


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
