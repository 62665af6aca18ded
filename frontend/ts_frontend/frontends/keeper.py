"""The keeper: a process without threads, forked from the lead before it had any, which forks its siblings.

So a sibling has the lead's settings, whatever their files say later, and needs no command of its own.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

#: What a sibling runs: its number, its end of the line to the lead, and the descriptors of its sockets by the
#: listeners' `where`. Returns its exit status.
RunSibling = Callable[[int, int, "Mapping[str, Sequence[int]]"], int]

_MESSAGE_BYTES_MAX = 65_536
_DESCRIPTORS_MAX = 250


class Keeper:
    """The lead's side of its keeper, which ends with the lead. `prepare`: what it does first, for all siblings;
    `run`: runs one."""

    def __init__(self, prepare: Callable[[], object], run: RunSibling) -> None:
        self._sock, theirs = socket.socketpair()
        if os.fork() == 0:
            _keep(theirs, prepare, run)
        theirs.close()

    def fork(self, number: int, line: socket.socket, sockets: Mapping[str, Sequence[socket.socket]]) -> None:
        """Starts the sibling `number`. Raises OSError if the keeper has ended."""
        message = {"number": number, "sockets": {where: len(some) for where, some in sockets.items()}}
        fds = [line.fileno(), *(one.fileno() for some in sockets.values() for one in some)]
        socket.send_fds(self._sock, [json.dumps(message).encode()], fds)

    def close(self) -> None:
        self._sock.close()


def _keep(sock: socket.socket, prepare: Callable[[], object], run: RunSibling) -> NoReturn:
    """The keeper's process, which never goes on as a copy of the lead."""
    try:
        _fork_siblings(sock, prepare, run)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def _fork_siblings(sock: socket.socket, prepare: Callable[[], object], run: RunSibling) -> NoReturn:
    _, last = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.closerange(3, sock.fileno())
    os.closerange(sock.fileno() + 1, min(last, 1 << 20))
    prepare()
    while True:
        data, fds, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES_MAX, _DESCRIPTORS_MAX)
        if not data:
            os._exit(0)
        try:
            pid = os.fork()
        except OSError as error:  # the lead, whose line ends, tries again
            pid = -1
            print(f"No frontend can be forked: {error}", file=sys.stderr, flush=True)
        if pid == 0:
            sock.close()
            _become(json.loads(data), fds, run)
        for fd in fds:
            os.close(fd)


def _become(message: dict[str, object], fds: list[int], run: RunSibling) -> NoReturn:
    status = 1
    try:
        for fd in fds:
            os.set_inheritable(fd, False)
        counts, rest = message["sockets"], iter(fds)
        line = next(rest)
        assert isinstance(counts, dict) and isinstance(message["number"], int)
        status = run(message["number"], line, {where: [next(rest) for _ in range(n)] for where, n in counts.items()})
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
