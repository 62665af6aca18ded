"""Unpacking untrusted archives: every name, kind and size is checked before anything is written.

An entry may only become a plain file or a directory below the target. Sizes are counted as bytes come out, not as the
archive claims them. The first thing wrong ends it with InvalidArchive, which names archive, entry and reason. A server
unpacks to a directory of its own; the next one removes that of a killed one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import io
import logging
import os
import re
import shutil
import stat
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeAlias

from ts_frontend.errors import InvalidArchive, ServeError
from ts_frontend.models.store.http import Stamp, Stop

PREFIX = "torchrelay-server-"
#: The prefix of a directory's name until its server has locked it.
NEW = "torchrelay-new-"
#: Seconds after which a directory that still has this name belongs to a killed server.
NEW_S_MAX = 60.0
#: The names of one line of the log.
NAMES_SHOWN_MAX = 10

log = logging.getLogger(__name__)

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextlib.contextmanager
def work_dir(parent: Path) -> Iterator[Path]:
    """A new directory in `parent`, deleted at the end.

    A server holds a lock on its directory for its whole life, and gives the directory its name after taking the lock: a
    directory of that name without a lock is abandoned (`remove_abandoned`). Raises OSError.
    """
    new = Path(tempfile.mkdtemp(prefix=NEW, dir=parent))
    path = new.with_name(PREFIX + new.name.removeprefix(NEW))
    handle = os.open(new, _DIRECTORY_FLAGS)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.rename(new, path)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


def remove_abandoned(parent: Path) -> None:
    """Deletes this user's directories that no server has locked, those of killed servers, and logs their names.
    Directories that can't be deleted stay. Blocking."""
    removed = []
    for prefix, age_s_min in ((PREFIX, 0.0), (NEW, NEW_S_MAX)):
        for path in sorted(parent.glob(f"{prefix}*")):
            with contextlib.suppress(OSError):
                if _remove_if_abandoned(path, age_s_min):
                    removed.append(path.name)
    if removed:
        more = f" and {len(removed) - NAMES_SHOWN_MAX} more" if len(removed) > NAMES_SHOWN_MAX else ""
        log.info("Removed from %s what killed servers left: %s%s", parent, ", ".join(removed[:NAMES_SHOWN_MAX]), more)


def _remove_if_abandoned(path: Path, age_s_min: float) -> bool:
    """Whether it was abandoned, and is gone."""
    handle = os.open(path, _DIRECTORY_FLAGS)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid() or time.time() - status.st_mtime < age_s_min:
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    finally:
        os.close(handle)


try:
    from lzma import LZMAError
except ImportError:  # a Python without it says that it can't read such an entry
    LZMAError = zlib.error  # type: ignore[assignment, misc]

#: The largest file whose contents are in an archive's outline.
OUTLINE_BYTES_MAX = 1 << 20
_COPY_BYTES = 1 << 20
_NAME_BYTES_MAX = 1024
_PART_BYTES_MAX = 255
_TAR_HEADER_BYTES_MAX = 1 << 20
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DRIVE = re.compile(r"^[A-Za-z]:")
_TAR_META_TYPES = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


@dataclass(frozen=True, slots=True)
class ExtractLimits:
    """Limits of one archive's unpacked files. `ratio_max` counts above `ratio_floor_bytes`: text packs well."""

    bytes_max: int = 200 << 30
    files_max: int = 100_000
    ratio_max: float = 200.0
    ratio_floor_bytes: int = 16 << 20


def refusal(archive: Path, reason: str, entry: str | None = None) -> InvalidArchive:
    """The error for `archive`; entry names are shown escaped, they are the archive's words."""
    where = f"Archive {archive.name}" + (f", entry {entry!a}" if entry is not None else "")
    return InvalidArchive(f"{where}: {reason}")


