"""Lines that a worker writes to its standard output and error."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

LINE_BYTES_MAX = 64 * 1024
#: At a time, so that a worker which prints without end doesn't hold up the event loop.
READ_BYTES = 8 * 1024
#: More than a pipe holds (64 KiB).
PIPE_READS_MAX = 16


class LineReader:
    """Reads a pipe and hands on whole lines; a line longer than LINE_BYTES_MAX comes in parts."""

    def __init__(self, fd: int, stream: str, on_line: Callable[[str, str], None]) -> None:
        os.set_blocking(fd, False)
        self._fd: int | None = fd
        self._stream = stream
        self._on_line = on_line
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._readable)

    def _readable(self) -> bool:
        """True when there may be more."""
        if self._fd is None:
            return False
        try:
            data = os.read(self._fd, READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        if not data:
            self._close()
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._emit(line)
        if len(self._rest) > LINE_BYTES_MAX:
            self._emit(self._rest)
            self._rest = b""
        return True

    def _emit(self, line: bytes) -> None:
        self._on_line(self._stream, line.rstrip(b"\r").decode("utf-8", "backslashreplace"))

    def finish(self) -> None:
        """The writer has ended: reads what it left in the pipe and closes, also when a child of it goes on writing."""
        for _ in range(PIPE_READS_MAX):
            if not self._readable():
                break
        self._close()

    def _close(self) -> None:
        if self._fd is None:
            return
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = None
        if self._rest:
            self._emit(self._rest)
            self._rest = b""
