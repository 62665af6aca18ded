"""Freed memory is kept for the next body, unless the environment tunes the C library's allocator, and torch's large
blocks lie in huge pages, unless the environment says otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from ts_frontend.config.load import load_config
from ts_frontend.workers.spawning import worker_env

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


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
#: The huge pages of a process with a tensor of 16 MiB, in KiB.
TENSOR = """
import re, torch
tensor = torch.ones(4 << 20)
print(re.search(r"AnonHugePages: +([0-9]+)", open("/proc/self/smaps_rollup").read())[1])
"""


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[madvise]" not in HUGE_PAGES.read_text(), reason="huge pages aren't for those who ask"
)
@pytest.mark.parametrize(("given", "huge"), [({}, True), ({"THP_MEM_ALLOC_ENABLE": "0"}, False)])
def test_a_workers_tensors_lie_in_huge_pages_unless_the_user_says_otherwise(given: dict[str, str], huge: bool) -> None:
    env = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    seen = worker_env(load_config([], None, env | given))
    done = subprocess.run([sys.executable, "-c", TENSOR], env=seen, capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 8 << 10) == huge, done.stdout
