"""Reproducible archives: equal files give equal bytes, for any order, dates, owners and permissions on disk."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import stat
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from model_archiver.model_archiver_error import ModelArchiverError

_COPY_BYTES = 1 << 20
_ZIP_EARLIEST = (1980, 1, 1, 0, 0, 0)
_ZIP_LATEST = (2107, 12, 31, 23, 59, 58)

#: Names to files, or to the bytes of generated files.
Members = Mapping[str, "Path | bytes"]
Moment = tuple[int, int, int, int, int, int]


class Stamp:
    """The date of all files in an archive, UTC."""

    def __init__(self, epoch_s: int, moment: Moment) -> None:
        self.epoch_s = epoch_s
        self.moment = moment

    @classmethod
    def now(cls) -> Stamp:
        """Now, or SOURCE_DATE_EPOCH (reproducible-builds.org/specs/source-date-epoch): seconds since 1970.

        Raises ModelArchiverError.
        """
        text = os.environ.get("SOURCE_DATE_EPOCH")
        try:
            epoch_s = int(time.time()) if text is None else int(text)
            return cls(epoch_s, time.gmtime(epoch_s)[:6])
        except (ValueError, OverflowError, OSError):
            raise ModelArchiverError(f"SOURCE_DATE_EPOCH is {text!r}, but must be seconds since 1970") from None

    def __str__(self) -> str:
        """As `createdOn` of a manifest."""
        year, month, day, hour, minute, second = self.moment
        return f"{day:02d}/{month:02d}/{year:04d} {hour:02d}:{minute:02d}:{second:02d}"


def write_zip(members: Members, file: IO[bytes], stamp: Stamp, compression: int) -> None:
    date = min(max(stamp.moment, _ZIP_EARLIEST), _ZIP_LATEST)
    with zipfile.ZipFile(file, "w", compression) as package:
        for name in sorted(members):
            with _opened(members[name]) as (source, size, mode):
                info = zipfile.ZipInfo(name, date)
                info.compress_type, info.file_size, info.create_system = compression, size, 3
                info.external_attr = (stat.S_IFREG | mode) << 16
                with package.open(info, "w") as target:
                    shutil.copyfileobj(source, target, _COPY_BYTES)


def write_tgz(members: Members, file: IO[bytes], stamp: Stamp, top: str) -> None:
    """Everything lies below the directory `top`."""
    with (
        gzip.GzipFile("", "wb", fileobj=file, mtime=stamp.epoch_s) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as package,
    ):
        for name in sorted(members):
            with _opened(members[name]) as (source, size, mode):
                entry = tarfile.TarInfo(f"{top}/{name}")
                entry.size, entry.mode, entry.mtime = size, mode, stamp.epoch_s
                package.addfile(entry, source)


def write_directory(members: Members, directory: Path) -> None:
    for name in sorted(members):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with _opened(members[name]) as (source, _, mode), path.open("xb") as target:
            shutil.copyfileobj(source, target, _COPY_BYTES)
            path.chmod(mode)


@contextmanager
def _opened(member: Path | bytes) -> Iterator[tuple[IO[bytes], int, int]]:
    """(content, bytes, mode): of the permissions only the owner's execute bit counts."""
    if isinstance(member, bytes):
        yield io.BytesIO(member), len(member), 0o644
        return
    with member.open("rb") as source:
        status = os.fstat(source.fileno())
        yield source, status.st_size, 0o755 if status.st_mode & stat.S_IXUSR else 0o644


def _mar(compression: int) -> Callable[[Members, Path, Stamp, str], None]:
    def write(members: Members, path: Path, stamp: Stamp, _name: str) -> None:
        with path.open("xb") as file:
            write_zip(members, file, stamp, compression)

    return write


def _tgz(members: Members, path: Path, stamp: Stamp, name: str) -> None:
    with path.open("xb") as file:
        write_tgz(members, file, stamp, name)


def _directory(members: Members, path: Path, _stamp: Stamp, _name: str) -> None:
    path.mkdir()
    write_directory(members, path)


#: --archive-format: (suffix of the file name, function that writes it).
FORMATS: Mapping[str, tuple[str, Callable[[Members, Path, Stamp, str], None]]] = {
    "default": (".mar", _mar(zipfile.ZIP_DEFLATED)),
    "zip-store": (".mar", _mar(zipfile.ZIP_STORED)),
    "tgz": (".tar.gz", _tgz),
    "no-archive": ("", _directory),
}


def pack(members: Members, target: Path, archive_format: str, stamp: Stamp, name: str) -> None:
    """Writes a temporary file and renames it to `target`, so that a failure keeps an existing file. Raises OSError,
    with the target's name where the system gives none (a full disk)."""
    _, write = FORMATS[archive_format]
    with tempfile.TemporaryDirectory(prefix=".archiving-", dir=target.parent) as work:
        fresh = Path(work, "new")
        try:
            write(members, fresh, stamp, name)
        except OSError as error:
            if error.filename is None and error.errno is not None:
                raise OSError(error.errno, error.strerror, str(target)) from error
            raise
        if target.is_dir() and not target.is_symlink():
            os.rename(target, Path(work, "old"))
        os.replace(fresh, target)
