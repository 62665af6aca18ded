"""Renewal of a loaded handler from newer source files: the check whether its loaded state is still valid, and the
update of its code.

The loaded state is the work of the functions that ran during the load. It stays valid as long as these functions, and
the names that they use of their files, are unchanged; comments, layout and docstrings don't matter. Everything else may
change: then the statements at the top of a file that are new or changed run in its module, functions and classes get
the new code in place, so that existing objects have it too, and values with an unchanged assignment stay.

Modules of a folder that is being written are compiled at each import (`SourceImports`).
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
IMPORTS = (ast.Import, ast.ImportFrom)
#: The limits of the search in a model's folder.
DEPTH_MAX, FILES_MAX = 8, 5000
#: The attributes that belong to a class itself.
OWN = frozenset({"__dict__", "__weakref__", "__module__", "__firstlineno__", "__static_attributes__"})


class SourceFile(NamedTuple):
    """A file of a model, parsed. `defined`: functions and classes by qualified name, without those inside of
    functions; `bound`: the other statements at the top by the names that they bind; `free`: those that bind none."""

    path: str
    text: str
    body: list[ast.stmt]
    defined: dict[str, ast.stmt]
    bound: dict[str, list[ast.stmt]]
    free: list[ast.stmt]

    @staticmethod
    def of(path: str, text: str) -> SourceFile:
        """Raises SyntaxError."""
        tree: Any = compile(text, path, "exec", ast.PyCF_ONLY_AST)  # without a frame of ast.py in its traceback
        body: list[ast.stmt] = tree.body
        defined = dict(_definitions(body, ""))
        bound: dict[str, list[ast.stmt]] = {}
        free = []
        for statement in body:
            if isinstance(statement, DEFINITIONS):
                continue
            names = _bindings(statement)
            for name in names:
                bound.setdefault(name, []).append(statement)
            if not names and not _idle(statement):
                free.append(statement)
        return SourceFile(path, text, body, defined, bound, free)


def _definitions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, DEFINITIONS):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body, f"{prefix}{node.name}.")


def _bindings(statement: ast.stmt) -> list[str]:
    if isinstance(statement, IMPORTS):
        return [(one.asname or one.name).partition(".")[0] for one in statement.names]
    found = [
        node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    ]
    inner = [node for node in ast.walk(statement) if isinstance(node, IMPORTS)]
    return found + [name for one in inner for name in _bindings(one)]


def _idle(statement: ast.stmt) -> bool:
    """Whether a statement has no effect on an import: a docstring, or code that only runs in a program."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True
    return isinstance(statement, ast.If) and "__main__" in ast.unparse(statement.test)


def _said(node: ast.AST) -> str:
    """A node's content, without docstrings and positions."""
    node = ast.parse(ast.unparse(node))
    for one in ast.walk(node):
        body = getattr(one, "body", None)
        if isinstance(one, DEFINITIONS) and isinstance(body, list) and _idle(body[0]):
            body[0] = ast.Pass()
    return ast.dump(node)


def _shell(node: ast.ClassDef) -> str:
    """A class's content, without its functions."""
    return _said(_without_functions(node))


def _without_functions(node: ast.ClassDef) -> ast.ClassDef:
    body = [one for one in node.body if not isinstance(one, FUNCTIONS) and not _idle(one)]
    shell = ast.ClassDef(**{**dict(ast.iter_fields(node)), "body": body or [ast.Pass()]})
    return ast.fix_missing_locations(shell)


