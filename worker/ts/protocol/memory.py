"""The C library's handling of freed memory, for the frontend and for workers.

By default, glibc returns the free end of the heap to the system as soon as it is larger than twice the largest freed
block (from 256 KiB on). Each large body then gets new pages, which the kernel clears, maps one by one and unmaps again:
more than five hundred for a body of 1 MiB there and back, with two fifths of its CPU time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Mapping

#: The values that glibc comes to by itself once the process has freed a block of 32 MiB: smaller ones are taken from
#: the heap, whose free end is kept up to twice that size.
HEAP_BLOCK_BYTES_MAX = 32 << 20
KEPT_BYTES_MAX = 2 * HEAP_BLOCK_BYTES_MAX
#: The parameters of `mallopt`.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: The variables by which a user sets the same.
_VARIABLES = frozenset({"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"})


def keep_freed() -> None:
    """Has freed memory kept for the next body, up to KEPT_BYTES_MAX.

    A worker calls it when its model is loaded: a load frees much that no request needs again. Other C libraries than
    glibc go on as they do, and so does glibc where the environment tunes its allocator.
    """
    if sys.platform != "linux" or _is_tuned(os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, HEAP_BLOCK_BYTES_MAX)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES_MAX)


def _is_tuned(environment: Mapping[str, str]) -> bool:
    return not _VARIABLES.isdisjoint(environment) or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")


def give_back_freed() -> None:
    """Returns all freed memory of the heap to the system. It has no effect on C libraries other than glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
