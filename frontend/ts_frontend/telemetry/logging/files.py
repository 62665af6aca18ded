"""Handlers for log lines: rotated files, and a console that may go away."""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, TextIO

from ts_frontend.config.files import LOG_MODE

FILE_BYTES_MAX = 100 << 20
FILES_KEPT_MAX = 5
#: The interval of checks whether a file was moved, removed or emptied.
LOOK_S = 1.0
#: The pause after an error (a full disk) before writing or rotating is tried again.
RETRY_S = 5.0
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def daily_name(path: Path) -> Callable[[datetime, int], Path]:
    """TorchServe's file names: `ts_log.20-Nov.log.gz`; a second file of that day has a number before `.log`."""

    def name(moment: datetime, number: int) -> Path:
        day = f"{moment.day:02d}-{_MONTHS[moment.month - 1]}"
        return path.with_name(f"{path.stem}.{day}{f'.{number}' if number else ''}.log.gz")

    return name


class Rotation(NamedTuple):
    """When a log file is rotated, and its new name: the next free one that `name` gives for the time the file began
    and 0, 1, …. Of the files that `found` matches (a glob in their directory), the newest `kept_max` are kept.
    `by_time`: the file is also rotated when `name` gives another name for the current time."""

    name: Callable[[datetime, int], Path]
    found: str
    bytes_max: int = FILE_BYTES_MAX
    kept_max: int = FILES_KEPT_MAX
    by_time: bool = True


def daily(path: Path, bytes_max: int = FILE_BYTES_MAX, kept_max: int = FILES_KEPT_MAX) -> Rotation:
    """TorchServe's rotation."""
    return Rotation(daily_name(path), f"{path.stem}.*.log.gz", bytes_max, kept_max)


class Complaints:
    """Reports on standard error that files of a directory can't be written, once until all of them can be."""

    def __init__(self) -> None:
        self._failing: set[Path] = set()

    def failed(self, path: Path, error: OSError) -> None:
        if not any(one.parent == path.parent for one in self._failing):
            where = f"Log file {path} can't be written, nor may the others of its directory: their lines are lost until"
            _complain(f"{where} they can: {error}. LOG_LOCATION and METRICS_LOCATION name the directories of logs.")
        self._failing.add(path)

    def written(self, path: Path) -> None:
        self._failing.discard(path)


class RotatedFile(logging.Handler):
    """A log file; without `rotation` it grows without limit. Lines that can't be written (the disk is full, the
    directory is read-only, also on opening) are counted; their number is written once the file can be written again.
    `now` returns the local time; `complaints` are shared by the files of a server."""

    def __init__(
        self,
        path: Path,
        rotation: Rotation | None = None,
        now: Callable[[], datetime] = datetime.now,
        append: bool = True,
        complaints: Complaints | None = None,
    ) -> None:
        super().__init__()
        self.path, self._rotation, self._now = path, rotation, now
        self._complaints = complaints or Complaints()
        self._fd = -1
        self._place = 0, 0
        self._size = 0
        self._look_at_s = self._retry_at_s = self._rotate_at_s = 0.0
        self._lost = 0
        self._broken_line = False
        try:
            self._make(os.O_APPEND if append else os.O_TRUNC | os.O_APPEND)
        except OSError as error:
            self._failed(error, time.monotonic(), 0)

    def _make(self, flags: int = os.O_APPEND) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open(flags)

    def _open(self, flags: int = os.O_APPEND) -> None:
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, LOG_MODE)
        information = os.fstat(self._fd)
        self._place = information.st_dev, information.st_ino
        self._size = information.st_size
        self._began = datetime.fromtimestamp(information.st_mtime) if self._size else self._now()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            data = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        except Exception:
            self.handleError(record)
            return
        now_s = time.monotonic()
        if now_s < self._retry_at_s:
            self._lost += data.count(b"\n")
            return
        try:
            self._prepare(now_s, len(data))
            self._write(data)
        except OSError as error:
            self._failed(error, now_s, data.count(b"\n"))
            return
        self._complaints.written(self.path)

    def _prepare(self, now_s: float, more_bytes: int) -> None:
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            self._look()
        if self._size and now_s >= self._rotate_at_s and self._is_done(more_bytes):
            self._rotate(now_s)
        if self._lost or self._broken_line:
            self._resume()

    def _look(self) -> None:
        """Reopens the file when it was moved or removed, and updates the size when it was truncated."""
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            there = None
        if self._fd < 0 or there is None or (there.st_dev, there.st_ino) != self._place:
            self._close()
            self._make()
        else:
            self._size = there.st_size

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            self._size += written
            self._broken_line = written < len(view)
            view = view[written:]

    def _resume(self) -> None:
        """Writes how many lines are missing; the count is reset only when that is written."""
        text = f"{self._lost} lines are missing here: they couldn't be written\n" if self._lost else ""
        self._write(f"{chr(10) if self._broken_line else ''}{text}".encode())
        self._lost, self._broken_line = 0, False

    def _failed(self, error: OSError, now_s: float, lines: int) -> None:
        self._complaints.failed(self.path, error)
        self._lost += lines
        self._retry_at_s = now_s + RETRY_S
        if self._fd < 0:
            self._look_at_s = self._retry_at_s  # the file is looked for then

    def close(self) -> None:
        self._close()
        super().close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # --- rotation

    def _is_done(self, more_bytes: int) -> bool:
        rotation = self._rotation
        if rotation is None:
            return False
        if self._size + more_bytes > rotation.bytes_max:
            return True
        return rotation.by_time and rotation.name(self._began, 0) != rotation.name(self._now(), 0)

    def _rotate(self, now_s: float) -> None:
        assert self._rotation is not None
        try:
            _put_away(self.path, self._rotated_path(self._rotation))
            self._delete_old(self._rotation)
        except OSError as error:
            self._rotate_at_s = now_s + RETRY_S
            _complain(f"Log file {self.path} can't be rotated, it grows: {error}")
            return
        self._close()
        self._open()

    def _rotated_path(self, rotation: Rotation) -> Path:
        number = 0
        while (path := rotation.name(self._began, number)).exists():
            number += 1
        return path

    def _delete_old(self, rotation: Rotation) -> None:
        directory = rotation.name(self._began, 0).parent
        old = [path for path in directory.glob(rotation.found) if path != self.path]
        for path in sorted(old, key=lambda path: path.stat().st_mtime_ns)[: -rotation.kept_max]:
            with contextlib.suppress(OSError):
                path.unlink()


def _put_away(source: Path, target: Path) -> None:
    """Moves `source` to `target`, compressed if its suffix is .gz (at level 1, since the log waits for it)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix != ".gz":
        source.rename(target)
        return
    try:
        with (
            open(source, "rb") as plain,
            open(target, "wb", opener=_group_reads) as file,
            gzip.GzipFile("", "wb", compresslevel=1, fileobj=file) as packed,
        ):
            shutil.copyfileobj(plain, packed, 1 << 20)
    except OSError:
        target.unlink(missing_ok=True)
        raise
    source.unlink()


def _group_reads(path: str, flags: int) -> int:
    return os.open(path, flags, LOG_MODE)


def _complain(text: str) -> None:
    """Writes to standard error, since the logs can't be written."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


class Console(logging.StreamHandler[TextIO]):
    """Standard output; silent once its reader is gone (a closed terminal or pipe)."""

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream.closed:
            return
        try:
            self.stream.write(self.format(record) + self.terminator)
            self.stream.flush()
        except OSError:
            self._silence()
        except Exception:
            self.handleError(record)

    def _silence(self) -> None:
        """Point the descriptor at /dev/null: flushing the buffered output would fail again at exit."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
