"""A worker of several processes (torchrun): the rendezvous with the frontend, and one connection for all of them.

torchrun starts its processes itself, so they can't inherit a socket. Each connects to a socket in a private directory
of the server, sends the worker's secret, and gets the progress file. Rank 0 answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from ts.protocol.frames import (
    Cancel,
    Chunk,
    Credit,
    Failed,
    Load,
    LoadFailed,
    Message,
    Pieces,
    Predict,
    Ready,
    Stop,
    check,
)
from ts_frontend.workers.in_flight import Connection

log = logging.getLogger(__name__)

GREETING_BYTES_MAX = 4096
SOCKET_PATH_BYTES_MAX = 100
UNBOUNDED_BYTES = 1 << 62


@contextlib.contextmanager
def _short(directory: Path, name: str) -> Iterator[str]:
    """A path of the file `name`, short enough for a socket's address."""
    path = str(directory / name)
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        yield path
        return
    if sys.platform != "linux":
        raise OSError(
            f"{path} is longer than {SOCKET_PATH_BYTES_MAX} bytes, the most that a socket's address has here: set "
            "temp_dir (or TMPDIR) to a directory with a shorter path"
        )
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{name}"
    finally:
        os.close(handle)


@dataclass(slots=True)
class Rendezvous:
    """The socket that the `count` processes of one worker connect to. `pids`: the connected ones; `lost`: a sentence
    on the first one that ended."""

    count: int
    lockstep: bool
    directory: Path
    listener: socket.socket
    secret: str
    pids: list[int] = field(default_factory=list)
    lost: str = ""

    @staticmethod
    def open(parent: Path, count: int, lockstep: bool) -> Rendezvous:
        """Makes a rendezvous in a directory that only this user can enter. Raises OSError."""
        directory = Path(tempfile.mkdtemp(prefix="ranks-", dir=parent))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short(directory, "socket") as address:
                listener.bind(address)
            listener.listen(count)
        except OSError:
            listener.close()
            shutil.rmtree(directory, ignore_errors=True)
            raise
        listener.setblocking(False)
        return Rendezvous(count, lockstep, directory, listener, secrets.token_hex(16))

    @property
    def env(self) -> dict[str, str]:
        """Returns the environment variables by which a process finds the rendezvous."""
        return {"TORCHRELAY_RENDEZVOUS": str(self.directory), "TORCHRELAY_RENDEZVOUS_SECRET": self.secret}

    def rank_of(self, greeting: bytes) -> int:
        """The rank of the process that sent `greeting`. Raises ValueError for a foreign process."""
        said: Any = json.loads(greeting)
        if not isinstance(said, dict) or not hmac.compare_digest(str(said.get("secret")), self.secret):
            raise ValueError("the secret is wrong")
        rank = int(said["rank"])
        if not 0 <= rank < self.count:
            raise ValueError(f"rank {rank} of {self.count}")
        self.pids.append(int(said["pid"]))
        return rank

    def close(self) -> None:
        self.listener.close()
        shutil.rmtree(self.directory, ignore_errors=True)


