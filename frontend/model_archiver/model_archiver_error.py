"""The model archiver's errors."""

from __future__ import annotations


class ModelArchiverError(Exception):
    """The archive can't be made; the message gives the reason and the remedy."""


class MissingFile(ModelArchiverError, FileNotFoundError):
    """A named file doesn't exist."""
