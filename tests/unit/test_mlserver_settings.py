"""MLServer's settings.json and variables in this server's words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ts_frontend.config.foreign.mlserver import MLServerDefaults, dotenv, read
from ts_frontend.errors import InvalidArgument


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


def test_variables_win() -> None:
    assert values({"grpc_port": 1}, MLSERVER_GRPC_PORT="2") == {"grpc_inference_port": "2"}


def test_what_has_no_effect_is_named() -> None:
    assert read('{"kafka_enabled": true, "debug": false}', {}).notes == [
        "MLServer's setting kafka_enabled has no effect here",
        "MLServer's setting debug has no effect here",
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [("[", "JSON"), ("[]", "list"), ('{"grpc_port": "x"}', "grpc_port"), ('{"cors_settings": 1}', "cors_settings")],
)
def test_nonsense_is_refused(text: str, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        read(text, {})


def test_where_the_images_of_mlserver_have_their_models() -> None:
    assert values({}, MLSERVER_MODELS_DIR="/mnt/models") == {"model_store": "/mnt/models"}
    assert values({}, MLSERVER_MODEL_REPOSITORY_ROOT="here") == {"model_store": "here"}


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


def test_a_relative_path_starts_at_this_directory() -> None:
    uri = read(None, {"MLSERVER_MODEL_URI": "model.json"}).models.model["parameters"]["uri"]
    assert uri == str(Path("model.json").absolute())
    assert read(None, {"MLSERVER_MODEL_URI": "s3://a/b"}).models.model["parameters"]["uri"] == "s3://a/b"


def test_a_variable_that_is_no_json() -> None:
    with pytest.raises(InvalidArgument, match="MLSERVER_MODEL_INPUTS is JSON"):
        read(None, {"MLSERVER_MODEL_INPUTS": "["})


def test_a_file_of_variables() -> None:
    text = '# no\nexport A=1\nB = "x y" \nC=d # more\n\nnothing\n'
    assert dotenv(text) == {"A": "1", "B": "x y", "C": "d"}
