"""The targets of the documentation's links exist."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def pages(root: Path) -> Iterator[Path]:
    yield from root.glob("*.md")
    for folder in ("docs", "examples", "benchmarks", "deploy"):
        yield from (page for page in (root / folder).rglob("*.md") if "node_modules" not in page.parts)


def test_links_lead_somewhere(root: Path) -> None:
    broken = [
        f"{page.relative_to(root)}: {target}"
        for page in pages(root)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken


def test_files_that_are_named_exist(root: Path) -> None:
    """Words in backquotes that look like paths into the repository."""
    tops = (
        "frontend/",
        "worker/",
        "protos/",
        "examples/",
        "model_store/",
        "ts_scripts/",
        "tests/",
        "docs/",
        "benchmarks/",
    )
    broken = [
        f"{page.relative_to(root)}: {name}"
        for page in pages(root)
        for name in re.findall(r"`([\w./-]+)`", page.read_text())
        if name.startswith(tops) and not (root / name).exists() and page.name != "CHANGELOG.md"
    ]
    assert not broken


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(root: Path, page: str) -> None:
    listed = subprocess.run(["make", "help"], cwd=root, capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"make ([\w-]+)", listed))
    named = set(re.findall(r"(?:`|^)make ([\w-]+)", (root / page).read_text(), re.MULTILINE))
    assert named <= known


def test_every_page_of_docs_is_in_its_index(root: Path) -> None:
    index = (root / "docs/README.md").read_text()
    missing = [page.name for page in (root / "docs").glob("*.md") if page.name not in index]
    assert not missing
