"""The variables of hosting platforms, each with the settings of this server that it sets. Pure.

A platform is named by the setting `platform`, or found by its variables. A variable counts like one of this server's
own; the platform's other defaults are weaker than all that is given, and stronger than a profile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, TypeAlias

from ts_frontend.config.foreign.aliases import Meaning, Said, nothing, port_range, sets
from ts_frontend.config.kinds import grouped

AUTO, NONE = "auto", "none"
SAGEMAKER, VERTEX, AZUREML, MLFLOW = "sagemaker", "vertex", "azureml", "mlflow"
PLATFORMS = (SAGEMAKER, VERTEX, AZUREML, MLFLOW)
#: The name of a platform's only model.
MODEL = "model"
SESSION_HEADER = "X-Amzn-SageMaker-Session-Id"
_SAGEMAKER_DIR = "/opt/ml"
_AZURE_DIR = "/var/azureml-app"
_MIB = 1024 * 1024
#: Settings that name what is served: with any of them the platform's own model isn't loaded.
NAMING = ("load_models", "model_store", "model_repository", "model_dir", "program", "dev_model")
#: The platform's network decides who reaches the server, and nothing that a run leaves is there for the next one.
_HOSTED = {
    "inference_address": "http://127.0.0.1:8080",
    "host": "0.0.0.0",
    "disable_token_authorization": "true",
    "ncs": "true",
}

Environ: TypeAlias = "Mapping[str, str]"
Defaults: TypeAlias = "Callable[[Environ], dict[str, str]]"


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of one platform. `tells`: its presence tells the platform. `meaning` None: `Platform.defaults` or the
    model's own code reads it."""

    name: str
    doc: str
    meaning: Meaning | None = None
    tells: bool = True


@dataclass(frozen=True, slots=True)
class Platform:
    """A platform's variables, their prefixes, and its other settings, which depend on the variables."""

    name: str
    prefixes: tuple[str, ...]
    defaults: Defaults
    variables: tuple[Variable, ...]

    def told_by(self, environ: Environ) -> str:
        """The first variable that tells the platform, "" for none."""
        return next((one.name for one in self.variables if one.tells and environ.get(one.name, "").strip()), "")

    def unknown(self, environ: Environ) -> list[str]:
        """The variables with the platform's prefix that aren't in the table."""
        known = {one.name for one in self.variables}
        return sorted(name for name in environ if name.startswith(self.prefixes) and name not in known)


# --- meanings


