"""What the archiver refuses."""

from __future__ import annotations


class ModelArchiverError(Exception):
    """The archive can't be made as asked; the message says why and what to do."""


class MissingFile(ModelArchiverError, FileNotFoundError):
    """A file that was named isn't there."""
