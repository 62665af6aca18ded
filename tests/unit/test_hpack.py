"""HPACK by the examples of RFC 7541, appendix C, and against another implementation of it."""

from __future__ import annotations

import time
import tracemalloc

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_frontend.transport.hpack import (
    ENTRY_BYTES,
    STATIC,
    TABLE_BYTES_MAX,
    BadBlock,
    Field,
    FieldsTooLarge,
    HeaderDecoder,
    encode,
    huffman_decoded,
)

FIELDS_BYTES_MAX = 1 << 20
REQUESTS: list[list[Field]] = [
    [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")],
    [
        *((b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")),
        (b"cache-control", b"no-cache"),
    ],
    [
        *((b":method", b"GET"), (b":scheme", b"https"), (b":path", b"/index.html")),
        *((b":authority", b"www.example.com"), (b"custom-key", b"custom-value")),
    ],
]
DATE, LATER = b"Mon, 21 Oct 2013 20:13:21 GMT", b"Mon, 21 Oct 2013 20:13:22 GMT"
PLACE = (b"location", b"https://www.example.com")
COOKIE = b"foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1"
ANSWERS: list[list[Field]] = [
    [(b":status", b"302"), (b"cache-control", b"private"), (b"date", DATE), PLACE],
    [(b":status", b"307"), (b"cache-control", b"private"), (b"date", DATE), PLACE],
    [
        *((b":status", b"200"), (b"cache-control", b"private"), (b"date", LATER), PLACE),
        *((b"content-encoding", b"gzip"), (b"set-cookie", COOKIE)),
    ],
]
#: Blocks of appendix C, their fields, and the entries of the table behind them, the newest first.
SERIES = {
    "C.2.1": [("400a637573746f6d2d6b65790d637573746f6d2d686561646572", [(b"custom-key", b"custom-header")])],
    "C.2.2": [("040c2f73616d706c652f70617468", [(b":path", b"/sample/path")])],
    "C.2.3": [("100870617373776f726406736563726574", [(b"password", b"secret")])],
    "C.2.4": [("82", [(b":method", b"GET")])],
    "C.3": [
        ("828684410f7777772e6578616d706c652e636f6d", REQUESTS[0]),
        ("828684be58086e6f2d6361636865", REQUESTS[1]),
        ("828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565", REQUESTS[2]),
    ],
    "C.4": [
        ("828684418cf1e3c2e5f23a6ba0ab90f4ff", REQUESTS[0]),
        ("828684be5886a8eb10649cbf", REQUESTS[1]),
        ("828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf", REQUESTS[2]),
    ],
    # The table of these has 256 bytes, so that entries are dropped.
    "C.5": [
        (
            "3fe1014803333032580770726976617465611d4d6f6e2c203231204f637420323031332032303a31333a323120474d54"
            "6e1768747470733a2f2f7777772e6578616d706c652e636f6d",
            ANSWERS[0],
        ),
        ("4803333037c1c0bf", ANSWERS[1]),
        (
            "88c1611d4d6f6e2c203231204f637420323031332032303a31333a323220474d54c05a04677a69707738666f6f3d4153"
            "444a4b48514b425a584f5157454f50495541585157454f49553b206d61782d6167653d333630303b2076657273696f6e3d31",
            ANSWERS[2],
        ),
    ],
    "C.6": [
        (
            "3fe101488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad1718"
            "63c78f0b97c8e9ae82ae43d3",
            ANSWERS[0],
        ),
        ("4883640effc1c0bf", ANSWERS[1]),
        (
            "88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab77ad94e7821dd7f2e6c7b335dfdf"
            "cd5b3960d5af27087f3672c1ab270fb5291f9587316065c003ed4ee5b1063d5007",
            ANSWERS[2],
        ),
    ],
}


@pytest.mark.parametrize("name", SERIES)
def test_examples_of_the_standard(name: str) -> None:
    decoder = HeaderDecoder(FIELDS_BYTES_MAX)
    for block, fields in SERIES[name]:
        assert decoder.decode(bytes.fromhex(block)) == tuple(fields)


def test_integers_of_the_standard() -> None:
    """C.1: 10 within five bits, 1337 within five, 42 within eight. The sizes of tables and texts are such integers."""
    decoder = HeaderDecoder(FIELDS_BYTES_MAX)
    assert decoder.decode(bytes.fromhex("2a")) == () and decoder._size_max == 10
    assert decoder.decode(bytes.fromhex("3f9a0a")) == () and decoder._size_max == 1337
    assert decoder.decode(b"\0\1a\x2a" + b"x" * 42) == ((b"a", b"x" * 42),)


def test_a_table_that_shrinks_forgets() -> None:
    decoder = HeaderDecoder(FIELDS_BYTES_MAX)
    assert decoder.decode(b"\x40\1a\1b\x40\1c\1d\xbe\xbf") == ((b"a", b"b"), (b"c", b"d"), (b"c", b"d"), (b"a", b"b"))
    one = 34 - 31
    assert decoder.decode(bytes((0x3F, one, 0xBE))) == ((b"c", b"d"),)
    with pytest.raises(BadBlock):
        decoder.decode(b"\xbf")
    assert decoder.decode(b"\x20\x3f" + bytes((one,)) + b"\x82") == ((b":method", b"GET"),)
    with pytest.raises(BadBlock):
        decoder.decode(b"\xbe")


# --- against the other implementation

_NAMES = st.one_of(
    st.sampled_from([name for name, _ in STATIC[1:]]),
    st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=20).map(str.encode),
)
_VALUES = st.one_of(
    st.sampled_from([value for _, value in STATIC if value] + [b"", b"application/grpc", b"\xff" * 9, b"x" * 4065]),
    st.binary(max_size=60),
    st.text("0123456789abcdef", max_size=60).map(str.encode),
)
_FIELDS = st.lists(st.tuples(_NAMES, _VALUES, st.sampled_from(("indexed", "plain", "secret"))), max_size=12)
_BLOCKS = st.lists(st.tuples(_FIELDS, st.booleans(), st.lists(st.integers(0, TABLE_BYTES_MAX), max_size=2)), max_size=8)


def _encoded(encoder: hpack.Encoder, fields: list[tuple[bytes, bytes, str]], huffman: bool) -> bytes:
    """A block of the other encoder, which indexes all fields but the secret ones: the plain ones are put in by hand."""
    block = b""
    for name, value, kind in fields:
        if kind == "plain":
            block += encoder.encode([]) + b"\0" + _text(name) + _text(value)
        else:
            block += encoder.encode(
                [hpack.HeaderTuple(name, value)] if kind == "indexed" else [(name, value, True)], huffman
            )
    return bytes(block)


def _text(raw: bytes) -> bytes:
    return bytes(hpack.hpack.encode_integer(len(raw), 7)) + raw


@given(_BLOCKS)
def test_blocks_of_another_encoder(blocks: list[tuple[list[tuple[bytes, bytes, str]], bool, list[int]]]) -> None:
    encoder, decoder = hpack.Encoder(), HeaderDecoder(FIELDS_BYTES_MAX)
    other = hpack.Decoder(FIELDS_BYTES_MAX)
    for fields, huffman, sizes in blocks:
        for size in sizes:
            encoder.header_table_size = size
        block = _encoded(encoder, fields, huffman)
        expected = tuple((name, value) for name, value, _ in fields)
        assert decoder.decode(bytes(block)) == expected
        assert tuple((name, value) for name, value in other.decode(block, raw=True)) == expected


@given(_BLOCKS, st.integers(0, 400))
def test_too_large_blocks_change_the_table_as_any(
    blocks: list[tuple[list[tuple[bytes, bytes, str]], bool, list[int]]], most: int
) -> None:
    encoder, decoder = hpack.Encoder(), HeaderDecoder(most)
    for fields, huffman, sizes in blocks:
        for size in sizes:
            encoder.header_table_size = size
        block = bytes(_encoded(encoder, fields, huffman))
        left, fitting = most, []
        for name, value, _ in fields:
            left -= ENTRY_BYTES + len(name) + len(value)
            if left >= 0:
                fitting.append((name, value))
        try:
            assert decoder.decode(block) == tuple(fitting) and left >= 0
        except FieldsTooLarge as error:
            assert error.fields == tuple(fitting) and left < 0


@given(st.lists(st.tuples(_NAMES, _VALUES), max_size=12))
def test_our_blocks_for_another_decoder(fields: list[Field]) -> None:
    """None changes the decoder's table: even one without a table reads it."""
    other = hpack.Decoder(FIELDS_BYTES_MAX)
    for _ in range(2):
        assert [(name, value) for name, value in other.decode(encode(fields), raw=True)] == fields
    assert len(other.header_table.dynamic_entries) == 0


@given(st.binary(max_size=80))
def test_huffman_codes(text: bytes) -> None:
    coder = hpack.huffman.HuffmanEncoder(
        hpack.huffman_constants.REQUEST_CODES, hpack.huffman_constants.REQUEST_CODES_LENGTH
    )
    assert huffman_decoded(coder.encode(text)) == text
    try:
        theirs = hpack.huffman_table.decode_huffman(text)
    except hpack.HPACKDecodingError:
        with pytest.raises(BadBlock):
            huffman_decoded(text)
    else:
        assert huffman_decoded(text) == theirs


# --- what isn't HPACK

BAD = {
    "entry 0": "80",
    "an entry that isn't there": "be",
    "a name that isn't there": "7e0161",
    "an index over all limits": "ffffffffffff7f",
    "an index without an end": "ffffff",
    "a number with too many zeros": "ff808080808000",
    "a text that is longer than the block": "000a6162",
    "a text without a value": "000161",
    "a text over all limits": "007fffffffff7f",
    "a size over the limit": "3fe21f",
    "a size after a field": "8220",
    "a Huffman code of the end": "0001618 4ffffffff".replace(" ", ""),
    "a Huffman code with eight bits behind": "00016182 1fff".replace(" ", ""),
    "a Huffman code with zeros behind": "00016181 18".replace(" ", ""),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_blocks(name: str) -> None:
    with pytest.raises(BadBlock):
        HeaderDecoder(FIELDS_BYTES_MAX).decode(bytes.fromhex(BAD[name]))


def test_a_size_after_a_field_that_is_too_large() -> None:
    with pytest.raises(BadBlock):
        HeaderDecoder(10).decode(bytes.fromhex("8220"))


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_bytes_are_a_block_or_a_bad_one(blocks: list[bytes]) -> None:
    """What both implementations read, they read the same."""
    decoder, other = HeaderDecoder(FIELDS_BYTES_MAX), hpack.Decoder(FIELDS_BYTES_MAX)
    for block in blocks:
        try:
            ours = decoder.decode(block)
        except BadBlock:
            return
        try:
            theirs = other.decode(block, raw=True)
        except hpack.HPACKError:
            return
        assert ours == tuple((name, value) for name, value in theirs)


def test_a_bomb_takes_no_memory() -> None:
    """A byte that stands for 4 KB, a hundred thousand times."""
    decoder = HeaderDecoder(64 * 1024)
    value = b"x" * (TABLE_BYTES_MAX - ENTRY_BYTES - 1)
    decoder.decode(b"\x40\1a" + _text(value))
    bomb = b"\xbe" * 100_000
    tracemalloc.start()
    with pytest.raises(FieldsTooLarge) as caught:
        decoder.decode(bomb)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(caught.value.fields) == 16
    assert most < 64 * 1024


def test_a_bomb_takes_the_time_of_its_own_bytes() -> None:
    def took_s(byte: bytes) -> float:
        decoder = HeaderDecoder(64 * 1024)
        decoder.decode(b"\x40\1a" + _text(b"x" * 4000))
        begun_s = time.process_time()
        with pytest.raises(FieldsTooLarge):
            decoder.decode(byte * 100_000)
        return time.process_time() - begun_s

    assert took_s(b"\xbe") < 20 * took_s(b"\x82")


def test_equal_blocks_are_kept_within_a_limit() -> None:
    decoder = HeaderDecoder(FIELDS_BYTES_MAX)
    block = encode([(b":method", b"GET"), (b"a", b"b")])
    assert decoder.decode(block) is decoder.decode(block)
    for number in range(1000):
        decoder.decode(encode([(b"n", b"%d" % number)]))
    assert len(decoder._kept) <= 16
    decoder.decode(b"\x40\1a\1b")  # now a block with an index means something else
    assert decoder.decode(b"\xbe") == ((b"a", b"b"),)
    decoder.decode(b"\x40\1c\1d")
    assert decoder.decode(b"\xbe") == ((b"c", b"d"),)
