"""Where log lines go: files that are rotated, and a console that may go away."""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    TextHandler = logging.StreamHandler[TextIO]
else:
    TextHandler = logging.StreamHandler  # can't be subscripted before Python 3.11

FILE_BYTES_MAX = 100 << 20
FILES_KEPT_MAX = 5
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class RotatedFile(TextHandler):
    """A file that becomes `NAME.dd-MMM.log.gz` when its day is over or it is larger than `bytes_max`; the newest
    `kept_max` of those stay. `today` tells the date."""

    def __init__(
        self,
        path: Path,
        bytes_max: int = FILE_BYTES_MAX,
        kept_max: int = FILES_KEPT_MAX,
        today: Callable[[], date] = date.today,
    ) -> None:
        self.path, self._bytes_max, self._kept_max, self._today = path, bytes_max, kept_max, today
        super().__init__(self._open())

    def _open(self) -> TextIO:
        stream = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        information = os.fstat(stream.fileno())
        self._size = information.st_size
        self._day = date.fromtimestamp(information.st_mtime) if self._size else self._today()
        return stream

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + self.terminator
            if self._size and (self._size + len(line) > self._bytes_max or self._today() != self._day):
                self._rotate()
            self.stream.write(line)
            self.stream.flush()
            self._size += len(line)
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        self.stream.close()
        super().close()

    def _rotate(self) -> None:
        self.stream.close()
        try:
            _compress(self.path, self._rotated_path())
            self._delete_old()
        finally:
            self.stream = self._open()

    def _rotated_path(self) -> Path:
        """`ts_log.20-Nov.log.gz`; a second one of that day has a number before `.log`."""
        day = f"{self._day.day:02d}-{_MONTHS[self._day.month - 1]}"
        stem, number = self.path.stem, 0
        while True:
            path = self.path.with_name(f"{stem}.{day}{f'.{number}' if number else ''}.log.gz")
            if not path.exists():
                return path
            number += 1

    def _delete_old(self) -> None:
        rotated = sorted(self.path.parent.glob(f"{self.path.stem}.*.log.gz"), key=lambda path: path.stat().st_mtime_ns)
        for path in rotated[: -self._kept_max]:
            with contextlib.suppress(OSError):
                path.unlink()


def _compress(source: Path, target: Path) -> None:
    """Move `source` into a gzip file; level 1: the log waits meanwhile."""
    with open(source, "rb") as plain, gzip.open(target, "wb", compresslevel=1) as packed:
        shutil.copyfileobj(plain, packed, 1 << 20)
    source.unlink()


class Console(TextHandler):
    """Standard output; silent from then on when its reader is gone (a closed terminal or pipe)."""

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
        """Point the descriptor to nowhere: what is buffered would fail again at exit."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
