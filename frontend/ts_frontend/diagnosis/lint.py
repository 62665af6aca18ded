"""Checks of an opened archive without running it: its files, compared with its manifest. Blocking."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import ts.version
from ts_frontend.config.table import ServerConfig
from ts_frontend.diagnosis.imports import REFUSING, missing
from ts_frontend.diagnosis.report import Section
from ts_frontend.models.archive import Archive

BUILT_IN = Path(ts.version.__file__).parent / "torch_handler"
_CONFIG_NAMES = ("model-config.yaml", "model_config.yaml", "model-config.yml", "model_config.yml")


def lint(section: Section, archive: Archive, config: ServerConfig, *, loads: bool) -> None:
    """Adds the faults in the files of one of TorchServe's archives. The files of other servers' models are read when
    the server opens them. `loads`: a worker will load the archive, and report failed imports itself."""
    if archive.adapter:
        return
    _files(section, archive)
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


def _config_file(section: Section, archive: Archive) -> None:
    """Adds a warning about a configuration that has no effect because the manifest doesn't name it."""
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
    """Compares the imports of the archive's modules with the installed ones, except for modules that a
    requirements file may install."""
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
