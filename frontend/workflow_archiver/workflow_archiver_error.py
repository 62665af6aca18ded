"""The workflow archiver's errors."""

from __future__ import annotations


class WorkflowArchiverError(Exception):
    """The archive can't be made; the message gives the reason and the remedy."""
