"""Frames: everything that can be said comes out as it went in, however the stream is cut; nonsense is refused."""

from __future__ import annotations

import copy
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ts.protocol import decoder, frames
from ts.protocol.decoder import Decoder, decode_bytes
from ts.protocol.frames import (
    FRAME_BYTES_MAX,
    HEADER,
    Call,
    Cancel,
    Chunk,
    Credit,
    Failed,
    FrameError,
    Input,
    Item,
    Load,
    LoadFailed,
    Measure,
    Pieces,
    Predict,
    Ready,
    Stop,
    Times,
    encode_bytes,
)
from ts_frontend.errors import InvalidArgument
from ts_frontend.job import handlers_headers

LIMIT = 1 << 24


def plain(message):
    """The message with views as bytes and sequences as lists, for comparing."""
    if isinstance(message, Chunk):
        return message._replace(data=bytes(message.data), headers=list(message.headers))
    if isinstance(message, Pieces):
        return message._replace(data=[bytes(one) for one in message.data])
    if isinstance(message, Call):
        return message._replace(data=bytes(message.data))
    if isinstance(message, Predict):
        return message._replace(items=[_plain_item(item) for item in message.items])
    return message


def _plain_item(item):
    inputs = [Input(one.name, one.content_type, bytes(one.data)) for one in item.inputs]
    return item._replace(headers=list(item.headers), inputs=inputs)


u64 = st.integers(0, 2**64 - 1)
short = st.text(max_size=20)
pairs = st.lists(st.tuples(short, short), max_size=3)
payload = st.binary(max_size=100) | st.integers(0, 40_000).map(bytes)
inputs = st.lists(st.builds(Input, short, short, payload), max_size=3)
items = st.builds(Item, u64, short, st.floats(allow_nan=False), pairs, inputs)
objects = st.dictionaries(short, st.integers() | short | st.none() | st.booleans(), max_size=4)
messages = st.one_of(
    st.builds(Load, objects),
    st.builds(Predict, u64, st.lists(items, max_size=3)),
    st.builds(Cancel, u64),
    st.builds(Credit, u64, u64),
    st.just(Stop()),
    st.builds(Ready, objects),
    st.builds(LoadFailed, objects),
    st.builds(Chunk, u64, payload, st.booleans(), st.integers(0, 65535), short, pairs),
    st.builds(
        Failed,
        u64,
        st.integers(0, 65535),
        st.text(max_size=200),
        st.booleans(),
        st.text(max_size=200),
        st.booleans(),
        st.booleans(),
    ),
    st.builds(Call, u64, objects, payload),
    st.builds(Pieces, u64, st.lists(payload, min_size=1, max_size=frames.PIECES_MAX), st.booleans()),
)

SAMPLES: list[frames.Message] = [
    Load({"model_name": "m", "gpu_id": None}),
    Predict(1, []),
    Predict(2**64 - 1, [Item(5, "id", math.inf, [("a", "é")], [Input("x", "text/plain", b"123"), Input("", "", b"")])]),
    Cancel(3),
    Credit(4, 2**40),
    Measure(7),
    Times(7, 1.5, 2.25, 3.0),
    Stop(),
    Ready({"pid": 1}),
    LoadFailed({"code": 500}),
    Chunk(7, b"data", False, 201, "Made", [("k", "v")]),
    Chunk(7, b"", True),
    Pieces(7, [b"one", b"", b"two"], True),
    Failed(8, 503, "Prediction failed é"),
    Failed(8, 413, "", True, "a trace", True),
]


@given(messages)
def test_any_message_survives(message):
    assert [plain(one) for one in decode_bytes(encode_bytes(message))] == [plain(message)]


@given(
    u64,
    items
    | st.builds(
        Item, u64, short, st.floats(allow_nan=False), pairs, st.tuples(st.builds(Input, short, short, payload))
    ),
)
def test_a_requests_frame_is_that_of_its_message(batch_id, item):
    frame = frames.request_frame(batch_id, item.job_id, item.request_id, item.deadline_s, item.headers, item.inputs)
    kind, key, body = frames.encode(Predict(batch_id, [item]))
    small = len(item.inputs) == 1 and frames.small_frame(kind, key, body)
    assert frame == (small or None)


