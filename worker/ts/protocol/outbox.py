"""Messages that wait to be written to a worker socket: control before bulk, large messages interleaved. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, TypeAlias

from ts.protocol.frames import (
    CHUNK,
    CONTROL_KINDS,
    FAILED,
    JOINED_BYTES_MAX,
    PIECES,
    PIECES_MAX,
    Buffer,
    Chunk,
    Message,
    Pieces,
    encode,
    frames,
    shared_frame,
    small_frame,
)
from ts.protocol.shared import Giver

IOV_MAX: Final = 256
WRITE_BYTES_MAX: Final = 512 * 1024
JOINED_FRAMES_MAX: Final = 64
#: The largest piece that shares a frame; larger ones have frames of their own.
PIECE_BYTES_MAX: Final = 4096
#: The most bytes of the pieces in one frame, so that it stays a small one.
GROUP_BYTES_MAX: Final = JOINED_BYTES_MAX - 256

_Key: TypeAlias = "tuple[int, int]"

_OVERTAKING: Final = CONTROL_KINDS - {FAILED}
#: The kinds of an answer's messages, which share a key and keep their order.
_ANSWERS: Final = frozenset({CHUNK, FAILED, PIECES})


class Outbox:
    """Messages in, buffers out: `buffers()` returns the next buffers to write, and `sent(n)` takes the number of
    written bytes.

    Messages of one (kind, key) keep their order, and Failed keeps its place behind the Chunks of its key. Small
    messages keep their order among each other; after each frame of a larger message, others may follow. Small waiting
    pieces of one answer share a frame, at the position of the first. With a `giver`, larger messages are small ones as
    long as it has room.
    """

    def __init__(self) -> None:
        self.giver: Giver | None = None
        self._flight: deque[memoryview] = deque()
        self._control: deque[bytes] = deque()
        self._queue: deque[bytes | _Group | _Large] = deque()
        self._large: dict[_Key, _Large] = {}
        #: The last groups of the answers, which further pieces may join.
        self._groups: dict[int, _Group] = {}

    def close(self) -> None:
        """Leaves the arena, whose memory may go then."""
        if self.giver is not None:
            self.giver.close()
            self.giver = None

    def __bool__(self) -> bool:
        return bool(self._queue or self._control or self._flight)

    def push(self, message: Message) -> None:
        """Queues `message`. Raises ValueError for a message that doesn't fit a frame."""
        kind, key, body = encode(message)
        if self._groups and kind in _ANSWERS:
            self._groups.pop(key, None)
        if self._large and self._follows_large(kind, key, body):
            return
        frame = small_frame(kind, key, body) or self._shared_frame(kind, key, body)
        if frame is None:
            self._queue.append(self._begin(kind, key, body))
        elif kind in _OVERTAKING:
            self._control.append(frame)
        else:
            self._queue.append(frame)

    def _shared_frame(self, kind: int, key: int, body: list[Buffer]) -> bytes | None:
        if self.giver is None:
            return None
        size = sum(map(len, body))
        place = self.giver.put(body, size)
        return None if place is None else shared_frame(kind, key, place, size)

    def push_frame(self, frame: bytes) -> None:
        """Queues an encoded small frame of a kind that keeps its order; none with its key may be waiting."""
        self._queue.append(frame)

    def push_piece(self, key: int, data: bytes) -> None:
        """The same as `push(Chunk(key, data, last=False))`, in a frame with other waiting pieces."""
        size = len(data)
        if size > PIECE_BYTES_MAX or (self._large and (CHUNK, key) in self._large):
            self.push(Chunk(key, data, False))
            return
        group = self._groups.get(key)
        if group is None or not group.has_room(size):
            group = self._groups[key] = _Group(key)
            self._queue.append(group)
        group.add(data)

    def push_last(self, key: int, data: bytes) -> None:
        """The same as `push(Chunk(key, data))`: an answer's last piece."""
        group = self._groups.pop(key, None)
        if group is None or not group.has_room(len(data)):
            self.push(Chunk(key, data))
        else:
            group.add(data)
            group.ends = True

    def _begin(self, kind: int, key: int, body: list[Buffer]) -> _Large:
        large = self._large[kind, key] = _Large((kind, key), frames(kind, key, body))
        return large

    def _follows_large(self, kind: int, key: int, body: list[Buffer]) -> bool:
        before = self._large.get((CHUNK if kind in _ANSWERS else kind, key))
        if before is None:
            return False
        before.followers.append((kind, key, body))
        return True

    def buffers(self) -> list[memoryview]:
        """The next buffers to write, at most IOV_MAX of them; [] if there are none."""
        flight = self._flight
        size = sum(map(len, flight)) if flight else 0
        while size < WRITE_BYTES_MAX and len(flight) < IOV_MAX // 2:
            if self._control:
                size += self._fly(self._join_small(self._control))
            elif self._queue:
                head = self._queue[0]
                size += self._fly_large(head) if type(head) is _Large else self._fly(self._join_small(self._queue))
            else:
                break
        return list(flight)[:IOV_MAX]

    def _join_small(self, queue: deque[bytes] | deque[bytes | _Group | _Large]) -> bytes:
        """The small frames at the head of `queue`, as one buffer."""
        pieces: list[bytes] = []
        while queue and len(pieces) < JOINED_FRAMES_MAX:
            head = queue[0]
            if type(head) is bytes:
                pieces.append(head)
            elif type(head) is _Group:
                pieces.append(self._closed(head))
            else:
                break
            queue.popleft()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _closed(self, group: _Group) -> bytes:
        if self._groups.get(group.key) is group:
            del self._groups[group.key]
        return group.frame()

    def _fly(self, buffer: Buffer) -> int:
        self._flight.append(memoryview(buffer))
        return len(buffer)

    def _fly_large(self, large: _Large) -> int:
        """Sends one frame of a large message; the rest takes its turn behind the others."""
        self._queue.popleft()
        frame = next(large.frames, None)
        if frame is None:
            self._end(large)
            return 0
        self._queue.append(large)
        return sum(self._fly(buffer) for buffer in frame if len(buffer))

    def _end(self, large: _Large) -> None:
        """Ends a large message: the messages that waited behind it go next, up to the next large one."""
        del self._large[large.key]
        followers = large.followers
        while followers:
            kind, key, body = followers.popleft()
            frame = small_frame(kind, key, body)
            if frame is None:
                successor = self._begin(kind, key, body)
                successor.followers = followers
                self._queue.append(successor)
                return
            self._queue.append(frame)

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


