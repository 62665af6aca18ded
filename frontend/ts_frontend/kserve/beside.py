"""What is served beside a program: those of this server's options that its command line may have, too."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from ts_frontend.config import ConfigError, Option, ServerConfig
from ts_frontend.config_kinds import s3_of
from ts_frontend.kserve.options import alike

#: Flags, and the settings that they are.
FLAGS = {
    "model_store": "model_store",
    "models": "load_models",
    "model_repository": "model_repository",
    "model_control_mode": "model_control_mode",
    "load_model": "load_model",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def settings(argv: Sequence[str]) -> list[Option]:
    """The settings among the words of a program's command line; `-` and `_` are alike in names. ConfigError for an
    option without a value."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in FLAGS:
        parser.add_argument(f"--{name}", action="extend", nargs="+")
    found, _ = parser.parse_known_args([alike(word) for word in argv])
    return [
        Option(key, ",".join(getattr(found, name)), f"--{name}")
        for name, key in FLAGS.items()
        if getattr(found, name) is not None
    ]


def notes(more: Sequence[Option]) -> list[str]:
    """A sentence for what is given and serves nothing."""
    keys = {option.key for option in more}
    if "model_store" in keys and "load_models" not in keys:
        return ["--model_store: nothing of it is served without --models=NAME or --models=all"]
    return []


def check(config: ServerConfig) -> None:
    """ConfigError when a directory isn't there."""
    for key in ("model_store", "model_repository"):
        found = getattr(config, key)
        for directory in found if isinstance(found, tuple) else [found] if found else []:
            if s3_of(directory) is None and not directory.is_dir():
                raise ConfigError(f"{key} ({config.sources.get(key, 'default')}) directory not found: {directory}")
