"""The keeper that frontends are forked from."""

from __future__ import annotations

import subprocess
import sys

from support import GUARD_S

#: In a process of its own, as the lead's is when it makes its keeper: without threads.
LEAD = """
import os, socket
from ts_frontend.frontends.keeper import Keeper

def without_processes():  # in the keeper: as with too many processes, once
    fork = os.fork
    def refused():
        os.fork = fork
        raise BlockingIOError(11, "Resource temporarily unavailable")
    os.fork = refused

def run(number, line, sockets):
    os.write(line, b"frontend %d" % number)
    return 0

keeper = Keeper(without_processes, run)
for number in (1, 2):
    ours, theirs = socket.socketpair()
    keeper.fork(number, theirs, {})
    theirs.close()
    print(ours.recv(100).decode() or "nothing", flush=True)
keeper.close()
"""


def test_a_fork_that_fails_ends_the_line_and_the_next_one_is_a_frontend() -> None:
    lead = subprocess.run([sys.executable, "-c", LEAD], capture_output=True, text=True, timeout=GUARD_S)
    assert lead.stdout.splitlines() == ["nothing", "frontend 2"], lead.stderr
    assert lead.stderr == "No frontend can be forked: [Errno 11] Resource temporarily unavailable\n"
