"""The workflow archiver behind `torch-workflow-archiver`; Python code imports it as `workflow_archiver`."""

from ts.version import __version__
from workflow_archiver.workflow_archiver_error import WorkflowArchiverError

__all__ = ["WorkflowArchiverError", "__version__"]
