"""Nothing that tests start outlives them, even if they are killed.

A process that tests run in marks its environment, which all that it starts inherits, forked programs and servers of
servers alike, and starts a watcher in a session of its own. When the process has ended, in whatever way, the watcher
kills all that bears its mark. A signal for a parent's death (PR_SET_PDEATHSIG) would come when a thread ends, and
reaches one generation only.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys

import psutil

MARK = "TORCHRELAY_TEST_RUN"
#: So many looks find nothing new before the watcher ends: what it kills may just have started something.
LOOKS = 3
LOOK_EVERY_S = 0.1


def end_with_this_process() -> None:
    """Starts the watcher of this process, once; a fork of one with a watcher has another one."""
    mark = os.environ.get(MARK, "")
    if mark.startswith(f"{os.getpid()}-"):
        return
    os.environ[MARK] = mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    command = [sys.executable, __file__, mark]
    silent = subprocess.DEVNULL
    watcher = subprocess.Popen(command, stdin=silent, stdout=silent, stderr=silent, start_new_session=True)
    watcher.returncode = 0  # it outlives this process, which doesn't wait for it


def marked(mark: str) -> list[psutil.Process]:
    """The running processes that bear the mark, but for this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):  # it has ended, or is another user's
            continue
    return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def watch(mark: str) -> None:
    try:
        process = psutil.Process(int(mark.partition("-")[0]))
        while process.status() != psutil.STATUS_ZOMBIE:  # which it stays until its parent asks
            psutil.wait_procs([process], timeout=1)
    except psutil.NoSuchProcess:
        pass
    nothing = 0
    while nothing < LOOKS:
        left = marked(mark)
        nothing = 0 if left else nothing + 1
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=LOOK_EVERY_S)


if __name__ == "__main__":
    watch(sys.argv[1])