def archive_kind(file: IO[bytes]) -> str | None:
    """'zip', 'tar.gz' or 'tar' by content (names are not reliable), None for anything else. Raises OSError."""
    file.seek(0)
    head = file.read(512)
    if head.startswith(b"\x1f\x8b"):
        return "tar.gz"
    if head[257:262] == b"ustar":
        return "tar"
    return "zip" if zipfile.is_zipfile(file) else None


def safe_parts(archive: Path, name: str) -> tuple[str, ...]:
    """The path components of an entry's name; () for the root itself. A backslash separates, as on Windows."""
    if _CONTROL.search(name):
        raise refusal(archive, "the name has control characters", name)
    path = name.replace("\\", "/")
    if path.startswith("/") or _DRIVE.match(path):
        raise refusal(archive, "the name is an absolute path", name)
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if ".." in parts:
        raise refusal(archive, "the name leads out of the archive with '..'", name)
    _check_lengths(archive, name, parts)
    return parts


def _check_lengths(archive: Path, name: str, parts: tuple[str, ...]) -> None:
    try:
        lengths = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        raise refusal(archive, "the name isn't valid UTF-8", name) from None
    if lengths and (max(lengths) > _PART_BYTES_MAX or sum(lengths) + len(lengths) > _NAME_BYTES_MAX):
        reason = f"the name is too long (at most {_PART_BYTES_MAX} bytes a part, {_NAME_BYTES_MAX} in all)"
        raise refusal(archive, reason, name[:80] + "...")


@dataclass(slots=True)
class Budget:
    """Counts the files and bytes of one archive against its limits while it is unpacked. `outline`: the contents of
    large files are left out; `left_out`: of how many."""

    archive: Path
    limits: ExtractLimits
    packed_bytes: int
    stop: Stop = field(default_factory=Stop)
    outline: bool = False
    files: int = field(default=0, init=False)
    left_out: int = field(default=0, init=False)
    unpacked_bytes: int = field(default=0, init=False)

    def add_entry(self) -> None:
        self.stop.check()
        self.files += 1
        self.check_entries(self.files)

    def check_entries(self, count: int) -> None:
        if count > self.limits.files_max:
            reason = f"more than {self.limits.files_max} entries; extract_files_max raises the limit"
            raise refusal(self.archive, reason)

    def add_bytes(self, count: int, entry: str | None = None) -> None:
        self.stop.check()
        self.unpacked_bytes += count
        self.check(self.unpacked_bytes, entry)

    def check(self, total_bytes: int, entry: str | None = None) -> None:
        """Refuses `total_bytes`, announced or seen, when they're over the size or the ratio allowed."""
        limits = self.limits
        if total_bytes > limits.bytes_max:
            reason = f"unpacks to more than {limits.bytes_max} bytes; extract_bytes_max raises the limit"
            raise refusal(self.archive, reason, entry)
        if total_bytes > max(limits.ratio_floor_bytes, self.packed_bytes * limits.ratio_max):
            reason = (
                f"unpacks to more than {limits.ratio_max:g} times its {self.packed_bytes} bytes, as bombs do; "
                "extract_ratio_max raises the limit"
            )
            raise refusal(self.archive, reason, entry)


#: Raises ServeError for an opened archive that may not be unpacked; returns whether it has a digest.
Check: TypeAlias = Callable[[IO[bytes]], bool]


def extract(
    archive: Path,
    target: Path,
    limits: ExtractLimits,
    stop: Stop | None = None,
    *,
    outline: bool = False,
    check: Check | None = None,
) -> bool:
    """Unpacks `archive` (zip, tar, gzipped tar) into the empty directory `target`; True when all of it is there.
    Blocking. The file is opened once: what `check` has seen is unpacked, and must not be written meanwhile. Another one
    may take its name, unless it has a digest: the time that a writer can't set changes then, too. `outline`: of a zip
    file, whose directory is read at once, the files of more than OUTLINE_BYTES_MAX are only named: each is one byte
    longer than that, and takes no room.

    Raises InvalidArchive, the errors of `check`; ServeError where the disk fails; Stopped once `stop` is set. Files
    written so far stay: the caller removes them.
    """
    try:
        with archive.open("rb") as file:
            before = Stamp.of(os.fstat(file.fileno()))
            pinned = check is not None and check(file)
            budget = Budget(archive, limits, before.size_bytes, stop or Stop(), outline)
            try:
                _unpack(file, target, budget)
            finally:
                after = Stamp.of(os.fstat(file.fileno()))
                if after != before if pinned else not after.is_like(before):
                    raise refusal(archive, "it was changed while it was unpacked: register the model again")
        return not budget.left_out
    except OSError as error:
        raise not_unpacked(archive, target, error) from error


