"""Messages on their way out, and bodies in memory that a worker shares with its frontend."""

from __future__ import annotations

import struct
from collections import deque
from mmap import mmap
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ts.protocol.decoder import Decoder
from ts.protocol.frames import (
    CHUNK,
    FRAME_BYTES_MAX,
    HEADER,
    SHARED,
    Chunk,
    Failed,
    FrameError,
    Input,
    Item,
    Predict,
    shared_frame,
)
from ts.protocol.outbox import IOV_MAX, WRITE_BYTES_MAX, Outbox
from ts.protocol.shared import ARENA_BYTES, REQUESTS_AT, SHARED_BYTES, Giver, Taker


def write(outbox, take=1 << 30):
    """The bytes that reach a socket which accepts `take` bytes per call."""
    out = []
    while outbox:
        data = b"".join(outbox.buffers())
        if not data:
            break
        data = data[:take]
        outbox.sent(len(data))
        out.append(data)
    return b"".join(out)


def names(data):
    return [(type(one).__name__, getattr(one, "job_id", 0)) for one in Decoder(1 << 30).feed(data)]


def pushed(*messages):
    outbox = Outbox()
    for message in messages:
        outbox.push(message)
    return outbox


def test_buffers_are_bounded():
    outbox = pushed(*(Chunk(key, bytes(20_000)) for key in range(1000)))
    buffers = outbox.buffers()
    assert len(buffers) <= IOV_MAX
    assert sum(map(len, buffers)) <= WRITE_BYTES_MAX + FRAME_BYTES_MAX
    assert names(write(outbox)) == [("Chunk", key) for key in range(1000)]


sizes = st.sampled_from([0, 1, 100, 16_000, 17_000, 300_000, 800_000])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), sizes, st.booleans()), max_size=12), st.integers(1, 200_000))
def test_everything_arrives_once_and_in_order_per_key(sent, take):
    outbox = Outbox()
    written = b""
    for key, size, pause in sent:
        outbox.push(Chunk(key, bytes(size), False))
        if pause:
            data = b"".join(outbox.buffers())[: take * 3]
            outbox.sent(len(data))
            written += data
    for key in (1, 2, 3):
        outbox.push(Failed(key, 500, ""))
    written += write(outbox, max(take, 5000))
    found: list[Any] = Decoder(1 << 30).feed(written)
    for key in (1, 2, 3):
        mine = [len(one.data) if isinstance(one, Chunk) else -1 for one in found if one.job_id == key]
        assert mine == [size for k, size, _ in sent if k == key] + [-1]


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
