"""docs/promises.md has every promise of the pages, each with tests that are there, or with the reason why not."""

from __future__ import annotations

import re
from pathlib import Path

#: Promises of each page, by its number.
COUNTS = {"000": 23, "001": 46, "002": 23, "003": 23, "004": 16}


def rows(root: Path) -> list[tuple[str, str]]:
    found = re.findall(r"^\| (\d{3}-\d\d) \| .+? \| (.+) \|$", (root / "docs/promises.md").read_text(), re.MULTILINE)
    return [(one[0], one[1]) for one in found]


def test_every_promise_has_one_row(root: Path) -> None:
    wanted = [f"{page}-{number:02d}" for page, count in COUNTS.items() for number in range(1, count + 1)]
    assert [promise for promise, _ in rows(root)] == wanted


def test_each_is_kept_by_tests_that_are_there_or_says_why_not(root: Path) -> None:
    for promise, kept in rows(root):
        tests = re.findall(r"`(tests/[^`]+)`", kept)
        assert tests or kept.startswith("not yet: "), promise
        for test in tests:
            file, _, name = test.partition("::")
            assert f"def {name}(" in (root / file).read_text(), (promise, test)
