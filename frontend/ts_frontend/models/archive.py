"""A model's files: their description, the unpacking of an archive, and the reading of its manifest and configuration.

Archives are untrusted. Every name, kind and size is checked before anything is written: an entry may only become a
plain file or a directory below the target. Sizes are counted as bytes come out, not as the archive claims them. The
first thing wrong ends it with InvalidArchive, which names archive, entry and reason. A server unpacks to a directory of
its own; the next one removes that of a killed one.

A path may name another file, and a file may have other content, between any two looks at it. What is checked and what
is unpacked must be the same: both are read from one open file, whose stamp is compared before and after.

Every value from an archive is checked, too. `path` is the archive (its name in errors), `file` a file of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gzip
import hashlib
import io
import json
import logging
import os
import re
import secrets
import shutil
import stat
import tarfile
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import yaml

from ts_frontend.config.files import read_file
from ts_frontend.errors import ArchiveNotFound, InvalidArchive, ServeError
from ts_frontend.graphs.graph import Ensemble
from ts_frontend.graphs.inference_graph import InferenceGraph
from ts_frontend.models.settings import Signature
from ts_frontend.scheduling.batcher import Priorities
from ts_frontend.tasks import Stop, owned
from ts_frontend.workers.resources import Needs

PREFIX = "torchrelay-server-"
#: The prefix of a directory's name until its server has locked it.
NEW = "torchrelay-new-"
#: Seconds after which a directory that still has this name belongs to a killed server.
NEW_S_MAX = 60.0
#: The names of one line of the log.
NAMES_SHOWN_MAX = 10

log = logging.getLogger(__name__)

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


_DIGEST_BYTES = 1 << 20


class Stamp(NamedTuple):
    """Changes with the file at a path and its content; `ctime_ns`, unwritable, also with links and permissions."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def of(status: os.stat_result) -> Stamp:
        return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def is_like(self, other: Stamp) -> bool:
        """Whether both are equal apart from `ctime_ns`."""
        return self[:-1] == other[:-1]


@dataclass(frozen=True, slots=True)
class Pin:
    """The digest that an archive must have, hexadecimal. `stamp`: of the file that had it, None if none was checked."""

    sha256: str
    stamp: Stamp | None = None


def digest(file: IO[bytes], stop: Stop) -> str:
    """The SHA-256 of an open file from its beginning. Raises OSError, Stopped."""
    found = hashlib.sha256()
    file.seek(0)
    while data := file.read(_DIGEST_BYTES):
        stop.check()
        found.update(data)
    return found.hexdigest()


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


#: The configuration's name, and the suffixes of files of weights, where no manifest names them.
CONFIG_FILE = "model-config.yaml"
WEIGHTS = frozenset({".pt", ".pth", ".bin", ".safetensors", ".ckpt", ".onnx", ".pt2", ".npz"})
#: The suffix of a language model's file, which is a model by itself.
GGUF = ".gguf"
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_TEXT_BYTES_MAX = OUTLINE_BYTES_MAX
_YAML_NODES_MAX = 100_000
#: Of a number in YAML: longer ones have no text in JSON, or take seconds to read.
_NUMBER_CHARS_MAX = 1000
_NUMBERS = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})


