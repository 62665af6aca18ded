"""Optional packages of single handlers, imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any


class PackageMissing(ImportError):
    """A handler needs a package that isn't installed; the message names it and its installation."""


def needed(module: str, package: str, what: str) -> Any:
    """Imports the module for `what`. Raises PackageMissing, naming `package`, if it or its imports are missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PackageMissing(
            f"{what} needs the package {package}, which can't be imported ({error}): add it to the archive's "
            "requirements file, or pip install it where the server runs"
        ) from error
