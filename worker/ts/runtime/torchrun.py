"""Workers of several processes: `python -m ts.runtime.torchrun start SERVER_PID TORCHRUN'S WORDS…` is torchrun in a
process that ends with the server, `python -m ts.runtime.torchrun rank` one of the processes that it starts.

A rank connects to the socket in the directory that `TORCHRELAY_RENDEZVOUS` names, identifies itself, and gets the
progress file; from then on it is a worker like any other, but only rank 0 answers.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from ts.runtime import main as worker
from ts.runtime.process import STOPPING, die_with


def start(server_pid: int, words: list[str]) -> None:
    """Runs torchrun until its processes have ended."""
    die_with(server_pid)
    # torchrun ends its processes on any of these. Blocked, so that it never hears of them; its processes unblock them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    from torch.distributed.run import main as run

    run(words)


def meet(directory: str, secret: str, rank: int) -> tuple[int, int]:
    """Descriptors of the connected socket and the progress file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        handle = os.open(directory, os.O_RDONLY)
        try:
            # The path itself may be too long for a socket's address.
            sock.connect(f"/proc/self/fd/{handle}/socket" if sys.platform == "linux" else f"{directory}/socket")
        finally:
            os.close(handle)
        sock.sendall(json.dumps({"secret": secret, "rank": rank, "pid": os.getpid()}).encode())
        data, fds, _, _ = socket.recv_fds(sock, 1, 1)
        if not data or not fds:
            raise ConnectionError("the server doesn't know this process")
        return sock.detach(), fds[0]


def be_rank() -> None:
    die_with(os.getppid())
    rank = int(os.environ["LOCAL_RANK"])
    directory, secret = os.environ.pop("TORCHRELAY_RENDEZVOUS"), os.environ.pop("TORCHRELAY_RENDEZVOUS_SECRET")
    try:
        fds = meet(directory, secret, rank)
    except OSError as error:
        sys.exit(f"rank {rank} can't reach the server: {error}")
    worker.live(*fds, silent=rank != 0)


def main() -> None:
    if sys.argv[1] == "rank":
        be_rank()
    else:
        start(int(sys.argv[2]), sys.argv[3:])


if __name__ == "__main__":
    main()
