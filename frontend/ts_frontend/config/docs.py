"""The table of docs/configuration.md, made from the settings. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ts_frontend.config.foreign.aliases import aliases_table
from ts_frontend.config.table import EFFECTS, NO_EFFECT, SETTINGS, Setting


def settings_table() -> str:
    """Markdown: TorchServe's settings, ours, and the keys without effect."""
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
        *(f"| `{key}` | it {why} |" for key, why in NO_EFFECT.items()),
        "\n### Options of other servers\n",
        *aliases_table(),
    ]
    return "\n".join(parts)


def _rows(settings: list[Setting]) -> Iterator[str]:
    yield "| key | kind | default | environment | meaning |"
    yield "|---|---|---|---|---|"
    for setting in settings:
        yield f"| `{setting.key}` | {setting.kind.name} | {_default(setting)} | {_env(setting)} | {_meaning(setting)} |"


def _default(setting: Setting) -> str:
    value = setting.default
    if value is None or value == ():
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _env(setting: Setting) -> str:
    return f"`{setting.env}`{'*' if setting.env_always else ''}" if setting.env else ""


def _meaning(setting: Setting) -> str:
    text = setting.doc.replace("|", "\\|")
    return f"{text} ({EFFECTS[setting.effect]})" if setting.effect else text
