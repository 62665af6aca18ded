"""How long options may be spelt: `-` and `_` alike, and beginnings of flags that fit one flag only. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def spelled(words: Sequence[str], own: Collection[str], flags: Collection[str]) -> tuple[list[str], str]:
    """The words with their options as in `flags`, and the first option that is none ("" without one). Beginnings count
    for the flags of `own`, where only one fits."""
    found: list[str] = []
    for at, word in enumerate(words):
        if word == "--":
            return [*found, *words[at:]], ""
        if not word.startswith("--"):
            found.append(word)
            continue
        name, equals, value = word.partition("=")
        flag = _flag(name.replace("_", "-"), own, flags)
        if flag is None:
            return found, name
        found.append(flag + equals + value)
    return found, ""


def _flag(name: str, own: Collection[str], flags: Collection[str]) -> str | None:
    if name in flags:
        return name
    fitting = [flag for flag in own if flag.startswith(name)]
    return fitting[0] if len(fitting) == 1 else None
