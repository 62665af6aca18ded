"""The server that KServe's programs start, and what they read of the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from ts.compat.kserve_api.arguments import parser
from ts.compat.kserve_api.model import Model
from ts.compat.start import serve


def __getattr__(name: str) -> Any:
    """`args`: the command line's, read on first access; KServe reads it when it is imported."""
    if name == "args":
        return parser.parse_known_args()[0]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class ModelServer:
    """Options given here apply where the command line sets none."""

    def __init__(self, **options: Any) -> None:
        self._options = {name: value for name, value in options.items() if value is not None}

    def start(self, models: Iterable[Model]) -> NoReturn:
        """This process becomes the server; its workers run the program again, up to here."""
        by_name = {}
        for model in models:
            model.start()
            by_name[model.name] = model
        plain = {name: value for name, value in self._options.items() if isinstance(value, (str, int, float, bool))}
        serve("kserve", by_name, plain)
