"""The tests that the pages on security and reliability name are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

#: What docs/security.md has a row for: one for each vulnerability, and the reports of outages.
CVES = [
    *("CVE-2023-43654", "CVE-2022-1471", "CVE-2024-35198", "CVE-2024-35199", "CVE-2025-23319", "CVE-2025-23310"),
    *("CVE-2025-33201", "CVE-2026-24208", "CVE-2024-2912", "CVE-2024-50050", "CVE-2026-3059", "CVE-2026-109156"),
    *("CVE-2023-48022", "CVE-2026-34753"),
]
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def named(root: Path, page: str) -> list[tuple[str, str]]:
    return [(file, test) for file, test in TEST.findall((root / "docs" / page).read_text())]


def functions(path: Path) -> set[str]:
    return {
        one.name
        for one in ast.walk(ast.parse(path.read_text()))
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("page", ["security.md", "reliability.md"])
def test_the_tests_that_a_page_names_are_there(root: Path, page: str) -> None:
    found = named(root, page)
    assert found
    missing = [one for one in found if not (root / one[0]).is_file()]
    missing += [one for one in found if one not in missing and one[1] and one[1] not in functions(root / one[0])]
    assert not missing


def test_each_vulnerability_has_a_row_with_its_test(root: Path) -> None:
    rows = [line for line in (root / "docs" / "security.md").read_text().splitlines() if line.startswith("| CVE-")]
    without = [one for one in CVES if not any(one in row and TEST.search(row) for row in rows)]
    assert not without


def test_each_kind_of_outage_has_a_row_with_its_test(root: Path) -> None:
    text = (root / "docs" / "reliability.md").read_text()
    section = text[text.index("## Outages of model servers") :]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 10
    assert not [row for row in rows if not TEST.search(row)]
