"""What settings name on disk, before a server starts with them: made, or looked for."""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path

from ts_frontend.config import ConfigError, ServerConfig
from ts_frontend.config_checks import secured
from ts_frontend.config_kinds import s3_of


def prepare(config: ServerConfig) -> None:
    """Makes the directories that a server with these settings writes to, and looks for what they name.

    :raises ConfigError: with TorchServe's words where it has some.
    """
    if config.work_dir is not None:
        _make_places(config, config.work_dir)
    if config.model_store is None and not config.model_repository and not config.program.lines:
        raise ConfigError("Missing mandatory parameter --model-store (or --model-repository)")
    for directory in config.model_repository:
        if s3_of(directory) is None:
            _check_place(config, "model_repository", "directory", directory)
        elif config.model_control_mode == "poll":
            raise ConfigError(f"model_control_mode is poll, and {s3_of(directory)} isn't looked at again: use explicit")
    for key in ("model_store", "workflow_store"):
        _check_place(config, key, "directory", getattr(config, key))
    for key in ("log_config", "certificate_file", "private_key_file", "client_ca_file", "metrics_config"):
        _check_place(config, key, "file", getattr(config, key))
    if any(secured(config)):
        import_module("ts_frontend.tls").check_certificates(config)
    if not config.temp_dir.is_dir():
        raise ConfigError(f"Invalid temp directory: {config.temp_dir}, please check TEMP environment variable.")


def _make_places(config: ServerConfig, work_dir: Path) -> None:
    """The directories of `work_dir`, for this user alone. Temporary files of this process go there, too."""
    for place in (work_dir, config.temp_dir):
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            name = config.sources.get("work_dir", "work_dir")
            raise ConfigError(f"{name} {work_dir}: {place} can't be made: {error.strerror}") from None
    tempfile.tempdir = str(config.temp_dir.absolute())


def _check_place(config: ServerConfig, key: str, what: str, path: Path | None) -> None:
    if path is None or (path.is_dir() if what == "directory" else path.is_file()):
        return
    source = config.sources.get(key, "default")
    name = source if source.startswith("--") else f"{key} ({source})"
    raise ConfigError(f"{name} {what} not found: {path if what == 'directory' else path.absolute()}")
