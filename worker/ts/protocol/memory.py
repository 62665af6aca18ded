"""The memory of large bodies, for the frontend and for workers.

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
from typing import Any, Final

#: The values that glibc comes to by itself once the process has freed a block of 32 MiB: smaller ones are taken from
#: the heap, whose free end is kept up to twice that size.
HEAP_BLOCK_BYTES_MAX = 32 << 20
KEPT_BYTES_MAX = 2 * HEAP_BLOCK_BYTES_MAX
#: The parameters of `mallopt`.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: The variables by which a user sets the same.
_VARIABLES = frozenset({"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"})
#: Below this size, clearing takes less time than the call that leaves it out.
_UNFILLED_BYTES_MIN: Final = 32 * 1024
_made: Any = ctypes.pythonapi.PyByteArray_FromStringAndSize
_made.argtypes, _made.restype = (ctypes.c_void_p, ctypes.c_ssize_t), ctypes.py_object
_made_bytes: Any = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_address: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))
_view: Any = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_WRITABLE: Final = 0x200


def unfilled(size: int) -> bytearray:
    """A buffer that the caller fills before anyone else sees it: a large one holds what its memory held before, because
    clearing a mebibyte takes 75 µs."""
    if size < _UNFILLED_BYTES_MIN:
        return bytearray(size)
    found: bytearray = _made(None, size)
    return found


def unfilled_bytes(size: int) -> tuple[bytes, memoryview]:
    """Bytes that the caller fills through the view before anyone else sees them, as C code does with new ones. The view
    must not be used longer than the bytes exist. `size` is above one. Raises MemoryError."""
    found: bytes = _made_bytes(None, size)
    view: memoryview = _view(_address(found), size, _WRITABLE)
    return found, view


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
