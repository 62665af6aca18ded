"""The package that handlers written for TorchServe import."""

from ts.version import __version__

__all__ = ["__version__"]
