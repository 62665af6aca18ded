"""The invariants of the architecture, read from the source: who imports what, who begins tasks, what is never read.
Each test names the files that break its rule."""

from __future__ import annotations

import ast
import functools
import gc
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SHIMS = "worker/ts/compat/shims/"


@functools.cache
def modules(top: str) -> dict[str, ast.Module]:
    """Every module under a folder, by its path from the repository's root; generated ones are left out."""
    files = sorted((ROOT / top).rglob("*.py"))
    return {str(f.relative_to(ROOT)): parsed(f) for f in files if "_pb2" not in f.name}


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a tree. A walk takes much longer than a loop over its result."""
    return tuple(ast.walk(tree))


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """The trees of all modules are millions of objects, which each collection would go through, also in later
    tests."""
    gc.disable()
    yield
    for kept in (modules, parsed, nodes, imports, calls, graph):
        kept.cache_clear()
    gc.enable()


def worker() -> dict[str, ast.Module]:
    return modules("worker/ts")


def frontend() -> dict[str, ast.Module]:
    return modules("frontend/ts_frontend")


@functools.cache
def imports(tree: ast.Module) -> frozenset[str]:
    """Dotted names that are imported anywhere in it; `from a.b import c` gives `a.b` and `a.b.c`."""
    return frozenset(imported(nodes(tree)))


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def eager(tree: ast.Module) -> ast.Module:
    """The statements that run when the module is imported: no bodies of functions and methods, no TYPE_CHECKING."""
    kept: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        kept += eager(ast.Module(body=node.body, type_ignores=[])).body if isinstance(node, ast.ClassDef) else [node]
    return ast.Module(body=kept, type_ignores=[])


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@functools.cache
def calls(tree: ast.Module) -> frozenset[str]:
    """The called name as it is written: `os.fork`, `Registry`."""
    return frozenset(ast.unparse(node.func) for node in nodes(tree) if isinstance(node, ast.Call))


def breaking(found: dict[str, ast.Module], forbidden: tuple[str, ...], but: tuple[str, ...] = ()) -> list[str]:
    """`file: import` for each forbidden import; files whose path starts with one of `but` may have it."""
    return [
        f"{path}: {name}"
        for path, tree in found.items()
        if not path.startswith(but or ("\0",))
        for name in sorted(imports(tree))
        if any(within(name, package) for package in forbidden)
    ]


def test_the_tree_is_where_the_tests_look() -> None:
    assert "worker/ts/protocol/frames.py" in worker()
    assert "frontend/ts_frontend/errors.py" in frontend()


def test_workers_import_nothing_of_the_frontend() -> None:
    assert not breaking(worker(), ("ts_frontend", "model_archiver"))


def test_the_frontend_imports_only_the_protocol_and_the_version_of_ts() -> None:
    """But for the module that runs handlers inside the server, which is off unless `bypass_serve` is set: it imports a
    worker's runtime, nothing else does."""
    assert breaking(frontend(), ("ts.runtime",)) == [
        f"frontend/ts_frontend/workers/launchers.py: ts.runtime.main{more}" for more in ("", ".live_in_process")
    ]
    found = breaking(frontend(), ("ts",), ("frontend/ts_frontend/workers/launchers.py",))
    allowed = {line for line in found if any(within(line.split(": ")[1], it) for it in ("ts.protocol", "ts.version"))}
    assert not [line for line in found if line not in allowed and not line.endswith(": ts")]


def test_a_workers_code_is_not_imported_with_the_server() -> None:
    inside = eager(frontend()["frontend/ts_frontend/workers/launchers.py"])
    assert not breaking({"launchers.py": inside}, ("ts",))


def test_torch_is_imported_only_by_workers() -> None:
    assert not breaking(frontend(), ("torch", "numpy"))


def test_torch_is_imported_when_needed_outside_of_the_handlers() -> None:
    at_import = {path: eager(tree) for path, tree in worker().items()}
    assert not breaking(
        at_import,
        ("torch", "torchvision"),
        ("worker/ts/torch_handler/", "worker/ts/handler_utils/", "worker/ts/language/"),
    )


TASK_STARTERS = {"create_task", "ensure_future", "TaskGroup"}


def starting_tasks(tree: ast.AST) -> set[str]:
    """Names of the functions in which a task is begun without `ts_frontend.tasks`."""
    functions = [one for one in nodes(tree) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return {
        function.name
        for function in functions
        for one in ast.walk(function)
        if isinstance(one, ast.Attribute) and one.attr in TASK_STARTERS
    }


def test_tasks_are_begun_where_their_failures_are_seen() -> None:
    """A task that fails unseen ends silently."""
    own = "frontend/ts_frontend/tasks.py"
    found = {path: starting_tasks(tree) for path, tree in frontend().items() if path != own}
    assert not {path: names for path, names in found.items() if names}


def module_of(path: str) -> str:
    name = path.removeprefix("frontend/").removeprefix("worker/").removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """Everything except the code that only type checkers read."""
    left = [tree]
    while left:
        node = left.pop()
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node
            left += ast.iter_child_nodes(node)


@functools.cache
def graph() -> dict[str, set[str]]:
    """Which module imports which, when it is imported itself or later."""
    found = {**modules("frontend"), **worker()}
    names = {module_of(path): set(imported(running(tree))) for path, tree in found.items()}
    return {name: {to for to in all_of_it if to in names and to != name} for name, all_of_it in names.items()}


def test_imports_go_one_way() -> None:
    edges = dict(graph())
    while free := [name for name, targets in edges.items() if not targets & edges.keys()]:
        for name in free:
            del edges[name]
    rings = {name for name in edges if any(name in edges[target] for target in edges[name] & edges.keys())}
    assert not edges, f"these import each other, or a ring: {sorted(rings or edges)}"


def part_of(module: str) -> str:
    return module.split(".")[1] if module.startswith("ts_frontend.") else ""


def test_packages_import_one_way() -> None:
    left: dict[str, set[str]] = {}
    for name, targets in graph().items():
        if part := part_of(name):
            left.setdefault(part, set()).update({part_of(to) for to in targets} - {part, ""})
    assert len(left) > 15
    while free := [part for part, others in left.items() if not others & left.keys()]:
        for part in free:
            del left[part]
    assert not left, f"these packages import each other, or a ring: {sorted(left)}"


def test_the_drawing_of_the_packages_is_up_to_date() -> None:
    script = ROOT / "ts_scripts/draw_packages.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


#: Formats whose reading runs code that the bytes name (`multiprocessing` pickles what it sends).
RUNS_CODE = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle", "multiprocessing")
#: These only name the error that torch raises when it refuses such bytes.
NAMES_ITS_ERROR = (
    "worker/ts/torch_handler/model_files.py",
    "worker/ts/torch_handler/densenet_handler.py",
)


def test_nothing_that_runs_code_is_read_from_a_socket_or_a_file() -> None:
    """BentoML, vLLM, SGLang and others unpickled data from callers or from their own workers' sockets."""
    found = {**frontend(), **worker()}
    assert not breaking(found, RUNS_CODE, but=(*NAMES_ITS_ERROR, SHIMS))
    for name in NAMES_ITS_ERROR:
        used = {one for one in calls(found[name]) if one.startswith("pickle.")}
        assert not used, (name, used)
    for name, tree in found.items():
        unsafe = {one for one in calls(tree) if one in ("yaml.load", "yaml.unsafe_load", "yaml.full_load")}
        assert not unsafe, (name, unsafe)
