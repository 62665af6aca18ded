"""The imports of a handler's source, read without running it: names of `ts` that this server lacks, and modules
that aren't installed. Blocking."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import ts.version

PACKAGE = Path(ts.version.__file__).parent
#: The largest module that is read, and the most modules of an archive.
SOURCE_BYTES_MAX = 1 << 20
SOURCES_MAX = 200
#: Modules of TorchServe that exist only to say why they can't be used.
REFUSING = frozenset({"ts.torch_handler.trt_llm_handler", "ts.torch_handler.dali_handler"})
_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


class Missing(NamedTuple):
    """A name that an import doesn't find: a `module`, or a `name` in it. `line` counts from 1."""

    file: str
    line: int
    module: str
    name: str = ""

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


class _Import(NamedTuple):
    module: str
    name: str
    line: int


def missing(directory: Path) -> tuple[list[Missing], list[Missing]]:
    """The missing names in the imports of a folder's modules: names of `ts` that this server lacks, and other modules
    that neither the folder nor this Python has. Imports that a `try` provides for are left out; for other modules
    than `ts`, so are imports inside functions."""
    lacking: list[Missing] = []
    others: dict[str, Missing] = {}
    for path in sorted(directory.rglob("*.py"))[:SOURCES_MAX]:
        tree = _parsed(path)
        if tree is None:
            continue
        file = str(path.relative_to(directory))
        for one in _imports(tree.body):
            first = one.module.partition(".")[0]
            if first == "ts" and not _provides(one.module, one.name):
                lacking.append(Missing(file, one.line, one.module, one.name))
        for one in _imports(tree.body, eager=True):
            first = one.module.partition(".")[0]
            if first != "ts" and not _there(first, (directory, path.parent)):
                others.setdefault(first, Missing(file, one.line, first))
    return lacking, list(others.values())


def _parsed(path: Path) -> ast.Module | None:
    """The syntax tree of a file; None if it isn't Python or is too large."""
    try:
        if path.stat().st_size > SOURCE_BYTES_MAX:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _imports(body: list[ast.stmt], *, eager: bool = False) -> Iterator[_Import]:
    """The absolute imports in statements and in the statements inside them. `eager`: without those in functions."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (_Import(one.name, "", node.lineno) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module and not node.level:
                yield from (_Import(node.module, one.name, node.lineno) for one in node.names)
        elif not _is_guarded(node) and not (eager and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            for name in ("body", "orelse", "finalbody"):
                yield from _imports(getattr(node, name, []), eager=eager)


def _is_guarded(node: ast.stmt) -> bool:
    """Whether a failed import in the statement is harmless: it is caught, or only a type checker runs it."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.Try) and any(_catches(one) for one in node.handlers)


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    return any(isinstance(one, ast.Name) and one.id in _IMPORT_ERRORS for one in ast.walk(handler.type))


def _provides(module: str, name: str) -> bool:
    """Whether this server's `ts` has the module, and in it the name ("" for the module alone)."""
    file = _file_of(module)
    if file is None:
        return False
    if not name or name == "*" or _file_of(f"{module}.{name}") is not None:
        return True
    names = _names(file)
    return "__getattr__" in names or "*" in names or name in names


def _file_of(module: str) -> Path | None:
    base = PACKAGE.joinpath(*module.split(".")[1:])
    return next((one for one in (base.with_suffix(".py"), base / "__init__.py") if one.is_file()), None)


@functools.cache
def _names(file: Path) -> frozenset[str]:
    """The names that a module of ours binds at its top level; `*` for an import of everything."""
    found: set[str] = set()
    pending: list[ast.AST] = list(ast.parse(file.read_bytes()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((one.asname or one.name).partition(".")[0] for one in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        else:
            pending += ast.iter_child_nodes(node)
    return frozenset(found)


def _there(first: str, folders: tuple[Path, ...]) -> bool:
    if first in sys.stdlib_module_names or any(
        (folder / f"{first}.py").is_file() or (folder / first).is_dir() for folder in folders
    ):
        return True
    try:
        return importlib.util.find_spec(first) is not None
    except (ImportError, ValueError):
        return False
