"""Draws the imports between the packages of the frontend, read from the code, into docs/architecture.md, with the
subject of each package, from its docstring.

Usage: python ts_scripts/draw_packages.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FRONTEND = ROOT / "frontend/ts_frontend"
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- packages: drawn by ts_scripts/draw_packages.py -->\n```text\n", "```\n<!-- end of packages -->"


def part_of(path: Path) -> str:
    """The package of a file of the frontend, or the name of a module at its root."""
    first = path.relative_to(FRONTEND).parts[0]
    return first.removesuffix(".py")


def imported(tree: ast.Module) -> Iterator[str]:
    """The parts of the frontend that a module imports when it runs."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        left += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and node.module:
            names = node.module.split(".")
            if names[0] == "ts_frontend":
                yield from [names[1]] if len(names) > 1 else [alias.name for alias in node.names]


def packages() -> dict[str, set[str]]:
    """Each part of the frontend with the parts that it imports."""
    found: dict[str, set[str]] = {}
    for path in sorted(FRONTEND.rglob("*.py")):
        part = part_of(path)
        if part not in ("__init__", "protos"):
            found.setdefault(part, set()).update(imported(ast.parse(path.read_text())))
    return {part: {other for other in others if other in found and other != part} for part, others in found.items()}


def reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """The direct and indirect imports of a part."""
    return graph[start] | {far for near in graph[start] for far in reached(graph, near)}


def levels(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The parts from the top to the bottom; each imports only from lines below its own."""
    height: dict[str, int] = {}

    def measure(part: str) -> int:
        if part not in height:
            height[part] = 1 + max((measure(other) for other in graph[part]), default=0)
        return height[part]

    for part in graph:
        measure(part)
    return [sorted(part for part in graph if height[part] == one) for one in sorted(set(height.values()), reverse=True)]


def subject(part: str) -> str:
    """The first sentence of a part's docstring, without its full stop: "Logs, metrics and traces"."""
    place = FRONTEND / part
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    text = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split())
    return text.partition(". ")[0].removesuffix(".")


def drawing(graph: Mapping[str, set[str]]) -> str:
    """A line for each part, top first: its name, an arrow to its direct imports without those that another import
    already reaches, and its subject."""
    lines = []
    for level in levels(graph):
        for part in level:
            direct = {one for one in graph[part] if not any(one in reached(graph, other) for other in graph[part])}
            arrow = f"-> {' '.join(sorted(direct))}" if direct else ""
            lines.append(f"{part:14} {arrow:42} {subject(part)}".rstrip())
    return "\n".join(lines) + "\n"


def page() -> str:
    """docs/architecture.md as it should be."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}{drawing(packages())}{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the packages of the frontend into docs/architecture.md.")
    parser.add_argument("--check", action="store_true", help="only say whether the drawing is out of date")
    wanted = page()
    if not parser.parse_args().check:
        PAGE.write_text(wanted)
    elif PAGE.read_text() != wanted:
        sys.exit("docs/architecture.md is out of date: python ts_scripts/draw_packages.py")


if __name__ == "__main__":
    main()
