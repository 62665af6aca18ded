"""A workflow's files: a `.war` is a zip with the specification, the handler file and `WAR-INF/MANIFEST.json`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ts_frontend.errors import InvalidArchive, InvalidWorkflow
from ts_frontend.models.archive import read_config, unpack
from ts_frontend.models.extraction import ExtractLimits, refusal
from ts_frontend.models.manifest import file_name, member, read_manifest, text
from ts_frontend.models.stop import Stop
from ts_frontend.workflows.spec import Spec, parse_spec

MANIFEST = Path("WAR-INF", "MANIFEST.json")


@dataclass(frozen=True, slots=True)
class WorkflowArchive:
    """An unpacked archive. `handler`: the file with the functions, relative to `dir`."""

    dir: Path
    name: str | None
    handler: str | None
    spec: Spec

    def remove(self) -> None:
        """Deletes the unpacked copy. Blocking, never fails."""
        shutil.rmtree(self.dir, ignore_errors=True)


def open_workflow(path: Path, work_dir: Path, limits: ExtractLimits, stop: Stop | None = None) -> WorkflowArchive:
    """Unpacks the archive at `path` to `work_dir/workflows/<32 hex>` and reads it. Blocking.

    Raises InvalidWorkflow, InvalidGraph, ServeError (disk), Stopped once `stop` is set; nothing is left then.
    """
    try:
        if path.is_dir():
            raise refusal(path, "a directory can't be registered: make an archive with torch-workflow-archiver")
        target = unpack(path, work_dir / "workflows", limits, stop)
        try:
            return _read(path, target)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
    except InvalidArchive as error:
        raise InvalidWorkflow(error.message) from error


def _read(path: Path, directory: Path) -> WorkflowArchive:
    manifest = read_manifest(path, directory / MANIFEST)
    if not manifest:
        raise refusal(path, f"it has no {MANIFEST}: make it with torch-workflow-archiver")
    workflow = member(path, manifest, "workflow", MANIFEST)
    spec_file = file_name(path, workflow, "specFile", MANIFEST)
    if not spec_file or not (directory / spec_file).is_file():
        raise refusal(path, f"'specFile' must name a file of the archive, not {spec_file!a}", str(MANIFEST))
    handler = file_name(path, workflow, "handler", MANIFEST)
    if handler and not (directory / handler).is_file():
        raise refusal(path, f"'handler' must name a file of the archive, not {handler!a}", str(MANIFEST))
    try:
        spec = parse_spec(read_config(path, directory / spec_file), has_handler=handler is not None)
    except InvalidWorkflow as error:
        raise type(error)(f"{spec_file} of {path.name}: {error.message}") from None
    return WorkflowArchive(directory, text(path, workflow, "workflowName", MANIFEST), handler, spec)