def _unpack(file: IO[bytes], target: Path, budget: Budget) -> None:
    kind = archive_kind(file)
    if kind is None:
        reason = "neither a zip file (.mar) nor a tar file (.tar.gz, .tgz), or broken or incomplete"
        raise refusal(budget.archive, reason)
    with _broken_archive(budget.archive):
        (_extract_zip if kind == "zip" else _extract_tar)(file, target, budget)


def not_unpacked(archive: Path, target: Path, error: OSError) -> ServeError:
    """The error for the system's, which says more about a full disk."""
    remedy = "; make room there, or set another temp_dir" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return ServeError(f"Could not unpack {archive} to {target}: {error.strerror or error}{remedy}")


@contextmanager
def _broken_archive(archive: Path) -> Iterator[None]:
    """Turns the errors of zipfile, tarfile, gzip and zlib on damaged data into InvalidArchive."""
    try:
        yield
    except (
        zipfile.BadZipFile,
        zipfile.LargeZipFile,
        tarfile.TarError,
        gzip.BadGzipFile,
        zlib.error,
        LZMAError,
        EOFError,
    ) as error:
        raise refusal(archive, f"damaged: {error or type(error).__name__}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise refusal(archive, f"damaged: {error}") from error  # bz2's error has no errno; the disk's has one
    except MemoryError as error:  # an entry declares the size of LZMA's dictionary, up to 4 GiB
        raise refusal(archive, "can't be read: it needs more memory than there is") from error
    except (NotImplementedError, RuntimeError, ValueError, OverflowError) as error:  # RecursionError is a RuntimeError
        raise refusal(archive, f"can't be read: {error}") from error


class _ZipSource(io.FileIO):
    """An archive whose directory may not be read as one huge block: zipfile takes it into memory whole."""

    def __init__(self, file: IO[bytes], path: Path, read_bytes_max: int) -> None:
        super().__init__(file.fileno(), "rb", closefd=False)
        self._archive, self._read_bytes_max = path, read_bytes_max

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > self._read_bytes_max:
            raise refusal(self._archive, f"its directory has {size} bytes; extract_files_max raises the limit")
        return super().read(-1 if size is None else size) or b""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_SET and offset < 0:  # lseek would report EINVAL, which looks like a disk error
            raise zipfile.BadZipFile("an entry begins before the file does")
        return super().seek(offset, whence)


def _extract_zip(file: IO[bytes], target: Path, budget: Budget) -> None:
    directory_bytes_max = max(_COPY_BYTES, budget.limits.files_max * 512)
    with _ZipSource(file, budget.archive, directory_bytes_max) as source, zipfile.ZipFile(source) as package:
        infos = package.infolist()
        budget.check_entries(len(infos))
        budget.check(sum(info.file_size for info in infos))
        for info in infos:
            _extract_zip_entry(package, info, target, budget)


def _extract_zip_entry(package: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path, budget: Budget) -> None:
    # Not `filename`: zipfile cuts that at a NUL.
    archive, name, mode = budget.archive, info.orig_filename, info.external_attr >> 16
    parts = safe_parts(archive, name)
    _check_kind(archive, name, mode)
    budget.add_entry()
    if name.endswith(("/", "\\")) or stat.S_ISDIR(mode):
        _make_directory(archive, target, parts, name)
        return
    if info.flag_bits & 1:
        raise refusal(archive, "the entry is encrypted", name)
    with package.open(info) as source, create_file(archive, target, parts, name, mode) as file:
        if budget.outline and info.file_size > OUTLINE_BYTES_MAX:
            budget.left_out += 1
            file.truncate(OUTLINE_BYTES_MAX + 1)
            return
        while data := source.read(_COPY_BYTES):
            budget.add_bytes(len(data), name)
            file.write(data)


def _check_kind(archive: Path, name: str, mode: int) -> None:
    """Refuses links, devices, pipes and sockets; a mode without a type is a file's (zips made on Windows)."""
    kind = stat.S_IFMT(mode)
    if kind == stat.S_IFLNK:
        raise refusal(archive, "links aren't allowed: store the file itself", name)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise refusal(archive, "only files and directories are allowed", name)


class _TarEntry(tarfile.TarInfo):
    """A header block, refused before tarfile reads its announced data (long names, pax records, maps) into memory."""

    def _proc_member(self, package: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _TAR_META_TYPES and self.size > _TAR_HEADER_BYTES_MAX:
            raise ValueError(f"a header of {self.size} bytes")
        if self.type == tarfile.GNUTYPE_SPARSE:
            self._refuse_sparse()
        member: tarfile.TarInfo = super()._proc_member(package)  # type: ignore[misc]  # which tarfile names for subclasses
        return member

    def _refuse_sparse(self, *_: Any) -> None:
        raise ValueError(f"{self.name!a} is a sparse file")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


class _Counted(io.RawIOBase):
    """A tar stream that spends the budget as it's read: headers, padding and all."""

    def __init__(self, source: IO[bytes], budget: Budget) -> None:
        self._source, self._budget = source, budget

    def read(self, size: int = -1, /) -> bytes:
        data = self._source.read(size)
        self._budget.add_bytes(len(data))
        return data


def _extract_tar(raw: IO[bytes], target: Path, budget: Budget) -> None:
    raw.seek(0)
    gzipped = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    source: IO[bytes] = gzip.GzipFile(fileobj=raw) if gzipped else raw  # type: ignore[assignment]
    stream = _Counted(source, budget)
    # A stream ("r|"): one pass forward, no seeking back through compressed data.
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_TarEntry, bufsize=_COPY_BYTES) as package:
        for entry in package:
            _extract_tar_entry(package, entry, target, budget)


def _extract_tar_entry(package: tarfile.TarFile, entry: tarfile.TarInfo, target: Path, budget: Budget) -> None:
    archive = budget.archive
    parts = safe_parts(archive, entry.name)
    budget.add_entry()
    if entry.issym() or entry.islnk():
        raise refusal(archive, "links aren't allowed: store the file itself", entry.name)
    if entry.isdir():
        _make_directory(archive, target, parts, entry.name)
        return
    source = package.extractfile(entry) if entry.isreg() else None
    if source is None:
        raise refusal(archive, "only files and directories are allowed", entry.name)
    with source, create_file(archive, target, parts, entry.name, entry.mode) as file:
        while data := source.read(_COPY_BYTES):
            file.write(data)


def _make_directory(archive: Path, target: Path, parts: tuple[str, ...], name: str) -> Path:
    path = target.joinpath(*parts)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise refusal(archive, "the name is a directory's and a file's", name) from None
    return path


def create_file(archive: Path, target: Path, parts: tuple[str, ...], name: str, mode: int) -> IO[bytes]:
    """A new file. Its mode keeps only the owner's execute bit: no setuid, no setgid.

    O_EXCL finds names that are the same file here, also those that differ in case or Unicode form only on a file
    system that folds them.
    """
    if not parts:
        raise refusal(archive, "the entry has no name", name)
    directory = _make_directory(archive, target, parts[:-1], name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(directory / parts[-1], flags, 0o755 if mode & stat.S_IXUSR else 0o644)
    except (FileExistsError, IsADirectoryError):
        raise refusal(archive, "the name is in the archive twice", name) from None
    return os.fdopen(handle, "wb")
