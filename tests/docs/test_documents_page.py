"""docs/documents.md has every block, each with a verdict, the needed changes, and an existing test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

#: The code blocks of each page, counted there.
BLOCKS = {"max": 4, "dynamo": 17, "torchserve": 9, "aissemble": 3, "mlserver": 5}


def rows(root: Path) -> dict[tuple[str, int], tuple[str, list[str]]]:
    """(page, block) -> how it runs, its tests."""
    found: dict[tuple[str, int], tuple[str, list[str]]] = {}
    page = ""
    for line in (root / "docs/documents.md").read_text().splitlines():
        if line.startswith("## "):
            page = line.removeprefix("## ").lower()
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 4 and cells[1].isdigit():
            found[page, int(cells[1])] = cells[3], re.findall(r"`(\S+)`", cells[4])
    return found


def test_every_block_is_listed_and_kept(root: Path) -> None:
    wanted = {(page, number) for page, count in BLOCKS.items() for number in range(1, count + 1)}
    assert set(rows(root)) == wanted
    files = {(path.parent.name, int(path.stem)) for path in (root / "tests/data/documents").glob("*/*.txt")}
    assert files == wanted


def test_every_verdict_says_what_it_must(root: Path) -> None:
    for block, (how, _) in rows(root).items():
        assert re.match(r"as it is|repaired: .+|not here: .+\. Nearest: .+", how), block


def test_every_test_is_there(root: Path) -> None:
    for block, (_, tests) in rows(root).items():
        assert tests, block
        for test in tests:
            file, _, name = test.partition("::")
            assert f"def {name}(" in (root / file).read_text(), (block, test)


def test_the_readmes_program_is_the_blocks(root: Path) -> None:
    program = (root / "tests/data/programs/aissemble_readme.txt").read_text()
    for number in (2, 3):
        assert (root / f"tests/data/documents/aissemble/{number}.txt").read_text().strip() in program


@pytest.mark.parametrize("page", BLOCKS)
def test_blocks_are_not_empty(root: Path, page: str) -> None:
    assert all(path.read_text().strip() for path in (root / "tests/data/documents" / page).iterdir())