class PackedFiles:
    """The files of the archive `path`, which lie in `directory` (`PARENT/<32 hex>`) while they are needed. `pin`: the
    digest of the archive. The methods block, apart from `needed`."""

    def __init__(self, path: Path, parent: Path, limits: ExtractLimits, pin: Pin | None = None) -> None:
        self.directory = parent / secrets.token_hex(16)
        self._path, self._limits, self._pin = path, limits, pin
        self._stamp = self._now()
        self._lock = threading.Lock()
        self._whole = False
        self._removed = Stop()
        self._unpacking: asyncio.Task[None] | None = None

    @property
    def whole(self) -> bool:
        return self._whole

    def outline(self, stop: Stop | None = None) -> None:
        """Unpacks the files that describe the model, and names the others (`extract`). The sizes of files are those in
        the archive's entries. Raises as `unpack`."""
        with self._lock:
            self._whole = self._unpacked(stop or self._removed, outline=True)

    def unpack(self, stop: Stop | None = None) -> None:
        """Unpacks all files, unless they are there. Raises ArchiveNotFound; InvalidArchive, also for an archive that
        was changed since it was opened; ServeError (disk); Stopped once `stop` is set, or they are removed."""
        with self._lock:
            if not self._whole:
                shutil.rmtree(self.directory, ignore_errors=True)
                self._whole = self._unpacked(stop or self._removed, outline=False)

    async def needed(self) -> None:
        """Unpacks all files, once for all who ask for them at a time. A caller may leave. Raises as `unpack`."""
        if self._whole:
            return
        if self._unpacking is None or self._unpacking.done():
            self._unpacking = owned(asyncio.to_thread(self.unpack))
        await asyncio.shield(self._unpacking)

    def put_away(self) -> None:
        """Deletes the files until they are needed. Never fails."""
        with self._lock:
            self._whole = False
            shutil.rmtree(self.directory, ignore_errors=True)

    def remove(self) -> None:
        """Deletes the files for good. Never fails."""
        self._removed.set("the model was removed")
        self.put_away()

    def _now(self) -> Stamp:
        try:
            return Stamp.of(self._path.stat())
        except OSError as error:
            raise ArchiveNotFound(f"Model not found at: {self._path} ({error.strerror})") from error

    def _unpacked(self, stop: Stop, *, outline: bool) -> bool:
        self._now()

        def check(file: IO[bytes]) -> bool:
            self._check(file, stop)
            return self._pin is not None

        return unpack_to(self._path, self.directory, self._limits, stop, outline=outline, check=check)

    def _check(self, file: IO[bytes], stop: Stop) -> None:
        """Raises InvalidArchive unless the opened file is the one that was registered, with the pinned digest."""
        now = Stamp.of(os.fstat(file.fileno()))
        if not now.is_like(self._stamp):
            raise refusal(self._path, "it was changed since the model was registered: register the model again")
        if self._pin is None or now == self._pin.stamp:
            return
        if (found := digest(file, stop)) != self._pin.sha256:
            raise refusal(self._path, f"its SHA-256 is {found}, not {self._pin.sha256}")
        self._pin = Pin(found, now)


@dataclass(frozen=True, slots=True)
class Archive:
    """An opened archive. File names are relative to `dir`; `manifest` and `config` are {} when the file is missing.
    `packed`: the files of a packed archive, unpacked when they are needed; None for a directory.

    `adapter`: the module that runs a handler written for another server (`ts.compat.NAME`), with `adapter_settings`.
    `signature`: the tensors that the model's files declare outside `config`. `completed`: returns the archive with the
    configuration that the loaded handler has completed. `priorities`: the priority levels and queue timeouts of
    requests. `needs`: what a worker takes of the rate limiter's resources, of each group of workers that differs.
    `graph`: the steps of a model without a handler. `handler_settings`: stronger than the section
    `handler` of the configuration. `remembered`: False for an archive that each start finds by itself, so that no
    snapshot lists it."""

    dir: Path
    packed: PackedFiles | None = None
    name: str | None = None
    version: str = "1.0"
    manifest: dict[str, Any] = field(default_factory=dict)
    handler: str | None = None
    model_file: str | None = None
    serialized_file: str | None = None
    requirements_file: str | None = None
    config_file: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    runtime: str = "python"
    adapter: str = ""
    adapter_settings: dict[str, Any] = field(default_factory=dict)
    signature: Signature | None = None
    priorities: Priorities | None = None
    needs: tuple[Needs, ...] = ()
    graph: Ensemble | InferenceGraph | None = None
    completed: Callable[[Archive, dict[str, Any]], Archive] | None = None
    handler_settings: dict[str, Any] = field(default_factory=dict)
    remembered: bool = True

    def remove(self) -> None:
        """Deletes the unpacked files; a directory that was only linked stays. Blocking, never fails."""
        if self.packed is not None:
            self.packed.remove()


def unpack(
    path: Path, directory: Path, limits: ExtractLimits, stop: Stop | None = None, pin: Pin | None = None
) -> Path:
    """The files of an archive, unpacked to `directory/<32 hex>`. Blocking. Raises ArchiveNotFound, InvalidArchive,
    ServeError (disk); Stopped once `stop` is set."""
    packed = PackedFiles(path, directory, limits, pin)
    packed.unpack(stop)
    return packed.directory


