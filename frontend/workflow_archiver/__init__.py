"""The workflow archiver: what `torch-workflow-archiver` runs, importable as `workflow_archiver`."""

from ts.version import __version__
from workflow_archiver.workflow_archiver_error import WorkflowArchiverError

__all__ = ["WorkflowArchiverError", "__version__"]
