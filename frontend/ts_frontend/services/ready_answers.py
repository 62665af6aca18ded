"""Answers of one stream that wait to be written: so many bytes; then whoever brings more waits for the client."""

from __future__ import annotations

import asyncio

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
