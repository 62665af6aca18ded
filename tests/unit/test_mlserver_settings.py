"""MLServer's settings.json and variables in this server's words."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from ts_frontend.config.foreign.mlserver import MLServerDefaults, dotenv, hugging_face, read
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import InvalidArchive, InvalidArgument
from ts_frontend.models.formats.formats import known_formats


def values(settings: dict[str, Any], **environ: str) -> dict[str, str]:
    """The settings without `load_models`, which is checked: by default all models are loaded."""
    found = read(json.dumps(settings), environ).values
    assert found.pop("load_models", None) == (None if settings.get("load_models_at_startup") is False else "all")
    return found


def test_nothing_said_loads_all_models() -> None:
    assert read(None, {"PATH": "/bin"})[:2] == ({"load_models": "all"}, [])
    assert read("{}", {}).models == MLServerDefaults(only=True)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"http_port": 9000}, {"inference_address": "http://127.0.0.1:9000"}),
        ({"metrics_port": 9002}, {"metrics_address": "http://127.0.0.1:9002"}),
        (
            {"host": "0.0.0.0"},
            {
                "inference_address": "http://0.0.0.0:8080",
                "metrics_address": "http://0.0.0.0:8082",
                "grpc_inference_address": "0.0.0.0",
            },
        ),
        ({"grpc_port": 9001}, {"grpc_inference_port": "9001"}),
        ({"grpc_max_message_length": 5}, {"max_request_size": "5", "max_response_size": "5"}),
        ({"parallel_workers": 3}, {"default_workers_per_model": "3"}),
        ({"parallel_workers": 0}, {"default_workers_per_model": "1"}),
        ({"load_models_at_startup": True}, {}),
        ({"load_models_at_startup": False}, {}),
        ({"model_repository_root": "models"}, {"model_store": "models"}),
        (
            {"cors_settings": {"allow_origins": ["https://a.example"], "allow_methods": ["GET", "POST"]}},
            {"cors_allowed_origin": "https://a.example", "cors_allowed_methods": "GET,POST"},
        ),
    ],
)
def test_settings(settings: dict[str, Any], expected: dict[str, str]) -> None:
    assert values(settings) == expected


def test_an_address_of_version_6() -> None:
    assert values({"host": "::1", "http_port": 1})["inference_address"] == "http://[::1]:1"


@pytest.mark.parametrize(
    ("text", "named"),
    [("[", "JSON"), ("[]", "list"), ('{"grpc_port": "x"}', "grpc_port"), ('{"cors_settings": 1}', "cors_settings")],
)
def test_nonsense_is_refused(text: str, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        read(text, {})


def test_what_variables_say_of_models() -> None:
    found = read(
        None,
        {
            "MLSERVER_MODEL_NAME": "m",
            "mlserver_model_implementation": "a.B",
            "MLSERVER_MODEL_URI": "/mnt/models",
            "MLSERVER_MODEL_EXTRA": '{"k": 1}',
            "MLSERVER_MODEL_MAX_BATCH_SIZE": "4",
            "MLSERVER_MODEL_PARAMETERS": '{"version": "v2"}',
            "MLSERVER_SERVER_NAME": "s",
        },
    ).models
    parameters = {"uri": "/mnt/models", "extra": {"k": 1}, "version": "v2"}
    assert found == MLServerDefaults(
        {"name": "m", "implementation": "a.B", "max_batch_size": 4, "parameters": parameters}, "s", only=True
    )
    assert found.is_model


def test_a_variable_that_is_no_json() -> None:
    with pytest.raises(InvalidArgument, match="MLSERVER_MODEL_INPUTS is JSON"):
        read(None, {"MLSERVER_MODEL_INPUTS": "["})


def test_a_file_of_variables() -> None:
    text = '# no\nexport A=1\nB = "x y" \nC=d # more\n\nnothing\n'
    assert dotenv(text) == {"A": "1", "B": "x y", "C": "d"}


@pytest.mark.parametrize(
    ("extra", "environ", "expected"),
    [
        ({"task": "text-generation"}, {}, ("", {"task": "text-generation"}, {})),
        (
            {"task": "text2text-generation", "pretrained_model": "org/t5", "pretrained_tokenizer": "org/t"},
            {},
            ("org/t5", {"task": "text-generation", "tokenizer": "org/t"}, {}),
        ),
        (
            {"task": "feature-extraction", "device": -1, "intra_op_threads": 2, "framework": "pt"},
            {},
            ("", {"task": "embeddings"}, {"cpuThreads": 2, "deviceType": "cpu"}),
        ),
        (
            {"task": "text-generation", "device": "cuda:1", "model_kwargs": {"torch_dtype": "float16"}},
            {},
            ("", {"task": "text-generation", "dtype": "float16"}, {"deviceType": "gpu", "deviceIds": [1]}),
        ),
        (
            {"device": 0},
            {"TASK": "text-generation", "PRETRAINED_MODEL": "org/m", "OPTIMUM_MODEL": "false", "DEVICE": "cpu"},
            ("org/m", {"task": "text-generation"}, {"deviceType": "gpu", "deviceIds": [0]}),
        ),
    ],
)
def test_the_hugging_face_runtime_in_this_servers_words(
    extra: dict[str, Any], environ: dict[str, str], expected: tuple[str, dict[str, Any], dict[str, Any]]
) -> None:
    variables = {f"MLSERVER_MODEL_HUGGINGFACE_{name}": text for name, text in environ.items()}
    assert tuple(hugging_face(extra, variables)) == expected


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({}, "task is None; text-generation, text2text-generation, feature-extraction"),
        ({"task": "summarization"}, "task is 'summarization'.*others by the package mlserver_huggingface"),
        ({"task": "text-generation", "optimum_model": True}, "served by PyTorch"),
        ({"task": "text-generation", "framework": "tf"}, "served by PyTorch"),
        ({"task": "text-generation", "device": "tpu"}, "device is 'tpu'; allowed are cpu, cuda"),
        ({"task": "text-generation", "model_kwargs": {"load_in_8bit": True}}, "model_kwargs has load_in_8bit"),
    ],
)
def test_what_of_that_runtime_is_not_served(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        hugging_face(extra, {})


def folder_with(place: Path, settings: dict[str, Any]) -> Path:
    """MLServer's folder `mine`, and the package transformers, which is found and not imported."""
    (place / "mine" / "weights").mkdir(parents=True)
    (place / "mine" / "model-settings.json").write_text(json.dumps(settings))
    (place / "mine" / "weights" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (place / "mine" / "weights" / "model.safetensors").touch()
    (place / "transformers.py").write_text("raise AssertionError")
    return place / "mine"


RUNTIME = {
    "name": "chat",
    "implementation": "mlserver_huggingface.HuggingFaceRuntime",
    "parameters": {"version": "v3", "uri": "./weights", "extra": {"task": "text-generation", "device": "cpu"}},
}


def test_a_folder_of_that_runtime_is_a_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path, RUNTIME)
    monkeypatch.syspath_prepend(tmp_path)
    archive = known_formats(ServerConfig(), env={}, work_dir=tmp_path, gpus=0).open(folder, tmp_path)
    assert (archive.name, archive.version, archive.dir) == ("chat", "v3", folder / "weights")
    assert (archive.handler, archive.adapter) == ("transformers_handler", "")
    assert archive.handler_settings == {"task": "text-generation"} and archive.config["deviceType"] == "cpu"
    (tmp_path / "mlserver_huggingface.py").touch()
    importlib.invalidate_caches()
    archive = known_formats(ServerConfig(), env={}, work_dir=tmp_path, gpus=0).open(folder, tmp_path)
    assert archive.adapter == "mlserver_runtime", "the package itself runs it"


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"uri": ".", "extra": {"task": "text-generation"}}, "there is no language model at ."),
        ({"extra": {"task": "summarization"}}, "extra: task is 'summarization'"),
    ],
)
def test_a_folder_of_that_runtime_without_such_a_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any], says: str
) -> None:
    folder = folder_with(tmp_path, {**RUNTIME, "parameters": parameters})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidArchive, match=says):
        known_formats(ServerConfig(), env={}, work_dir=tmp_path, gpus=0).open(folder, tmp_path)
