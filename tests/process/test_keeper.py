"""The keeper that frontends are forked from."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence

from support import GUARD_S
from ts_frontend.frontends.keeper import Keeper


def test_a_fork_that_fails_ends_the_line_and_the_next_one_is_a_frontend() -> None:
    def without_processes() -> None:
        """In the keeper: as with too many processes, once."""
        fork = os.fork

        def refused() -> int:
            os.fork = fork
            raise BlockingIOError(11, "Resource temporarily unavailable")

        os.fork = refused
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # pytest's files are closed there

    def run(number: int, line: int, sockets: Mapping[str, Sequence[int]]) -> int:
        os.write(line, b"frontend %d" % number)
        return 0

    keeper = Keeper(without_processes, run)
    try:
        told = []
        for number in (1, 2):
            ours, theirs = socket.socketpair()
            ours.settimeout(GUARD_S)
            with ours:
                with theirs:
                    keeper.fork(number, theirs, {})
                told.append(ours.recv(100))
        assert told == [b"", b"frontend 2"]
    finally:
        keeper.close()