def _whole(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise ValueError("allowed are whole numbers")
    return int(text)


def _mebibytes(text: str) -> Said:
    return Said(dict.fromkeys(("max_request_size", "max_response_size"), str(_whole(text) * _MIB)))


def _level(text: str) -> Said:
    """Python's level of logging, as a number or a word."""
    words = {"10": "debug", "20": "info", "30": "warning", "40": "error", "50": "error", "critical": "error"}
    return Said({"log_level": words.get(text.lower(), text)})


def _milliseconds(text: str) -> Said:
    return Said({"default_response_timeout": str(max(1, -(-_whole(text) // 1000)))})


def _origin(text: str) -> Said:
    if "," in text:
        raise ValueError("one origin is possible, or *: answers name it as it is")
    return Said({"cors_allowed_origin": text})


def _route(key: str) -> Meaning:
    def meaning(text: str) -> Said:
        if not re.fullmatch(r"/[\w.~:/@-]*", text, re.ASCII):
            raise ValueError("allowed is a path, from its / on")
        return Said({key: text})

    return meaning


def _log_verbosity(text: str) -> Said:
    return Said({"log_level": "debug"} if _whole(text) else {})


# --- the other settings


def _switched_on(environ: Environ, name: str) -> bool:
    return environ.get(name, "").strip().lower() == "true"


def _sagemaker(environ: Environ) -> dict[str, str]:
    base = environ.get("SAGEMAKER_BASE_DIR") or _SAGEMAKER_DIR
    port = environ.get("SAGEMAKER_BIND_TO_PORT") or "8080"
    many = _switched_on(environ, "SAGEMAKER_MULTI_MODEL")
    found = {
        **_HOSTED,
        "max_request_size": str(25 * _MIB),
        "max_response_size": str(25 * _MIB),
        "default_response_timeout": "60",
        "default_startup_timeout": "600",
        "decode_input_request": "false",
        "install_py_dep_per_model": "true",
    }
    triton = environ.get("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME")
    if many:
        one_port = f"http://0.0.0.0:{port}"
        found |= {"inference_address": one_port, "management_address": one_port, "enable_model_api": "true"}
        found |= {"model_store": f"{base}/models", "registered_memory_max": "auto", "default_workers_per_model": "1"}
        # Triton's `serve` names an empty repository, which takes the store's place.
        found["allowed_urls"] = f"file://{re.escape(base)}/models/.*"
    elif triton:
        found |= {"model_repository": f"{base}/model", "model_control_mode": "explicit", "load_model": triton}
        found["exit_on_error"] = "true"
    else:
        found |= {"model_store": f"{base}/model", "load_models": f"{MODEL}={base}/model", "exit_on_error": "true"}
        found["allowed_urls"] = f"file://{re.escape(base)}/.*"  # the folders of adapters
        first = environ.get("SAGEMAKER_SAFE_PORT_RANGE", "").partition("-")[0]
        if first.isdecimal():
            found["management_address"] = f"http://127.0.0.1:{int(first) + 3}"
        if settings := _of_model(environ):
            found["models"] = json.dumps({MODEL: {"1.0": {"defaultVersion": True, **settings}}})
    if _switched_on(environ, "SAGEMAKER_ENABLE_STATEFUL_SESSIONS"):
        found |= {"ts_header_key_sequence_id": SESSION_HEADER, "session_expires_s": "1200"}
    return found


#: TorchServe's keys of a model by the variables of AWS's toolkit.
_OF_MODEL = {
    "SAGEMAKER_TS_BATCH_SIZE": "batchSize",
    "SAGEMAKER_TS_MAX_BATCH_DELAY": "maxBatchDelay",
    "SAGEMAKER_TS_MIN_WORKERS": "minWorkers",
    "SAGEMAKER_TS_MAX_WORKERS": "maxWorkers",
    "SAGEMAKER_TS_RESPONSE_TIMEOUT": "responseTimeout",
}


def _of_model(environ: Environ) -> dict[str, Any]:
    """The settings of the only model. With any of them, the others have the defaults of AWS's toolkit."""
    given = {}
    for name, key in _OF_MODEL.items():
        if text := environ.get(name, "").strip():
            try:
                given[key] = _whole(text)
            except ValueError as error:
                raise ValueError(f"environment {name} = {text}: {error}") from None
    if not given:
        return {}
    others = {"batchSize": 1, "maxBatchDelay": 100, "minWorkers": 1, "responseTimeout": 60}
    found = {**others, **given}
    return {"maxWorkers": found["minWorkers"], **found}


def _vertex(environ: Environ) -> dict[str, str]:
    found = {**_HOSTED, "exit_on_error": "true", "health_route": "/ping", "predict_route": "/predict"}
    if source := environ.get("AIP_STORAGE_URI", "").strip().rstrip("/"):
        found |= {"load_models": f"{MODEL}={source}", "allowed_urls": f"{re.escape(source)}(/.*)?"}
    return found


def _azureml(environ: Environ) -> dict[str, str]:
    root = environ.get("AML_APP_ROOT") or _AZURE_DIR
    script = PurePosixPath(root, environ.get("AZUREML_ENTRY_SCRIPT") or "main.py")
    return {
        **_HOSTED,
        "exit_on_error": "true",
        "inference_address": "http://127.0.0.1:5001",
        "model_store": str(script.parent),
        "load_models": f"{MODEL}={script}",
        "default_response_timeout": "3600",
        "decode_input_request": "false",
    }


def _mlflow(environ: Environ) -> dict[str, str]:
    return {**_HOSTED, "exit_on_error": "true", "decode_input_request": "false"}


# --- the table

_RESERVED = "no effect"


def _others(
    *names: str, doc: str = _RESERVED, why: str = "it says where the server runs", tells: bool = False
) -> Iterator[Variable]:
    """Variables without a setting."""
    for name in names:
        yield Variable(name, doc, nothing(why) if doc == _RESERVED else None, tells)


_WORKERS = "`default_workers_per_model`"
_BY_MODEL = "read by the model's code"

_PLATFORMS = (
    Platform(
        SAGEMAKER,
        ("SAGEMAKER_",),
        _sagemaker,
        (
            Variable("SAGEMAKER_BIND_TO_PORT", "`http_port`", sets("http_port")),
            Variable(
                "SAGEMAKER_SAFE_PORT_RANGE",
                "`metrics_port`, `grpc_inference_port`, `grpc_management_port` and the management port, in this order",
                port_range,
            ),
            Variable("SAGEMAKER_MULTI_MODEL", "`true`: models are registered on the one port; docs/platforms.md"),
            Variable("SAGEMAKER_BASE_DIR", "the folder of `model` or `models`; `/opt/ml`"),
            Variable("SAGEMAKER_MODEL_SERVER_WORKERS", _WORKERS, sets("default_workers_per_model")),
            Variable("SAGEMAKER_MODEL_SERVER_TIMEOUT", "`default_response_timeout`", sets("default_response_timeout")),
            Variable(
                "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS",
                "`default_response_timeout`, stronger than the one before",
                sets("default_response_timeout"),
            ),
            Variable("SAGEMAKER_STARTUP_TIMEOUT", "`default_startup_timeout`", sets("default_startup_timeout")),
            Variable("SAGEMAKER_MAX_PAYLOAD_IN_MB", "`max_request_size` and `max_response_size`", _mebibytes),
            Variable("SAGEMAKER_CONTAINER_LOG_LEVEL", "`log_level`: 10 to 50, as Python counts", _level),
            *(Variable(name, f"`{key}` of the model `{MODEL}`") for name, key in _OF_MODEL.items()),
            *_others("SAGEMAKER_PROGRAM", "SAGEMAKER_SUBMIT_DIRECTORY", doc=_BY_MODEL, tells=True),
            *_others("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", doc=_BY_MODEL, tells=True),
            Variable("SAGEMAKER_ENABLE_STATEFUL_SESSIONS", "`true`: sessions; docs/platforms.md"),
            Variable("SAGEMAKER_SESSIONS_EXPIRATION", "`session_expires_s`", sets("session_expires_s")),
            Variable("SAGEMAKER_SESSIONS_PATH", _RESERVED, nothing("sessions are kept in memory")),
            Variable("SAGEMAKER_MODEL_SERVER_VMARGS", _RESERVED, nothing("there is no JVM")),
            Variable("SAGEMAKER_HANDLER", "for `$$SAGEMAKER_HANDLER$$` in AWS's config file", tells=False),
            Variable("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", "`load_model`, of the model repository"),
            Variable("SAGEMAKER_TRITON_GRPC_PORT", "`grpc_inference_port`", sets("grpc_inference_port")),
            Variable("SAGEMAKER_TRITON_ALLOW_GRPC", "`enable_grpc`", sets("enable_grpc")),
            Variable("SAGEMAKER_TRITON_METRICS_PORT", "`metrics_port`", sets("metrics_port")),
            Variable("SAGEMAKER_TRITON_ALLOW_METRICS", "`enable_metrics_api`", sets("enable_metrics_api")),
            Variable("SAGEMAKER_TRITON_LOG_VERBOSE", "above 0: `log_level=debug`", _log_verbosity),
            *_others(
                "SAGEMAKER_TRITON_PING_MODE",
                "SAGEMAKER_TRITON_OVERRIDE_PING_MODE",
                why="/ping tells whether all models are healthy",
            ),
            Variable("SAGEMAKER_TRITON_INFERENCE_TYPE", "`generate`: /invocations generates texts; else it infers"),
            *_others(
                *("SAGEMAKER_TRITON_THREAD_COUNT", "SAGEMAKER_TRITON_SHM_DEFAULT_BYTE_SIZE"),
                *("SAGEMAKER_TRITON_SHM_GROWTH_BYTE_SIZE", "SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT"),
                *("SAGEMAKER_TRITON_DISABLE_MODEL_NAMESPACING", "SAGEMAKER_TRITON_LOG_INFO"),
                *("SAGEMAKER_TRITON_LOG_WARNING", "SAGEMAKER_TRITON_LOG_ERROR", "SAGEMAKER_TRITON_ADDITIONAL_ARGS"),
                *("SAGEMAKER_TRITON_BUFFER_MANAGER_THREAD_COUNT",),
                why="it tunes a part of Triton that this server doesn't have",
            ),
            *_others("SAGEMAKER_REGION", "SAGEMAKER_MANAGED", "SAGEMAKER_INFERENCE_ACCELERATOR_PRESENT"),
        ),
    ),
    Platform(
        VERTEX,
        ("AIP_",),
        _vertex,
        (
            Variable("AIP_HTTP_PORT", "`http_port`", sets("http_port")),
            Variable("AIP_HEALTH_ROUTE", "`health_route`", _route("health_route")),
            Variable("AIP_PREDICT_ROUTE", "`predict_route`", _route("predict_route")),
            Variable("AIP_STORAGE_URI", f"the only model, `{MODEL}`: a folder at `gs://…`"),
            *_others("AIP_MODE", tells=True),
            *_others(
                *("AIP_FRAMEWORK", "AIP_ENDPOINT_ID", "AIP_DEPLOYED_MODEL_ID", "AIP_MODEL_NAME", "AIP_PROJECT_NUMBER"),
                *("AIP_ACCELERATOR_TYPE", "AIP_MACHINE_TYPE", "AIP_VERSION_NAME"),
            ),
        ),
    ),
    Platform(
        AZUREML,
        ("AZUREML_", "AML_"),
        _azureml,
        (
            Variable("AZUREML_ENTRY_SCRIPT", f"the script of the only model, `{MODEL}`, in AML_APP_ROOT; `main.py`"),
            Variable("AML_APP_ROOT", "the folder of the script; `/var/azureml-app`"),
            *_others("AZUREML_MODEL_DIR", doc=_BY_MODEL, tells=True),
            *_others("AZUREML_SOURCE_DIRECTORY", doc="a folder in AML_APP_ROOT for the script's imports"),
            Variable("SCORING_TIMEOUT_MS", "`default_response_timeout`, whole seconds", _milliseconds, False),
            Variable("WORKER_COUNT", _WORKERS, sets("default_workers_per_model"), False),
            Variable("WORKER_TIMEOUT", "`default_startup_timeout`", sets("default_startup_timeout"), False),
            Variable("AZUREML_LOG_LEVEL", "`log_level`", _level, False),
            Variable("AML_CORS_ORIGINS", "`cors_allowed_origin`: one origin, or `*`", _origin, False),
            Variable("SERVICE_PATH_PREFIX", "the prefix of the paths in /swagger.json", None, False),
            *_others("SERVICE_NAME", "SERVICE_VERSION", doc="title and version in /swagger.json"),
            *_others("HTTP_X_MS_SERVER_VERSION", doc="the header x-ms-server-version of answers"),
            *_others(
                *("AML_APP_INSIGHTS_ENABLED", "AML_APP_INSIGHTS_KEY", "APP_INSIGHTS_LOG_RESPONSE_ENABLED"),
                why="traces go out over OTLP (otlp_endpoint)",
            ),
            *_others("AML_MODEL_DC_STORAGE_ENABLED", why="no inputs are collected"),
            *_others("AZUREML_DEBUG_PORT", why="debugpy_port attaches a debugger"),
            *_others("AZUREML_CONFIG_FILE", why="settings are in config.properties"),
        ),
    ),
    Platform(
        MLFLOW,
        ("MLFLOW_MODELS_", "MLFLOW_SCORING_"),
        _mlflow,
        (
            Variable(
                "MLFLOW_SCORING_SERVER_REQUEST_TIMEOUT", "`default_response_timeout`", sets("default_response_timeout")
            ),
            Variable("MLFLOW_MODELS_WORKERS", _WORKERS, sets("default_workers_per_model")),
            *_others("MLFLOW_MODELS_INFERENCE_SERVER_URL", why="it is for clients"),
        ),
    ),
)  # fmt: skip

BY_NAME: Mapping[str, Platform] = MappingProxyType({one.name: one for one in _PLATFORMS})


def told(environ: Environ) -> dict[str, str]:
    """The platforms that the environment tells, each with the variable that does."""
    return {one.name: variable for one in _PLATFORMS if (variable := one.told_by(environ))}


def platforms_table() -> Iterator[str]:
    """The tables of the documentation, one for each platform. Variables of the same meaning share a row."""
    for platform in _PLATFORMS:
        yield f"\n| variable of `{platform.name}` | here |"
        yield "|---|---|"
        for doc, names in grouped((one.name, one.doc) for one in platform.variables).items():
            yield f"| {names} | {doc} |"
