"""Hooks of mkdocs for the documentation site (mkdocs.yml): pages in the order of docs/README.md's table, pages from
outside docs/, and links between them. A link to a file that is no page of the site becomes plain text.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs/README.md"
#: Pages of the site that lie outside docs/: their files in the repository, and their names in the site.
OUTSIDE = {
    "README.md": "project.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
#: The weight of pages in the search, 1 by default: short answers come before pages that match a question's small words.
WEIGHTS = {"questions.md": 20, "architecture.md": 0.5, "project.md": 0.5, "changelog.md": 0.1, "contributing.md": 0.2}
_ROW = re.compile(r"^\| (?:\[[^\]]*\]\(([^)]+)\)|\*\*([^*]+)\*\*) \|", re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def navigation(table: str) -> list[Any]:
    """The nav from the table's text: pages, and sections with pages. A folder stands for the pages in it."""
    found: list[Any] = ["README.md"]
    pages = found
    for match in _ROW.finditer(table):
        target, section = match.groups()
        if section:
            pages = []
            found.append({section: pages})
        elif target.endswith("/") and not target.startswith(".."):
            inner = sorted((ROOT / "docs" / target).glob("*.md"))
            pages.append({target.strip("/").capitalize(): [f"{target}{page.name}" for page in inner]})
        else:
            pages.append(in_site(posixpath.normpath(f"docs/{target}")) or target)
    found[-1][next(iter(found[-1]))].append(OUTSIDE["CHANGELOG.md"])
    return found


def listed(nav: list[Any]) -> Iterator[str]:
    """All pages of a nav."""
    for one in nav:
        if isinstance(one, str):
            yield one
        else:
            for inner in one.values():
                yield from listed(inner)


def in_site(path: str) -> str | None:
    """The name in the site of a file of the repository; None if it is no page of the site."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.rstrip("/") == "examples":
        return OUTSIDE["examples/README.md"]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def linked(markdown: str, source: str) -> str:
    """The text of a page (`source` in the repository), with links within the site."""
    page = in_site(source) or source

    def link(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in target or target.startswith("mailto:"):
            return match[0]
        whole = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = in_site(whole)
        if place is not None and (ROOT / whole).is_dir() and whole != "examples":
            first = sorted((ROOT / whole).glob("*.md"))
            place = f"{place}/{first[0].name}" if first else None
        if place is None:
            return text
        relative = posixpath.relpath(place, posixpath.dirname(page) or ".")
        return f"{image}[{text}]({relative}{'#' * bool(anchor)}{anchor})"

    pieces = _FENCE.split(markdown)
    return "".join(piece if at % 2 else _LINK.sub(link, piece) for at, piece in enumerate(pieces))


# --- the hooks, by the names that mkdocs looks for


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = navigation(TABLE.read_text(encoding="utf-8"))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for source, name in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri in WEIGHTS:
        page.meta["search"] = {"boost": WEIGHTS[page.file.src_uri]}
    sources = {name: source for source, name in OUTSIDE.items()}
    name = page.file.src_uri.replace(os.sep, "/")
    return linked(markdown, sources.get(name, f"docs/{name}"))
