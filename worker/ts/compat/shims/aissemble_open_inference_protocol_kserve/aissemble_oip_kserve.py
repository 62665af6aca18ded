"""A handler as a server program."""

from ts.compat.aissemble import AissembleOIPKServe

__all__ = ["AissembleOIPKServe"]
