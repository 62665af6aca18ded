"""What the workflow archiver refuses."""

from __future__ import annotations


class WorkflowArchiverError(Exception):
    """The archive can't be made as asked; the message says why and what to do."""
