"""KServe's command line, and its server."""

from typing import Any

from ts.compat.kserve_api.model import ModelServer, parser

__all__ = ["ModelServer", "parser"]


def __getattr__(name: str) -> Any:
    """`args`: the command line's options, parsed at the first access; KServe parses them at the import."""
    if name == "args":
        return parser.parse_known_args()[0]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
