"""A worker without a frontend: its socket holds the requests before it starts, and takes all answers.

Usage: python benchmarks/counting/worker.py LIBRARY FOLDER

It gets the Load messages and requests that the frontend sent to its workers, as `frontend.py` recorded them in FOLDER.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import pickle
import socket
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

from counting.counter import Counter, CountFailed
from counting.frontend import ASKED
from ts.protocol.decoder import decode_bytes
from ts.protocol.frames import Chunk, Failed, Item, Load, Message, Pieces, Predict, Stop, encode_bytes
from ts.protocol.progress import PROGRESS_BYTES, Progress
from ts.runtime import blocking, worker
from ts.runtime.jobs import Ledger
from ts.runtime.main import answer

SOCKET_BYTES = 8 * 1024 * 1024
#: The credit of a stream, large enough that none waits for its reader.
CREDIT_BYTES = 1 << 40


#: The rows that are also measured in batches, as a model with dynamic batching gets them under load, and the size of
#: those. With 64 clients, batches of the benchmark's Triton model have about 25 requests.
BATCHED, TOGETHER = ("ModelInfer gRPC", "ModelInfer JSON"), 16


class Life:
    """Lives of a worker of one model, one after another in this process, each with a number of requests in batches of
    `together`."""

    def __init__(self, settings: dict[str, Any], items: Sequence[Item], pieces: int, together: int = 1) -> None:
        self._settings = {**settings, "credit_bytes": CREDIT_BYTES}
        self._items, self._pieces, self._together = items, pieces, together

    async def run(self, requests: int, counted: AbstractContextManager[None]) -> None:
        """Runs from Load to Stop. Raises CountFailed unless every request has its answer."""
        ours, its = socket.socketpair()
        for end in (ours, its):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        items = [self._items[number % len(self._items)]._replace(job_id=number) for number in range(1, requests + 1)]
        starts = range(0, requests, self._together)
        messages = [Predict(number, items[at : at + self._together]) for number, at in enumerate(starts, 1)]
        sent: list[Message] = [Load(self._settings), *messages, Stop()]
        ours.setblocking(False)
        ours.sendall(b"".join(encode_bytes(one) for one in sent))
        link = worker.Link(os.dup(its.fileno()), leave=_ended)
        link._closed = True  # its second thread, which would stand in for a long call, ends at once
        with counted:
            answer(link, Progress(mmap.mmap(-1, PROGRESS_BYTES)), Ledger)
        link.close()
        its.shutdown(socket.SHUT_RDWR)  # its second thread may be waiting for it, and keep it open
        its.close()
        self._check(b"".join(iter(lambda: ours.recv(1 << 20), b"")), requests)
        ours.close()

    def _check(self, data: bytes, requests: int) -> None:
        messages = decode_bytes(data)
        failed = [message for message in messages if isinstance(message, Failed)]
        pieces = sum(isinstance(message, Chunk) for message in messages)
        pieces += sum(len(message.data) for message in messages if isinstance(message, Pieces))
        if failed or pieces != requests * self._pieces:
            raise CountFailed(f"{pieces} pieces for {requests} requests; failures: {failed[:1]}")


def _ended(status: int) -> NoReturn:
    raise CountFailed(f"the worker ended with status {status}")


async def main(library: Path, folder: Path) -> None:
    loads, asked = pickle.loads((folder / ASKED).read_bytes())  # noqa: S301  # the frontend's part wrote it just now
    counter = Counter(library)
    for name, (model, items, pieces) in asked.items():
        few, many = (1, 5) if pieces > 1 else (40, 120)
        await counter.measure(name, Life(loads[model], items, pieces).run, few, many, pieces)
        if name in BATCHED:
            life = Life(loads[model], items, pieces, TOGETHER)
            await counter.measure(f"{name} in batches", life.run, 3 * TOGETHER, 8 * TOGETHER, pieces)


if __name__ == "__main__":
    # Without time limits: under callgrind, on a busy machine, each would be exceeded now and then.
    blocking.QUICK_CALL_S = blocking.HOLD_BACK_S_MAX = blocking.UNREAD_S_MAX = worker.HELD_S_MAX = math.inf
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
    sys.stdout.flush()
    os._exit(0)