class RankConnections:
    """The connections to all processes of a worker, with the interface of one `Connection`.

    In lockstep the processes compute together, so they need the same requests in the same order, and none may stop
    early: a batch is sent when all have finished the previous one, without cancels, deadlines or credit.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        progress_fd: int,
        on_messages: Callable[[list[Message]], None],
        on_end: Callable[[str], None],
        message_bytes_max: int,
    ) -> None:
        self._rendezvous = rendezvous
        self._progress_fd = progress_fd
        self._on_messages, self._on_end = on_messages, on_end
        self._message_bytes_max = message_bytes_max
        self._lines: dict[int, Connection] = {}
        self._guests: set[socket.socket] = set()
        self._early: list[Message] = []
        self._ready: dict[int, Ready] = {}
        self._open: dict[int, set[int]] = {}
        self._waiting: list[Predict] = []
        self._closed = self._finishing = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(rendezvous.listener, self._welcome)

    # --- who comes

    def _welcome(self) -> None:
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while True:
                guest, _ = self._rendezvous.listener.accept()
                guest.setblocking(False)
                self._guests.add(guest)
                self._loop.add_reader(guest, self._greeted, guest)

    def _greeted(self, guest: socket.socket) -> None:
        self._loop.remove_reader(guest)
        self._guests.discard(guest)
        try:
            rank = self._rendezvous.rank_of(guest.recv(GREETING_BYTES_MAX))
            if rank in self._lines:
                raise ValueError(f"a second rank {rank}")
            socket.send_fds(guest, [b"\0"], [self._progress_fd])
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("A process was turned away from the ranks of a worker: %s", error)
            guest.close()
            return
        self._join(rank, guest)

    def _join(self, rank: int, guest: socket.socket) -> None:
        line = Connection(
            guest,
            lambda messages: self._received(rank, messages),
            lambda reason: self._lost(rank, reason),
            self._message_bytes_max,
        )
        self._lines[rank] = line
        for message in self._early:
            self._send(line, rank, message)
        if len(self._lines) == self._rendezvous.count:
            self._stop_welcoming()

    def _stop_welcoming(self) -> None:
        if self._rendezvous.listener.fileno() >= 0:
            self._loop.remove_reader(self._rendezvous.listener)
            self._rendezvous.close()
        for guest in self._guests:
            self._loop.remove_reader(guest)
            guest.close()
        self._guests.clear()

    # --- to them

    def push(self, message: Message) -> None:
        """Queues a message for the ranks that need it."""
        if isinstance(message, (Load, Stop)):
            self._early.append(message)
            for rank, line in self._lines.items():
                self._send(line, rank, message)
        elif not self._rendezvous.lockstep:
            self._lines[0].push(message)
        elif isinstance(message, Predict):
            check(message)  # its sender has to know now, not when its turn comes
            self._waiting.append(message)
            self._send_next()
        elif isinstance(message, Cancel):
            self._lines[0].push(Credit(message.job_id, UNBOUNDED_BYTES))
        else:
            self._lines[0].push(message)

    def _send(self, line: Connection, rank: int, message: Message) -> None:
        if isinstance(message, Load):
            gpu = {"gpu_id": rank} if message.settings.get("gpu_id") is not None else {}
            message = Load({**message.settings, **gpu})
        line.push(message)

    def _send_next(self) -> None:
        if any(self._open.values()) or not self._waiting:
            return
        predict = self._waiting.pop(0)
        items = [item._replace(deadline_s=inf) for item in predict.items]
        for rank, line in self._lines.items():
            line.push(Predict(predict.batch_id, items))
            self._open[rank] = {item.job_id for item in items}
            line.flush()

    def flush(self) -> None:
        for line in self._lines.values():
            line.flush()

    # --- from them

    def _received(self, rank: int, messages: list[Message]) -> None:
        kept = [message for message in messages if self._counts(rank, message)]
        if kept:
            self._on_messages(kept)
        if self._rendezvous.lockstep and not self._closed:
            self._send_next()

    def _counts(self, rank: int, message: Message) -> bool:
        """Returns True for a message to pass on to the worker: rank 0's answers, and a failed load of any rank. When
        all ranks are ready, it passes that on itself."""
        if isinstance(message, Ready):
            self._ready[rank] = message
            if len(self._ready) == self._rendezvous.count:
                self._on_messages([self._ready[0]])
            return False
        if isinstance(message, LoadFailed):
            return True
        if isinstance(message, Failed) or (isinstance(message, (Chunk, Pieces)) and message.last):
            self._open.get(rank, set()).discard(message.job_id)
        return rank == 0

    # --- the end

    def _lost(self, rank: int, reason: str) -> None:
        if not self._closed and not self._finishing:
            self._rendezvous.lost = f"Rank {rank} of {self._rendezvous.count} ended"
        self._ended(f"rank {rank} of {self._rendezvous.count}: {reason}")

    def _ended(self, reason: str) -> None:
        if not self._closed:
            self.close()
            self._on_end(reason)

    def finish(self, reason: str) -> None:
        """Reads the processes' last messages after torchrun has ended, then ends."""
        self._finishing = True
        for line in list(self._lines.values()):
            line.finish(reason)
        self._ended(reason)

    def close(self) -> None:
        """Closes everything; nothing is called afterwards."""
        self._closed = True
        self._stop_welcoming()
        for line in self._lines.values():
            line.close()