def unpack_to(
    path: Path,
    target: Path,
    limits: ExtractLimits,
    stop: Stop | None = None,
    *,
    outline: bool = False,
    check: Check | None = None,
) -> bool:
    """Unpacks an archive to `target`, which appears only when it's complete, or has the `outline` (`extract`); True
    when all files are there. Blocking. Raises as `unpack`."""
    partial = target.with_name(f".partial-{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(mode=0o700)
        whole = extract(path, partial, limits, stop, outline=outline, check=check)
        os.rename(root_of(partial), target)
    except OSError as error:
        raise not_unpacked(path, target.parent, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return whole


def root_of(directory: Path) -> Path:
    """Where the model's files begin: the only subdirectory, if there's nothing else (a .tar.gz has one)."""
    entries = list(directory.iterdir())
    if len(entries) == 1 and entries[0].is_dir() and not entries[0].is_symlink() and entries[0].name != "MAR-INF":
        return entries[0]
    return directory


def is_gguf(name: str) -> bool:
    """Whether a file of this name is a language model, or the first part of one."""
    return name.endswith(GGUF) and not _LATER_PART.search(name)


def real(path: Path) -> Path:
    """The path without links. A link to a language model's file stays, whose name says what it is: in caches that of
    the target is a digest."""
    return path.parent.resolve() / path.name if is_gguf(path.name) and path.is_file() else path.resolve()


def read_manifest(path: Path, file: Path) -> dict[str, Any]:
    """The JSON object in `file`, {} when it isn't there."""
    content = read_text(path, file)
    if content is None:
        return {}
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise refusal(path, f"not JSON: {error}", f"{file.parent.name}/{file.name}") from error
    if not isinstance(manifest, dict):
        raise refusal(path, "must be a JSON object", f"{file.parent.name}/{file.name}")
    return manifest


def read_text(path: Path, file: Path) -> str | None:
    """A small text file (UTF-8, byte order mark allowed), None if it isn't there."""
    try:
        return read_file(file, _TEXT_BYTES_MAX).decode("utf-8-sig")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise refusal(path, f"not UTF-8: {error}", file.name) from error
    except OSError as error:
        raise refusal(path, f"can't be read: {error.strerror}", file.name) from error


def member(path: Path, manifest: dict[str, Any], key: str, file: Path) -> dict[str, Any]:
    value = manifest.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refusal(path, f"{key!r} must be an object, not {value!r}", str(file))
    return value


def text(path: Path, values: dict[str, Any], key: str, file: Path) -> str | None:
    """A text of the manifest; absent, null and "" are None."""
    value = values.get(key)
    if value is not None and not isinstance(value, str):
        raise refusal(path, f"{key!r} must be a text, not {value!r}", str(file))
    return value or None


def file_name(path: Path, values: dict[str, Any], key: str, file: Path) -> str | None:
    """A file the manifest names: it must lie inside the archive. A missing one is the handler's business."""
    name = text(path, values, key, file)
    return "/".join(safe_parts(path, name)) or None if name else None


def read_config(path: Path, file: Path) -> dict[str, Any]:
    """The mapping in a YAML file of an archive, {} when it isn't there. Raises InvalidArchive."""
    content = read_text(path, file)
    if content is None:
        log.warning("%s: its manifest names the configuration %s, which isn't there", path.name, file.name)
        return {}
    try:
        return parse_config(content)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise refusal(path, f"not usable as YAML: {error}", file.name) from error


def parse_config(text: str) -> dict[str, Any]:
    """The mapping in a model-config.yaml. Raises yaml.YAMLError, ValueError, RecursionError.

    Plain YAML types only. Aliases may not blow the document up: each counts as the value it refers to.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}
        if _size(node, {}) > _YAML_NODES_MAX:
            raise ValueError(f"more than {_YAML_NODES_MAX} values with all aliases written out")
        value = loader.construct_document(node)
    finally:
        loader.dispose()
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"must be keys with values, not {type(value).__name__}")
    return value


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """The number of nodes below `node` and in it, aliases written out; `known` is by id, 0 while open. Raises
    ValueError for numbers that are too long.

    Long texts count as several: an alias can repeat them too.
    """
    if (size := known.get(id(node))) is not None:
        if size == 0:
            raise ValueError("an alias stands inside what it names")
        return size
    if node.tag in _NUMBERS and len(node.value) > _NUMBER_CHARS_MAX:
        raise ValueError(f"a number of {len(node.value)} characters, at most {_NUMBER_CHARS_MAX} are possible")
    known[id(node)] = 0
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    own = 1 + len(node.value) // 100 if isinstance(node, yaml.ScalarNode) else 1
    size = known[id(node)] = own + sum(_size(child, known) for child in children)
    return size
