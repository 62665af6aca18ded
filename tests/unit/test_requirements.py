"""Requirements of models, and `python -m ts.compat.install`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ts.compat import SHIMS
from ts.compat.install import COMMAND, NAME, main
from ts_frontend.models.environments import digest


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "a-1.0-py3-none-any.whl").write_bytes(b"first")
    (tmp_path / "nested.txt").write_text("b==2\n")
    (tmp_path / "handler.py").write_text("x = 1\n")
    return tmp_path


def of(archive: Path, text: str, *more: str) -> str:
    (archive / "requirements.txt").write_text(text)
    return digest(archive, "requirements.txt", *more)


def test_of_a_folder_with_packages_only_those_count(archive: Path) -> None:
    before = of(archive, "--find-links .\na")
    (archive / "weights.pt").write_bytes(b"large")
    assert of(archive, "--find-links .\na") == before
    (archive / "a-2.0.tar.gz").write_bytes(b"package")
    assert of(archive, "--find-links .\na") != before


def test_no_requirements_is_a_need_too(archive: Path) -> None:
    assert digest(archive, None, "x") == digest(archive, None, "x") != of(archive, "", "x")


@pytest.mark.parametrize(
    "line", ["-r nested.txt", "--requirement nested.txt", "--constraint=nested.txt", "-c nested.txt"]
)
def test_nested_files_count_with_what_they_name(archive: Path, line: str) -> None:
    (archive / "nested.txt").write_text("./wheels/a-1.0-py3-none-any.whl\n-r requirements.txt\n")
    before = of(archive, line)
    (archive / "wheels" / "a-1.0-py3-none-any.whl").write_bytes(b"second")
    assert of(archive, line) != before


@pytest.mark.parametrize("line", ["-e .", "--editable ./wheels", ".", "./"])
def test_what_is_installed_in_place_is_not_shared(
    archive: Path, tmp_path_factory: pytest.TempPathFactory, line: str
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "wheels").mkdir()
    (elsewhere / "wheels" / "a-1.0-py3-none-any.whl").write_bytes(b"first")
    assert of(archive, line) != of(elsewhere, line)


def test_the_path_file_and_the_command_come_and_go(tmp_path: Path) -> None:
    assert main([], tmp_path, tmp_path) == 0
    assert (tmp_path / NAME).read_text() == SHIMS + "\n"
    assert os.access(tmp_path / COMMAND, os.X_OK) and "mlserver.cli.main" in (tmp_path / COMMAND).read_text()
    assert main(["--remove"], tmp_path, tmp_path) == 0
    assert not list(tmp_path.iterdir())


def test_a_command_of_the_real_package_stays(tmp_path: Path) -> None:
    (tmp_path / COMMAND).write_text("theirs")
    assert main([], tmp_path, tmp_path) == main(["--remove"], tmp_path, tmp_path) == 0
    assert (tmp_path / COMMAND).read_text() == "theirs"
