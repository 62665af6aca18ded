"""How far a stream's requests are read ahead of their answers: by number and by size."""

from __future__ import annotations

import asyncio

#: Requests of one stream that have been read and not answered; the client's next ones wait in its connection.
REQUESTS_MAX = 64
#: The same in bytes: two of the largest that the default limits allow. A larger request goes alone.
REQUEST_BYTES_MAX = 16 * 1024 * 1024


class ReadAhead:
    """The room of one stream. It has one reader, which waits for those that leave."""

    def __init__(self, requests_max: int = REQUESTS_MAX, bytes_max: int = REQUEST_BYTES_MAX) -> None:
        self._requests_max, self._bytes_max = requests_max, bytes_max
        self._requests = self._bytes = 0
        self._changed: asyncio.Future[None] | None = None

    async def enter(self, size_bytes: int) -> None:
        """Returns when there is room for a request of that size, which then is taken."""
        while self._requests and (self._requests >= self._requests_max or self._bytes + size_bytes > self._bytes_max):
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed
        self._requests += 1
        self._bytes += size_bytes

    def leave(self, size_bytes: int) -> None:
        """A request of that size has been answered."""
        self._requests -= 1
        self._bytes -= size_bytes
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


WAITING_BYTES_MAX = 256 * 1024
#: What an answer takes beside its bytes.
ANSWER_COST_BYTES = 128


class ReadyAnswers:
    """A queue of groups of answers. A group is let in while fewer than WAITING_BYTES_MAX wait, however large it is."""

    def __init__(self) -> None:
        self._groups: asyncio.Queue[list[bytes] | None] = asyncio.Queue()
        self._waiting_bytes = 0
        self._space = asyncio.Event()

    async def put(self, answers: list[bytes]) -> None:
        while self._waiting_bytes >= WAITING_BYTES_MAX:
            self._space.clear()
            await self._space.wait()
        self._waiting_bytes += _cost_bytes(answers)
        self._groups.put_nowait(answers)

    def end(self) -> None:
        """Nothing comes after it."""
        self._groups.put_nowait(None)

    async def get(self) -> list[bytes] | None:
        """The next group; None at the end."""
        return self._taken(await self._groups.get())

    def get_waiting(self) -> list[bytes]:
        """All that is there now, which may be nothing."""
        answers: list[bytes] = []
        while not self._groups.empty():
            group = self._taken(self._groups.get_nowait())
            if group is None:
                self.end()
                break
            answers += group
        return answers

    def _taken(self, answers: list[bytes] | None) -> list[bytes] | None:
        if answers is not None:
            self._waiting_bytes -= _cost_bytes(answers)
            self._space.set()
        return answers


def _cost_bytes(answers: list[bytes]) -> int:
    return sum(map(len, answers)) + ANSWER_COST_BYTES * len(answers)
