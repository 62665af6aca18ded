"""`torch-workflow-archiver`. `generate_workflow_archive` and `package_workflow` are TorchServe's names."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from model_archiver.model_archiver_error import ModelArchiverError
from model_archiver.packing import NAME, NAME_RULE, Contents, Stamp, check_compiles, existing, pack, yaml_of
from ts.version import __version__
from ts_frontend.errors import ServeError
from ts_frontend.workflows.specification import parse_spec
from workflow_archiver.arg_parser import ArgParser
from workflow_archiver.workflow_archiver_error import WorkflowArchiverError

__all__ = ["ArgParser", "WorkflowArchiverError", "generate_workflow_archive", "make_archive", "package_workflow"]


def generate_workflow_archive() -> None:
    """The console command. An error is one line on stderr and exit status 1."""
    package_workflow(ArgParser.workflow_archiver_args_parser().parse_args())


def package_workflow(args: Any, manifest: str | None = None) -> None:
    """Makes the archive that `args` asks for (attributes named as the options). `manifest`: text in place of the one
    that would be made. Exits with status 1 when it can't be made."""
    logging.basicConfig(format="%(levelname)s - %(message)s")
    try:
        path = make_archive(
            args.workflow_name,
            args.spec_file,
            handler=getattr(args, "handler", None),
            extra_files=getattr(args, "extra_files", None),
            export_path=getattr(args, "export_path", None),
            force=bool(getattr(args, "force", False)),
            manifest=manifest,
        )
    except (WorkflowArchiverError, OSError) as error:
        sys.exit(f"torch-workflow-archiver: {error}")
    print(f"Wrote {path}")


def make_archive(
    workflow_name: str,
    spec_file: str,
    *,
    handler: str | None = None,
    extra_files: str | None = None,
    export_path: str | None = None,
    force: bool = False,
    manifest: str | None = None,
) -> Path:
    """Writes `<export_path>/<workflow_name>.war`, and says where. Raises WorkflowArchiverError, OSError."""
    directory = Path(export_path or os.getcwd())
    target = directory / f"{workflow_name}.war"
    _check(workflow_name, directory, target, force)
    try:
        stamp = Stamp.now()
        contents = Contents("WAR-INF")
        contents.add(Path(spec_file).name, existing(Path(spec_file), "--spec-file"))
        _check_spec(Path(spec_file), handler)
        if handler:
            contents.add(Path(handler).name, existing(Path(handler), "--handler"))
            check_compiles(Path(handler))
        contents.add_extra(extra_files, target, preserve=False)
    except ModelArchiverError as error:
        raise WorkflowArchiverError(str(error)) from error
    text = manifest or manifest_of(workflow_name, spec_file, handler, stamp)
    pack({**contents.files, "WAR-INF/MANIFEST.json": text.encode()}, target, "default", stamp, workflow_name)
    return target


def _check(workflow_name: str, directory: Path, target: Path, force: bool) -> None:
    if not NAME.fullmatch(workflow_name):
        raise WorkflowArchiverError(f"--workflow-name {workflow_name!r} is not allowed: {NAME_RULE}")
    if not directory.is_dir():
        raise WorkflowArchiverError(f"--export-path: {directory} is not a directory")
    if target.is_dir():
        raise WorkflowArchiverError(f"{target} is a directory")
    if os.path.lexists(target) and not force:
        raise WorkflowArchiverError(f"{target} is already there. Use --force (-f) to replace it.")


def _check_spec(path: Path, handler: str | None) -> None:
    """Reads the specification as the server does. Raises WorkflowArchiverError, ModelArchiverError."""
    try:
        parse_spec(yaml_of(path, "--spec-file"), has_handler=bool(handler))
    except ServeError as error:
        raise WorkflowArchiverError(f"--spec-file: {path}: {error.message}") from None


def manifest_of(workflow_name: str, spec_file: str, handler: str | None, stamp: Stamp) -> str:
    """The contents of WAR-INF/MANIFEST.json. Files have their names in the archive, all at its root."""
    workflow = {"workflowName": workflow_name, "specFile": Path(spec_file).name}
    if handler:
        workflow["handler"] = Path(handler).name
    manifest = {"createdOn": str(stamp), "workflow": workflow, "archiverVersion": __version__}
    return json.dumps(manifest, indent=2) + "\n"


if __name__ == "__main__":
    generate_workflow_archive()
