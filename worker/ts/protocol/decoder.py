"""Decodes bytes into messages. No I/O: received bytes go in, messages come out (the format: `ts.protocol.frames`)."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from ts.protocol import frames
from ts.protocol.frames import (
    CHUNK,
    CHUNK_HEAD,
    CHUNK_HEAD_SIZE,
    COUNT,
    FRAME_BYTES_MAX,
    HEADER,
    HEADER_SIZE,
    INPUT_HEAD,
    INPUT_HEAD_SIZE,
    ITEM_HEAD,
    ITEM_HEAD_SIZE,
    JOINED_BYTES_MAX,
    SHARED,
    SINGLE,
    SINGLE_SIZE,
    U64,
    WHOLE_HEAD,
    WHOLE_HEAD_SIZE,
    Chunk,
    FrameError,
    Input,
    Item,
    Message,
    PackedPairs,
    Pairs,
    Predict,
)
from ts.protocol.memory import unfilled
from ts.protocol.shared import Taker

#: Makes a named tuple of its values at half the cost of calling its type.
new: Final = tuple.__new__
#: The input of decoders: the bytes of a small message, a view of a large one.
Body: TypeAlias = "bytes | memoryview"


class _Reader:
    """Walks a body; any length that leaves it is a FrameError."""

    __slots__ = ("at", "body")

    def __init__(self, body: Body) -> None:
        self.body, self.at = body, 0

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        at = self.at
        try:
            values = layout.unpack_from(self.body, at)
        except struct.error as error:
            raise FrameError(f"body of {len(self.body)} bytes ends inside a field at {at}") from error
        self.at = at + layout.size
        return values

    def take(self, size: int) -> Body:
        at = self.at
        end = self.at = at + size
        if end > len(self.body):
            raise FrameError(f"body of {len(self.body)} bytes has no {size} bytes at {at}")
        return self.body[at:end]

    def text(self, size: int) -> str:
        if not size:
            return ""
        try:
            return str(self.take(size), "utf-8")
        except UnicodeDecodeError as error:
            raise FrameError(f"text at {self.at - size} isn't UTF-8") from error

    def pair(self) -> tuple[str, str]:
        name_size, value_size = self.unpack(frames.PAIR_HEAD)
        return self.text(name_size), self.text(value_size)


def _decode_item(body: Body, at: int, end: int | None = None) -> tuple[Item, int]:
    """The item at `at` and its end; slices beyond the body's end are short, which the check at the end catches.
    `end`: the body's end, if its last input extends beyond `body`."""
    job_id, deadline_s, id_size, headers_size, input_count = ITEM_HEAD.unpack_from(body, at)
    if deadline_s != deadline_s:
        raise FrameError("deadline is not a number")
    at += ITEM_HEAD_SIZE
    id_end = at + id_size
    request_id = str(body[at:id_end], "utf-8")
    at = id_end + headers_size
    headers: Pairs = PackedPairs(body[id_end:at]) if headers_size else ()
    inputs = []
    for _ in range(input_count):
        name_size, type_size, size = INPUT_HEAD.unpack_from(body, at)
        at += INPUT_HEAD_SIZE
        name_end = at + name_size
        start = name_end + type_size
        name = str(body[at:name_end], "utf-8") if name_size else ""
        content_type = str(body[name_end:start], "utf-8") if type_size else ""
        at = start + size
        inputs.append(new(Input, (name, content_type, body[start:at])))
    if at > (len(body) if end is None else end):
        raise FrameError(f"an item ends at {at} of {len(body)} bytes")
    return new(Item, (job_id, request_id, deadline_s, headers, inputs)), at


