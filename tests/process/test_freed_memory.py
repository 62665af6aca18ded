"""Freed memory is kept for the next body, unless the environment tunes the C library's allocator."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

ROUNDS = 50
#: Blocks of growing sizes would be mapped anew, as each is larger than what was freed before.
PROGRAM = f"""
import resource
from ts.protocol.memory import keep_freed

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed()
largest = bytes(b"x" * (2 << 20))
del largest
before = faults()
for number in range({ROUNDS}):
    block = b"x" * ((1 << 20) + 4096 * number)
    del block
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
@pytest.mark.parametrize(
    "tuned", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}]
)
def test_bodies_use_the_memory_of_former_ones_unless_the_user_says_otherwise(tuned: dict[str, str]) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env | tuned, capture_output=True, text=True, check=True)
    assert (int(done.stdout) >= ROUNDS) == bool(tuned), done.stdout
