"""The API description: `OPTIONS /` and `/api-description` describe a listener's routes, `OPTIONS` of a model its
inputs. OpenAPI 3.0.1, shorter than TorchServe's: every path with its parameters, and one form of errors for all. And
what is near a path that nothing answers: the path that was meant, and the listener that serves it."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Any, Final

from ts_frontend.config.parameters import REGISTER, SCALE
from ts_frontend.console.site import HEADERS
from ts_frontend.http.request import Header, HttpAnswer, HttpRequest, json_answer
from ts_frontend.http.routing import HTTP_INFERENCE, HTTP_MANAGEMENT, HTTP_METRICS, Effect, Row
from ts_frontend.models.model import Registry

_NUMBER, _FLAG, _TEXT = {"type": "integer"}, {"type": "boolean"}, {"type": "string"}
#: Parameters that aren't texts.
_SCHEMAS: dict[str, dict[str, Any]] = {
    **{row.name: _NUMBER if row.kind is int else _FLAG for row in (*REGISTER, *SCALE) if row.kind is not str},
    **dict.fromkeys(("limit", "next_page_token"), _NUMBER),
    "customized": _FLAG,
    "name[]": {"type": "array", "items": _TEXT},
}
_ERROR = {
    "type": "object",
    "required": ["code", "type", "message"],
    "properties": {
        "code": {"type": "integer", "description": "The HTTP status"},
        "type": {"type": "string", "description": "The kind of error"},
        "message": {"type": "string", "description": "The error, in a sentence"},
    },
}


class HttpDescription:
    """Answers OPTIONS: `rows` are the listener's routes."""

    def __init__(self, rows: Sequence[Row], models: Registry, version: str) -> None:
        self._rows = rows
        self._models = models
        self._version = version

    async def of_server(self, request: HttpRequest) -> HttpAnswer:
        return json_answer(200, document("TorchServe APIs", self._version, self._rows))

    async def of_model(self, request: HttpRequest) -> HttpAnswer:
        first, name = request.path.split("/")[1], request.path_params["model_name"]
        if first in ("v1", "v2"):
            name = name.rpartition(":")[0] or name
        self._models.find(name)
        found = [row for row in self._rows if "{model_name}" in row.path]
        below = [row for row in found if row.path.startswith("/models/{model_name}")]
        managed = [row for row in below if not row.path.endswith("/invoke")]
        if first == "models" and any(row.summary for row in managed):
            return json_answer(200, document(f"RESTful Management API for: {name}", self._version, managed))
        rest_of = [row for row in found if row not in managed]
        return json_answer(200, document(f"RESTful API for: {name}", self._version, rest_of))


def _operations(rows: Iterable[Row]) -> Iterator[Row]:
    """Yields the rows to describe: the first one for each path and method (on a shared address)."""
    seen = set()
    for row in rows:
        place = row.template, row.described_method
        if row.summary and place not in seen:
            seen.add(place)
            yield row


def document(title: str, version: str, rows: Iterable[Row]) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for row in _operations(rows):
        paths.setdefault(row.template, {})[row.described_method] = _described(row)
    info = {"title": title, "version": version}
    return {"openapi": "3.0.1", "info": info, "paths": paths, "components": {"schemas": {"Error": _ERROR}}}


def _described(row: Row) -> dict[str, Any]:
    path = row.template
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    found: dict[str, Any] = {
        "description": row.summary,
        "operationId": row.operation or f"{row.described_method}{re.sub('[^a-z0-9]+', '_', path)}",
        "parameters": [*_path_parameters(path), *_query_parameters(row.query)],
        "responses": {"200": {"description": "OK"}, "default": {"description": "An error", "content": error}},
    }
    if row.body:
        found["requestBody"] = {"content": {name: {} for name in row.body}}
    return found


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"in": "path", "name": name, "required": True, "schema": _TEXT} for name in re.findall(r"\{([^{}]+)\}", path)
    ]


def _query_parameters(names: Sequence[str]) -> list[dict[str, Any]]:
    return [{"in": "query", "name": name, "required": False, "schema": _SCHEMAS.get(name, _TEXT)} for name in names]


HTML: Header = (b"content-type", b"text/html; charset=utf-8")
TITLE = "torchrelay's HTTP APIs"
_HEAD = (
    f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{TITLE}</title>'
    '<link rel="icon" href="/console/icon.svg"><link rel="stylesheet" href="/console/base.css">'
    '<link rel="stylesheet" href="/console/docs.css"><script src="/console/docs.js" type="module"></script>'
)


class HttpDocs:
    """The page /docs, with forms to try the calls, and the OpenAPI document; `rows`: the listener's routes."""

    def __init__(self, rows: Sequence[Row], version: str) -> None:
        self._document = document(TITLE, version, rows)
        self._page = _page(rows, version).encode()

    async def page(self, request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, (HTML, *HEADERS), self._page)

    async def openapi(self, request: HttpRequest) -> HttpAnswer:
        return json_answer(200, self._document)


def _page(rows: Sequence[Row], version: str) -> str:
    lines = "".join(
        f"<tr><td><code>{row.described_method.upper()}</code></td><td><code>{html.escape(row.template)}</code></td>"
        f"<td>{html.escape(row.summary)}</td></tr>"
        for row in sorted(_operations(rows), key=lambda row: row.effect is not Effect.RUNS)
    )
    about = f'<p>Version {html.escape(version)}. <a href="/openapi.json">OpenAPI</a></p>'
    table = f"<table><thead><tr><th>Method<th>Path<th>Description</thead><tbody>{lines}</tbody></table>"
    main = f'<main class="docs"><h1>{TITLE}</h1>{about}<div id="operations">{table}</div></main>'
    return f'<!doctype html><html lang="en"><head>{_HEAD}</head><body>{main}</body></html>\n'


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
