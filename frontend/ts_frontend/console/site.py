"""The console's files (folder `site`), read once. They load nothing from other origins; no other file is served."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).with_name("site")
PAGE, DOCS = "index.html", "docs.html"
KINDS = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".txt": b"text/plain; charset=utf-8",
}
#: Scripts, styles and requests only from the page's own origin, no inline scripts; images also from data: URLs (an
#: answer's); no framing by other pages.
POLICY = (
    b"default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    b"frame-ancestors 'none'"
)
#: The headers of every file, besides those of every answer.
HEADERS = ((b"content-security-policy", POLICY), (b"x-frame-options", b"DENY"), (b"referrer-policy", b"no-referrer"))


class SiteFile(NamedTuple):
    """A file: its content type, and its bytes."""

    kind: bytes
    data: bytes

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return ((b"content-type", self.kind), *HEADERS)


class Site:
    """All files by name. Any other name, with or without `..`, is not found."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {
            path.name: SiteFile(KINDS[path.suffix], path.read_bytes())
            for path in sorted(folder.iterdir())
            if path.suffix in KINDS
        }

    def file(self, name: str) -> SiteFile | None:
        return self._files.get(name)

    def page(self, name: str) -> SiteFile:
        return self._files[name]
