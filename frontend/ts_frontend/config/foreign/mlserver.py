"""MLServer's settings.json and MLSERVER_* variables, mapped to this server's settings (docs/mlserver.md). No I/O."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ts_frontend.config.foreign.aliases import TASKS
from ts_frontend.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class MLServerDefaults:
    """The defaults for all models from MLServer's settings.json and variables. `model`: members for every
    model-settings.json that lacks them; with an `implementation`, a store without any such file is itself one model.
    `only`: folders without a model-settings.json are ignored."""

    model: Mapping[str, Any] = field(default_factory=dict)
    server_name: str = "mlserver"
    only: bool = False

    @property
    def is_model(self) -> bool:
        return bool(self.model.get("implementation"))


__all__ = ["FILE", "PLACES", "MLServerDefaults", "MLServerSettings", "dotenv", "read"]

FILE = "settings.json"
PREFIX = "MLSERVER_"
#: Variables with the models' directory; the second is set in MLServer's images.
PLACES = ("MLSERVER_MODEL_REPOSITORY_ROOT", "MLSERVER_MODELS_DIR")
#: Variables of models: defaults for their model-settings.json.
_MODEL_PREFIX = "MLSERVER_MODEL_"
_LOCAL, _HTTP_PORT, _METRICS_PORT = "127.0.0.1", 8080, 8082
#: MLServer's settings that equal one setting of this server.
_SAME = {
    "grpc_port": ("grpc_inference_port",),
    "grpc_max_message_length": ("max_request_size", "max_response_size"),
    "parallel_workers": ("default_workers_per_model",),
    "model_repository_root": ("model_store",),
    "models_dir": ("model_store",),
}
_CORS = {
    "allow_origins": "cors_allowed_origin",
    "allow_methods": "cors_allowed_methods",
    "allow_headers": "cors_allowed_headers",
}
_ADDRESSES = ("host", "http_port", "metrics_port")
_KNOWN = frozenset({*_SAME, *_ADDRESSES, "cors_settings", "load_models_at_startup", "server_name"})
#: The members that variables can set for a model: texts, and values in JSON.
_MODEL_TEXTS, _MODEL_VALUES = ("name", "platform", "implementation"), ("versions", "inputs", "outputs", "parameters")
_MODEL_NUMBERS = ("max_batch_size", "max_batch_time", "parallel_workers")
_PARAMETER_TEXTS = ("version", "environment_path", "environment_tarball", "format", "content_type")
#: All members of a model-settings.json, and of its `parameters`, in MLServer 1.7.
MEMBERS = (*_MODEL_TEXTS, *_MODEL_VALUES, *_MODEL_NUMBERS, "warm_workers", "cache_enabled")
PARAMETERS = (*_PARAMETER_TEXTS, "uri", "extra", "inference_pool_gid", "autogenerate_inference_pool_gid")


class MLServerSettings(NamedTuple):
    """`values`: this server's settings, as text, by their names in config.properties. `notes`: settings without effect,
    and why. `models`: the defaults for models."""

    values: dict[str, str]
    notes: list[str]
    models: MLServerDefaults


def read(text: str | None, environ: Mapping[str, str]) -> MLServerSettings:
    """Maps MLServer's settings to this server's. `text`: the content of settings.json, or None; variables override it,
    as in MLServer. Raises InvalidArgument, naming the key, for invalid values."""
    settings = _parsed(text) | _variables(environ)
    values, notes = _addresses(settings), []
    for key, value in settings.items():
        for ours in _SAME.get(key, ()):
            values[ours] = str(value) if ours == "model_store" else _number(key, value)
        if key not in _KNOWN:
            notes.append(f"MLServer's setting {key} has no effect here")
    if values.get("default_workers_per_model") == "0":
        values["default_workers_per_model"] = "1"  # MLServer's 0 means the server's own process
    if str(settings.get("load_models_at_startup", True)).lower() not in ("false", "0", "off", "no", "f", "n"):
        values["load_models"] = "all"
    values |= _cors(settings.get("cors_settings"))
    return MLServerSettings(
        values, notes, MLServerDefaults(_model(environ), str(settings.get("server_name") or "mlserver"), only=True)
    )


def _parsed(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{FILE} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgument(f"{FILE} is a JSON object, not {type(found).__name__}")
    return found


def _variables(environ: Mapping[str, str]) -> dict[str, Any]:
    known = _prefixed(environ, PREFIX)
    return {name: value for name, value in known.items() if not name.startswith("model_") or name in _KNOWN}


def _prefixed(environ: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The variables with that prefix, by their names without it, in lower case."""
    return {name[len(prefix) :].lower(): value for name, value in environ.items() if name.upper().startswith(prefix)}


def dotenv(text: str) -> dict[str, str]:
    """The variables of a file `.env`: lines `NAME=VALUE`, also with `export` or in quotes."""
    found = {}
    for line in text.splitlines():
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if not equals or name.startswith("#"):
            continue
        value = value.strip()
        quoted = value[:1] in ("'", '"') and value[-1:] == value[:1] and len(value) > 1
        found[name.strip()] = value[1:-1] if quoted else value.partition(" #")[0].strip()
    return found


