"""Resources of a process that its forks can't share: threads, devices, connections and child processes."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import threading
import time
from collections.abc import Collection
from typing import Any, NamedTuple

NAMES_MAX = 4
#: Linux's directory about this process, which other systems lack.
PROC = "/proc/self"
#: The targets of /proc/self/fd that two processes can't share. Files are opened again instead.
SHARED_BADLY = ("socket:", "pipe:", "anon_inode:")
DEVICES = ("/dev/nvidia", "/dev/dri/", "/dev/kfd", "/dev/accel")
ACCELERATORS = ("cuda", "xpu", "mps")
#: The most seconds in which a thread that has been joined leaves the kernel.
LEAVES_S_MAX = 0.5


class Footprint(NamedTuple):
    """The threads, descriptors and children of this process. `tasks`: kernel threads by id, with their names;
    `files`: descriptors and their targets; all {} if the system doesn't provide them."""

    threads: frozenset[int]
    tasks: dict[int, str]
    files: dict[int, str]
    children: frozenset[int]

    @staticmethod
    def now() -> Footprint:
        threads = frozenset(one.native_id or 0 for one in threading.enumerate() if one is not threading.main_thread())
        tasks = _tasks()
        return Footprint(threads, tasks, _files(), _children(tasks))

    def refusal(self, before: Footprint) -> str:
        """The reason why this process can't be forked since the footprint `before`; "" if it can."""
        if device := _device() or self._opened_device(before):
            return f"it uses {device}, which a forked process can't"
        if threads := self.threads - before.threads:
            names = [one.name for one in threading.enumerate() if one.native_id in threads]
            return f"it has started {_some(names, 'thread')}, which forked processes don't have"
        if tasks := self.tasks.keys() - before.tasks.keys():
            names = [self.tasks[one] for one in sorted(tasks)]
            return (
                f"it has started {_some(names, 'native thread')}, which forked processes don't have: by a parallel "
                "operation with more than one thread, or in a library"
            )
        if started := self.children - before.children:
            return f"it has started {_some([str(one) for one in sorted(started)], 'process', 'es')}"
        opened = [where for fd, where in self.files.items() if before.files.get(fd) != where]
        if bad := [where for where in opened if where.startswith(SHARED_BADLY)]:
            return f"it has opened {_some(bad, 'connection')}, which forked processes would share"
        return ""

    def _opened_device(self, before: Footprint) -> str:
        return next((at for fd, at in self.files.items() if fd not in before.files and at.startswith(DEVICES)), "")


def refusal_since(before: Footprint) -> str:
    """The reason why this process can't be forked since that footprint, "" if it can. Threads that are just ending may
    end first."""
    until_s = time.monotonic() + LEAVES_S_MAX
    while (now := Footprint.now()).refusal(before) and time.monotonic() < until_s:
        if now.tasks.keys() <= before.tasks.keys():
            break
        time.sleep(LEAVES_S_MAX / 100)
    return now.refusal(before)


def _some(names: list[str], what: str, plural: str = "s") -> str:
    """`2 threads (a, b)`."""
    shown = ", ".join(names[:NAMES_MAX]) + (", …" if len(names) > NAMES_MAX else "")
    return f"{len(names)} {what}{plural if len(names) > 1 else ''} ({shown})"


def _tasks() -> dict[int, str]:
    found = {}
    for name in _listed(f"{PROC}/task"):
        try:
            with open(f"{PROC}/task/{name}/comm") as file:
                found[int(name)] = file.read().strip()
        except OSError:  # it has ended meanwhile
            continue
    return found


def _files() -> dict[int, str]:
    found = {}
    for name in _listed(f"{PROC}/fd"):
        try:
            found[int(name)] = os.readlink(f"{PROC}/fd/{name}")
        except OSError:  # the listing's own
            continue
    return found


def _children(tasks: Collection[int]) -> frozenset[int]:
    found: set[int] = set()
    for task in tasks:
        try:
            with open(f"{PROC}/task/{task}/children") as file:
                found.update(map(int, file.read().split()))
        except OSError:  # a kernel that doesn't list them
            continue
    return frozenset(found)


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _device() -> str:
    """The kind of accelerator that torch has initialised, "" for none."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return ""
    for kind in ACCELERATORS:
        is_initialized = getattr(getattr(torch, kind, None), "is_initialized", None)
        if is_initialized is not None and is_initialized():
            return kind
    return ""


def owned_files(but: Collection[int]) -> None:
    """Reopens the regular files of a forked process at the same offset: with inherited descriptors, the processes
    would share the offset."""
    for fd in _files():
        if fd <= 2 or fd in but:
            continue
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                continue
            again = os.open(f"{PROC}/fd/{fd}", fcntl.fcntl(fd, fcntl.F_GETFL))
        except OSError:  # a file that can't be opened again stays as it is
            continue
        os.lseek(again, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(again, fd, inheritable=os.get_inheritable(fd))
        os.close(again)
