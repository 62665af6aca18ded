"""MLServer's settings.json and MLSERVER_* variables, in this server's words (docs/mlserver.md). Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ts_frontend.errors import InvalidArgument

FILE = "settings.json"
PREFIX = "MLSERVER_"
#: Variables of models, which runtimes read themselves.
_MODEL_PREFIX = "MLSERVER_MODEL_"
_LOCAL, _HTTP_PORT, _METRICS_PORT = "127.0.0.1", 8080, 8082
#: Each names one setting of ours.
_SAME = {
    "grpc_port": ("grpc_inference_port",),
    "grpc_max_message_length": ("max_request_size", "max_response_size"),
    "parallel_workers": ("default_workers_per_model",),
    "model_repository_root": ("model_store",),
}
_CORS = {
    "allow_origins": "cors_allowed_origin",
    "allow_methods": "cors_allowed_methods",
    "allow_headers": "cors_allowed_headers",
}
_ADDRESSES = ("host", "http_port", "metrics_port")
_KNOWN = frozenset({*_SAME, *_ADDRESSES, "cors_settings", "load_models_at_startup"})


class Found(NamedTuple):
    """`values`: our settings, as text, by their names in config.properties. `notes`: what had no effect, and why."""

    values: dict[str, str]
    notes: list[str]


def read(text: str | None, environ: Mapping[str, str]) -> Found:
    """`text`: the content of settings.json, None without one; variables win over it, as in MLServer. InvalidArgument,
    naming the key, for values that can't be meant."""
    settings = _parsed(text) | _variables(environ)
    values, notes = _addresses(settings), []
    for key, value in settings.items():
        for ours in _SAME.get(key, ()):
            values[ours] = str(value) if ours == "model_store" else _number(key, value)
        if key not in _KNOWN:
            notes.append(f"MLServer's setting {key} has no effect here")
    if values.get("default_workers_per_model") == "0":
        values["default_workers_per_model"] = "1"  # MLServer's 0 is: in the server's own process
    if str(settings.get("load_models_at_startup", "")).lower() == "true":
        values["load_models"] = "all"
    values |= _cors(settings.get("cors_settings"))
    return Found(values, notes)


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
    return {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(PREFIX) and not name.startswith(_MODEL_PREFIX)
    }


def _number(key: str, value: Any) -> str:
    text = str(value)
    if isinstance(value, bool) or not text.isascii() or not text.isdigit():
        raise InvalidArgument(f"MLServer's setting {key} is a whole number, not {value!r}")
    return text


def _addresses(settings: Mapping[str, Any]) -> dict[str, str]:
    """Hosts and ports, as far as one is named. Without `host` it stays the loopback address."""
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
    """Lists become the values of headers."""
    if found is None:
        return {}
    try:
        settings = json.loads(found) if isinstance(found, str) else found
        lists = {ours: settings.get(key) or [] for key, ours in _CORS.items()}
        return {ours: ",".join(map(str, value)) for ours, value in lists.items() if value}
    except (ValueError, TypeError, AttributeError):
        raise InvalidArgument(f"MLServer's setting cors_settings is an object of lists, not {found!r}") from None