def _decode_single(key: int, body: bytes) -> Message | None:
    """Decodes the usual batch, one small request with one input, by its two heads. None for any other batch, and for
    invalid bytes, which `_decode_any` reports."""
    count, job_id, deadline_s, id_size, headers_size, input_count = SINGLE.unpack_from(body)
    id_end = SINGLE_SIZE + id_size
    headers_end = id_end + headers_size
    name = headers_end + INPUT_HEAD_SIZE
    if count != 1 or input_count != 1 or len(body) < name or deadline_s != deadline_s:
        return None
    name_size, type_size, size = INPUT_HEAD.unpack_from(body, headers_end)
    content_type = name + name_size
    data = content_type + type_size
    if data + size != len(body):
        return None
    part = new(
        Input, (body[name:content_type].decode(), body[content_type:data].decode() if type_size else "", body[data:])
    )
    headers = PackedPairs(body[id_end:headers_end]) if headers_size else ()
    return new(Predict, (key, (new(Item, (job_id, body[SINGLE_SIZE:id_end].decode(), deadline_s, headers, (part,))),)))


def _decode_any(key: int, body: Body) -> Message:
    items: list[Item] = []
    at = COUNT.size
    for _ in range(COUNT.unpack_from(body)[0]):
        item, at = _decode_item(body, at)
        items.append(item)
    return Predict(key, items)


def _decode_predict(key: int, body: Body) -> Message:
    try:
        single = _decode_single(key, body) if type(body) is bytes and len(body) >= SINGLE_SIZE else None
        return single or _decode_any(key, body)
    except (struct.error, UnicodeDecodeError, OverflowError) as error:  # a length may be no index at all
        raise FrameError(f"a request of {len(body)} bytes: {error}") from error


def _decode_chunk(key: int, body: Body) -> Message:
    try:
        last, status, phrase_size, header_count = CHUNK_HEAD.unpack_from(body)
    except struct.error as error:
        raise FrameError(f"a chunk of {len(body)} bytes") from error
    if not phrase_size and not header_count:
        return new(Chunk, (key, body[CHUNK_HEAD_SIZE:], bool(last), status, "", ()))
    reader = _Reader(body)
    reader.at = CHUNK_HEAD_SIZE
    phrase = reader.text(phrase_size)
    headers = [reader.pair() for _ in range(header_count)]
    return Chunk(key, body[reader.at :], bool(last), status, phrase, headers)


def _decode_pieces(key: int, body: Body) -> Message:
    try:
        last, count = frames.PIECES_HEAD.unpack_from(body)
        if not 0 < count <= frames.PIECES_MAX:
            raise FrameError(f"a frame of {count} pieces")
        layout = frames.PIECE_SIZES[count]
        sizes = layout.unpack_from(body, frames.PIECES_HEAD.size)
    except struct.error as error:
        raise FrameError(f"pieces in {len(body)} bytes") from error
    at = frames.PIECES_HEAD.size + layout.size
    found = []
    for size in sizes:
        end = at + size
        found.append(body[at:end])
        at = end
    if at != len(body):
        raise FrameError(f"pieces that end at {at} of {len(body)} bytes")
    return frames.Pieces(key, found, bool(last))


def _decode_failed(key: int, body: Body) -> Message:
    reader = _Reader(body)
    code, flags, size = reader.unpack(frames.FAILED_HEAD)
    message, traceback = reader.text(size), reader.text(len(body) - reader.at)
    by_handler, whole, begun = bool(flags & frames.BY_HANDLER), bool(flags & frames.WHOLE), not flags & frames.NOT_BEGUN
    return frames.Failed(key, code, message, by_handler, traceback, whole, begun)


def _decode_feed(key: int, body: Body) -> Message:
    reader = _Reader(body)
    last, count = reader.unpack(frames.FEED_HEAD)
    inputs = []
    for _ in range(count):
        name_size, type_size, size = reader.unpack(INPUT_HEAD)
        inputs.append(Input(reader.text(name_size), reader.text(type_size), reader.take(size)))
    return frames.Feed(key, inputs, bool(last))


def _decode_credit(key: int, body: Body) -> Message:
    return frames.Credit(key, _Reader(body).unpack(U64)[0])


