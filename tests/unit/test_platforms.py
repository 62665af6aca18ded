"""The variables of hosting platforms: each has the settings of its row, and all have them only on their platform."""

from __future__ import annotations

from pathlib import Path

import pytest

from ts_frontend.config.foreign.platforms import BY_NAME, platforms_table
from ts_frontend.config.load import ConfigError, load_config
from ts_frontend.config.table import ServerConfig

#: A value of each variable, and the settings that it makes, as texts.
EXPECTED = {
    "SAGEMAKER_BIND_TO_PORT": ("8123", {"inference_address": "http://0.0.0.0:8123"}),
    "SAGEMAKER_SAFE_PORT_RANGE": (
        "9000-9003",
        {
            "metrics_address": "http://0.0.0.0:9000",
            "grpc_inference_port": "9001",
            "grpc_management_port": "9002",
            "management_address": "http://127.0.0.1:9003",
        },
    ),
    "SAGEMAKER_MULTI_MODEL": (
        "true",
        {
            "inference_address": "http://0.0.0.0:8080",
            "management_address": "http://0.0.0.0:8080",
            "model_store": "/opt/ml/models",
            "load_models": "()",
            "default_workers_per_model": "1",
            "enable_model_api": "True",
            "registered_memory_max": "-1",
        },
    ),
    "SAGEMAKER_BASE_DIR": ("/base", {"load_models": "('model=/base/model',)", "model_store": "/base/model"}),
    "SAGEMAKER_MODEL_SERVER_WORKERS": ("3", {"default_workers_per_model": "3"}),
    "SAGEMAKER_MODEL_SERVER_TIMEOUT": ("7", {"default_response_timeout": "7"}),
    "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": ("8", {"default_response_timeout": "8"}),
    "SAGEMAKER_STARTUP_TIMEOUT": ("9", {"default_startup_timeout": "9"}),
    "SAGEMAKER_MAX_PAYLOAD_IN_MB": ("2", {"max_request_size": "2097152", "max_response_size": "2097152"}),
    "SAGEMAKER_CONTAINER_LOG_LEVEL": ("10", {"log_level": "debug"}),
    **{
        name: ("2", {"models": key})
        for name, key in {
            "SAGEMAKER_TS_BATCH_SIZE": "batchSize",
            "SAGEMAKER_TS_MAX_BATCH_DELAY": "maxBatchDelay",
            "SAGEMAKER_TS_MIN_WORKERS": "minWorkers",
            "SAGEMAKER_TS_MAX_WORKERS": "maxWorkers",
            "SAGEMAKER_TS_RESPONSE_TIMEOUT": "responseTimeout",
        }.items()
    },
    "SAGEMAKER_ENABLE_STATEFUL_SESSIONS": (
        "true",
        {"session_expires_s": "1200.0", "ts_header_key_sequence_id": "X-Amzn-SageMaker-Session-Id"},
    ),
    "SAGEMAKER_SESSIONS_EXPIRATION": ("60", {"session_expires_s": "60.0"}),
    "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": (
        "m",
        {"model_repository": "(PosixPath('/opt/ml/model'),)", "model_control_mode": "explicit", "load_model": "('m',)"},
    ),
    "SAGEMAKER_TRITON_GRPC_PORT": ("8301", {"grpc_inference_port": "8301"}),
    "SAGEMAKER_TRITON_ALLOW_GRPC": ("false", {"enable_grpc": "False"}),
    "SAGEMAKER_TRITON_METRICS_PORT": ("8302", {"metrics_address": "http://0.0.0.0:8302"}),
    "SAGEMAKER_TRITON_ALLOW_METRICS": ("false", {"enable_metrics_api": "False"}),
    "SAGEMAKER_TRITON_LOG_VERBOSE": ("1", {"log_level": "debug"}),
    "AIP_HTTP_PORT": ("8124", {"inference_address": "http://0.0.0.0:8124"}),
    "AIP_HEALTH_ROUTE": ("/v1/endpoints/1", {"health_route": "/v1/endpoints/1"}),
    "AIP_PREDICT_ROUTE": ("/v1/endpoints/1:predict", {"predict_route": "/v1/endpoints/1:predict"}),
    "AIP_STORAGE_URI": ("gs://bucket/model/", {"load_models": "('model=gs://bucket/model',)"}),
    "AZUREML_ENTRY_SCRIPT": (
        "in/score.py",
        {"load_models": "('model=/var/azureml-app/in/score.py',)", "model_store": "/var/azureml-app/in"},
    ),
    "AML_APP_ROOT": ("/app", {"load_models": "('model=/app/main.py',)", "inference_address": "http://0.0.0.0:5001"}),
    "SCORING_TIMEOUT_MS": ("1001", {"default_response_timeout": "2"}),
    "WORKER_COUNT": ("2", {"default_workers_per_model": "2"}),
    "WORKER_TIMEOUT": ("3", {"default_startup_timeout": "3"}),
    "AZUREML_LOG_LEVEL": ("WARNING", {"log_level": "warning"}),
    "AML_CORS_ORIGINS": ("https://a.example", {"cors_allowed_origin": "https://a.example"}),
    "MLFLOW_SCORING_SERVER_REQUEST_TIMEOUT": ("11", {"default_response_timeout": "11"}),
    "MLFLOW_MODELS_WORKERS": ("2", {"default_workers_per_model": "2"}),
}
_ROWS = [(platform.name, one) for platform in BY_NAME.values() for one in platform.variables]


