"""The workflow archiver's errors."""


class WorkflowArchiverError(Exception):
    """The archive can't be made; the message gives the reason and the remedy."""