def _decode_call(key: int, body: Body) -> Message:
    reader = _Reader(body)
    (size,) = reader.unpack(COUNT)
    return frames.Call(key, _parse_json(reader.take(size)), body[reader.at :])


def _parse_json(body: Body) -> dict[str, Any]:
    try:
        value = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"body of {len(body)} bytes isn't JSON") from error
    if not isinstance(value, dict):
        raise FrameError(f"JSON object expected, got {type(value).__name__}")
    return value


def _decode_load(key: int, body: Body) -> Message:
    return frames.Load(_parse_json(body))


def _decode_cancel(key: int, body: Body) -> Message:
    return frames.Cancel(key)


def _decode_stop(key: int, body: Body) -> Message:
    return frames.Stop()


def _decode_ready(key: int, body: Body) -> Message:
    return frames.Ready(_parse_json(body))


def _decode_load_failed(key: int, body: Body) -> Message:
    return frames.LoadFailed(_parse_json(body))


def _decode_measure(key: int, body: Body) -> Message:
    return frames.Measure(key)


def _decode_times(key: int, body: Body) -> Message:
    return frames.Times(key, *_Reader(body).unpack(frames.TIMES))


_DECODERS: Final[dict[int, Callable[[int, Body], Message]]] = {
    frames.LOAD: _decode_load,
    frames.PREDICT: _decode_predict,
    frames.CANCEL: _decode_cancel,
    frames.CREDIT: _decode_credit,
    frames.STOP: _decode_stop,
    frames.READY: _decode_ready,
    frames.LOAD_FAILED: _decode_load_failed,
    CHUNK: _decode_chunk,
    frames.FAILED: _decode_failed,
    frames.FEED: _decode_feed,
    frames.CALL: _decode_call,
    frames.PIECES: _decode_pieces,
    frames.MEASURE: _decode_measure,
    frames.TIMED: _decode_times,
}


def _decode_owned(kind: int, key: int, whole: bytearray) -> Message:
    """The message of a body in its own buffer. A payload at its end becomes that buffer without the bytes before it,
    which are cut off without a copy."""
    if kind == frames.PREDICT:
        return _decode_owned_single(key, whole) or _decode_predict(key, memoryview(whole))
    if kind == CHUNK and len(whole) >= CHUNK_HEAD_SIZE:
        last, status, phrase_size, header_count = CHUNK_HEAD.unpack_from(whole)
        if not phrase_size and not header_count:
            del whole[:CHUNK_HEAD_SIZE]
            return Chunk(key, whole, bool(last), status)
    return _DECODERS[kind](key, memoryview(whole))


def _decode_owned_single(key: int, whole: bytearray) -> Message | None:
    """Decodes a batch of one request with one input; None for any other batch, and for invalid bytes."""
    if len(whole) < SINGLE_SIZE:
        return None
    count, _, _, id_size, headers_size, input_count = SINGLE.unpack_from(whole)
    at = SINGLE_SIZE + id_size + headers_size
    if count != 1 or input_count != 1 or at + INPUT_HEAD_SIZE > len(whole):
        return None
    name_size, type_size, size = INPUT_HEAD.unpack_from(whole, at)
    start = at + INPUT_HEAD_SIZE + name_size + type_size
    if start + size != len(whole):
        return None
    try:
        item, _ = _decode_item(bytes(memoryview(whole)[:start]), COUNT.size, len(whole))
    except UnicodeDecodeError:
        return None
    del whole[:start]
    return Predict(key, [item._replace(inputs=[item.inputs[0]._replace(data=whole)])])


