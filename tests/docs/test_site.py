"""The documentation site: its nav has every page, its links stay within it, and its search answers questions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support import module_of

#: Questions, and the pages that answer them.
QUESTIONS = {
    "how to stream": ("questions.html#how-to-stream", "handlers.html#streaming"),
    "how to batch": ("questions.html#how-to-batch", "batching.html"),
    "how to set a token": ("questions.html#how-to-set-a-token", "security.html#keys"),
    "why a request was refused": ("questions.html#why-a-request-was-refused", "errors.html"),
    "how to run under KServe": ("questions.html#how-to-run-under-kserve", "kserve.html"),
    "what a setting means": ("questions.html#what-a-setting-means", "configuration.html"),
    "config.pbtxt": ("triton.html#fields-of-configpbtxt",),
}


@pytest.fixture(scope="module")
def hooks(root: Path) -> ModuleType:
    return module_of(root / "ts_scripts/docs_site.py")


def test_the_nav_has_every_page_once(hooks: ModuleType, root: Path) -> None:
    listed = list(hooks.listed(hooks.navigation((root / "docs/README.md").read_text())))
    docs = {str(page.relative_to(root / "docs")) for page in (root / "docs").rglob("*.md")}
    assert set(listed) == docs | set(hooks.OUTSIDE.values())
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize(
    ("source", "link", "there"),
    [
        ("docs/a.md", "[b](security.md#keys)", "[b](security.md#keys)"),
        ("docs/a.md", "[b](../README.md#install)", "[b](project.md#install)"),
        ("docs/a.md", "[b](../deploy/torchrelay.service)", "b"),
        ("docs/decisions/a.md", "[b](../../README.md)", "[b](../project.md)"),
        ("docs/a.md", "[b](decisions/)", "[b](decisions/0001-ingress.md)"),
        ("docs/a.md", "![b](images/console-live.png)", "![b](images/console-live.png)"),
        ("README.md", "[b](docs/triton.md)", "[b](triton.md)"),
        ("README.md", "[Apache](LICENSE)", "Apache"),
        ("README.md", "[examples](examples/)", "[examples](examples.md)"),
        ("examples/README.md", "[b](../docs/triton.md)", "[b](triton.md)"),
        ("docs/a.md", "[b](https://example.org/x.md) [c](#here)", "[b](https://example.org/x.md) [c](#here)"),
        ("docs/a.md", "```\n[b](../deploy/x)\n```", "```\n[b](../deploy/x)\n```"),
        ("docs/a.md", "[`x[0]`](../deploy/x)", "`x[0]`"),
    ],
)
def test_links_lead_to_pages_of_the_site(hooks: ModuleType, source: str, link: str, there: str) -> None:
    assert hooks.linked(link, source) == there


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.external
def test_the_site_is_built_strictly_and_its_search_finds_what_people_ask(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material isn't installed")
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node: make test-external")
    built = build(root, tmp_path / "site")
    assert built.returncode == 0, built.stdout + built.stderr
    pages = [page.read_text() for page in (tmp_path / "site").glob("*.html")]
    assert len(pages) > 40 and not any("fonts.googleapis" in page for page in pages)
    command = [node, str(root / "tests/docs/search.js"), str(tmp_path / "site"), *QUESTIONS]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)
    missed = {
        question: groups[:2]
        for question, groups in found.items()
        if not any(location in QUESTIONS[question] for group in groups[:2] for location in group[:1])
    }
    assert not missed


@pytest.mark.external
def test_a_broken_link_fails_the_build(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material isn't installed")
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(root / name, tmp_path)
    for name in ("docs", "examples", "ts_scripts"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    page = tmp_path / "docs/questions.md"
    page.write_text(page.read_text() + "\n[nowhere](security.md#no-such-heading)\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode != 0 and "no-such-heading" in built.stdout + built.stderr
