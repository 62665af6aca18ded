"""The lists in setup.cfg agree with the tree."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
from pathlib import Path

import pytest

from support import module_of
from ts_frontend.cli import launch
from ts_frontend.cli import main as cli


@pytest.fixture
def setup(root: Path) -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(delimiters=("=",))
    parsed.read(root / "setup.cfg")
    return parsed


def words(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def folders(setup: configparser.ConfigParser, root: Path) -> dict[str, Path]:
    pairs = (line.split("=") for line in words(setup["options"]["package_dir"]))
    return {name.strip(): root / folder.strip() for name, folder in pairs}


def folder_of(package: str, tops: dict[str, Path]) -> Path:
    top, *rest = package.split(".")
    return tops[top].joinpath(*rest)


#: Modules and packages that only workers import, by their own names: installed as data (setup.cfg, package_data).
SHIMS = "worker/ts/compat/shims"


def test_every_package_of_the_tree_is_listed(setup: configparser.ConfigParser, root: Path) -> None:
    in_tree = {
        ".".join((name, *init.parent.relative_to(folder).parts))
        for name, folder in folders(setup, root).items()
        for init in folder.rglob("__init__.py")
        if root / SHIMS not in init.parents
    }
    assert sorted(words(setup["options"]["packages"])) == sorted(in_tree)


def test_folders_with_code_are_packages(setup: configparser.ConfigParser, root: Path) -> None:
    bare = {
        str(module.parent.relative_to(root))
        for folder in folders(setup, root).values()
        for module in folder.rglob("*.py")
        if not (module.parent / "__init__.py").exists()
    } - {SHIMS}
    assert not bare, f"no __init__.py in {sorted(bare)}: what is there would not be installed"


def test_every_data_file_is_listed(setup: configparser.ConfigParser, root: Path) -> None:
    """Files that aren't code are installed only where [options.package_data] has a pattern for them."""
    tops = folders(setup, root)
    listed = {
        file
        for package, patterns in setup["options.package_data"].items()
        for pattern in re.split(r"[\s,]+", patterns.strip())
        for file in folder_of(package, tops).glob(pattern)
    }
    data = {
        file
        for folder in tops.values()
        for file in folder.rglob("*")
        if file.is_file() and file.suffix not in {".py", ".pyc"} and "__pycache__" not in file.parts
    }
    assert sorted(map(str, data - listed)) == []


def test_what_is_compiled_is_there_and_not_run_by_its_name(setup: configparser.ConfigParser, root: Path) -> None:
    tops = folders(setup, root)
    for module in words(setup["torchrelay:compiled"]["modules"]):
        assert "__main__" not in folder_of(module, tops).with_suffix(".py").read_text(), module


@pytest.fixture
def compiled(setup: configparser.ConfigParser, root: Path) -> dict[str, ast.Module]:
    """The modules that can be compiled, by name."""
    found = {}
    for module in words(setup["torchrelay:compiled"]["modules"]):
        top = "worker" if module.startswith("ts.") else "frontend"
        found[module] = ast.parse((root / top / f"{module.replace('.', '/')}.py").read_text())
    return found


def test_nothing_compiled_awaits_in_finally(compiled: dict[str, ast.Module]) -> None:
    """In a compiled coroutine that would raise the exception that its caller is handling; `tasks.each` is for that."""
    waits = (ast.Await, ast.AsyncWith, ast.AsyncFor)
    found = []
    for module, tree in compiled.items():
        for node in ast.walk(tree):
            ends = node.finalbody if isinstance(node, ast.Try) else [node] if isinstance(node, ast.AsyncWith) else []
            if any(isinstance(one, waits) for end in ends for one in ast.walk(end)):
                found.append(f"{module}: {ast.unparse(node)}")
    assert not found


