"""gRPC's messages and headers without any I/O."""

from __future__ import annotations

import gzip
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_frontend.errors import MessageTooLarge, Unimplemented
from ts_frontend.grpc import protocol
from ts_frontend.grpc import protocol as headers

MESSAGES = st.lists(st.binary(max_size=40), max_size=6)


def decode(pieces: list[bytes], bytes_max: int = 1000) -> list[protocol.Message]:
    decoder = protocol.Decoder(bytes_max)
    found = [message for piece in pieces for message in decoder.feed(piece)]
    decoder.finish()
    return found


@given(messages=MESSAGES, data=st.data())
def test_any_cut_gives_the_same_messages(messages, data):
    stream = protocol.encode(messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    edges = [0, *cuts, len(stream)]
    pieces = [stream[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    assert [message.data for message in decode(pieces)] == messages


def test_pieces_of_every_size():
    messages = [b"", b"a", b"bc" * 300, b"", b"d" * 7]
    stream = protocol.encode(messages)
    for size in range(1, len(stream) + 1):
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [message.data for message in decode(pieces)] == messages


def test_every_truncation_is_noticed():
    messages = [b"one", b"two!"]
    stream = protocol.encode(messages)
    for end in range(len(stream)):
        if end in (0, 8):
            assert len(decode([stream[:end]])) == end // 8
        else:
            with pytest.raises(protocol.BrokenMessages, match=f"after {end - 8 if end > 8 else end} of its bytes"):
                decode([stream[:end]])


def test_oversize_after_good_messages():
    with pytest.raises(MessageTooLarge):
        decode([protocol.encode([b"good", bytes(11)])], 10)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@given(data=st.binary(max_size=3000))
def test_compression_round_trip(encoding, data):
    assert protocol.decompress(encoding, protocol.compress(encoding, data), 3000) == data


def test_decompression_stops_at_the_limit():
    bomb = gzip.compress(bytes(50_000_000))
    with pytest.raises(MessageTooLarge, match="more than the limit of 1000 bytes"):
        protocol.decompress("gzip", bomb, 1000)


@pytest.mark.parametrize(
    "data", [b"", b"plain", gzip.compress(b"x" * 100, mtime=0)[:-1], gzip.compress(b"a", mtime=0) + b"more"]
)
def test_broken_compression(data):
    with pytest.raises(protocol.BrokenMessages):
        protocol.decompress("gzip", data, 1000)


def test_compressed_flag_without_compression():
    for encoding in (None, "identity"):
        with pytest.raises(protocol.BrokenMessages, match="grpc-encoding"):
            protocol.decompress(encoding, b"", 1000)


def test_only_messages_worth_it_are_compressed():
    small, big = b"s", b"b" * protocol.COMPRESS_BYTES_MIN
    first, second = decode([protocol.encode([small, big], "gzip")])
    assert first == (False, small)
    assert second.compressed
    assert protocol.decompress("gzip", second.data, 10_000) == big


def test_encodings():
    for good in (None, "identity", "gzip", "deflate"):
        protocol.check_encoding(good)
    with pytest.raises(Unimplemented, match="'zstd'"):
        protocol.check_encoding("zstd")


@pytest.mark.parametrize(
    ("request_encoding", "accepted", "expected"),
    [
        ("gzip", "identity, deflate,gzip", "gzip"),
        ("deflate", "deflate", "deflate"),
        ("gzip", "identity", None),
        ("gzip", None, None),
        ("identity", "identity,gzip", None),
        (None, "gzip", None),
    ],
)
def test_answers_are_compressed_when_the_request_was(request_encoding, accepted, expected):
    assert protocol.answer_encoding(request_encoding, accepted) == expected


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_status_message_round_trip(message):
    encoded = headers.encode_message(message)
    assert unquote(encoded.decode()) == headers.bounded(message)
    assert encoded.isascii()
    assert encoded == encoded.strip()
    assert all(0x20 <= byte < 0x7F for byte in encoded)


@pytest.mark.parametrize("char", ["a", "%", "ü", "\N{GRINNING FACE}", "\n"])
def test_status_message_has_a_bound(char):
    encoded = headers.encode_message(char * 100_000)
    assert len(encoded) <= headers.STATUS_MESSAGE_BYTES_MAX
    assert unquote(encoded.decode()).endswith(" ...")


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        (b"application/grpc", True),
        (b"application/grpc+proto", True),
        (b"Application/GRPC;x=y", True),
        (b"application/grpc-web", False),
        (b"application/grpc-web+proto", False),
        (b"application/grpcx", False),
        (b"application/json", False),
        (None, False),
    ],
)
def test_content_types(content_type, expected):
    assert headers.is_grpc(content_type) is expected


TEXT_KEYS = st.from_regex(r"x-[a-z0-9_.\-]{1,8}", fullmatch=True).filter(lambda key: not key.endswith("-bin"))
TEXT_VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20).map(str.strip)
ENTRIES = st.lists(
    st.one_of(st.tuples(TEXT_KEYS, TEXT_VALUES), st.tuples(TEXT_KEYS.map("{}-bin".format), st.binary(max_size=20)))
)


@given(ENTRIES)
def test_metadata_round_trip(entries):
    assert headers.decode_metadata(headers.encode_metadata(entries)) == entries


@pytest.mark.parametrize(
    "entry",
    [
        ("Upper", "x"),
        ("", "x"),
        ("sp ace", "x"),
        ("grpc-status", "0"),
        ("a", "ü"),
        ("a", "x\ny"),
        ("a", b"x"),
        ("a-bin", "x"),
    ],
)
def test_metadata_that_cannot_be_sent(entry):
    with pytest.raises(ValueError, match="metadata"):
        headers.encode_metadata([entry])


def test_status_details_may_be_sent():
    assert headers.encode_metadata([("grpc-status-details-bin", b"\x08\x03")]) == [(b"grpc-status-details-bin", b"CAM")]
