"""`mlserver.utils`: where a model's files lie."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence

from .errors import InvalidModelURI
from .settings import ModelSettings


async def get_model_uri(settings: ModelSettings, wellknown_filenames: Sequence[str] = ()) -> str:
    """The path of the model's file or folder: of a folder, that of its first existing well-known file, if any."""
    uri = settings.parameters.uri if settings.parameters is not None else None
    if not uri:
        raise InvalidModelURI(settings.name)
    return _usable(settings.name, to_absolute_path(settings, uri), wellknown_filenames)


def _usable(model: str, path: str, wellknown_filenames: Sequence[str]) -> str:
    if os.path.isfile(path):
        return path
    for name in wellknown_filenames:
        if os.path.isfile(os.path.join(path, name)):
            return os.path.join(path, name)
    if not os.path.isdir(path):
        raise InvalidModelURI(model, path)
    return path


def to_absolute_path(model_settings: ModelSettings, uri: str) -> str:
    """Resolves relative paths against the folder of model-settings.json."""
    source = model_settings._source
    return uri if source is None else os.path.join(os.path.dirname(os.path.abspath(source)), uri)


def generate_uuid() -> str:
    return str(uuid.uuid4())