def test_no_constant_tuple_is_recognized_by_identity(compiled: dict[str, ast.Module]) -> None:
    """A compiled module makes a new tuple object each time that its constant is read."""
    tuples, compared = set(), {}
    for module, tree in compiled.items():
        for node in tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Tuple):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                tuples |= {target.id for target in targets if isinstance(target, ast.Name)}
        for compare in ast.walk(tree):
            if isinstance(compare, ast.Compare) and any(isinstance(op, (ast.Is, ast.IsNot)) for op in compare.ops):
                names = [side.id for side in (compare.left, *compare.comparators) if isinstance(side, ast.Name)]
                compared.update({name: f"{module}: {ast.unparse(compare)}" for name in names})
    assert "ANY_KEY" in tuples
    assert not [where for name, where in compared.items() if name in tuples]


def test_every_shim_is_installed(setup: configparser.ConfigParser, root: Path) -> None:
    patterns = words(setup["options.package_data"]["ts"])
    listed = {file for pattern in patterns for file in (root / "worker/ts").glob(pattern)}
    assert sorted(set((root / SHIMS).rglob("*.py")) - listed) == []


def test_commands_lead_to_functions(setup: configparser.ConfigParser, root: Path) -> None:
    tops = folders(setup, root)
    for line in words(setup["options.entry_points"]["console_scripts"]):
        module, function = line.split("=")[1].strip().split(":")
        source = folder_of(module, tops).with_suffix(".py")
        assert re.search(rf"^(async )?def {function}\(|^{function} = ", source.read_text(), re.MULTILINE), line


def test_torch_is_never_asked_for_without_a_version(setup: configparser.ConfigParser, root: Path) -> None:
    asked = setup["options"]["install_requires"] + "".join(setup["options.extras_require"].values())
    assert not re.search(r"^\s*torch\b", asked, re.MULTILINE)
    assert re.search(r"^TORCH_SPEC \?= torch==[\d.]+$", (root / "Makefile").read_text(), re.MULTILINE)


def test_every_requirement_is_explained(setup: configparser.ConfigParser, root: Path) -> None:
    asked = setup["options"]["install_requires"] + "".join(setup["options.extras_require"].values())
    names = {re.split(r"[ <>=;\[]", line)[0] for line in words(asked)}
    text = (root / "docs/dependencies.md").read_text().lower()
    assert sorted(name for name in names if f"`{name.lower()}`" not in text) == []


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_the_code_compiles_on_every_python(
    version: str, setup: configparser.ConfigParser, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the interpreters that are there; warnings, such as of escapes that will be errors, are errors."""
    assert f"Programming Language :: Python :: {version}" in words(setup["metadata"]["classifiers"])
    monkeypatch.syspath_prepend(root / "ts_scripts")
    python = module_of(root / "ts_scripts" / "release.py").interpreter(version)
    if python is None:
        pytest.skip(f"there is no python{version}")
    compiled = (
        "import pathlib, sys\n"
        "for top in sys.argv[1:]:\n"
        "    for file in pathlib.Path(top).rglob('*.py'):\n"
        "        compile(file.read_bytes(), str(file), 'exec', dont_inherit=True)\n"
    )
    tops = [str(root / name) for name in ("frontend", "worker", "ts_scripts")]
    done = subprocess.run([python, "-W", "error", "-I", "-c", compiled, *tops], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_torchserves_packages_are_named_in_one_line(tmp_path: Path) -> None:
    for name, version in (("torchserve", "0.12.0"), ("torch_model_archiver", "0.12.0"), ("torchrelay", "1.0")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    found = launch.rivals([str(tmp_path)])
    assert found == ["torchserve 0.12.0", "torch-model-archiver 0.12.0"]
    told = launch.rivals_told(found)
    assert told.startswith("torchserve 0.12.0, torch-model-archiver 0.12.0 are installed") and "\n" not in told
    assert launch.rivals_told(launch.rivals([str(tmp_path / "none")])) == ""


def test_a_start_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "rivals", lambda: ["torchserve 0.12.0"])
    assert cli.main(["--start", "--ts-config", str(tmp_path / "none.properties")]) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("torchserve 0.12.0 is installed alongside this server") and "file not found" in told[1]
