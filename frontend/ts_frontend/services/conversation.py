"""StreamPredictions2: requests come as the client sends them, answers leave as they are ready.

Requests of one sequence_id run one after another; those without an id are one sequence too, so that their answers
keep the order of the questions. Different sequences run side by side. A request that fails is answered with a
status, and the stream goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from typing import TypeAlias

from ts_frontend.errors import ServeError
from ts_frontend.services.predictions import Request, failure_response, parse, sequence_response
from ts_frontend.services.read_ahead import ReadAhead
from ts_frontend.services.ready_answers import ReadyAnswers
from ts_frontend.services.served import Answer
from ts_frontend.tasks import owned, watched

Start: TypeAlias = Callable[[Request], Answer]


class _Conversation:
    """The state of one call."""

    def __init__(self, method: str, start: Start) -> None:
        self._method, self._start = method, start
        self._room = ReadAhead()
        self._last: dict[str | None, asyncio.Task[None]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._answers = ReadyAnswers()

    async def read(self, requests: AsyncIterator[bytes]) -> None:
        """Starts every request and waits for their ends; `ready` ends after that, or with the first error here."""
        try:
            async for data in requests:
                await self._room.enter(len(data))
                await self._take(data)
            if self._running:
                await asyncio.wait(self._running)
        finally:
            for task in self._running:
                task.cancel()
            self._answers.end()

    async def ready(self) -> list[bytes] | None:
        """The answers that are ready, at least one; None after the last."""
        answers = await self._answers.get()
        return answers if answers is None else answers + self._answers.get_waiting()

    async def _take(self, data: bytes) -> None:
        try:
            request = parse(self._method, data)
        except ServeError as error:
            self._room.leave(len(data))
            await self._answers.put([failure_response(error, None)])
            return
        sequence_id = request.sequence_id
        task = watched(self._run(request, self._last.get(sequence_id)), f"A request of {self._method}")
        self._last[sequence_id] = task
        self._running.add(task)
        task.add_done_callback(partial(self._ended, sequence_id, len(data)))

    def _ended(self, sequence_id: str | None, size_bytes: int, task: asyncio.Task[None]) -> None:
        self._room.leave(size_bytes)
        self._running.discard(task)
        if self._last.get(sequence_id) is task:
            del self._last[sequence_id]

    async def _run(self, request: Request, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})
        try:
            answer = self._start(request)
            await self._drain(answer, request.sequence_id or answer.sequence_id or None)
        except ServeError as error:
            await self._answers.put([failure_response(error, request.sequence_id)])
        except Exception as error:
            internal = ServeError(f"{self._method}: {type(error).__name__} in the server, see its log")
            await self._answers.put([failure_response(internal, request.sequence_id)])
            raise

    async def _drain(self, answer: Answer, sequence_id: str | None) -> None:
        try:
            async for pieces in answer.chunks():
                await self._answers.put([sequence_response(piece, sequence_id) for piece in pieces])
        finally:
            answer.cancel()


async def converse(method: str, requests: AsyncIterator[bytes], start: Start) -> AsyncGenerator[Sequence[bytes], None]:
    """The answers to `requests`; `start` begins one. Leaving early cancels what is running."""
    conversation = _Conversation(method, start)
    reader = owned(conversation.read(requests))
    try:
        while (answers := await conversation.ready()) is not None:
            yield answers
        await reader
    finally:
        reader.cancel()
        del reader  # the exception that it ended with may be on its way through this frame
