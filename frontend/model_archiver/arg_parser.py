"""The command line of `torch-model-archiver`."""

from __future__ import annotations

import argparse
import os

from model_archiver.manifest_components.manifest import RuntimeType
from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.packing import FORMATS


class ArgParser:
    """Named as in TorchServe: scripts there replace `export_model_args_parser`."""

    @staticmethod
    def export_model_args_parser() -> ModelArchiverConfig:
        """The options of the command line. Exits with status 2 and a usage line when they can't be parsed."""
        return ModelArchiverConfig.from_args(make_parser().parse_args())


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torch-model-archiver",
        description="Packs a model, its handler and their files into one archive for the server.",
    )
    parser.add_argument(
        "--model-name",
        required=True,
        metavar="NAME",
        help="name of the model and of the archive: letters, digits, '_', '-', '.'; begins with a letter or a digit",
    )
    parser.add_argument("-v", "--version", required=True, help="version of the model, any text")
    parser.add_argument(
        "--handler",
        required=True,
        help="built-in handler (image_classifier, text_classifier, object_detector, image_segmenter, base_handler, "
        "...), FILE.py, or FILE:FUNCTION for a function other than 'handle'",
    )
    parser.add_argument(
        "--serialized-file", metavar="FILE", help="weights or program: .pt, .pth, .pt2, .onnx, .so, ... (optional)"
    )
    parser.add_argument(
        "--model-file", metavar="FILE", help="Python file with one class: the model whose weights are serialized"
    )
    parser.add_argument(
        "--extra-files",
        metavar="PATHS",
        help="comma-separated files, directories and patterns (* ? [ ]); the content of a directory goes to the root",
    )
    parser.add_argument(
        "--preserve-structure",
        "--keep-structure",
        action="store_true",
        help="extra files keep their relative paths, and directories their names, instead of going to the root",
    )
    parser.add_argument(
        "-r", "--requirements-file", metavar="FILE", help="Python packages that the handler needs, as pip reads them"
    )
    parser.add_argument(
        "-c", "--config-file", metavar="FILE", help="model-config.yaml: workers, batching, timeouts, ..."
    )
    parser.add_argument(
        "--runtime",
        choices=[one.value for one in RuntimeType],
        default="python",
        help="runtime of the handler (default: python)",
    )
    parser.add_argument(
        "--export-path",
        metavar="DIR",
        default=os.getcwd(),
        help="directory for the archive; created if missing (default: the current directory)",
    )
    parser.add_argument(
        "--archive-format",
        metavar="FORMAT",
        choices=tuple(FORMATS),
        default="default",
        help="default: NAME.mar, compressed; zip-store: NAME.mar, not compressed, quick for large weights; "
        "tgz: NAME.tar.gz; no-archive: directory NAME",
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing archive")
    return parser
