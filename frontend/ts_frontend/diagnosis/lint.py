"""Checks of an opened archive without running it: its files, compared with its manifest, and its handler's imports
(names of `ts` that this server lacks, modules that aren't installed). Blocking."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import ts.version
from ts_frontend.config.files import read_file
from ts_frontend.config.table import ServerConfig
from ts_frontend.diagnosis.report import Section
from ts_frontend.models.archive import Archive

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
        for one in _imports_of(tree.body):
            first = one.module.partition(".")[0]
            if first == "ts" and not _provides(one.module, one.name):
                lacking.append(Missing(file, one.line, one.module, one.name))
        for one in _imports_of(tree.body, eager=True):
            first = one.module.partition(".")[0]
            if first != "ts" and not _there(first, (directory, path.parent)):
                others.setdefault(first, Missing(file, one.line, first))
    return lacking, list(others.values())


def _parsed(path: Path) -> ast.Module | None:
    try:
        if path.stat().st_size > SOURCE_BYTES_MAX:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _imports_of(body: list[ast.stmt], *, eager: bool = False) -> Iterator[_Import]:
    """The absolute imports in statements and in the statements inside them. `eager`: without those in functions."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (_Import(one.name, "", node.lineno) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module and not node.level:
                yield from (_Import(node.module, one.name, node.lineno) for one in node.names)
        elif not _is_guarded(node) and not (eager and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            for name in ("body", "orelse", "finalbody"):
                yield from _imports_of(getattr(node, name, []), eager=eager)


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


BUILT_IN = Path(ts.version.__file__).parent / "torch_handler"
#: Files of Hugging Face that may name code.
_NAMING_CODE = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_CONFIG_NAMES = ("model-config.yaml", "model_config.yaml", "model-config.yml", "model_config.yml")


def lint(section: Section, archive: Archive, config: ServerConfig, *, loads: bool) -> None:
    """Adds the faults in the files of one of TorchServe's archives. The files of other servers' models are read when
    the server opens them. `loads`: a worker will load the archive, and report failed imports itself."""
    if archive.adapter:
        return
    _files(section, archive)
    _brought_code(section, archive)
    _config_file(section, archive)
    _requirements(section, archive, config)
    _handler(section, archive, config)
    _imports(section, archive, config, loads)


def _files(section: Section, archive: Archive) -> None:
    for member, name in (
        ("modelFile", archive.model_file),
        ("serializedFile", archive.serialized_file),
        ("requirementsFile", archive.requirements_file),
    ):
        if name and not (archive.dir / name).exists():
            section.error("manifest", f"{member} is {name}, which isn't in the archive{_meant(name, archive.dir)}")


def _brought_code(section: Section, archive: Archive) -> None:
    """Adds which code of a folder of Hugging Face, or of another repository of the hub, its handler would run."""
    if archive.handler not in ("transformers_handler", "vllm_handler"):
        return
    code = sorted({name for file in _NAMING_CODE for name in _code_named_in(archive.dir / file)})
    if not code:
        return
    names = ", ".join(code)
    section_of = archive.config.get("handler")
    settings = {**(section_of if isinstance(section_of, dict) else {}), **archive.handler_settings}
    if settings.get("trustRemoteCode") or (settings.get("vllm_engine_config") or {}).get("trust_remote_code"):
        section.warn("code", f"trustRemoteCode is true: the model's own code runs in the worker: {names}")
    else:
        section.ok("code", f"the model brings code, which isn't run without trustRemoteCode: {names}")


def _code_named_in(file: Path) -> Iterator[str]:
    """The code that `auto_map` names: `FILE.py: CLASS`, with the repository if it is another one."""
    try:
        named = json.loads(read_file(file, SOURCE_BYTES_MAX))["auto_map"]
        values = list(named.values()) if isinstance(named, dict) else [named]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return
    for value in values:
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str) and "." in one:
                repository, found, place = one.rpartition("--")
                module, _, name = place.rpartition(".")
                yield f"{module}.py: {name}{f' (of {repository})' if found else ''}"


def _config_file(section: Section, archive: Archive) -> None:
    if archive.config_file:
        if not (archive.dir / archive.config_file).exists():
            meant = _meant(archive.config_file, archive.dir)
            section.error("manifest", f"configFile is {archive.config_file}, which isn't in the archive{meant}")
        return
    for name in _CONFIG_NAMES:
        if (archive.dir / name).is_file():
            text = f"{name} is in the archive, and its manifest doesn't name it: it has no effect. Pack it with "
            section.warn(name, f"{text}torch-model-archiver --config-file {name}")


def _requirements(section: Section, archive: Archive, config: ServerConfig) -> None:
    name = archive.requirements_file
    if not name or config.install_py_dep_per_model or archive.config.get("useVenv") is True:
        return
    section.warn(
        name,
        "this server doesn't install it: install_py_dep_per_model isn't true, and model-config.yaml has no "
        "useVenv: true (docs/environments.md)",
    )


def _handler(section: Section, archive: Archive, config: ServerConfig) -> None:
    handler = archive.handler or config.default_service_handler
    if not handler:
        section.error("manifest", "names no handler, and default_service_handler is not set (model: handler)")
        return
    path = handler.partition(":")[0]
    name = os.path.basename(path).removesuffix(".py")
    found = [file for file in _places(archive.dir, path, name) if file.is_file()]
    if found:
        _source(section, found[0])
    elif not (BUILT_IN / f"{name}.py").is_file() and not _importable(name):
        text = f"{handler} is not in the archive, and there is no built-in handler of that name"
        section.error("handler", text + _meant(name, archive.dir, BUILT_IN, suffix=".py"))


def _places(directory: Path, path: str, name: str) -> Iterator[Path]:
    """The files that a worker finds for the handler: in its own folder, which is on the import path, or at the root."""
    yield directory / f"{name}.py"
    yield directory / os.path.dirname(path) / f"{name}.py"
    yield directory / name / "__init__.py"


def _source(section: Section, file: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as an escape in a string that Python doesn't know
            compile(file.read_bytes(), file.name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        detail = [str(error.text).rstrip()] if isinstance(error, SyntaxError) and error.text else []
        section.error("handler", f"{file.name}{line}: {type(error).__name__}: {text}", detail)


def _imports(section: Section, archive: Archive, config: ServerConfig, loads: bool) -> None:
    lacking, others = missing(archive.dir)
    for one in lacking:
        section.error("imports", f"{one.file}, line {one.line}: this server has no {one.dotted} (docs/ts-package.md)")
    brought = archive.requirements_file and (config.install_py_dep_per_model or archive.config.get("useVenv") is True)
    for one in others if not (brought or loads) else ():
        section.warn(
            "imports", f"{one.file}, line {one.line}: {one.module} isn't installed in this Python, {sys.executable}"
        )
    handler = f"ts.torch_handler.{(archive.handler or '').partition(':')[0]}"
    if handler in REFUSING:
        section.error("imports", f"{archive.handler} needs a runtime that this server doesn't have")


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _meant(name: str, *folders: Path, suffix: str = "") -> str:
    """`; did you mean X?` for the file most like that name in the folders, or nothing."""
    known = sorted(
        file.name.removesuffix(suffix)
        for folder in folders
        for file in folder.glob(f"*{suffix}")
        if file.is_file() and not file.name.startswith("_")
    )
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
