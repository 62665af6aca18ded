"""The operator's console over HTTP: its page and files, its events, a worker's log, the store's models; and the answer
at `/` of every listener, a page for people and JSON for programs (docs/console.md)."""

from __future__ import annotations

import asyncio
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ts_frontend.console.collector import Collector, worker_log
from ts_frontend.console.site import HEADERS, PAGE, Site
from ts_frontend.errors import ServeError
from ts_frontend.http.errors import ResourceNotFound
from ts_frontend.http.open_inference import EVENTS
from ts_frontend.http.openapi import HTML
from ts_frontend.http.request import HttpAnswer, HttpRequest, json_answer
from ts_frontend.http.routing import HTTP_INFERENCE, HTTP_MANAGEMENT, HTTP_METRICS
from ts_frontend.models.model import Registry
from ts_frontend.scheduling.stream import resumed

CONSOLE_PATH = "/console"


class HttpConsole:
    """The requests of the console's page. `stored` returns the names in the model store; blocking."""

    def __init__(self, collector: Collector, models: Registry, stored: Callable[[], Sequence[str]]) -> None:
        self._collector, self._models, self._stored = collector, models, stored

    async def events(self, request: HttpRequest) -> HttpAnswer:
        """Answers with the collector's events, until the client disconnects or must reconnect."""
        await request.body()
        events = self._collector.events()
        first = await anext(events)
        body = resumed(first, events)
        return HttpAnswer(200, (EVENTS,), body)

    async def worker_log(self, request: HttpRequest) -> HttpAnswer:
        params = request.path_params
        model = self._models.find(params["model_name"], params["model_version"])
        found = worker_log(model, params["worker_id"])
        if found is None:
            raise ResourceNotFound(f"Model {model} has no worker {params['worker_id'][:80]!r}")
        return json_answer(200, found)

    async def stored(self, request: HttpRequest) -> HttpAnswer:
        """Answers with the names in the model store that can be registered, sorted."""
        try:
            names = await asyncio.to_thread(self._stored)
        except OSError as error:
            raise ServeError(f"The model store can't be read: {error.strerror}") from error
        return json_answer(200, {"models": sorted(names)})


@dataclass(eq=False)
class HttpPages:
    """The files, and `/` of one listener, which serves `apis`. `about`: the facts about the server shown there;
    `console`: the address of the listener with the console, "" if it isn't shown or isn't served."""

    site: Site
    apis: Sequence[str]
    about: Mapping[str, Any]
    console: Callable[[], str]
    _: KW_ONLY
    docs: bool

    async def root(self, request: HttpRequest) -> HttpAnswer:
        """Answers at `/`: the console, or a page with links on other listeners; JSON unless HTML is preferred."""
        if not prefers_html(request.header(b"accept")):
            return json_answer(200, self._told())
        if HTTP_MANAGEMENT in self.apis:
            return await self.page(request)
        return HttpAnswer(200, (HTML, *HEADERS), _links(self._told()).encode())

    async def page(self, request: HttpRequest) -> HttpAnswer:
        found = self.site.page(PAGE)
        return HttpAnswer(200, found.headers, found.data)

    async def file(self, request: HttpRequest) -> HttpAnswer:
        found = self.site.file(request.path_params["file"])
        if found is None:
            raise ResourceNotFound
        return HttpAnswer(200, found.headers, found.data)

    def _told(self) -> dict[str, Any]:
        found: dict[str, Any] = {**self.about, "apis": list(self.apis)}
        found["description"] = "/api-description"
        if self.docs:
            found |= {"docs": "/docs", "openapi": "/openapi.json"}
        if address := CONSOLE_PATH if HTTP_MANAGEMENT in self.apis else self.console():
            found["console"] = address
        return found


def prefers_html(accept: str) -> bool:
    """Returns whether a client accepts HTML by name and doesn't prefer JSON, as browsers do."""
    kinds = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    wanted = [kind for kind in kinds if kind in ("text/html", "application/json")]
    return wanted[:1] == ["text/html"]


_LINKS = {
    "console": "The console: models, workers, queues, a playground",
    "docs": "The HTTP APIs of this address, with forms to try them",
    "description": "The OpenAPI description of these APIs",
}


#: The name of each API on that page.
_APIS = {
    HTTP_INFERENCE: "predictions over HTTP",
    HTTP_MANAGEMENT: "the management of models over HTTP",
    HTTP_METRICS: "metrics for Prometheus at /metrics",
}


def _links(told: Mapping[str, Any]) -> str:
    items = "".join(
        f'<li><a href="{html.escape(told[name])}">{text}</a></li>' for name, text in _LINKS.items() if told.get(name)
    )
    name, version = html.escape(str(told["name"])), html.escape(str(told["version"]))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>'
    style = '<link rel="stylesheet" href="/console/base.css"><link rel="icon" href="/console/icon.svg">'
    icon = '<img src="/console/icon.svg" alt="" width="32" height="32">'
    body = f'<main class="plain panel"><h1>{icon}{name} <small>{version}</small></h1>'
    body += f"<p>This address serves {' and '.join(_APIS[api] for api in told['apis'])}.</p><ul>{items}</ul></main>"
    return f'<!doctype html><html lang="en"><head>{head}{style}</head><body>{body}</body></html>\n'
