"""The transport of a model's files, or of the package `ts`, to nodes: packed in pieces that are named by their content,
and unpacked once on each node.

Its functions run on nodes too, which get their code by value: it uses nothing but Python's library.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import py_compile
import shutil
import stat
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

#: The bytes of one object in Ray's store.
PIECE_BYTES = 64 * 1024 * 1024
SKIPPED = frozenset({"__pycache__", ".git"})
#: The folders of the package `ts` with the modules that every worker imports.
WORKERS_PARTS = ("", "protocol", "runtime", "utils")
#: The number of unused packages that stay unpacked on a node.
KEPT_MAX = 8


def files_of(root: str) -> list[tuple[str, str, os.stat_result]]:
    """The files below a folder, sorted: relative names with slashes, paths, and results of stat. Links to files
    count as their targets; links to folders aren't followed. Raises OSError."""
    found: list[tuple[str, str, os.stat_result]] = []
    for folder, names, files in os.walk(root, onerror=_raised):
        names[:] = [name for name in names if name not in SKIPPED]
        for name in files:
            path = os.path.join(folder, name)
            about = os.stat(path)
            if stat.S_ISREG(about.st_mode):
                found.append((os.path.relpath(path, root).replace(os.sep, "/"), path, about))
    return sorted(found)


def _raised(error: OSError) -> None:
    raise error


def print_of(root: str, extra: Sequence[str] = ()) -> str:
    """A fingerprint of the names, sizes and times of a folder's files, which is cheaper than packing them."""
    lines = [f"{name} {about.st_size} {about.st_mtime_ns}" for name, _, about in files_of(root)]
    for path in extra:
        about = os.stat(path)
        lines.append(f"{path} {about.st_size} {about.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def packed_pieces(
    root: str,
    extra: dict[str, str],
    below: str = "",
    made: Mapping[str, bytes] | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> Iterator[bytes]:
    """A tar file of a folder, in pieces, the same for the same content. `extra`: further files, their paths by the
    names that they get; `below`: before the names of the folder's; `made`: further small files by their names. Raises
    OSError."""
    whole = [*((below + name, path) for name, path, _ in files_of(root)), *sorted(extra.items())]
    buffer = io.BytesIO()
    for name, path in whole:
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            head = tarfile.TarInfo(name)
            head.size, head.mode = about.st_size, 0o700 if about.st_mode & 0o100 else 0o600
            buffer.write(head.tobuf(tarfile.PAX_FORMAT, "utf-8"))
            left = about.st_size
            while left:
                data = file.read(min(left, 1 << 20))
                if not data:
                    raise OSError(f"{path} became shorter while it was read")
                left -= len(data)
                buffer.write(data)
                while buffer.tell() >= piece_bytes:
                    yield _taken(buffer, piece_bytes)
            buffer.write(b"\0" * (-about.st_size % tarfile.BLOCKSIZE))
    for name, data in sorted((made or {}).items()):
        head = tarfile.TarInfo(name)
        head.size, head.mode = len(data), 0o600
        buffer.write(head.tobuf(tarfile.PAX_FORMAT, "utf-8") + data + b"\0" * (-len(data) % tarfile.BLOCKSIZE))
    buffer.write(b"\0" * (2 * tarfile.BLOCKSIZE))
    yield buffer.getvalue()


def bytecode_of(root: str, below: str) -> dict[str, bytes]:
    """The bytecode of the modules in `root`, the package `ts`, as `made` of its tar file. Without it, the first worker
    of a node compiles the modules, and every worker does so where Python writes no bytecode, as in most container
    images. Python compares it with a hash of its source. Raises OSError, py_compile.PyCompileError."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        target = os.path.join(folder, "bytecode")
        for part in WORKERS_PARTS:
            for source in sorted(Path(root, part).glob("*.py")):
                mode = py_compile.PycInvalidationMode.CHECKED_HASH
                py_compile.compile(str(source), target, doraise=True, optimize=0, invalidation_mode=mode)
                name = PurePosixPath(below, part, "__pycache__", f"{source.stem}.{sys.implementation.cache_tag}.pyc")
                found[str(name)] = Path(target).read_bytes()
    return found


def _taken(buffer: io.BytesIO, size: int) -> bytes:
    """The first bytes of a buffer, which keeps the rest."""
    data = buffer.getvalue()
    buffer.seek(0)
    buffer.truncate()
    buffer.write(data[size:])
    return data[:size]


class _Pieces(io.RawIOBase):
    """Pieces as one file."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = memoryview(piece)
        size = min(len(room), len(self._left))
        room[:size] = self._left[:size]
        self._left = self._left[size:]
        return size


def safe_path(root: Path, name: str) -> Path:
    """The path for a file of a package. Raises ValueError for a name that leads out of the folder."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name or "\\" in name:
        raise ValueError(f"a package has a file with the name {name!r}")
    return root.joinpath(*parts)


def unpack_pieces(pieces: Iterable[bytes], root: Path, bytes_max: int) -> None:
    """Unpacks a package into a folder that exists. Only plain files are taken, only below the folder, each once, and no
    more than `bytes_max`. Raises ValueError, OSError."""
    left = bytes_max
    with tarfile.open(fileobj=io.BufferedReader(_Pieces(pieces), 1 << 20), mode="r|") as tar:
        for member in tar:
            path = safe_path(root, member.name)
            if not member.isreg():
                raise ValueError(f"a package has {member.name!r}, which is not a regular file")
            left -= member.size
            if left < 0:
                raise ValueError(f"a package has more than the {bytes_max} bytes that it was said to have")
            path.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700 if member.mode & 0o100 else 0o600)
            with os.fdopen(handle, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)


def node_folder() -> Path:
    """The folder of this user's packages on this node. Raises OSError when somebody else can write to it."""
    folder = Path(tempfile.gettempdir()) / f"torchrelay-node-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise OSError(f"{folder} belongs to another user, or others can write to it: remove it")
    return folder


@contextlib.contextmanager
def unpacked(digest: str, bytes_max: int, fetch: Callable[[], Iterable[bytes]]) -> Iterator[Path]:
    """A package's files on this node, for the time of the block. The first user unpacks them. `fetch` gets its
    pieces. Raises ValueError, OSError."""
    folder = node_folder()
    place = folder / digest
    with open(folder / f"{digest}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        while not place.is_dir():
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.is_dir():
                _make(folder, place, bytes_max, fetch)
            fcntl.flock(lock, fcntl.LOCK_SH)  # another one may delete it in between
        os.utime(place)
        yield place


def _make(folder: Path, place: Path, bytes_max: int, fetch: Callable[[], Iterable[bytes]]) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{place.name[:16]}-", dir=folder))
    try:
        unpack_pieces(fetch(), partial, bytes_max)
        os.rename(partial, place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _prune(folder, place.name)


def _prune(folder: Path, but: str) -> None:
    """Deletes the least recently used packages, unless they are in use."""
    found = sorted((one for one in folder.iterdir() if one.is_dir() and one.name[0] != "."), key=_used_s, reverse=True)
    for place in found[KEPT_MAX:]:
        if place.name == but:
            continue
        with open(folder / f"{place.name}.lock", "a") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(place, ignore_errors=True)


def _used_s(place: Path) -> float:
    try:
        return place.stat().st_mtime
    except OSError:
        return time.time()