def _model(environ: Mapping[str, str]) -> dict[str, Any]:
    """The variables about models, as members of a model-settings.json. Paths are relative to the current directory."""
    given = {name: value for name, value in _prefixed(environ, _MODEL_PREFIX).items() if value.strip()}
    found: dict[str, Any] = {name: given[name] for name in _MODEL_TEXTS if name in given}
    found |= {name: _json(name, given[name]) for name in (*_MODEL_VALUES, *_MODEL_NUMBERS) if name in given}
    parameters: dict[str, Any] = {name: given[name] for name in _PARAMETER_TEXTS if name in given}
    if "uri" in given:
        parameters["uri"] = given["uri"] if "://" in given["uri"] else os.path.abspath(given["uri"])
    if "extra" in given:
        parameters["extra"] = _json("extra", given["extra"])
    if parameters:
        found["parameters"] = {**parameters, **(found.get("parameters") or {})}
    return found


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidArgument(f"{_MODEL_PREFIX}{name.upper()} is JSON, not {text!r}") from None


def _number(key: str, value: Any) -> str:
    text = str(value)
    if isinstance(value, bool) or not text.isascii() or not text.isdigit():
        raise InvalidArgument(f"MLServer's setting {key} is a whole number, not {value!r}")
    return text


def _addresses(settings: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    host = str(settings.get("host") or _LOCAL)
    shown = f"[{host}]" if ":" in host else host
    if "host" in settings or "http_port" in settings:
        found["inference_address"] = f"http://{shown}:{_number('http_port', settings.get('http_port', _HTTP_PORT))}"
    if "host" in settings or "metrics_port" in settings:
        port = _number("metrics_port", settings.get("metrics_port", _METRICS_PORT))
        found["metrics_address"] = f"http://{shown}:{port}"
    if "host" in settings:
        found["grpc_inference_address"] = host
    return found


def _cors(found: Any) -> dict[str, str]:
    """The CORS settings: lists become comma-separated header values."""
    if found is None:
        return {}
    try:
        settings = json.loads(found) if isinstance(found, str) else found
        lists = {ours: settings.get(key) or [] for key, ours in _CORS.items()}
        return {ours: ",".join(map(str, value)) for ours, value in lists.items() if value}
    except (ValueError, TypeError, AttributeError):
        raise InvalidArgument(f"MLServer's setting cors_settings is an object of lists, not {found!r}") from None


# --- the runtime mlserver_huggingface.HuggingFaceRuntime

HUGGING_FACE = ("mlserver_huggingface.HuggingFaceRuntime", "mlserver_huggingface.runtime.HuggingFaceRuntime")
PACKAGE = "mlserver_huggingface"
_HUGGING_FACE_PREFIX = "MLSERVER_MODEL_HUGGINGFACE_"
_MODEL_KWARGS = {"torch_dtype": "dtype", "dtype": "dtype", "trust_remote_code": "trustRemoteCode"}


class HuggingFaceModel(NamedTuple):
    """A model of that runtime in this server's words. `place`: its folder or its name on the hub, "" for the model's
    `uri`; `settings`: as those of `language_models`; `config`: keys of a model-config.yaml."""

    place: str
    settings: dict[str, Any]
    config: dict[str, Any]


def hugging_face(extra: Mapping[str, Any], environ: Mapping[str, str]) -> HuggingFaceModel:
    """Maps the runtime's settings (`parameters.extra`); its variables count for those that are left out. Raises
    InvalidArgument for what isn't served."""
    given = {**{name: text for name, text in _prefixed(environ, _HUGGING_FACE_PREFIX).items() if text}, **extra}
    task = TASKS.get(str(given.get("task") or "").replace("-", "_"))
    if task is None:
        raise InvalidArgument(
            f"task is {given.get('task')!r}; text-generation, text2text-generation, feature-extraction, "
            "text-classification, token-classification, fill-mask and question-answering are served as language "
            f"models, and others by the package {PACKAGE}, if it is installed"
        )
    if str(given.get("optimum_model") or "false").lower() != "false" or given.get("framework") not in (None, "pt"):
        raise InvalidArgument("optimum_model and framework: models are served by PyTorch; leave them out")
    settings: dict[str, Any] = {"task": task}
    if given.get("pretrained_tokenizer"):
        settings["tokenizer"] = str(given["pretrained_tokenizer"])
    for key, value in (given.get("model_kwargs") or {}).items():
        if key not in _MODEL_KWARGS:
            raise InvalidArgument(f"model_kwargs has {key}; there are {', '.join(_MODEL_KWARGS)}")
        settings[_MODEL_KWARGS[key]] = value
    return HuggingFaceModel(str(given.get("pretrained_model") or ""), settings, _device(given))


def _device(given: Mapping[str, Any]) -> dict[str, Any]:
    """The device and the threads as keys of a model-config.yaml."""
    text = str(given.get("device") if given.get("device") is not None else "")
    threads = given.get("intra_op_threads")
    found: dict[str, Any] = {} if threads is None else {"cpuThreads": int(threads)}
    if text in ("-1", "cpu"):
        return found | {"deviceType": "cpu"}
    number = re.fullmatch(r"(?:cuda)?:?(\d+)?", text)
    if number is None:
        raise InvalidArgument(f"device is {given['device']!r}; allowed are cpu, cuda, cuda:N, N and -1")
    return found | ({"deviceType": "gpu"} if text else {}) | ({"deviceIds": [int(number[1])]} if number[1] else {})
