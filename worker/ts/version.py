"""The version of torchrelay, and its form."""

from __future__ import annotations

from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec

__version__ = "0.1.0"


def is_compiled() -> bool:
    """Whether this Python runs the compiled form (docs/performance.md). A Python of another version or architecture
    than the build's runs the sources."""
    found = find_spec("ts.protocol.frames")
    return found is not None and isinstance(found.loader, ExtensionFileLoader)