class _Group:
    """Pieces of one answer that share a frame. `ends`: the last of them ends it."""

    __slots__ = ("ends", "key", "pieces", "size_bytes")

    def __init__(self, key: int) -> None:
        self.key = key
        self.pieces: list[bytes] = []
        self.size_bytes = 0
        self.ends = False

    def has_room(self, size_bytes: int) -> bool:
        return len(self.pieces) < PIECES_MAX and self.size_bytes + size_bytes <= GROUP_BYTES_MAX

    def add(self, data: bytes) -> None:
        self.pieces.append(data)
        self.size_bytes += len(data)

    def frame(self) -> bytes:
        key, pieces = self.key, self.pieces
        message = Chunk(key, pieces[0], self.ends) if len(pieces) == 1 else Pieces(key, pieces, self.ends)
        frame = small_frame(*encode(message))
        assert frame is not None, f"{self.size_bytes} bytes of pieces are no small frame"
        return frame


class _Large:
    """A message of several buffers or frames in progress, and the messages that follow it."""

    __slots__ = ("followers", "frames", "key")

    def __init__(self, key: _Key, pieces: Iterator[list[Buffer]]) -> None:
        self.key, self.frames = key, pieces
        self.followers: deque[tuple[int, int, list[Buffer]]] = deque()
