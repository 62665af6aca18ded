"""The long description of the package, which setup.cfg can't make: the README without links to files of a checkout."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

#: A link or an image whose target is a file of the checkout: on a page of a package index it leads nowhere.
_RELATIVE = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#|mailto:)[^)\s]+\)")

readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
setup(long_description=_RELATIVE.sub(r"\1", readme), long_description_content_type="text/markdown")
