"""Settings as text: values with their sources, those that a snapshot keeps, and the table of docs/configuration.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ts_frontend.config.foreign.aliases import aliases_table
from ts_frontend.config.kinds import grouped
from ts_frontend.config.table import EFFECTS, NO_EFFECT, SETTINGS, ServerConfig, Setting


@dataclass(frozen=True, slots=True)
class Explained:
    """A setting, its value as text ("" if it isn't set) and the source of the value."""

    key: str
    value: str
    source: str
    doc: str


def explain(config: ServerConfig) -> list[Explained]:
    return [
        Explained(key, _shown(config, setting), config.sources.get(key, "default"), setting.doc)
        for key, setting in SETTINGS.items()
    ]


def snapshot_settings(config: ServerConfig) -> dict[str, str]:
    """The settings for a snapshot, as text that parses to the same values: no defaults, no secrets."""
    return {
        key: as_text(value.absolute() if isinstance(value := getattr(config, key), Path) else value)
        for key, setting in SETTINGS.items()
        if key in config.sources and setting.restored and not setting.secret
        if not config.sources[key].startswith("profile ")
    }


def as_text(value: object) -> str:
    """A value in the format of a config file; "" for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


def _shown(config: ServerConfig, setting: Setting) -> str:
    value = getattr(config, setting.key)
    return "***" if setting.secret and value else as_text(value)


def settings_table() -> str:
    """Markdown tables of TorchServe's settings, this server's own, and the keys without effect."""
    theirs = [setting for setting in SETTINGS.values() if not setting.group]
    ours = [setting for setting in SETTINGS.values() if setting.group]
    parts = [
        "### TorchServe's settings\n",
        *_rows(theirs),
        "\n### Settings of this server\n",
        *_rows(ours),
        "\n### Keys that are accepted and do nothing\n",
        "| key | why |",
        "|---|---|",
        *(f"| {keys} | it {why} |" for why, keys in grouped(NO_EFFECT.items()).items()),
        "\n### Options of other servers\n",
        *aliases_table(),
    ]
    return "\n".join(parts)


def _rows(settings: list[Setting]) -> Iterator[str]:
    yield "| key | kind | default | meaning |"
    yield "|---|---|---|---|"
    for setting in settings:
        yield f"| `{setting.key}` | {setting.kind.name} | {_default(setting)} | {_meaning(setting)}{_env(setting)} |"


def _default(setting: Setting) -> str:
    value = setting.default
    if value is None or value == ():
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _env(setting: Setting) -> str:
    """What the variable of a setting has else than that of most: `TS_` and the key, always read if it is ours."""
    if not setting.env:
        return "; no variable"
    named = "" if setting.env == f"TS_{setting.key.removeprefix('ts_').upper()}" else f"; variable `{setting.env}`"
    always = "; its variable always counts" if setting.env_always and not setting.group else ""
    return named + always


def _meaning(setting: Setting) -> str:
    text = setting.doc.replace("|", "\\|")
    return f"{text} ({EFFECTS[setting.effect]})" if setting.effect else text
