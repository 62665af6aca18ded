"""What the archiver refuses."""

from __future__ import annotations


class ModelArchiverError(Exception):
    """The archive can't be made; the message gives the reason and the remedy."""


class MissingFile(ModelArchiverError, FileNotFoundError):
    """A file that was named isn't there."""
