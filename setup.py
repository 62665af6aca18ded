"""The description and the addresses of the package, which setup.cfg can't make.

A package index shows the README outside of a checkout. TORCHRELAY_REPOSITORY=https://… (the address of the repository
that a release is made from) turns its links to files into links to that repository, and is the project's address;
without it these links become text.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from setuptools import setup

#: A link or an image whose target is a file of the checkout.
_RELATIVE = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#|mailto:)([^)\s]+)\)")
_REPOSITORY = os.environ.get("TORCHRELAY_REPOSITORY", "").rstrip("/")
_PAGES = {"Documentation": "docs/README.md", "Changelog": "CHANGELOG.md", "Source": ""}


def _absolute(link: re.Match[str]) -> str:
    image, text, path = link.groups()
    if not _REPOSITORY:
        return text
    return f"{image}[{text}]({_REPOSITORY}/{'raw' if image else 'blob'}/HEAD/{path})"


def _addresses() -> dict[str, str]:
    if not _REPOSITORY:
        return {}
    if not re.fullmatch(r"https://[^\s/]+/\S+", _REPOSITORY):
        sys.exit(f"TORCHRELAY_REPOSITORY={_REPOSITORY}: the address of a repository is needed, https://HOST/OWNER/NAME")
    return {name: f"{_REPOSITORY}/blob/HEAD/{path}" if path else _REPOSITORY for name, path in _PAGES.items()}


readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
setup(
    long_description=_RELATIVE.sub(_absolute, readme),
    long_description_content_type="text/markdown",
    project_urls=_addresses(),
)
