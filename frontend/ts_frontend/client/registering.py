"""Register a model and watch its workers come up.

The management API's answer to a register call that doesn't wait for workers names no model. So the
model is registered without workers, which is answered with its name and version, and scaled then. Only where the
archive itself asks for workers (minWorkers in model-config.yaml) must the new version be looked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ts_frontend.client.connection import CallFailed, Client

_REGISTERED = re.compile(r'Model "(?P<name>.+)" Version: (?P<version>.+) registered with')


def versions(client: Client) -> Iterator[tuple[dict[str, Any], bool]]:
    """Descriptions of all versions of all models, each with whether it is the default one."""
    for model in client.models():
        name = model["modelName"]
        try:
            (default,) = client.describe(name)
            found = client.describe(name, "all")
        except CallFailed as error:
            if error.code != "NOT_FOUND":  # unregistered in between
                raise
            continue
        for description in found:
            yield description, description["modelVersion"] == default["modelVersion"]


def _names(client: Client) -> set[tuple[str, str]]:
    return {(found["modelName"], found["modelVersion"]) for found, _ in versions(client)}


def register(client: Client, url: str, settings: dict[str, Any]) -> tuple[str, str, bool]:
    """Registers without waiting for workers: name, version, and whether the archive asks for workers itself."""
    before = _names(client)
    sentence = client.register(url, **settings)
    match = _REGISTERED.match(sentence)
    if match is not None:
        return match["name"], match["version"], False
    for description, _ in versions(client):
        name, version = description["modelName"], description["modelVersion"]
        if description["modelUrl"] == url and (name, version) not in before:
            return name, version, True
    raise CallFailed("UNKNOWN", f"The server said {sentence!r}, but lists no new model from {url}.")
