"""The HTTP API's description as a page, and as OpenAPI (`enable_docs_url`). The page needs nothing from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ts_frontend.ingress.http_call import Header, HttpAnswer, HttpRequest, Route, Serve
from ts_frontend.services.http_answers import json_answer
from ts_frontend.services.http_description import Operation, document

HTML: Header = (b"content-type", b"text/html; charset=utf-8")
PAGES = (["docs"], ["v2", "docs"])
DOCUMENTS = (["openapi.json"], ["v2", "docs", "dataplane.json"])
TITLE = "torchrelay's HTTP APIs"
_STYLE = (
    "body{font:16px/1.5 sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ccc;padding:.4rem;text-align:left}"
    "code{font:14px monospace}"
)


class HttpDocs:
    """`operations`: what the listener answers."""

    def __init__(self, operations: Sequence[Operation], version: str) -> None:
        self._document = document(TITLE, version, operations)
        self._page = _page(operations, version).encode()

    def routes(self, enabled: bool) -> list[Route]:
        return [self.route] if enabled else []

    def route(self, request: HttpRequest) -> Serve | None:
        if request.method not in ("GET", "HEAD"):
            return None
        if request.segments in PAGES:
            return self._shown
        return self._described if request.segments in DOCUMENTS else None

    async def _shown(self, request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, (HTML,), self._page)

    async def _described(self, request: HttpRequest) -> HttpAnswer:
        return json_answer(200, self._document)


def _page(operations: Sequence[Operation], version: str) -> str:
    rows = "".join(
        f"<tr><td><code>{operation.method.upper()}</code></td><td><code>{html.escape(operation.path)}</code></td>"
        f"<td>{html.escape(operation.summary)}</td></tr>"
        for operation in operations
    )
    head = f'<meta charset="utf-8"><title>{TITLE}</title><style>{_STYLE}</style>'
    about = f'<h1>{TITLE}</h1><p>Version {html.escape(version)}. <a href="/openapi.json">OpenAPI</a></p>'
    table = f"<table><tr><th>Method</th><th>Path</th><th>What it does</th></tr>{rows}</table>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{about}{table}</body></html>\n'
