"""What setup.cfg lists is what the tree holds."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest


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