def config_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **environ: str) -> ServerConfig:
    monkeypatch.chdir(tmp_path)
    return load_config([], None, environ)


@pytest.mark.parametrize(("platform", "variable"), _ROWS, ids=[one.name for _, one in _ROWS])
def test_each_variable_sets_what_its_row_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, variable: object
) -> None:
    name = getattr(variable, "name", "")
    text, expected = EXPECTED.get(name, ("1", {}))
    config = config_with(tmp_path, monkeypatch, TS_PLATFORM=platform, **{name: text})
    for key, value in expected.items():
        shown = str(getattr(config, key))
        assert (f"'{value}': 2" in shown) if key == "models" else shown == value, (key, shown)
    if expected and "models" not in expected:
        off = config_with(tmp_path, monkeypatch, TS_PLATFORM="none", **{name: text})
        assert any(str(getattr(off, key)) != value for key, value in expected.items())
    if not expected:  # it has no effect, which the log says, or the model's own code reads it
        said = [note.text for note in config.notes if name in note.text and "has no effect" in note.text]
        assert bool(said) != (getattr(variable, "meaning", None) is None)


def test_the_table_of_the_documentation_is_that_of_the_server() -> None:
    page = Path(__file__).parents[2] / "docs" / "platforms.md"
    table = "\n".join(platforms_table())
    assert table in page.read_text(), f"docs/platforms.md must have:\n{table}"


def test_no_variable_without_a_row_is_expected() -> None:
    assert EXPECTED.keys() <= {one.name for _, one in _ROWS}


def test_a_platform_is_told_by_its_variables_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for platform in BY_NAME.values():
        for one in platform.variables:
            config = config_with(tmp_path, monkeypatch, **{one.name: EXPECTED.get(one.name, ("1", {}))[0]})
            assert config.platform == (platform.name if one.tells else "auto"), one.name
    plain = config_with(tmp_path, monkeypatch, MLFLOW_TRACKING_URI="http://a", AZURE_CLIENT_ID="1")
    assert plain.platform == "auto" and not plain.notes and plain.inference_address.host == "127.0.0.1"


def test_unknown_variables_of_a_platform_are_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_with(tmp_path, monkeypatch, AIP_MODE="PREDICTION", AIP_COLOUR="1", AIP_SIZE="2")
    (said,) = [note.text for note in config.notes if "AIP_COLOUR" in note.text]
    assert "AIP_COLOUR, AIP_SIZE in the environment" in said


def test_two_platforms_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"SAGEMAKER_BASE_DIR \(sagemaker\) and AIP_MODE \(vertex\)"):
        config_with(tmp_path, monkeypatch, SAGEMAKER_BASE_DIR="/base", AIP_MODE="PREDICTION")
    config = config_with(tmp_path, monkeypatch, SAGEMAKER_BASE_DIR="/base", AIP_MODE="x", TS_PLATFORM="vertex")
    assert config.platform == "vertex"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("SAGEMAKER_SAFE_PORT_RANGE", "9000-9002", "a range of at least four ports"),
        ("SAGEMAKER_BIND_TO_PORT", "no", "SAGEMAKER_BIND_TO_PORT"),
        ("SAGEMAKER_TS_BATCH_SIZE", "two", "SAGEMAKER_TS_BATCH_SIZE = two: allowed are whole numbers"),
        ("SAGEMAKER_MAX_PAYLOAD_IN_MB", "6MB", "SAGEMAKER_MAX_PAYLOAD_IN_MB"),
        ("AIP_PREDICT_ROUTE", "predict", "allowed is a path"),
        ("SCORING_TIMEOUT_MS", "1.5", "SCORING_TIMEOUT_MS"),
        ("AML_CORS_ORIGINS", "https://a.example, https://b.example", "one origin is possible"),
    ],
)
def test_wrong_values_are_named_with_their_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, said: str
) -> None:
    platform = next(platform for platform, one in _ROWS if one.name == name)
    with pytest.raises(ConfigError) as error:
        config_with(tmp_path, monkeypatch, TS_PLATFORM=platform, **{name: text})
    assert said in error.value.message
