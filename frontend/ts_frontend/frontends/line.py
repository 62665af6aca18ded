"""The line between the lead and one of its siblings: calls in both directions, each with one answer.

A frame is its length (u32, little endian) and a MessagePack array: [CALL, id, name, value], [ANSWER, id, value], or
[FAILURE, id, kind, arguments, details] with the parts of an `Ending`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from ts_frontend.errors import Draining, ServeError, ending_of
from ts_frontend.tasks import watched

log = logging.getLogger(__name__)

CALL, ANSWER, FAILURE = range(3)
#: The largest frame: a description of thousands of models, or their metrics.
FRAME_BYTES_MAX = 64 << 20
_LENGTH = struct.Struct("<I")

#: Answers a call: its name, and its value.
Answer = Callable[[str, Any], Awaitable[Any]]


class Line:
    """One end of a line over a connected socket. `answer` answers the other side's calls, which run side by side."""

    def __init__(self, sock: socket.socket, answer: Answer) -> None:
        self._sock, self._answer = sock, answer
        self._ids = itertools.count(1).__next__
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._running: set[asyncio.Task[None]] = set()
        self.up = True
        self.ended = asyncio.Event()

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._sock)

    async def run(self) -> None:
        """Reads frames until the line ends: the other side has closed it, or sent what is none. Calls that wait for
        their answers fail then."""
        if self._reader is None:
            await self.open()
        reader = self._reader
        assert reader is not None
        try:
            while True:
                (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                if size > FRAME_BYTES_MAX:
                    log.error("A frame of %d bytes on the line between frontends: at most %d", size, FRAME_BYTES_MAX)
                    return
                self._take(msgspec.msgpack.decode(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            log.error("The line between frontends has a frame that can't be read: %s", error)
        finally:
            self.close()
            for task in self._running:
                task.cancel()

    def close(self) -> None:
        self.up = False
        self.ended.set()
        if self._writer is not None:
            self._writer.close()
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            if not one.done():
                one.set_exception(Draining("The frontend has ended"))

    async def call(self, name: str, value: Any = None) -> Any:
        """Returns the other side's answer. Raises its ServeError, or Draining once the line has ended."""
        if not self.up or self._writer is None:
            raise Draining("The frontend has ended")
        number = self._ids()
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(CALL, number, name, value)
            return await answer
        finally:
            self._waiting.pop(number, None)

    def _send(self, *parts: Any) -> None:
        data = msgspec.msgpack.encode(parts)
        if len(data) > FRAME_BYTES_MAX:
            raise ServeError(f"A message between frontends has {len(data)} bytes, and may have {FRAME_BYTES_MAX}")
        if self._writer is not None and self.up:
            self._writer.write(_LENGTH.pack(len(data)) + data)

    def _take(self, frame: Any) -> None:
        kind, number, *parts = frame
        if kind == CALL:
            name, value = parts
            task = watched(self._run(number, name, value), f"The call {name} of a frontend")
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            return
        waiting = self._waiting.pop(number, None)
        if waiting is None or waiting.done():
            return
        if kind == ANSWER:
            waiting.set_result(parts[0])
        else:
            waiting.set_exception(ending_of(*parts).error())

    async def _run(self, number: int, name: str, value: Any) -> None:
        try:
            self._send(ANSWER, number, await self._answer(name, value))
        except ServeError as error:
            self._send(FAILURE, number, *error.ending().plain())
        except Exception as error:
            self._send(FAILURE, number, "ServeError", [f"{type(error).__name__}: {error}"], {})
            raise
