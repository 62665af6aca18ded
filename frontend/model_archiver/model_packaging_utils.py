"""The steps of making an archive, under the names that scripts written for TorchServe call them by.

`ModelArchiver` does all of them at once.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from model_archiver.manifest_components.manifest import Manifest, RuntimeType
from model_archiver.manifest_components.model import Model
from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_archiver_error import ModelArchiverError
from model_archiver.packing import (
    BUILT_IN_HANDLERS,
    FORMATS,
    NAME,
    NAME_RULE,
    Members,
    Stamp,
    gather,
    pack,
    write_directory,
)

__all__ = ["Manifest", "Model", "ModelExportUtils", "RuntimeType", "archiving_options", "model_handlers"]

MANIFEST_FILE_NAME, MAR_INF = "MANIFEST.json", "MAR-INF"
archiving_options: Mapping[str, str] = {name: suffix for name, (suffix, _) in FORMATS.items()}
model_handlers: frozenset[str] = BUILT_IN_HANDLERS
_log = logging.getLogger(__name__)
_UNWANTED = {"__MACOSX", "__pycache__"}


class ModelExportUtils:
    """All of it without state. Errors are ModelArchiverError and OSError."""

    @staticmethod
    def validate_inputs(model_name: str, export_path: str) -> None:
        """Makes the folder for the archive, where there is none."""
        ModelExportUtils.check_model_name_regex_or_exit(model_name)
        if os.path.exists(export_path) and not os.path.isdir(export_path):
            raise ModelArchiverError(f"export path {export_path} is not a directory")
        ModelExportUtils.make_dir(export_path)

    @staticmethod
    def check_model_name_regex_or_exit(model_name: str) -> None:
        if not NAME.fullmatch(model_name):
            raise ModelArchiverError(f"model name {model_name!r} is not allowed: {NAME_RULE}")

    @staticmethod
    def get_archive_export_path(export_file_path: str, model_name: str, archive_format: str) -> str:
        return os.path.join(export_file_path, f"{model_name}{archiving_options[archive_format]}")

    @staticmethod
    def check_mar_already_exists(
        model_name: str, export_file_path: str | None, overwrite: bool, archive_format: str = "default"
    ) -> str:
        """The folder for the archive, the current one without any; refuses one that has it already."""
        folder = export_file_path or os.getcwd()
        target = ModelExportUtils.get_archive_export_path(folder, model_name, archive_format)
        if os.path.exists(target):
            if not overwrite:
                raise ModelArchiverError(f"{target} is already there. Use --force (-f) to replace it.")
            _log.warning("%s is replaced", target)
        return folder

    generate_model = staticmethod(Model.of)

    @staticmethod
    def generate_manifest_json(config: ModelArchiverConfig) -> str:
        return str(Manifest(config.runtime, Model.of(config)))

    @staticmethod
    def copy_artifacts(model_name: str, runtime: str, **kwargs: Any) -> str:
        """A new folder with copies of the files: `model_file`, `serialized_file`, `handler`, `extra_files`,
        `requirements-file`, `config_file`. Whoever calls removes it."""
        named = {key.replace("-", "_"): value for key, value in kwargs.items() if value}
        handler = named.pop("handler", "base_handler")
        folder = Path(tempfile.mkdtemp(prefix=f"{model_name}-"))
        try:
            config = ModelArchiverConfig(model_name, handler, "", runtime=str(runtime), **named)
            write_directory(gather(config, folder), folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return str(folder)

    @staticmethod
    def archive(
        export_file: str, model_name: str, model_path: str, manifest: str, archive_format: str = "default"
    ) -> None:
        """Packs the folder `model_path` with the text of a manifest into an archive in the folder `export_file`."""
        target = Path(ModelExportUtils.get_archive_export_path(export_file, model_name, archive_format))
        members: Members = {**_files(Path(model_path)), f"{MAR_INF}/{MANIFEST_FILE_NAME}": manifest.encode()}
        pack(members, target, archive_format, Stamp.now(), model_name)

    @staticmethod
    def directory_filter(directory: str, unwanted_dirs: Iterable[str]) -> bool:
        """Whether a folder of this name belongs into an archive: no hidden one does."""
        return directory not in set(unwanted_dirs) and not directory.startswith(".")

    @staticmethod
    def file_filter(current_file: str, files_to_exclude: Iterable[str]) -> bool:
        excluded = {*files_to_exclude, MANIFEST_FILE_NAME}
        return current_file not in excluded and not current_file.endswith((".pyc", ".DS_Store", ".mar"))

    @staticmethod
    def find_unique(files: Iterable[str], suffix: str) -> str | None:
        """The one file with this suffix, None without any."""
        found = [file for file in files if file.endswith(suffix)]
        if len(found) > 1:
            raise ModelArchiverError(f"only one {suffix} file is expected, and there are {', '.join(found)}")
        return found[0] if found else None

    @staticmethod
    def make_dir(d: str) -> None:
        os.makedirs(d, exist_ok=True)

    @staticmethod
    def clean_temp_files(temp_files: Iterable[str]) -> None:
        for file in temp_files:
            os.remove(file)


def _files(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for root, directories, files in os.walk(folder):
        directories[:] = [one for one in directories if ModelExportUtils.directory_filter(one, _UNWANTED)]
        found |= {Path(root, file).relative_to(folder).as_posix(): Path(root, file) for file in files}
    return found
