"""Packages of files for nodes: the same name for the same content, and nothing outside of their folder."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import ts.version
from ts_frontend.workers.cluster import packing

PACKAGE = str(Path(ts.version.__file__).parent)
BYTES_MAX = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "handler.py").write_text("x = 1\n")
    (root / "deep" / "er" / "weights.bin").write_bytes(os.urandom(100_000))
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "__pycache__").mkdir()
    (root / "__pycache__" / "handler.pyc").write_text("old")
    return root


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of a node."""
    folder = tmp_path / "node"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("piece_bytes", [1000, 1 << 20])
def test_files_arrive_as_they_were(model: Path, tmp_path: Path, piece_bytes: int) -> None:
    extra = tmp_path / "metrics.yaml"
    extra.write_text("mode: log\n")
    made = {"below/made": b"here"}
    pieces = list(packing.packed_pieces(str(model), {".metrics": str(extra)}, "below/", made, piece_bytes))
    assert all(len(piece) == piece_bytes for piece in pieces[:-1])
    target = tmp_path / "target"
    target.mkdir()
    packing.unpack_pieces(pieces, target, BYTES_MAX)
    wanted = {f"below/{name}": data for name, data in tree(model).items() if "__pycache__" not in name}
    assert tree(target) == wanted | {".metrics": b"mode: log\n"} | made
    assert os.access(target / "below" / "run.sh", os.X_OK)
    assert not os.access(target / "below" / "handler.py", os.X_OK)


def test_the_same_content_is_the_same_package(model: Path) -> None:
    first, look = list(packing.packed_pieces(str(model), {})), packing.print_of(str(model))
    os.utime(model / "handler.py", (1, 1))
    assert list(packing.packed_pieces(str(model), {})) == first
    assert packing.print_of(str(model)) != look, "a look tells of a file that was written again"


def test_a_worker_on_a_node_compiles_no_module(tmp_path: Path) -> None:
    made = packing.bytecode_of(PACKAGE, "ts/")
    assert packing.bytecode_of(PACKAGE, "ts/") == made
    packing.unpack_pieces(packing.packed_pieces(PACKAGE, {}, "ts/", made), tmp_path, 16 * BYTES_MAX)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-v", "-c", "import ts.runtime.remote"]
    told = subprocess.run(words, env=env, cwd=tmp_path, check=True, capture_output=True, text=True).stderr
    loaded = [line for line in told.splitlines() if line.startswith("# code object from") and str(tmp_path) in line]
    assert any("remote" in line for line in loaded)
    assert not [line for line in loaded if "__pycache__" not in line]


def member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"data", link: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        head = tarfile.TarInfo(name)
        head.type, head.size, head.linkname = kind, len(data) if kind == tarfile.REGTYPE else 0, link
        tar.addfile(head, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "package",
    [
        member("../outside"),
        member("/outside"),
        member("a/../../outside"),
        member("link", tarfile.SYMTYPE, link="/etc/passwd"),
        member("link", tarfile.LNKTYPE, link="other"),
        member("pipe", tarfile.FIFOTYPE),
        member("large", data=b"x" * 5000),
    ],
)
def test_what_no_package_has_is_refused(package: bytes, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(ValueError, match="a package has"):
        packing.unpack_pieces([package], target, 4000)
    assert not (tmp_path / "outside").exists()


def test_a_node_unpacks_a_package_once(model: Path, node: Path) -> None:
    pieces, fetched = list(packing.packed_pieces(str(model), {})), []

    def fetch() -> Iterable[bytes]:
        fetched.append(1)
        return pieces

    with packing.unpacked("digest", BYTES_MAX, fetch) as first, packing.unpacked("digest", BYTES_MAX, fetch) as second:
        assert first == second
        assert (first / "handler.py").read_text() == "x = 1\n"
    assert fetched == [1]


def test_a_package_that_breaks_off_leaves_nothing(model: Path, node: Path) -> None:
    pieces = list(packing.packed_pieces(str(model), {}, piece_bytes=1000))
    cut: Callable[[], Iterable[bytes]] = lambda: pieces[:3]  # noqa: E731
    with pytest.raises((tarfile.ReadError, OSError, ValueError)), packing.unpacked("digest", BYTES_MAX, cut):
        pass
    assert [path.name for path in packing.node_folder().iterdir()] == ["digest.lock"]


def test_packages_that_nobody_uses_make_room(model: Path, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "KEPT_MAX", 1)
    pieces = list(packing.packed_pieces(str(model), {}))
    with packing.unpacked("used", BYTES_MAX, lambda: pieces) as used:
        with packing.unpacked("old", BYTES_MAX, lambda: pieces) as old:
            pass
        os.utime(old, (1, 1))
        os.utime(used, (2, 2))
        with packing.unpacked("new", BYTES_MAX, lambda: pieces) as new:
            assert used.is_dir() and new.is_dir() and not old.exists()


def test_a_folder_of_somebody_else_is_not_used(node: Path) -> None:
    packing.node_folder().chmod(0o777)
    with pytest.raises(OSError, match="others can write to it"):
        packing.node_folder()
