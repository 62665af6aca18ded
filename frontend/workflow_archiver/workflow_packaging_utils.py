"""TorchServe's name for the steps of packing a workflow, for scripts and tests that call them one by one."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from model_archiver.model_packaging_utils import ModelExportUtils
from model_archiver.packing import NAME, NAME_RULE, Stamp
from workflow_archiver.workflow_archiver_error import WorkflowArchiverError
from workflow_archiver.workflow_packaging import manifest_of

__all__ = ["MANIFEST_FILE_NAME", "WAR_INF", "WorkflowArchiverError", "WorkflowExportUtils"]

MANIFEST_FILE_NAME = "MANIFEST.json"
WAR_INF = "WAR-INF"
_LEFT_OUT = {"__MACOSX", "__pycache__"}

log = logging.getLogger(__name__)


class WorkflowExportUtils:
    """The steps. `torch-workflow-archiver` itself packs without a temporary directory (`make_archive`)."""

    clean_temp_files = staticmethod(ModelExportUtils.clean_temp_files)
    make_dir = staticmethod(ModelExportUtils.make_dir)
    directory_filter = staticmethod(ModelExportUtils.directory_filter)

    @staticmethod
    def get_archive_export_path(export_file_path: str, workflow_name: str) -> str:
        return os.path.join(export_file_path, f"{workflow_name}.war")

    @staticmethod
    def check_war_already_exists(workflow_name: str, export_file_path: str | None, overwrite: bool) -> str:
        """The directory to write to, the current one for None. WorkflowArchiverError when the archive is there
        already, unless it may be overwritten."""
        directory = os.getcwd() if export_file_path is None else export_file_path
        target = WorkflowExportUtils.get_archive_export_path(directory, workflow_name)
        if os.path.lexists(target):
            if not overwrite:
                raise WorkflowArchiverError(f"{target} already exists. Use --force (-f) to replace it.")
            log.warning("Overwriting %s ...", target)
        return directory

    @staticmethod
    def generate_manifest_json(args: Any) -> str:
        """The manifest for `args` (attributes named as the options)."""
        return manifest_of(args.workflow_name, args.spec_file, args.handler, Stamp.now())

    @staticmethod
    def copy_artifacts(workflow_name: str, artifact_files: Iterable[str | None]) -> str:
        """A new directory in the system's temporary one, with these files; an entry may name several with commas."""
        target = Path(tempfile.gettempdir(), workflow_name)
        if target.exists():
            shutil.rmtree(target)
        target.mkdir(parents=True)
        for files in filter(None, artifact_files):
            for file in files.split(","):
                shutil.copy(file, target)
        return str(target)

    @staticmethod
    def archive(export_file: str, workflow_name: str, workflow_path: str, manifest: str) -> None:
        """Packs a directory and the manifest. Raises OSError."""
        path = WorkflowExportUtils.get_archive_export_path(export_file, workflow_name)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            WorkflowExportUtils.archive_dir(workflow_path, packed)
            packed.writestr(f"{WAR_INF}/{MANIFEST_FILE_NAME}", manifest)

    @staticmethod
    def archive_dir(path: str, dst: zipfile.ZipFile) -> None:
        """Adds a directory's files, except those in hidden directories and in directories that tools leave behind."""
        for folder, directories, files in os.walk(path):
            directories[:] = [name for name in directories if WorkflowExportUtils.directory_filter(name, _LEFT_OUT)]
            for name in files:
                file = os.path.join(folder, name)
                dst.write(file, os.path.relpath(file, path))

    @staticmethod
    def file_filter(current_file: str, files_to_exclude: set[str]) -> bool:
        """Whether a file of that name belongs into an archive; the manifest is added to `files_to_exclude`."""
        files_to_exclude.add(MANIFEST_FILE_NAME)
        return current_file not in files_to_exclude and not current_file.endswith((".pyc", ".DS_Store", ".war"))

    @staticmethod
    def check_workflow_name_regex_or_exit(workflow_name: str) -> None:
        """Raises WorkflowArchiverError for a name that isn't allowed, and doesn't exit, despite its name."""
        if not NAME.fullmatch(workflow_name):
            raise WorkflowArchiverError(f"Workflow name {workflow_name!r} is not allowed: {NAME_RULE}")

    @staticmethod
    def validate_inputs(workflow_name: str, export_path: str) -> None:
        """Raises WorkflowArchiverError for a name that isn't allowed, or a directory that doesn't exist."""
        WorkflowExportUtils.check_workflow_name_regex_or_exit(workflow_name)
        if not os.path.isdir(export_path):
            raise WorkflowArchiverError(f"Given export-path {export_path} is not a directory.")
