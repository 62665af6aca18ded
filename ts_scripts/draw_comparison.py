"""Draws the comparison with other servers, of docs/benchmarks.md, into docs/images/comparison.svg, for the README.

Usage: python ts_scripts/draw_comparison.py [--check]
"""

from __future__ import annotations

import argparse
import re
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE, PICTURE = ROOT / "docs/benchmarks.md", ROOT / "docs/images/comparison.svg"
SECTION, LOAD = "## A handler that returns at once, over HTTP/1.1", "64 clients"
#: The rows that are drawn, with their names: servers with TorchServe's kind of handler.
NAMES = {
    "compiled": "torchrelay, compiled",
    "mosec": "mosec",
    "ours": "torchrelay",
    "torchserve": "TorchServe",
    "litserve": "LitServe",
}
LEFT, WIDTH, ROW = 170, 640, 30


def rates(page: str) -> dict[str, int]:
    """Answered requests a second, by the row's name."""
    section = page.partition(SECTION + "\n")[2].partition("\n## ")[0]
    rows = re.findall(rf"^\| {LOAD} \| `([\w-]+)` \| ([\d,]+) ", section, re.MULTILINE)
    return {name: int(rate.replace(",", "")) for name, rate in rows}


def drawn(found: dict[str, int]) -> str:
    """The picture: a bar for each server, the fastest first."""
    shown = sorted(NAMES, key=lambda name: -found[name])
    unit = (WIDTH - LEFT - 90) / found[shown[0]]
    height = ROW * len(shown) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="14" role="img">',
        "<title>Requests a second of a handler that returns at once, over HTTP/1.1, 64 clients, one worker</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="10" y="22" fill="#444444">Requests a second: HTTP/1.1, 64 clients, one worker, two cores</text>',
    ]
    for index, name in enumerate(shown):
        top, width = 36 + ROW * index, max(1, round(found[name] * unit))
        colour = "#0f766e" if NAMES[name].startswith("torchrelay") else "#94a3b8"
        lines += [
            f'<text x="{LEFT - 10}" y="{top + 16}" text-anchor="end" fill="#111111">{escape(NAMES[name])}</text>',
            f'<rect x="{LEFT}" y="{top}" width="{width}" height="{ROW - 8}" fill="{colour}"/>',
            f'<text x="{LEFT + width + 8}" y="{top + 16}" fill="#111111">{found[name]:,}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if the picture isn't that of the page")
    picture = drawn(rates(PAGE.read_text()))
    if not parser.parse_args().check:
        PICTURE.write_text(picture)
    elif PICTURE.read_text() != picture:
        sys.exit("docs/images/comparison.svg is not that of docs/benchmarks.md: run ts_scripts/draw_comparison.py")


if __name__ == "__main__":
    main()
