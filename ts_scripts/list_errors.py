"""Lists every kind of error, with its statuses, message forms and remedy, from the code into docs/errors.md.

Usage: python ts_scripts/list_errors.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "frontend/ts_frontend"
PAGE = ROOT / "docs/errors.md"
BEGIN, END = "<!-- errors: listed by ts_scripts/list_errors.py -->\n", "<!-- end of errors -->"
#: The packages whose errors end a command or a start, and reach no client.
OF_STARTS = ("authorization", "cli", "config", "listeners", "process.py", "server.py")
#: The least fixed text of a form; with less, it says nothing.
FORM_CHARACTERS_MIN = 8
#: The most messages that a kind lists. Of a kind with more, each says by itself what is wrong with which value.
FORMS_MAX = 10


#: A docstring's sentence about an attribute, which readers of the page can't see.
ATTRIBUTE = re.compile(r" ?`\w+`: [^.]*\.")


class Kind(NamedTuple):
    """A class of errors. `forms`: its messages, with `{…}` in place of values."""

    name: str
    of_start: bool
    http_status: str
    type_name: str
    code: str
    doc: str
    remedy: str
    forms: list[str]


def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py")) if "_pb2" not in path.name}


def kinds(found: dict[Path, ast.Module]) -> dict[str, Kind]:
    """The public subclasses of ServeError by name, read from the classes themselves."""
    sys.path[:0] = [str(ROOT / "frontend"), str(ROOT / "worker")]
    errors = importlib.import_module("ts_frontend.errors")
    listed: dict[str, Kind] = {}
    bases = {"ServeError"}
    pending = [(path, node) for path, tree in found.items() for node in tree.body if isinstance(node, ast.ClassDef)]
    while ready := [(path, node) for path, node in pending if bases & {ast.unparse(base) for base in node.bases}]:
        for path, node in ready:
            bases.add(node.name)
            pending.remove((path, node))
            module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            kind = getattr(importlib.import_module(module), node.name)
            assert issubclass(kind, errors.ServeError)
            part = path.relative_to(PACKAGE).parts[0]
            listed[node.name] = Kind(
                node.name,
                part in OF_STARTS,
                "varies" if sets(node, "http_status") else str(kind.http_status),
                kind.type_name,
                "varies" if sets(node, "code") else kind.code.name,
                ATTRIBUTE.sub("", (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")),
                kind.remedy,
                [form for call in super_calls(node) for form in forms(call)],
            )
    for tree in found.values():
        for call in ast.walk(tree):
            name = called(call)
            if name in listed and isinstance(call, ast.Call):
                one = listed[name]
                one.forms.extend(form for form in forms(call) if form not in one.forms)
    return listed


def super_calls(node: ast.ClassDef) -> Iterator[ast.Call]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__":
            yield call


def sets(node: ast.ClassDef, name: str) -> bool:
    """Whether each error of the kind has its own value for an attribute."""
    return any(
        isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and one.attr == name for one in ast.walk(node)
    )


def called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def forms(call: ast.Call) -> Iterator[str]:
    """The message in a call, if the call contains it as text."""
    for argument in call.args[:1]:
        for text in texts(argument):
            own = text.replace("{…}", "")
            if len(own.strip()) >= FORM_CHARACTERS_MIN and " " in own.strip():
                yield " ".join(text.split())


def texts(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else value(part) for part in node.values)  # type: ignore[misc]
    elif isinstance(node, ast.BoolOp):
        yield from (text for one in node.values for text in texts(one))
    elif isinstance(node, ast.IfExp):
        yield from (*texts(node.body), *texts(node.orelse))


def value(part: ast.expr) -> str:
    """A placeholder for a value in a message, with its name if it has one."""
    assert isinstance(part, ast.FormattedValue)
    inner = part.value
    if isinstance(inner, ast.Name):
        return f"{{{inner.id}}}" if not inner.id.startswith("_") else "{…}"
    if isinstance(inner, ast.Attribute):
        return f"{{{inner.attr.lstrip('_')}}}"
    return "{…}"


def page(listed: dict[str, Kind]) -> Iterator[str]:
    """The generated part of the page, line by line."""
    of_calls = sorted((one for one in listed.values() if not one.of_start), key=lambda one: (one.http_status, one.name))
    of_starts = sorted((one for one in listed.values() if one.of_start), key=lambda one: one.name)
    for status, kinds_of_status in itertools.groupby(of_calls, lambda one: one.http_status):
        yield f"\n## HTTP {status}"
        for one in kinds_of_status:
            yield from described(one, f"`{one.type_name}`, {one.code}.")
    yield "\n## What ends a start or a command"
    for one in of_starts:
        yield from described(one)


def described(one: Kind, *answer: str) -> Iterator[str]:
    yield f"\n### {one.name}\n"
    yield " ".join(filter(None, (*answer, one.doc, f"**Remedy:** {one.remedy}")))
    if len(one.forms) > FORMS_MAX:
        yield f"\nIts {len(one.forms)} messages name the value at fault, and what is allowed."
    elif one.forms:
        yield ""
        yield from (f"- `{form.replace('`', chr(39))}`" for form in sorted(one.forms))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if the page is out of date")
    check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    new = before + BEGIN + "\n".join(page(kinds(trees()))) + "\n" + END + rest.partition(END)[2]
    if check and new != text:
        print(f"{PAGE.relative_to(ROOT)} is out of date: run {Path(sys.argv[0]).name}", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
