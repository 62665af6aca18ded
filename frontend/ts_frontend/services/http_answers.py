"""TorchServe's JSON in HTTP answers, and query parameters read as it reads them."""

from __future__ import annotations

import json
import logging
from typing import Any
from urllib.parse import parse_qsl

from ts_frontend.errors import InvalidArgument
from ts_frontend.ingress.http import JSON
from ts_frontend.ingress.http_call import HttpAnswer, HttpRequest

log = logging.getLogger(__name__)

PARAMETERS_MAX = 256


def json_answer(status: int, value: object) -> HttpAnswer:
    body = json.dumps(value, indent=2, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
    return HttpAnswer(status, (JSON,), body)


def compact_json(status: int, value: object) -> HttpAnswer:
    """JSON as other servers than TorchServe write it."""
    return HttpAnswer(status, (JSON,), json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def json_object(body: bytes) -> dict[str, Any]:
    """The object in a body, {} for an empty one. InvalidArgument for anything else."""
    if not body.strip():
        return {}
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"The body is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgument(f"The body is a JSON {type(found).__name__}, not an object")
    return found


def query_pairs(request: HttpRequest) -> list[tuple[str, str]]:
    """All parameters of the query, in their order. InvalidArgument when there are too many, or they aren't UTF-8."""
    try:
        return parse_qsl(
            request.query.decode("latin-1"), keep_blank_values=True, max_num_fields=PARAMETERS_MAX, errors="strict"
        )
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"The query is not UTF-8: {error.reason} in {error.object[:80]!r}") from error
    except ValueError as error:
        raise InvalidArgument(f"The query has more than {PARAMETERS_MAX} parameters") from error


class Parameters:
    """Parameters by name: of equal names the first counts, an empty one counts as not given."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self._values = dict(reversed(pairs))

    def text(self, name: str) -> str | None:
        return self._values.get(name) or None

    def required(self, name: str) -> str:
        """An empty one is given, too: what it stands for says what is wrong with it."""
        value = self._values.get(name)
        if value is None:
            raise InvalidArgument(f"Parameter {name} is required.")
        return value

    def integer(self, name: str) -> int | None:
        """InvalidArgument for what isn't a whole number."""
        value = self.text(name)
        if value is None:
            return None
        try:
            return int(value)
        except ValueError:
            raise InvalidArgument(f"Parameter {name} must be a whole number, not {value[:80]!r}") from None

    def tuning(self, name: str) -> int | None:
        """As `integer`; what isn't a whole number counts as not given, as in TorchServe, and is logged: for settings
        without which the call still does what was meant."""
        try:
            return self.integer(name)
        except InvalidArgument as error:
            log.warning("%s: it counts as not given", error.message)
            return None

    def startup_timeout(self, starts: bool) -> int | None:
        """Seconds; where nothing `starts` in it, 0 counts as not given, too."""
        value = self.tuning("startup_timeout")
        if value == 0 and not starts:
            log.warning("Parameter startup_timeout is 0, in which nothing can be loaded: it counts as not given")
            return None
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True for `true` in any case, False for any other text."""
        value = self.text(name)
        return default if value is None else value.lower() == "true"
