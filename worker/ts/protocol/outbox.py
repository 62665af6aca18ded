"""What waits to be written to a worker socket: control before bulk, large messages interleaved. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ts.protocol.frames import CONTROL_KINDS, Buffer, Message, encode, frames

IOV_MAX = 256
WRITE_BYTES_MAX = 512 * 1024


class Outbox:
    """Messages in, buffers out: `buffers()` is the next thing to write, `sent(n)` says how much of it went.

    Messages of one (kind, key) keep their order. Small messages of different keys keep theirs too; a message of
    several frames gives way to others after each frame.
    """

    def __init__(self) -> None:
        self._flight: deque[memoryview] = deque()
        self._control: deque[list[Buffer]] = deque()
        self._bulk: deque[tuple[tuple[int, int], Iterator[list[Buffer]]]] = deque()
        self._waiting: dict[tuple[int, int], deque[tuple[int, int, list[Buffer]]]] = {}

    def __bool__(self) -> bool:
        return bool(self._flight or self._control or self._bulk)

    def push(self, message: Message) -> None:
        kind, key, body = encode(message)
        if kind in CONTROL_KINDS:
            self._push_control(kind, key, body)
        elif (kind, key) in self._waiting:
            self._waiting[kind, key].append((kind, key, body))
        else:
            self._waiting[kind, key] = deque()
            self._bulk.append(((kind, key), iter(frames(kind, key, body))))

    def _push_control(self, kind: int, key: int, body: list[Buffer]) -> None:
        from ts.protocol.frames import CHUNK, FAILED

        chunk_key = (CHUNK, key)
        if kind == FAILED and chunk_key in self._waiting:  # an answer's end doesn't overtake its pieces
            self._waiting[chunk_key].append((kind, key, body))
            return
        self._control.extend(frames(kind, key, body))

    def buffers(self) -> list[memoryview]:
        """The next buffers to write, at most IOV_MAX of them; [] when there's nothing."""
        size = sum(map(len, self._flight))
        while size < WRITE_BYTES_MAX and len(self._flight) < IOV_MAX // 2:
            frame = self._next_frame()
            if frame is None:
                break
            for buffer in frame:
                if len(buffer):
                    self._flight.append(memoryview(buffer))
                    size += len(buffer)
        return list(self._flight)[:IOV_MAX]

    def sent(self, size: int) -> None:
        """`size` bytes of the last `buffers()` have been written."""
        flight = self._flight
        while size:
            head = flight[0]
            if len(head) > size:
                flight[0] = head[size:]
                return
            size -= len(head)
            flight.popleft()

    def _next_frame(self) -> list[Buffer] | None:
        if self._control:
            return self._control.popleft()
        while self._bulk:
            slot, pieces = self._bulk.popleft()
            frame = next(pieces, None)
            if frame is not None:
                self._bulk.append((slot, pieces))
                return frame
            self._follow(slot)
        return None

    def _follow(self, slot: tuple[int, int]) -> None:
        """The message in `slot` is out: its successor takes the turn."""
        successors = self._waiting[slot]
        if successors:
            self._bulk.append((slot, iter(frames(*successors.popleft()))))
        else:
            del self._waiting[slot]
