"""Which file an archive was when it was looked at, and the SHA-256 that its URL demands.

A path may name another file, and a file may have other content, between any two looks at it. What is checked and what
is unpacked must be the same: both are read from one open file, whose stamp is compared before and after.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import IO, NamedTuple

from ts_frontend.models.store.http import Stop

_READ_BYTES = 1 << 20


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
    while data := file.read(_READ_BYTES):
        stop.check()
        found.update(data)
    return found.hexdigest()