def _used(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


# --- imports


class SourceImports:
    """Makes modules of a folder be imported from their source files only, from `begin` to `end`. Python's bytecode
    cache doesn't notice a change of a file within the same second and of the same size."""

    def __init__(self, folder: str) -> None:
        self._root = os.path.join(os.path.realpath(folder), "")

    def begin(self) -> None:
        sys.path_hooks.insert(0, self._finder)
        self._forget()

    def end(self) -> None:
        sys.path_hooks.remove(self._finder)
        self._forget()

    def _forget(self) -> None:
        for path in list(sys.path_importer_cache):
            if self._has(path):
                del sys.path_importer_cache[path]

    def _has(self, path: str) -> bool:
        return os.path.join(os.path.realpath(path), "").startswith(self._root)

    def _finder(self, path: str) -> FileFinder:
        """Raises ImportError for other folders, so that Python uses the next hook."""
        if not (self._has(path) and os.path.isdir(path)):
            raise ImportError
        return FileFinder(
            path,
            (ExtensionFileLoader, EXTENSION_SUFFIXES),
            (_SourceLoader, SOURCE_SUFFIXES),
            (SourcelessFileLoader, BYTECODE_SUFFIXES),
        )


class _SourceLoader(SourceFileLoader):
    """A loader without a bytecode cache."""

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError(f"{path} is compiled at each import")


# --- while it is loaded


class Loading:
    """The functions that run while a model is loaded, and the source files of its modules."""

    def __init__(self, model_dir: str) -> None:
        self._root = os.path.join(os.path.realpath(model_dir), "")
        self._codes: set[CodeType] = set()
        self._before = self._times()
        self.sources: dict[str, SourceFile] = {}
        #: Qualified names of the functions that ran, by file; and the names of all that ran, wherever they are.
        self.ran: dict[str, set[str]] = {}
        self.names: set[str] = set()
        self._torn = ""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Records the functions that run in the block."""
        codes = self._codes

        def note(frame: Any, event: str, argument: Any) -> None:
            if event == "call":
                codes.add(frame.f_code)

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(before)
            self._settle()

    def _settle(self) -> None:
        now = self._times()
        for path in self.modules():
            if now.get(path) != self._before.get(path):
                self._torn = f"{os.path.basename(path)} was saved while the model was loaded"
            try:
                self.sources[path] = SourceFile.of(path, read(path))
            except SyntaxError as error:  # of a save, since it was imported
                self._torn = f"{os.path.basename(path)} was saved while the model was loaded: {error}"
        lines = {path: _by_line(source) for path, source in self.sources.items()}
        for code in self._codes:
            self.names.add(code.co_name)
            path = os.path.realpath(code.co_filename)
            name = lines.get(path, {}).get((code.co_firstlineno, code.co_name))
            if name is not None:
                self.ran.setdefault(path, set()).add(name)
        self._codes.clear()

    def _times(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for folder, folders, files in os.walk(self._root):
            deep = folder.count(os.sep) - self._root.count(os.sep) >= DEPTH_MAX
            folders[:] = [] if deep or len(found) > FILES_MAX else [one for one in folders if one[0] not in "._"]
            for name in files:
                if name.endswith(".py"):
                    path = os.path.join(folder, name)
                    with suppress(OSError):
                        at = os.stat(path)
                        found[path] = (at.st_mtime_ns, at.st_size)
        return found

    def modules(self) -> dict[str, ModuleType]:
        found = {}
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            path = os.path.realpath(file) if isinstance(file, str) else ""
            if path.startswith(self._root) and path.endswith(".py"):
                found[path] = module
        return found

    # --- later

    def changed(self) -> dict[str, str]:
        found = {path: read(path) for path in self.sources}
        return {path: text for path, text in found.items() if text != self.sources[path].text}

    def refusal(self) -> str:
        """The reason why the loaded state isn't valid for the present files; "" if it is. A syntax error is no
        reason, because it fails the worker that imports the file."""
        if self._torn:
            return self._torn
        changed = self.changed()
        new: dict[str, SourceFile] = {}
        for path, old in self.sources.items():
            try:
                new[path] = SourceFile.of(path, changed[path]) if path in changed else old
            except SyntaxError:
                new[path] = old
        return next(_Comparison(self, new).reasons(), "")


def read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""


def _by_line(source: SourceFile) -> dict[tuple[int, str], str]:
    found = {}
    for name, node in source.defined.items():
        if isinstance(node, FUNCTIONS):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            found[first, node.name] = name
    return found


class _Comparison:
    """The loaded files compared with the present ones: the reasons why the loaded state isn't valid any more."""

    def __init__(self, loading: Loading, new: Mapping[str, SourceFile]) -> None:
        self._loading, self._old, self._new = loading, loading.sources, new
        self._seen: set[tuple[str, str]] = set()

    def reasons(self) -> Iterator[str]:
        for path, old in self._old.items():
            file, new = os.path.basename(path), self._new[path]
            if [_said(one) for one in old.free] != [_said(one) for one in new.free]:
                yield f"a statement at the top of {file} has changed"
            for name in sorted(self._loading.ran.get(path, ())):
                node = new.defined.get(name)
                if node is None or _said(node) != _said(old.defined[name]):
                    yield f"{name} in {file}, which loads the model, has changed"
                yield from self._of_class(path, name.rpartition(".")[0])
                yield from self._of_names(path, _used(old.defined[name]))

    def _of_names(self, path: str, names: set[str]) -> Iterator[str]:
        for name in sorted(names):
            if (path, name) not in self._seen:
                self._seen.add((path, name))
                yield from self._of_class(path, name)
                yield from self._of_binding(path, name)

    def _of_class(self, path: str, name: str) -> Iterator[str]:
        old, new = self._old[path].defined.get(name), self._new[path].defined.get(name)
        if not isinstance(old, ast.ClassDef):
            return
        where = f"class {name} in {os.path.basename(path)}"
        if not isinstance(new, ast.ClassDef) or _shell(old) != _shell(new):
            yield f"{where}, which is used while the model is loaded, has changed"
            return
        methods = [{one.name for one in node.body if isinstance(one, FUNCTIONS)} for node in (old, new)]
        differ = methods[0] ^ methods[1]
        special = {one for one in differ if one.startswith("__") and one != "__call__"}
        for one in sorted(differ & self._loading.names | special):
            yield f"{where} has {'lost' if one in methods[0] else 'got'} {one}, which may load the model"
        yield from self._of_names(path, _used(_without_functions(old)))

    def _of_binding(self, path: str, name: str) -> Iterator[str]:
        old, new = (source[path].bound.get(name, []) for source in (self._old, self._new))
        if [_said(one) for one in old] != [_said(one) for one in new]:
            yield f"{name} in {os.path.basename(path)}, which is used while the model is loaded, has changed"
        for statement in old:
            if isinstance(statement, IMPORTS):
                yield from self._of_import(statement)
            yield from self._of_names(path, _used(statement) - {name})

    def _of_import(self, statement: ast.Import | ast.ImportFrom) -> Iterator[str]:
        module = (statement.module or "") if isinstance(statement, ast.ImportFrom) else ""
        for one in statement.names:
            for other in self._old:
                name = os.path.splitext(os.path.basename(other))[0]
                if isinstance(statement, ast.ImportFrom) and name == module.rpartition(".")[2]:
                    yield from self._of_names(other, {one.name} if one.name != "*" else set(self._old[other].bound))
                elif name == one.name.rpartition(".")[2]:
                    yield from self._of_names(other, set(self._old[other].bound))


# --- the new code


def renew(loading: Loading) -> bool:
    """Gives the imported modules the code of their present files; True when any has changed. Exceptions of new
    statements, and SyntaxError, pass through."""
    changed = loading.changed()
    if not changed:
        return False
    modules = loading.modules()
    replaced: dict[int, tuple[object, object]] = {}
    for path, module in modules.items():
        if path in changed:
            replaced |= _renew_module(module, loading.sources[path], SourceFile.of(path, changed[path]))
    for module in modules.values():
        for name, value in list(vars(module).items()):
            if id(value) in replaced and value is replaced[id(value)][0]:
                setattr(module, name, replaced[id(value)][1])
    linecache.clearcache()
    return True


def _renew_module(module: ModuleType, old: SourceFile, new: SourceFile) -> dict[int, tuple[object, object]]:
    """Runs the new statements in the module; returns the replaced objects by id, with their replacements."""
    values = vars(module)
    before = {name: values[name] for name in old.defined if name in values}
    for name in [*old.bound, *before]:
        if name not in new.bound and name not in new.defined:
            values.pop(name, None)
    body = _to_run(old, new)
    exec(compile(ast.Module(body=body, type_ignores=[]), new.path, "exec"), values)  # noqa: S102 (the handler, as an import does)
    replaced: dict[int, tuple[object, object]] = {}
    for name, was in before.items():
        now = values.get(name)
        if now is None or now is was:
            continue
        if _taken_over(was, now):
            values[name] = was
        else:
            replaced[id(was)] = (was, now)
    return replaced


def _to_run(old: SourceFile, new: SourceFile) -> list[ast.stmt]:
    """Definitions, imports, changed statements, and those that use a name which a changed one binds."""
    known = {_said(one) for one in old.body if not isinstance(one, DEFINITIONS)}
    fresh: set[str] = set()
    body: list[ast.stmt] = []
    for statement in new.body:
        if isinstance(statement, (*DEFINITIONS, *IMPORTS)):
            body.append(statement)
        elif not _idle(statement) and (_said(statement) not in known or _used(statement) & fresh):
            fresh.update(_bindings(statement))
            body.append(statement)
    return body


def _taken_over(was: object, now: object) -> bool:
    """Gives `was` the code of `now`; False when that can't be done in place."""
    if isinstance(was, FunctionType) and isinstance(now, FunctionType):
        return _function_taken_over(was, now)
    if inspect.isclass(was) and inspect.isclass(now):
        bases = [[(one.__module__, one.__qualname__) for one in each.__bases__] for each in (was, now)]
        if bases[0] != bases[1] or type(was) is not type(now) or "__slots__" in {*vars(was), *vars(now)}:
            return False
        _class_taken_over(was, now)
        return True
    return False


def _function_taken_over(was: FunctionType, now: FunctionType) -> bool:
    if was.__code__.co_freevars != now.__code__.co_freevars:
        return False
    if was.__closure__ and set(was.__code__.co_freevars) != {"__class__"}:
        return False  # a decorator's, which has the function in a cell
    was.__code__, was.__defaults__, was.__kwdefaults__ = now.__code__, now.__defaults__, now.__kwdefaults__
    was.__doc__, was.__annotations__ = now.__doc__, now.__annotations__
    was.__dict__.clear()
    was.__dict__.update(now.__dict__)
    return True


def _class_taken_over(was: type, now: type) -> None:
    """Gives a class a new one's code. `super()` in the new functions uses a cell, set to the old class."""
    for value in vars(now).values():
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        function = inspect.unwrap(inner) if callable(inner) else inner
        if isinstance(function, FunctionType) and "__class__" in function.__code__.co_freevars:
            cell = (function.__closure__ or ())[function.__code__.co_freevars.index("__class__")]
            cell.cell_contents = was
    for name in [one for one in vars(was) if one not in vars(now) and one not in OWN]:
        delattr(was, name)
    for name, value in list(vars(now).items()):
        if name in OWN:
            continue
        if name not in vars(was) or not _taken_over(vars(was)[name], value):
            setattr(was, name, value)
