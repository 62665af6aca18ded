"""The parameters of the Open Inference Protocol's repository calls, over HTTP and gRPC, and a model's configuration."""

from __future__ import annotations

import base64
import binascii
import json
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from google.protobuf import json_format, text_format

from ts.protocol.model_config_pb2 import ModelConfig
from ts.protocol.pool import POOL
from ts_frontend.errors import InvalidArgument, MessageTooLarge
from ts_frontend.models.registry import Registry
from ts_frontend.open_inference.heads import texts_of_member
from ts_frontend.open_inference.models import find

CONFIG, MODEL_PATH, UNLOAD_DEPENDENTS = "config", "model_path", "unload_dependents"
#: The prefix of a parameter with a file; the rest of its name is the path in the model's directory.
FILE = "file:"
CONFIG_CHARACTERS_MAX = 256 * 1024
_STEP_CHARACTERS = 64 * 1024


class LoadParameters(NamedTuple):
    """The parameters of a load call; None if not given. `config_text`: in the format of config.pbtxt; `url`: the source
    of the model; `files`: the content of its directory, by relative path."""

    config_text: str | None
    url: str | None
    files: dict[str, bytes] | None


def load_parameters_of_json(body: bytes) -> LoadParameters:
    """Returns the load parameters of a JSON body, which may be empty. Raises InvalidArgument for malformed or unknown
    ones, MessageTooLarge. To be called in a thread, since files may be large."""
    try:
        given = texts_of_member(body, "parameters") if body.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"The body is not valid JSON: {error}") from None
    return load_parameters(given)


def load_parameters(given: Mapping[str, Any]) -> LoadParameters:
    """Returns the load parameters from the parameters of a request. Raises InvalidArgument for malformed or unknown
    ones, MessageTooLarge. To be called in a thread, since files may be large."""
    files = {name.removeprefix(FILE): _content(name, given[name]) for name in given if name.startswith(FILE)}
    for name, value in given.items():
        if name not in (CONFIG, MODEL_PATH) and not name.startswith(FILE):
            known = f"there are {CONFIG}, {MODEL_PATH} and {FILE}VERSION/NAME"
            raise InvalidArgument(f"unrecognized load parameter {name!r}; {known}")
        if name in (CONFIG, MODEL_PATH) and not isinstance(value, str):
            raise InvalidArgument(f"load parameter {name!r} is a text, not {reprlib.repr(value)}")
        if name == CONFIG and len(value) > CONFIG_CHARACTERS_MAX:
            raise MessageTooLarge(
                f"load parameter {name!r} has {len(value)} characters; it may have {CONFIG_CHARACTERS_MAX} characters"
            )
    config, url = given.get(CONFIG), given.get(MODEL_PATH)
    if files and url is not None:
        raise InvalidArgument(f"load parameters {MODEL_PATH!r} and {FILE!r} exclude each other: give one of them")
    if files and config is None:
        raise InvalidArgument(f"load parameter {FILE!r} needs {CONFIG!r} too: the files replace the model's directory")
    return LoadParameters(None if config is None else _as_text(config), url, files or None)


def _content(name: str, value: Any) -> bytes:
    """Returns a file's content: given as bytes, or as base64 in JSON."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidArgument(f"load parameter {name!r} is a text, a file's content: bytes_param, or base64 in JSON")
    try:
        return b"".join(_decoded(value))
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(f"load parameter {name!r} is not base64: {error}") from None


def _decoded(text: str) -> Iterator[bytes]:
    """Decodes base64 in steps, which lets other threads run. Raises ValueError."""
    for at in range(0, len(text), _STEP_CHARACTERS):
        step = text[at : at + _STEP_CHARACTERS]
        if step.endswith("=") and at + len(step) < len(text):
            raise ValueError("padding inside")
        yield base64.b64decode(step, validate=True)


def check_unload_parameters(names: set[str]) -> None:
    """Raises InvalidArgument for unknown parameters."""
    unknown = names - {UNLOAD_DEPENDENTS}
    if unknown:
        raise InvalidArgument(f"unrecognized unload parameter {min(unknown)!r}; there is {UNLOAD_DEPENDENTS}")


def _as_text(config: str) -> str:
    """Converts a configuration from JSON to protobuf's text format."""
    try:
        found = json_format.Parse(config, ModelConfig(), descriptor_pool=POOL)
    except json_format.ParseError as error:
        raise InvalidArgument(f"load parameter {CONFIG!r} is not a ModelConfig in JSON: {error}") from None
    return str(text_format.MessageToString(found))


def config_of(models: Registry, name: str, version: str) -> ModelConfig:
    """Returns a model's configuration as a Triton ModelConfig, made from the settings of a TorchServe archive."""
    model = find(models, name, version)
    config = ModelConfig()
    text = json.dumps(model.config_message())
    json_format.Parse(text, config, descriptor_pool=POOL)
    return config
