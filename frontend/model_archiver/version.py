"""The archiver's version: the server's."""

from ts.version import __version__

__all__ = ["__version__"]
