"""What is near a path that nothing answers: the path that was meant, and the listener that serves it.

The text has paths of the table of routes and ports of this server, nothing that the client sent. It is for callers
whose keys were checked, as far as there are keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Final

from ts_frontend.http.routing import HTTP_INFERENCE, HTTP_MANAGEMENT, HTTP_METRICS, Row

#: Longer paths are no mistyped ones.
PATH_CHARACTERS_MAX: Final = 200
#: The least likeness (difflib's ratio) of a path that is named.
_LIKENESS_MIN: Final = 0.8
#: The likeness of a path that a listener serves.
SAME: Final = 2.0
_NAMES: Final = {HTTP_INFERENCE: "inference", HTTP_MANAGEMENT: "management", HTTP_METRICS: "metrics"}


class Near:
    """`rows`: the described routes of each HTTP API of the server; `here`: the APIs of the listener that was asked;
    `address`: tells where another API is, once the server listens."""

    def __init__(self, rows: Mapping[str, Iterable[Row]], here: Sequence[str], address: Callable[[str], str]) -> None:
        self._here, self._address = here, address
        #: The API of each path: this listener's before those of others.
        self._apis: dict[str, str] = {}
        for api in sorted(rows, key=lambda one: one not in here):
            for row in rows[api]:
                if row.summary:
                    self._apis.setdefault(row.template, api)
        #: Clients repeat a wrong path, and comparing it with all templates takes as long as ten requests.
        self._nearest = lru_cache(maxsize=64)(self._compared)

    def __call__(self, path: str) -> str:
        """Returns the sentences to add to the error, each after a blank; "" if no path is near."""
        if len(path) > PATH_CHARACTERS_MAX:
            return ""
        likeness, template = self._nearest(path.rstrip("/"))
        if likeness < _LIKENESS_MIN:
            return ""
        api = self._apis[template]
        meant = "" if likeness == SAME else f" Did you mean {template}?"
        if api in self._here:
            return meant
        return f"{meant} The {_NAMES[api]} API serves {'it' if meant else 'this path'}: {self._address(api)}."

    def _compared(self, path: str) -> tuple[float, str]:
        asked = path.split("/")
        return max(((_likeness(asked, template), template) for template in self._apis), key=lambda one: one[0])


def _likeness(asked: Sequence[str], template: str) -> float:
    """Returns how like the words of a path and of a template are (difflib's ratio), SAME if the template fits. The
    values of names, and missing ones, count for nothing."""
    words, fits = [*asked], True
    wanted = template.split("/")
    for place, word in enumerate(wanted):
        name, _, end = word.rpartition("}")
        if name:
            given = asked[place] if place < len(asked) else ""
            value, colon, verb = given.rpartition(":") if end else (given, "", "")
            wanted[place] = end
            fits = fits and bool(value)
            if given:
                words[place] = f"{colon}{verb}"
    if words == wanted:
        return SAME if fits else 1.0
    matcher = SequenceMatcher(None, "/".join(words).lower(), "/".join(wanted), autojunk=False)
    return matcher.ratio() if matcher.quick_ratio() >= _LIKENESS_MIN else 0.0