def _take_chunks(data: bytes, messages: list[Message]) -> int:
    """Decodes the small chunks without phrase and headers that the bytes begin with, which most answers are, each by
    its two heads at once. Returns where they end."""
    at, last_at, size = 0, len(data) - WHOLE_HEAD_SIZE, WHOLE_HEAD_SIZE
    while at <= last_at:
        length, kind, flags, _, key, last, status, phrase_size, header_count = WHOLE_HEAD.unpack_from(data, at)
        stop = at + HEADER_SIZE + length
        if (
            kind != CHUNK
            or flags
            or phrase_size
            or header_count
            or not CHUNK_HEAD_SIZE <= length < JOINED_BYTES_MAX
            or stop > len(data)
        ):
            break
        messages.append(new(Chunk, (key, data[at + size : stop], last != 0, status, "", ())))
        at = stop
    return at


#: Frames of this size are completed in a buffer of their own, which the socket can be read into.
OPEN_BYTES_MIN: Final = 32 * 1024


class _Open:
    """An incomplete large frame: its message, and the buffer for the rest."""

    __slots__ = ("flags", "key", "kind", "room", "whole")

    def __init__(self, kind: int, key: int, flags: int, whole: bytearray, room: memoryview) -> None:
        self.kind, self.key, self.flags, self.whole, self.room = kind, key, flags, whole, room

    def take(self, data: Body) -> None:
        self.room[: len(data)] = data
        self.advance(len(data))

    def advance(self, size: int) -> None:
        """`size` bytes of the room have been filled. No reference to it may be kept: the message takes it."""
        room, self.room = self.room, self.room[size:]
        room.release()


