"""The Open Inference Protocol's repository methods over gRPC: index, load, unload, and a model's configuration.

KServe's clients put the model's name where Triton's have the repository's; both get the answer that KServe's expect,
whose fields the others skip.
"""

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
#: The prefix of parameters that bring a file; the rest is its path in the model's directory.
FILE = "file:"
CONFIG_CHARACTERS_MAX = 256 * 1024
_STEP_CHARACTERS = 64 * 1024


class LoadParameters(NamedTuple):
    """The parameters of a load; None for one that isn't given. `config_text`: as config.pbtxt has it; `url`: the place
    of the model; `files`: replacing its directory, by their paths there."""

    config_text: str | None
    url: str | None
    files: dict[str, bytes] | None


def load_parameters_of_json(body: bytes) -> LoadParameters:
    """Returns the parameters of a body in JSON, which may be empty. Raises InvalidArgument for malformed or unknown
    ones, MessageTooLarge. Files make it large: for a thread."""
    try:
        given = texts_of_member(body, "parameters") if body.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"The body is not valid JSON: {error}") from None
    return load_parameters(given)


def load_parameters(given: Mapping[str, Any]) -> LoadParameters:
    """Returns the parameters of a load. Raises InvalidArgument for malformed or unknown ones, MessageTooLarge. Takes
    time in proportion to the size: for a thread."""
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
    """Decodes base64 in steps, between which other threads may run. Raises ValueError."""
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
    """Returns a configuration in JSON as text format."""
    try:
        found = json_format.Parse(config, ModelConfig(), descriptor_pool=POOL)
    except json_format.ParseError as error:
        raise InvalidArgument(f"load parameter {CONFIG!r} is not a ModelConfig in JSON: {error}") from None
    return str(text_format.MessageToString(found))


def config_of(models: Registry, name: str, version: str) -> ModelConfig:
    """Returns a model's configuration as Triton's; that of a TorchServe archive is made from its settings."""
    model = find(models, name, version)
    config = ModelConfig()
    text = json.dumps(model.config_message())
    json_format.Parse(text, config, descriptor_pool=POOL)
    return config
