"""The table of engines in docs/language-models.md is the one whose requests the engines are asked."""

from __future__ import annotations

from pathlib import Path

import language_features


def test_the_table_of_features_is_that_of_the_requests(root: Path) -> None:
    page = (root / "docs/language-models.md").read_text()
    shown = page.partition(language_features.BEGIN)[2].partition(language_features.END)[0]
    expected = "".join(f"{line}\n" for line in language_features.table())
    assert shown == expected, f"the table has to be:\n{expected}"
