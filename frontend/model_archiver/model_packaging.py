"""`torch-model-archiver`. This module can be loaded on its own, under any name, as TorchServe's test suites do."""

from __future__ import annotations

import logging
import sys
from typing import Any

from model_archiver.arg_parser import ArgParser
from model_archiver.model_archiver import ModelArchiver
from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_archiver_error import ModelArchiverError

__all__ = ["ArgParser", "ModelArchiverConfig", "ModelArchiverError", "generate_model_archive"]


def generate_model_archive(config: ModelArchiverConfig | None = None) -> None:
    """The console command; with a `config`, the same without a command line.

    From the command line, what's wrong is one line on stderr and exit status 1.
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
    """What `export_model_args_parser` gave: options, or (replaced by an older script) a parser for them."""
    parse = getattr(found, "parse_args", None)
    return ModelArchiverConfig.from_args(parse() if parse is not None else found)


if __name__ == "__main__":
    generate_model_archive()
