"""`oip.properties` as Krausening finds it: in the directory KRAUSENING_BASE, then those that add to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ts_frontend import properties
from ts_frontend.config_kinds import ConfigError

NAME = "oip.properties"
#: Directories in the order in which they are read: a later one wins.
PLACES = ("KRAUSENING_BASE", "KRAUSENING_EXTENSIONS", "KRAUSENING_OVERRIDE_EXTENSIONS")


def read(environ: Mapping[str, str]) -> dict[str, str]:
    """The properties, {} where there are none. ConfigError for a file that can't be read."""
    found: dict[str, str] = {}
    for place in PLACES:
        file = Path(environ.get(place) or "/nonexistent", NAME)
        if not file.is_file():
            continue
        try:
            found |= {one.key: one.value for one in properties.parse(properties.decode(file.read_bytes()))}
        except (OSError, properties.PropertiesError) as error:
            raise ConfigError(f"{file} can't be read: {error}") from None
    return found
