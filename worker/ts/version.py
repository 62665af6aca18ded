"""The version of torchrelay."""

__version__ = "0.1.0"
