"""The server that KServe's programs start, and the command line's options that they read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from ts.compat.kserve_api.arguments import parser
from ts.compat.kserve_api.model import Model
from ts.compat.start import serve


def __getattr__(name: str) -> Any:
    """`args`: the command line's options, parsed at the first access; KServe parses them at the import."""
    if name == "args":
        return parser.parse_known_args()[0]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class ModelServer:
    """KServe's server. Options given here apply unless the command line sets them."""

    def __init__(self, **options: Any) -> None:
        self._options = {name: value for name, value in options.items() if value is not None}

    def start(self, models: Iterable[Model]) -> NoReturn:
        """Turns this process into the server, whose workers run the program again up to this call."""
        by_name = {}
        for model in models:
            model.start()
            by_name[model.name] = model
        plain = {name: value for name, value in self._options.items() if isinstance(value, (str, int, float, bool))}
        serve("kserve", by_name, plain)
