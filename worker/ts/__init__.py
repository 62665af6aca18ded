"""The import name that handlers written for TorchServe use."""

from ts.version import __version__

__all__ = ["__version__"]