class Decoder:
    """Bytes in, messages out; holds incomplete messages.

    Payloads of large messages are views of the fed bytes, or the buffer itself that joined their frames, those of small
    ones are copies: they stay valid for as long as they are referenced. `message_bytes_max` bounds a message that
    comes in several frames.

    The following bytes may also be put into `room`, and their number given to `filled`; then the rest of a large frame
    isn't copied. Bodies that the peer puts into an arena are had from the `taker`.
    """

    def __init__(self, message_bytes_max: int) -> None:
        self.message_bytes_max = message_bytes_max
        self.taker: Taker | None = None
        self._pieces: list[bytes] = []
        self._have = self._need = 0
        self._partial: dict[tuple[int, int], tuple[bytearray, int]] = {}
        self._open: _Open | None = None

    def close(self) -> None:
        """Leaves the arena, whose memory may go then."""
        if self.taker is not None:
            self.taker.close()
            self.taker = None

    @property
    def room(self) -> memoryview | None:
        """The buffer for the next bytes; None if they have to be fed."""
        return None if self._open is None else self._open.room

    def filled(self, size: int) -> list[Message]:
        """The messages completed by `size` bytes in `room`, as from `feed`."""
        frame = self._open
        assert frame is not None
        frame.advance(size)
        return [] if len(frame.room) else self._closed(frame)

    def _closed(self, frame: _Open) -> list[Message]:
        self._open = None
        frame.room.release()
        if not frame.flags:
            return [_decode_owned(frame.kind, frame.key, frame.whole)]
        whole = self._added(frame.kind, frame.key, frame.flags)
        return [] if whole is None else [_decode_owned(frame.kind, frame.key, whole)]

    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completes, in order; FrameError leaves the decoder unusable."""
        if self._open is not None:
            return self._feed_open(self._open, data)
        if self._pieces:
            self._pieces.append(data)
            self._have += len(data)
            if self._have < self._need:
                return []
            data = b"".join(self._pieces)
            self._pieces = []
        view = memoryview(data)
        messages: list[Message] = []
        at, end = _take_chunks(data, messages), len(data)
        need = head_size = HEADER_SIZE
        while end - at >= head_size:
            length, kind, flags, _, key = HEADER.unpack_from(data, at)
            decode = _DECODERS.get(kind)
            if length > FRAME_BYTES_MAX or decode is None or flags > SHARED:
                raise FrameError(f"no frame: kind {kind}, flags {flags}, length {length}")
            stop = at + head_size + length
            if stop > end:
                need = head_size + length
                if length >= OPEN_BYTES_MIN:
                    need = head_size + U64.size
                    if end - at >= need:
                        self._begin_open(kind, key, flags, length, view[at + head_size :])
                        return messages
                break
            start, at = at + head_size, stop
            if flags == SHARED:
                messages.append(_decode_owned(kind, key, self._shared(view[start:stop])))
            elif flags:
                whole = self._join(kind, key, flags, view[start:stop])
                if whole is not None:
                    messages.append(_decode_owned(kind, key, whole))
            else:
                messages.append(decode(key, data[start:stop] if length < JOINED_BYTES_MAX else view[start:stop]))
        if at < end:
            self._pieces, self._have, self._need = [data[at:]], end - at, need
        return messages

    def _shared(self, body: memoryview) -> bytearray:
        """The body of a message in the arena."""
        if self.taker is None or len(body) != frames.PLACE.size:
            raise FrameError("a body in an arena that isn't there")
        place, size = frames.PLACE.unpack(body)
        if size > self.message_bytes_max:
            raise FrameError(f"message of {size} bytes is over the limit of {self.message_bytes_max}")
        try:
            return self.taker.take(place, size)
        except ValueError as error:
            raise FrameError(str(error)) from error

    def _feed_open(self, frame: _Open, data: bytes) -> list[Message]:
        size = len(frame.room)
        if len(data) < size:
            frame.take(data)
            return []
        frame.take(memoryview(data)[:size])
        messages = self._closed(frame)
        return messages + self.feed(data[size:]) if len(data) > size else messages

    def _begin_open(self, kind: int, key: int, flags: int, length: int, part: memoryview) -> None:
        """Opens a frame of `length` bytes, of which `part` has arrived, at least the size of a U64."""
        if not flags:
            whole = unfilled(length)
            room = memoryview(whole)
        else:
            if not flags & frames.CONTINUED:
                self._begin(kind, key, part)
                part, length = part[U64.size :], length - U64.size
            whole, filled = self._known(kind, key, length)
            self._partial[kind, key] = whole, filled + length
            room = memoryview(whole)[filled : filled + length]
        self._open = _Open(kind, key, flags, whole, room)
        self._open.take(part)

    def _join(self, kind: int, key: int, flags: int, body: memoryview) -> bytearray | None:
        """Adds a frame to its message; the whole body with the last one."""
        if not flags & frames.CONTINUED:
            self._begin(kind, key, body)
            body = body[U64.size :]
        whole, filled = self._known(kind, key, len(body))
        whole[filled : filled + len(body)] = body
        self._partial[kind, key] = whole, filled + len(body)
        return self._added(kind, key, flags)

    def _known(self, kind: int, key: int, size: int) -> tuple[bytearray, int]:
        """The message that a frame of `size` bytes continues, and its bytes so far."""
        if (kind, key) not in self._partial:
            raise FrameError(f"continuation of kind {kind}, key {key} without a beginning")
        whole, filled = self._partial[kind, key]
        if filled + size > len(whole):
            raise FrameError(f"message of kind {kind}, key {key} is longer than its {len(whole)} bytes")
        return whole, filled

    def _added(self, kind: int, key: int, flags: int) -> bytearray | None:
        if flags & frames.MORE:
            return None
        whole, filled = self._partial.pop((kind, key))
        if filled != len(whole):
            raise FrameError(f"message of kind {kind}, key {key} ends at {filled} of {len(whole)} bytes")
        return whole

    def _begin(self, kind: int, key: int, body: Body) -> None:
        if (kind, key) in self._partial:
            raise FrameError(f"message of kind {kind}, key {key} begins twice")
        (total,) = _Reader(body).unpack(U64)
        if total > self.message_bytes_max:
            raise FrameError(f"message of {total} bytes is over the limit of {self.message_bytes_max}")
        self._partial[kind, key] = unfilled(total), 0


def decode_bytes(data: bytes) -> list[Message]:
    """The messages of a byte string of whole frames, as `encode_bytes` makes it."""
    return Decoder(len(data)).feed(data)
