"""Measures ways of passing large bodies to another process and back: through a socket, and in a sealed memory file.

Usage: python benchmarks/passing.py [--sizes 65536,1048576] [--rounds N]

CPU time of both processes for each body, there and back. Linux only.
"""

from __future__ import annotations

import argparse
import fcntl
import mmap
import os
import resource
import select
import socket
import sys
from collections.abc import Callable, Sequence

from measuring import machine
from measuring.results import Spread, aligned

READ_BYTES = 512 * 1024
BYTES_PER_RUN = 200_000_000
BODIES_MIN, BODIES_MAX = 30, 1000
SEALS = 0xF  # F_SEAL_SEAL, _SHRINK, _GROW, _WRITE

Body = bytes | bytearray | mmap.mmap


class End:
    """One end of a socket like that of a worker."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.sock = sock
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)

    def send(self, body: Body) -> None:
        view = memoryview(body)
        while len(view):
            try:
                view = view[self.sock.send(view) :]
            except BlockingIOError:
                self._writable.poll()

    def joined(self, size: int) -> Body:
        """Receives pieces and copies them into a buffer."""
        whole, at = bytearray(size), 0
        while at < size:
            try:
                piece = self.sock.recv(READ_BYTES)
            except BlockingIOError:
                self._readable.poll()
                continue
            whole[at : at + len(piece)] = piece
            at += len(piece)
        return whole

    def read_into(self, size: int) -> Body:
        """Receives pieces into the buffer, as the server does."""
        whole, at = bytearray(size), 0
        with memoryview(whole) as view:
            while at < size:
                try:
                    at += self.sock.recv_into(view[at:])
                except BlockingIOError:
                    self._readable.poll()
        return whole

    def send_file(self, body: Body) -> None:
        fd = os.memfd_create("body", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(fd, body)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        socket.send_fds(self.sock, [b"f"], [fd])
        os.close(fd)

    def mapped(self, size: int) -> Body:
        self._readable.poll()
        (fd,) = socket.recv_fds(self.sock, 1, 1)[1]
        found = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        os.close(fd)
        return found

    def file_read(self, size: int) -> Body:
        self._readable.poll()
        (fd,) = socket.recv_fds(self.sock, 1, 1)[1]
        whole = bytearray(size)
        os.preadv(fd, [whole], 0)
        os.close(fd)
        return whole


Way = tuple[Callable[[End, Body], None], Callable[[End, int], Body]]
WAYS: dict[str, Way] = {
    "socket, read into the body": (End.send, End.read_into),
    "socket, pieces joined": (End.send, End.joined),
    "memory file, mapped": (End.send_file, End.mapped),
    "memory file, read": (End.send_file, End.file_read),
}


def cpu_s(way: Way, size: int, count: int) -> float:
    """CPU seconds for each of `count` bodies, of both processes."""
    send, receive = way
    ours, theirs = socket.socketpair()
    before = _used_s()
    pid = os.fork()
    if pid == 0:
        end = End(theirs)
        for _ in range(count):
            send(end, receive(end, size))
        os._exit(0)
    end, body = End(ours), os.urandom(size)
    for _ in range(count):
        send(end, body)
        got = receive(end, size)
    os.waitpid(pid, 0)
    if bytes(got) != body:
        sys.exit("another body came back")
    for one in (ours, theirs):
        one.close()
    return (_used_s() - before) / count


def _used_s() -> float:
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in found)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure ways of handing large bodies to another process.")
    parser.add_argument("--sizes", default="65536,262144,1048576,8388608", help="comma list of bytes")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(words)
    options.sizes = [int(size) for size in options.sizes.split(",")]
    return options


def main() -> None:
    options = parse()
    print(f"A body there and back between two processes. {machine.busy()}", flush=True)
    lines = [["bytes", "way", "CPU µs: min – median – max"]]
    for size in options.sizes:
        count = min(BODIES_MAX, max(BODIES_MIN, BYTES_PER_RUN // size))
        found: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(options.rounds):
            for name, way in WAYS.items():
                found[name].append(cpu_s(way, size, count) * 1e6)
        lines += [[str(size), name, Spread.of(values).text()] for name, values in found.items()]
    print(aligned(lines))


if __name__ == "__main__":
    main()
