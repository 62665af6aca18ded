"""The outbox: order, overtaking and interleaving, whatever the socket takes at a time."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ts.protocol.decoder import Decoder, decode_bytes
from ts.protocol.frames import FRAME_BYTES_MAX, Cancel, Chunk, Failed, Stop
from ts.protocol.outbox import IOV_MAX, WRITE_BYTES_MAX, Outbox

LARGE = FRAME_BYTES_MAX * 3


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


def test_small_messages_keep_their_order_and_leave_together():
    outbox = pushed(*(Chunk(key, b"x") for key in range(20)))
    assert len(outbox.buffers()) == 1
    assert names(write(outbox)) == [("Chunk", key) for key in range(20)]
    assert not outbox
    assert outbox.buffers() == []


def test_control_goes_before_what_is_queued():
    assert names(write(pushed(Chunk(1, b"x"), Chunk(2, bytes(LARGE)), Cancel(9), Stop()))) == [
        ("Cancel", 9),
        ("Stop", 0),
        ("Chunk", 1),
        ("Chunk", 2),
    ]


def test_control_overtakes_a_large_message_between_its_frames():
    outbox = pushed(Chunk(1, bytes(WRITE_BYTES_MAX * 4)))
    first = b"".join(outbox.buffers())
    outbox.sent(len(first))
    outbox.push(Cancel(9))
    assert names(first + write(outbox)) == [("Cancel", 9), ("Chunk", 1)]


def test_small_ones_pass_a_large_one():
    order = names(write(pushed(Chunk(1, bytes(LARGE)), Chunk(2, b"x"), Chunk(3, b"y"))))
    assert order == [("Chunk", 2), ("Chunk", 3), ("Chunk", 1)]


def test_messages_of_one_key_never_overtake_each_other():
    outbox = pushed(
        Chunk(1, b"a", False),
        Chunk(1, bytes(LARGE), False),
        Chunk(1, b"b", False),
        Chunk(2, b"other"),
        Chunk(1, bytes(LARGE), False),
        Chunk(1, b"c", False),
        Failed(1, 500, "end"),
    )
    decoded: list[Any] = decode_bytes(write(outbox))
    found = [one for one in decoded if one.job_id == 1]
    assert [len(one.data) if isinstance(one, Chunk) else "failed" for one in found] == [1, LARGE, 1, LARGE, 1, "failed"]


def test_a_failure_does_not_overtake_the_small_pieces_before_it():
    assert names(write(pushed(Chunk(1, b"a", False), Failed(1, 500, "")))) == [("Chunk", 1), ("Failed", 1)]


def test_large_messages_take_turns():
    outbox = pushed(Chunk(1, bytes(LARGE)), Chunk(2, bytes(LARGE)))
    first = b"".join(outbox.buffers())
    assert len(first) <= WRITE_BYTES_MAX + 2 * FRAME_BYTES_MAX
    keys = [first[at + 8] for at in range(0, len(first) - 16, FRAME_BYTES_MAX + 16)]
    assert keys[:2] == [1, 2]


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
