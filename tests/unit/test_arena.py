"""Bodies in memory that a worker shares with its frontend."""

from __future__ import annotations

import os
import struct
from collections import deque
from mmap import mmap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts.protocol.arena import ANSWERS_AT, ARENA_BYTES, REQUESTS_AT, SHARED_BYTES, Giver, Taker
from ts.protocol.decoder import Decoder
from ts.protocol.frames import CHUNK, HEADER, SHARED, Chunk, FrameError, Input, Item, Predict, shared_frame
from ts.protocol.outbox import Outbox
from ts_frontend.workers.process import Channels

COUNT = struct.Struct("=Q")


@pytest.fixture
def memory() -> mmap:
    return mmap(-1, SHARED_BYTES)


def sides(memory: mmap) -> tuple[Outbox, Decoder]:
    outbox, decoder = Outbox(), Decoder(1 << 30)
    outbox.giver, decoder.taker = Giver(memory, REQUESTS_AT), Taker(memory, REQUESTS_AT)
    return outbox, decoder


def written(outbox: Outbox) -> bytes:
    data = b""
    while outbox:
        buffers = b"".join(outbox.buffers())
        outbox.sent(len(buffers))
        data += buffers
    return data


def data_of(message: Any) -> bytes:
    return bytes(message.data if isinstance(message, Chunk) else message.items[0].inputs[0].data)


@given(st.lists(st.tuples(st.integers(0, 3 << 20), st.booleans(), st.integers(0, 3)), max_size=40))
def test_what_is_given_is_taken_whatever_waits(steps: list[tuple[int, bool, int]]) -> None:
    """`steps`: the size of a body, whether it is a request, and how many of the waiting messages are read then."""
    outbox, decoder = sides(mmap(-1, SHARED_BYTES))
    waiting: deque[tuple[bytes, bytes]] = deque()
    for number, (size, request, reads) in enumerate(steps, 1):
        data = number.to_bytes(4, "big") * (size // 4 + 1)
        parts = [Input("a", "", data)]
        message = Predict(number, [Item(number, "id", 0.0, (), parts)]) if request else Chunk(number, data)
        outbox.push(message)
        waiting.append((written(outbox), data))
        for _ in range(min(reads, len(waiting))):
            frame, expected = waiting.popleft()
            (found,) = decoder.feed(frame)
            assert data_of(found) == expected
    for frame, expected in waiting:
        (found,) = decoder.feed(frame)
        assert data_of(found) == expected


def test_a_body_that_is_taken_at_once_lies_at_the_same_place(memory: mmap) -> None:
    giver, taker = Giver(memory, ANSWERS_AT), Taker(memory, ANSWERS_AT)
    places = set()
    for _ in range(20):
        place = giver.put([b"a" * (1 << 20)], 1 << 20)
        assert place is not None and taker.take(place, 1 << 20) == b"a" * (1 << 20)
        places.add(place)
    assert len(places) == 1


def test_a_body_without_room_goes_through_the_socket_in_its_order(memory: mmap) -> None:
    outbox, decoder = sides(memory)
    bodies = [bytes([number]) * (3 << 20) for number in range(4)]
    for body in bodies:
        outbox.push(Chunk(1, body, last=False))
    data = written(outbox)
    assert 6 << 20 < len(data) < 7 << 20, "two fit the arena"
    assert [bytes(one.data) for one in decoder.feed(data) if isinstance(one, Chunk)] == bodies
    outbox.push(Chunk(1, b"a" * ARENA_BYTES))
    assert len(written(outbox)) > ARENA_BYTES, "larger than the arena"


@pytest.mark.parametrize("count", [5, 1 << 63, (1 << 64) - 1])
def test_a_wrong_count_of_the_taker_gives_it_no_more(memory: mmap, count: int) -> None:
    giver = Giver(memory, REQUESTS_AT)
    assert giver.put([b"a"], 1) is not None
    COUNT.pack_into(memory, REQUESTS_AT, count)
    assert giver.put([b"a"], 1) is None


@pytest.mark.parametrize(
    ("place", "size"),
    [(0, 8), (ARENA_BYTES, 1), (ARENA_BYTES - 4, 8), (8, ARENA_BYTES), (1 << 63, 1 << 63), ((1 << 64) - 1, 1)],
)
def test_a_place_outside_the_arena_is_no_frame(memory: mmap, place: int, size: int) -> None:
    _, decoder = sides(memory)
    with pytest.raises(FrameError):
        decoder.feed(shared_frame(CHUNK, 1, place, size))


def test_bodies_over_the_limit_or_without_an_arena_are_no_frames(memory: mmap) -> None:
    _, decoder = sides(memory)
    decoder.message_bytes_max = 99
    with pytest.raises(FrameError, match="over the limit of 99"):
        decoder.feed(shared_frame(CHUNK, 1, 64, 100))
    for broken in (shared_frame(CHUNK, 1, 64, 100), HEADER.pack(0, CHUNK, SHARED, 0, 1)):
        with pytest.raises(FrameError):
            Decoder(1 << 30).feed(broken)


@pytest.mark.parametrize("size", [0, SHARED_BYTES - 1, SHARED_BYTES + 1])
def test_a_worker_cannot_change_the_size_of_the_memory(size: int) -> None:
    """The server's next look would end it with SIGBUS."""
    channels = Channels()
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(channels.worker_fds()[1], size)
    finally:
        channels.close()
