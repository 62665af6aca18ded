"""MLServer's settings.json and variables in this server's words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ts_frontend.errors import InvalidArgument
from ts_frontend.mlserver_settings import read


def values(settings: dict[str, Any], **environ: str) -> dict[str, str]:
    return read(json.dumps(settings), environ).values


def test_nothing_said_changes_nothing() -> None:
    assert read(None, {"PATH": "/bin", "MLSERVER_MODEL_NAME": "m"}) == ({}, [])
    assert read("{}", {}) == ({}, [])


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
        ({"load_models_at_startup": True}, {"load_models": "all"}),
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
