"""Which requirements files need the same environment."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_the_same_words_need_the_same(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert of(archive, "a==1\nb\n") == of(elsewhere, "a==1\nb\n")
    assert of(archive, "a==1\n") != of(archive, "a==2\n")
    assert len(of(archive, "")) == 32


def test_another_interpreter_or_torch_needs_another(archive: Path) -> None:
    assert of(archive, "a\n", "3.11", "2.13") != of(archive, "a\n", "3.12", "2.13")
    assert of(archive, "a\n", "ab", "c") != of(archive, "a\n", "a", "bc")


def test_of_a_folder_with_packages_only_those_count(archive: Path) -> None:
    before = of(archive, "--find-links .\na")
    (archive / "weights.pt").write_bytes(b"large")
    assert of(archive, "--find-links .\na") == before
    (archive / "a-2.0.tar.gz").write_bytes(b"package")
    assert of(archive, "--find-links .\na") != before


def test_no_requirements_is_a_need_too(archive: Path) -> None:
    assert digest(archive, None, "x") == digest(archive, None, "x") != of(archive, "", "x")


@pytest.mark.parametrize(
    "line",
    [
        "./wheels/a-1.0-py3-none-any.whl",
        "a @ file:wheels/a-1.0-py3-none-any.whl",
        "--find-links wheels\na",
        "--find-links=wheels\na",
        "-f ./wheels\na",
        "./wheels/a-1.0-py3-none-any.whl ; python_version > '3'",
    ],
)
def test_named_files_count_with_their_contents(archive: Path, line: str) -> None:
    before = of(archive, line)
    (archive / "handler.py").write_text("x = 2\n")
    assert of(archive, line) == before
    (archive / "wheels" / "a-1.0-py3-none-any.whl").write_bytes(b"second")
    assert of(archive, line) != before


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


def test_a_missing_file_is_an_error(archive: Path) -> None:
    with pytest.raises(FileNotFoundError):
        digest(archive, "nowhere.txt")