def test_a_request_that_fits_no_frame_is_refused_as_its_message_is():
    item = Item(1, "r", math.inf, [], [Input("n" * 70_000, "", b"")])
    with pytest.raises(ValueError, match="doesn't fit a frame"):
        encode_bytes(Predict(1, [item]))
    assert frames.request_frame(1, *item) is None  # too large for a small one: its message is refused
    item = Item(1 << 64, "r", math.inf, [], [Input("", "", b"")])
    with pytest.raises(ValueError, match="doesn't fit a frame"):
        frames.request_frame(1, *item)


@settings(max_examples=30)
@given(st.lists(messages, max_size=5), st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_any_cuts_give_the_same_messages(sent, sizes):
    data = b"".join(map(encode_bytes, sent))
    decoder, found, at, turn = Decoder(LIMIT), [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        found += decoder.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert [plain(one) for one in found] == [plain(one) for one in sent]


def put_or_fed(decoder, data, size):
    """The messages of `data`, of which `size` bytes come at a time: into the decoder's room where it has some, and
    beyond it, as from a socket."""
    found: list[frames.Message] = []
    for at in range(0, len(data), size):
        piece = data[at : at + size]
        if (room := decoder.room) is not None:
            filled = min(len(room), len(piece))
            room[:filled] = piece[:filled]
            found += decoder.filled(filled)
            piece = piece[filled:]
        if piece:
            found += decoder.feed(piece)
    return found


def some_bytes(size):
    return (bytes(range(256)) * (size // 256 + 1))[:size]


large = st.builds(
    lambda key, size, last: Chunk(key, some_bytes(size), last), u64, st.integers(0, 700_000), st.booleans()
) | st.builds(
    lambda key, name, size, count: Predict(
        key, [Item(1, name, 0.0, [("k", name)], [Input(name, "", some_bytes(size))])] * count
    ),
    u64,
    short,
    st.integers(0, 700_000),
    st.integers(1, 2),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(messages | large, max_size=4), st.integers(5_000, 300_000))
def test_bytes_put_into_the_room_give_the_same_messages_as_bytes_fed(sent, size):
    data = b"".join(map(encode_bytes, sent))
    decoder = Decoder(LIMIT)
    fed = [one for at in range(0, len(data), size) for one in decoder.feed(data[at : at + size])]
    put = put_or_fed(Decoder(LIMIT), data, size)
    assert [plain(one) for one in put] == [plain(one) for one in fed] == [plain(one) for one in sent]


def test_a_large_payload_is_the_buffer_it_was_read_into():
    for message in (Chunk(1, bytes(1_000_000)), Predict(1, [Item(1, "r", 0.0, [], [Input("d", "", bytes(100_000))])])):
        (found,) = put_or_fed(Decoder(LIMIT), encode_bytes(message), 65_536)
        data = found.data if isinstance(found, Chunk) else found.items[0].inputs[0].data
        assert type(data) is bytearray and not any(data) and plain(found) == plain(message)
        data += b"x"  # nothing else holds it


one_input = st.tuples(st.builds(Input, short, short, payload))


@given(st.builds(Item, u64, short, st.floats(allow_nan=False), pairs, one_input), u64)
def test_a_batch_of_one_is_read_as_any_other(item, batch_id):
    _, key, body = frames.encode(Predict(batch_id, [item]))
    raw = b"".join(body)
    (any_other,) = decode_bytes(encode_bytes(Predict(batch_id, [item, item])))
    by_heads, by_parts = decoder._decode_single(key, raw), decoder._decode_any(key, raw)
    assert plain(by_heads) == plain(by_parts) == Predict(batch_id, [_plain_item(item)])
    assert plain(any_other).items[0] == plain(by_heads).items[0]


@given(u64, st.binary(max_size=200) | st.integers(0, frames.ANSWER_BYTES_MAX).map(bytes))
def test_a_whole_answers_frame_is_that_of_its_chunk(job_id, data):
    kind, key, body = frames.encode(Chunk(job_id, data))
    assert frames.answer_frame(job_id, data) == frames.small_frame(kind, key, body) == encode_bytes(Chunk(job_id, data))
    assert frames.small_frame(*frames.encode(Chunk(job_id, bytes(frames.ANSWER_BYTES_MAX + 1)))) is None


@given(pairs)
def test_packed_pairs_are_read_when_somebody_looks(given_pairs):
    found = frames.PackedPairs(frames.packed(given_pairs))
    assert bool(found) == bool(given_pairs)
    assert (list(found), len(found), dict(found)) == (given_pairs, len(given_pairs), dict(given_pairs))
    assert given_pairs == [] or (found[0], found[:1]) == (given_pairs[0], given_pairs[:1])
    assert frames.packed(found) == frames.packed(list(found)) == frames.packed(given_pairs)
    assert list(copy.copy(found)) == given_pairs, "as after pickle"


header_names = st.sampled_from([b"host", b"accept", b"x-request-id"]) | st.binary(max_size=20)


@given(st.lists(st.tuples(header_names, st.binary(max_size=300)), max_size=4), pairs)
def test_headers_of_http_are_packed_as_their_texts(headers, more):
    texts = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    for _ in range(2):  # those that come again are known
        assert frames.packed_headers(headers) == frames.packed(texts)
    assert list(handlers_headers(headers, more)) == texts + more


def test_short_values_of_the_usual_headers_are_kept_and_no_others():
    blocks = frames._PackedHeaders()
    for header in [(b"authorization", b"x"), (b"host", bytes(1000)), (b"x-request-id", b"1")]:
        assert blocks[header] == frames.packed_headers([header])
    assert not blocks
    for number in range(frames.REPEATED_MAX + 2):
        assert blocks[b"host", str(number).encode()]
    assert len(blocks) == 2


def test_texts_that_no_frame_takes_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="can't be passed to a worker"):
        handlers_headers([], [("url_path", "\ud800")])
    with pytest.raises(InvalidArgument, match="can't be passed to a worker"):
        handlers_headers([(bytes(70_000), b"")])


@given(st.binary(min_size=1, max_size=40))
def test_a_block_that_holds_no_pairs_is_a_frame_error(block):
    try:
        assert frames.packed(list(frames.PackedPairs(block))) == block
    except FrameError:
        pass


def test_the_stream_may_be_cut_anywhere():
    data = b"".join(map(encode_bytes, SAMPLES))
    for size in range(1, len(data) + 1):
        decoder = Decoder(LIMIT)
        found = [one for at in range(0, len(data), size) for one in decoder.feed(data[at : at + size])]
        assert [plain(one) for one in found] == [plain(one) for one in SAMPLES], size


@pytest.mark.parametrize("size", [FRAME_BYTES_MAX - 30, FRAME_BYTES_MAX, FRAME_BYTES_MAX + 1, 1_000_000])
@pytest.mark.parametrize("step", [1 << 30, 65536, 100_003])
def test_large_messages_come_in_frames(size, step):
    body = bytes(range(256)) * (size // 256 + 1)
    sent: list[frames.Message] = [
        Chunk(1, body[:size], True, 200, "", [("k", "v")]),
        Predict(2, [Item(1, "", 0.0, [], [Input("d", "", body)])]),
    ]
    data = b"".join(map(encode_bytes, sent))
    decoder = Decoder(LIMIT)
    found = [one for at in range(0, len(data), step) for one in decoder.feed(data[at : at + step])]
    assert [plain(one) for one in found] == [plain(one) for one in sent]


def frame(kind, key=1, body=b"", flags=0, length=None):
    return HEADER.pack(len(body) if length is None else length, kind, flags, 0, key) + body


def item(id_size=0, headers=0, inputs=0, deadline=0.0, rest=b""):
    return struct.pack("<I", 1) + struct.pack("<QdHIH", 1, deadline, id_size, headers, inputs) + rest


BEGIN, END = frames.MORE, frames.CONTINUED
TOTAL = struct.pack("<Q", 10)

BAD = {
    "unknown kind": frame(99),
    "kind zero": frame(0),
    "length over the limit": frame(frames.STOP, length=FRAME_BYTES_MAX + 1),
    "unknown flag": frame(frames.STOP, flags=4),
    "load isn't JSON": frame(frames.LOAD, body=b"{"),
    "load isn't an object": frame(frames.LOAD, body=b"[]"),
    "load isn't text": frame(frames.LOAD, body=b"\xff"),
    "credit is short": frame(frames.CREDIT, body=b"1234567"),
    "failed is short": frame(frames.FAILED, body=b"1"),
    "failed isn't UTF-8": frame(frames.FAILED, body=b"\0\0\0\0\1\0\0\0\xff"),
    "chunk is short": frame(frames.CHUNK, body=b"12345678"[:6]),
    "chunk's phrase leaves the body": frame(frames.CHUNK, body=struct.pack("<BHHH", 1, 200, 9, 0) + b"short"),
    "chunk's phrase isn't UTF-8": frame(frames.CHUNK, body=struct.pack("<BHHH", 1, 200, 1, 0) + b"\xff"),
    "chunk's header is missing": frame(frames.CHUNK, body=struct.pack("<BHHH", 1, 200, 0, 1)),
    "chunk's header leaves the body": frame(frames.CHUNK, body=struct.pack("<BHHHHI", 1, 200, 0, 1, 4, 4) + b"abcd"),
    "predict is short": frame(frames.PREDICT, body=b"123"),
    "predict has no items": frame(frames.PREDICT, body=struct.pack("<I", 1)),
    "deadline isn't a number": frame(frames.PREDICT, body=item(deadline=math.nan)),
    "id leaves the body": frame(frames.PREDICT, body=item(id_size=5, rest=b"abc")),
    "id isn't UTF-8": frame(frames.PREDICT, body=item(id_size=1, rest=b"\xff")),
    "headers leave the body": frame(frames.PREDICT, body=item(headers=10, rest=struct.pack("<HI", 1, 9) + b"abc")),
    "headers are missing": frame(frames.PREDICT, body=item(headers=1)),
    "input is missing": frame(frames.PREDICT, body=item(inputs=1)),
    "input leaves the body": frame(frames.PREDICT, body=item(inputs=1, rest=struct.pack("<HHQ", 1, 0, 9) + b"abc")),
    "input is huge": frame(frames.PREDICT, body=item(inputs=1, rest=struct.pack("<HHQ", 1, 0, 2**63) + b"abc")),
    "input is huge, and another follows": frame(
        frames.PREDICT, body=item(inputs=2, rest=struct.pack("<HHQ", 1, 0, 2**63) + b"abc")
    ),
    "continuation without a beginning": frame(frames.CHUNK, body=b"x", flags=END),
    "begins twice": frame(frames.CHUNK, body=TOTAL, flags=BEGIN) * 2,
    "beginning without a length": frame(frames.CHUNK, body=b"1234567", flags=BEGIN),
    "message over the limit": frame(frames.CHUNK, body=struct.pack("<Q", LIMIT + 1), flags=BEGIN),
    "longer than it said": frame(frames.CHUNK, body=TOTAL + bytes(11), flags=BEGIN),
    "shorter than it said": frame(frames.CHUNK, body=TOTAL, flags=BEGIN) + frame(frames.CHUNK, body=b"123", flags=END),
}  # fmt: skip


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_bad_frames_are_errors(data):
    with pytest.raises(FrameError):
        Decoder(LIMIT).feed(data)


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_bad_frames_are_errors_however_they_are_cut(data):
    decoder = Decoder(LIMIT)
    with pytest.raises(FrameError):
        for at in range(len(data)):
            decoder.feed(data[at : at + 1])


@given(st.binary(max_size=300))
def test_random_bytes_give_messages_or_a_frame_error(data):
    try:
        decode_bytes(data)
    except FrameError:
        pass


@given(messages, st.integers(0, 1 << 20), st.integers(0, 255))
def test_a_changed_byte_gives_messages_or_a_frame_error(message, where, value):
    data = bytearray(encode_bytes(message))
    data[where % len(data)] = value
    try:
        Decoder(LIMIT).feed(bytes(data))
    except FrameError:
        pass
