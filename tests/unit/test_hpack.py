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
