"""`torch-model-archiver`. This module can be loaded on its own, under any name, as TorchServe's test suites do."""

from __future__ import annotations

import logging
import shutil
import sys
from typing import Any

from model_archiver.arg_parser import ArgParser
from model_archiver.model_archiver import ModelArchiver
from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_archiver_error import ModelArchiverError
from model_archiver.model_packaging_utils import ModelExportUtils

__all__ = [
    "ArgParser",
    "ModelArchiverConfig",
    "ModelArchiverError",
    "ModelExportUtils",
    "generate_model_archive",
    "package_model",
]


def package_model(config: ModelArchiverConfig, manifest: str) -> None:
    """Makes an archive with this text as its manifest. Raises ModelArchiverError, OSError."""
    name, steps = config.model_name, ModelExportUtils
    steps.validate_inputs(name, config.export_path)
    folder = steps.check_mar_already_exists(name, config.export_path, config.force, config.archive_format)
    keys = ("model_file", "serialized_file", "handler", "extra_files", "requirements_file", "config_file")
    files = steps.copy_artifacts(name, config.runtime, **{key: getattr(config, key) for key in keys})
    try:
        steps.archive(folder, name, files, manifest, config.archive_format)
    finally:
        shutil.rmtree(files, ignore_errors=True)


def generate_model_archive(config: ModelArchiverConfig | None = None) -> None:
    """The console command; with a `config`, the same without a command line.

    From the command line, an error is one line on stderr and exit status 1.
    """
    logging.basicConfig(format="%(levelname)s - %(message)s")
    if config is not None:
        ModelArchiver.generate_model_archive(config)
        return
    config = _parsed(ArgParser.export_model_args_parser())
    try:
        path = ModelArchiver.generate_model_archive(config)
    except (ModelArchiverError, OSError) as error:
        sys.exit(f"torch-model-archiver: {error}")
    if config.runtime == "LSP":
        logging.warning("The C++ runtime (LSP) is TorchServe's: this server can't serve the archive")
    print(f"Wrote {path}")


def _parsed(found: Any) -> ModelArchiverConfig:
    """The options that `export_model_args_parser` returned, or parsed by the parser that an older script's returned."""
    parse = getattr(found, "parse_args", None)
    return ModelArchiverConfig.from_args(parse() if parse is not None else found)


if __name__ == "__main__":
    generate_model_archive()
