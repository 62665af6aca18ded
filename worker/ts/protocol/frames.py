"""Every message that crosses the socket between frontend and worker. No I/O: bytes in, messages out.

A frame is a 16-byte header (`length u32, kind u8, flags u8, reserved u16, key u64`, little endian) and
`length` bytes of body. A message larger than `FRAME_BYTES_MAX` travels as several frames with the same
kind and key; the first one's body starts with the whole length (u64), so that the receiver allocates once.
Frames of different messages may be interleaved; those of one (kind, key) never overlap.

Strings are UTF-8. Times are seconds of `time.monotonic()`, which is one clock for all processes of a machine.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

FRAME_BYTES_MAX = 256 * 1024
JOINED_BYTES_MAX = 16 * 1024
#: Bytes of further inputs that a worker has and its handler has not taken; each message of them counts as so
#: many more than its data.
FEED_BYTES = 256 * 1024
FEED_COST_BYTES = 64
#: Bytes of answers to a worker's own call that it has not taken; each piece counts as so many more than its data.
CALL_BYTES = 256 * 1024
CALL_COST_BYTES = 64
#: The ids of workers' calls begin here, and those of jobs never come so far.
CALL_ID_MIN = 1 << 63
HEADER = struct.Struct("<IBBHQ")

Buffer: TypeAlias = "bytes | bytearray | memoryview"
Pairs: TypeAlias = "Sequence[tuple[str, str]]"

MORE, CONTINUED = 1, 2

_U64 = struct.Struct("<Q")
_ITEM = struct.Struct("<QdHHH")
_SINGLE = struct.Struct("<IQdHHH")  # _COUNT and _ITEM
_PAIR = struct.Struct("<HI")
_INPUT = struct.Struct("<HHQ")
_CHUNK = struct.Struct("<BHHH")
_FAILED = struct.Struct("<H")
_COUNT = struct.Struct("<I")
_FEED = struct.Struct("<BH")


class FrameError(ValueError):
    """Bytes that are no frame: the peer is broken or not ours. The connection can't go on."""


class Input(NamedTuple):
    """One named input of a request, as it came: `content_type` is "" when the client gave none."""

    name: str
    content_type: str
    data: Buffer


class Item(NamedTuple):
    """One request of a batch. `deadline_s`: monotonic seconds, `math.inf` for none."""

    job_id: int
    request_id: str
    deadline_s: float
    headers: Pairs
    inputs: Sequence[Input]


class Load(NamedTuple):
    """First message to a worker: which model to load and how (a JSON object)."""

    settings: dict[str, Any]


class Predict(NamedTuple):
    """A batch to run."""

    batch_id: int
    items: Sequence[Item]


class Cancel(NamedTuple):
    """Nobody waits for this request any more. From a worker: for this call of its own."""

    job_id: int


class Feed(NamedTuple):
    """Further inputs of a request whose handler takes them one after another; `last`: there won't be more. Sent only to
    who has given Credit for it, so that it never overtakes its request."""

    job_id: int
    inputs: Sequence[Input]
    last: bool


class Credit(NamedTuple):
    """The reader of this stream has taken so many bytes: its sender may send as many more. To a worker: pieces of an
    answer. From a worker: inputs of the request, or of the answer to its call."""

    job_id: int
    size_bytes: int


class Stop(NamedTuple):
    """Finish what has been started, send it and exit with status 0."""


class Ready(NamedTuple):
    """The model is loaded. `info`: `pid`, `handler_kind` (blocking, generator or async), `load_s`."""

    info: dict[str, Any]


class LoadFailed(NamedTuple):
    """The model couldn't be loaded. `info`: `code` (HTTP status), `message`, `traceback`."""

    info: dict[str, Any]


class Chunk(NamedTuple):
    """A piece of one answer; `last` ends it. Status, phrase and headers count on the first piece."""

    job_id: int
    data: Buffer
    last: bool = True
    status: int = 200
    phrase: str = ""
    headers: Pairs = ()


class Failed(NamedTuple):
    """The end of a request that has no answer. `code`: HTTP status, as TorchServe's handlers name it."""

    job_id: int
    code: int
    message: str


class Call(NamedTuple):
    """From a worker: something that its model asks of the server, for instance of another model. `what`: a JSON object
    that says it, `data`: the message that goes with it. The answer comes as Chunks, or Failed, with the same id."""

    call_id: int
    what: dict[str, Any]
    data: Buffer = b""


Message: TypeAlias = "Load | Predict | Cancel | Credit | Stop | Ready | LoadFailed | Chunk | Failed | Feed | Call"

LOAD, PREDICT, CANCEL, CREDIT, STOP, READY, LOAD_FAILED, CHUNK, FAILED, FEED, CALL = range(1, 12)
CONTROL_KINDS = frozenset({LOAD, CANCEL, CREDIT, STOP, READY, LOAD_FAILED, FAILED})


# --- encoding: message -> (kind, key, body segments)


def _pairs(out: list[Buffer], pairs: Pairs) -> None:
    for name, value in pairs:
        raw_name, raw_value = name.encode(), value.encode()
        out.append(_PAIR.pack(len(raw_name), len(raw_value)))
        out.append(raw_name)
        out.append(raw_value)


def _encode_single(batch_id: int, item: Item, part: Input) -> tuple[int, int, list[Buffer]]:
    """The usual batch, one request with one input and no headers, in one piece before its data."""
    raw_id, raw_name, raw_type = item.request_id.encode(), part.name.encode(), part.content_type.encode()
    head = b"".join(
        (
            _SINGLE.pack(1, item.job_id, item.deadline_s, len(raw_id), 0, 1),
            raw_id,
            _INPUT.pack(len(raw_name), len(raw_type), len(part.data)),
            raw_name,
            raw_type,
        )
    )
    return PREDICT, batch_id, [head, part.data]


def _encode_predict(message: Predict) -> tuple[int, int, list[Buffer]]:
    if len(message.items) == 1 and len((item := message.items[0]).inputs) == 1 and not item.headers:
        return _encode_single(message.batch_id, item, item.inputs[0])
    out: list[Buffer] = [_COUNT.pack(len(message.items))]
    for job_id, request_id, deadline_s, headers, inputs in message.items:
        raw_id = request_id.encode()
        out.append(_ITEM.pack(job_id, deadline_s, len(raw_id), len(headers), len(inputs)))
        out.append(raw_id)
        if headers:
            _pairs(out, headers)
        for name, content_type, data in inputs:
            raw_name, raw_type = name.encode(), content_type.encode()
            out.append(_INPUT.pack(len(raw_name), len(raw_type), len(data)))
            out.append(raw_name)
            out.append(raw_type)
            out.append(data)
    return PREDICT, message.batch_id, out


def _encode_chunk(message: Chunk) -> tuple[int, int, list[Buffer]]:
    job_id, data, last, status, text, headers = message
    phrase = text.encode()
    out: list[Buffer] = [_CHUNK.pack(last, status, len(phrase), len(headers)), phrase]
    if headers:
        _pairs(out, headers)
    out.append(data)
    return CHUNK, job_id, out


def _encode_failed(message: Failed) -> tuple[int, int, list[Buffer]]:
    return FAILED, message.job_id, [_FAILED.pack(message.code), message.message.encode()]


def _encode_feed(message: Feed) -> tuple[int, int, list[Buffer]]:
    out: list[Buffer] = [_FEED.pack(message.last, len(message.inputs))]
    for name, content_type, data in message.inputs:
        raw_name, raw_type = name.encode(), content_type.encode()
        out += (_INPUT.pack(len(raw_name), len(raw_type), len(data)), raw_name, raw_type, data)
    return FEED, message.job_id, out


def _encode_call(message: Call) -> tuple[int, int, list[Buffer]]:
    what = json.dumps(message.what).encode()
    return CALL, message.call_id, [_COUNT.pack(len(what)), what, message.data]


def _encode_object(kind: int, value: dict[str, Any]) -> tuple[int, int, list[Buffer]]:
    return kind, 0, [json.dumps(value).encode()]


_ENCODERS: dict[type, Callable[[Any], tuple[int, int, list[Buffer]]]] = {
    Chunk: _encode_chunk,
    Predict: _encode_predict,
    Cancel: lambda message: (CANCEL, message.job_id, []),
    Credit: lambda message: (CREDIT, message.job_id, [_U64.pack(message.size_bytes)]),
    Failed: _encode_failed,
    Load: lambda message: _encode_object(LOAD, message.settings),
    Ready: lambda message: _encode_object(READY, message.info),
    LoadFailed: lambda message: _encode_object(LOAD_FAILED, message.info),
    Stop: lambda _: (STOP, 0, []),
    Feed: _encode_feed,
    Call: _encode_call,
}


def encode(message: Message) -> tuple[int, int, list[Buffer]]:
    """`message` as (kind, key, body segments); payloads are not copied.

    Raises ValueError for what doesn't fit its field: more than 65 535 bytes of a name, an id or a phrase.
    """
    try:
        return _ENCODERS[type(message)](message)
    except struct.error as error:
        raise ValueError(f"{type(message).__name__} doesn't fit a frame: {error}") from error


def frames(kind: int, key: int, body: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    """One message's frames, each as its buffers; small ones are joined to a single buffer."""
    total = sum(map(len, body))
    if total <= FRAME_BYTES_MAX:
        head = HEADER.pack(total, kind, 0, 0, key)
        yield [b"".join((head, *body))] if total < JOINED_BYTES_MAX else [head, *body]
        return
    yield from _fragments(kind, key, _U64.pack(total), body)


def _fragments(kind: int, key: int, prefix: bytes, body: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    pending: list[Buffer] = [prefix]
    size, flags = len(prefix), 0
    for segment in body:
        view = memoryview(segment)
        while len(view):
            if size == FRAME_BYTES_MAX:
                yield [HEADER.pack(size, kind, flags | MORE, 0, key), *pending]
                pending, size, flags = [], 0, CONTINUED
            piece, view = view[: FRAME_BYTES_MAX - size], view[FRAME_BYTES_MAX - size :]
            pending.append(piece)
            size += len(piece)
    yield [HEADER.pack(size, kind, flags, 0, key), *pending]


def small_frame(kind: int, key: int, body: Sequence[Buffer]) -> bytes | None:
    """The one frame of a small message; None for a message that is better sent as `frames`."""
    total = sum(map(len, body))
    if total >= JOINED_BYTES_MAX:
        return None
    return HEADER.pack(total, kind, 0, 0, key) + b"".join(body)


def encode_bytes(message: Message) -> bytes:
    """`message` as one byte string of whole frames (tests, and senders that don't interleave)."""
    return b"".join(b"".join(frame) for frame in frames(*encode(message)))


# --- decoding: (kind, key, body) -> message


class _Reader:
    """Walks a body; any length that leaves it is a FrameError."""

    __slots__ = ("at", "body")

    def __init__(self, body: memoryview) -> None:
        self.body, self.at = body, 0

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        at = self.at
        try:
            values = layout.unpack_from(self.body, at)
        except struct.error as error:
            raise FrameError(f"body of {len(self.body)} bytes ends inside a field at {at}") from error
        self.at = at + layout.size
        return values

    def take(self, size: int) -> memoryview:
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

    def pairs(self, count: int) -> list[tuple[str, str]]:
        out = []
        for _ in range(count):
            name_size, value_size = self.unpack(_PAIR)
            out.append((self.text(name_size), self.text(value_size)))
        return out


def _decode_item(body: bytes | memoryview, at: int) -> tuple[Item, int]:
    """The item at `at` and where it ends; slices beyond the end come out short, which the caller's check catches."""
    job_id, deadline_s, id_size, header_count, input_count = _ITEM.unpack_from(body, at)
    if deadline_s != deadline_s:
        raise FrameError("deadline is not a number")
    at += _ITEM.size
    request_id = str(body[at : at + id_size], "utf-8")
    at += id_size
    headers: list[tuple[str, str]] = []
    for _ in range(header_count):
        name_size, value_size = _PAIR.unpack_from(body, at)
        middle = at + _PAIR.size + name_size
        headers.append((str(body[at + _PAIR.size : middle], "utf-8"), str(body[middle : middle + value_size], "utf-8")))
        at = middle + value_size
    inputs = []
    for _ in range(input_count):
        name_size, type_size, size = _INPUT.unpack_from(body, at)
        at += _INPUT.size
        name_end = at + name_size
        start = name_end + type_size
        content_type = str(body[name_end:start], "utf-8") if type_size else ""
        inputs.append(Input(str(body[at:name_end], "utf-8"), content_type, body[start : start + size]))
        at = start + size
    if at > len(body):
        raise FrameError(f"an item ends at {at} of {len(body)} bytes")
    return Item(job_id, request_id, deadline_s, headers, inputs), at


def _decode_predict(key: int, body: memoryview) -> Message:
    raw = body if len(body) >= JOINED_BYTES_MAX else bytes(body)
    items: list[Item] = []
    at = _COUNT.size
    try:
        for _ in range(_COUNT.unpack_from(raw)[0]):
            item, at = _decode_item(raw, at)
            items.append(item)
    except (struct.error, UnicodeDecodeError, OverflowError) as error:  # a length may be no index at all
        raise FrameError(f"a request of {len(body)} bytes: {error}") from error
    return Predict(key, items)


def _decode_chunk(key: int, body: memoryview) -> Message:
    try:
        last, status, phrase_size, header_count = _CHUNK.unpack_from(body)
    except struct.error as error:
        raise FrameError(f"a chunk of {len(body)} bytes") from error
    if not phrase_size and not header_count:
        return Chunk(key, body[_CHUNK.size :], bool(last), status)
    reader = _Reader(body)
    reader.at = _CHUNK.size
    phrase = reader.text(phrase_size)
    headers = reader.pairs(header_count) if header_count else ()
    return Chunk(key, body[reader.at :], bool(last), status, phrase, headers)


def _decode_failed(key: int, body: memoryview) -> Message:
    reader = _Reader(body)
    (code,) = reader.unpack(_FAILED)
    return Failed(key, code, reader.text(len(body) - reader.at))


def _decode_feed(key: int, body: memoryview) -> Message:
    reader = _Reader(body)
    last, count = reader.unpack(_FEED)
    inputs = []
    for _ in range(count):
        name_size, type_size, size = reader.unpack(_INPUT)
        inputs.append(Input(reader.text(name_size), reader.text(type_size), reader.take(size)))
    return Feed(key, inputs, bool(last))


def _decode_credit(key: int, body: memoryview) -> Message:
    return Credit(key, _Reader(body).unpack(_U64)[0])


def _decode_call(key: int, body: memoryview) -> Message:
    reader = _Reader(body)
    (size,) = reader.unpack(_COUNT)
    return Call(key, _parse_json(reader.take(size)), body[reader.at :])


def _parse_json(body: memoryview) -> dict[str, Any]:
    try:
        value = json.loads(bytes(body))
    except ValueError as error:
        raise FrameError(f"body of {len(body)} bytes isn't JSON") from error
    if not isinstance(value, dict):
        raise FrameError(f"JSON object expected, got {type(value).__name__}")
    return value


_DECODERS: dict[int, Callable[[int, memoryview], Message]] = {
    LOAD: lambda _, body: Load(_parse_json(body)),
    PREDICT: _decode_predict,
    CANCEL: lambda key, _: Cancel(key),
    CREDIT: _decode_credit,
    STOP: lambda *_: Stop(),
    READY: lambda _, body: Ready(_parse_json(body)),
    LOAD_FAILED: lambda _, body: LoadFailed(_parse_json(body)),
    CHUNK: _decode_chunk,
    FAILED: _decode_failed,
    FEED: _decode_feed,
    CALL: _decode_call,
}


class Decoder:
    """Bytes in, messages out; holds what is incomplete.

    Payloads of the messages are views of the fed bytes (or of the buffer that joined their frames), those of small
    requests are copies: they stay valid for as long as they are referenced. `message_bytes_max` bounds a message that
    comes in several frames.
    """

    def __init__(self, message_bytes_max: int) -> None:
        self.message_bytes_max = message_bytes_max
        self._pieces: list[bytes] = []
        self._have = self._need = 0
        self._partial: dict[tuple[int, int], tuple[bytearray, int]] = {}

    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completes, in order; FrameError leaves the decoder unusable."""
        if self._pieces:
            self._pieces.append(data)
            self._have += len(data)
            if self._have < self._need:
                return []
            data = b"".join(self._pieces)
            self._pieces = []
        view = memoryview(data)
        messages: list[Message] = []
        at, end = 0, len(data)
        need = head_size = HEADER.size
        while end - at >= head_size:
            length, kind, flags, _, key = HEADER.unpack_from(data, at)
            decode = _DECODERS.get(kind)
            if length > FRAME_BYTES_MAX or decode is None or flags > MORE | CONTINUED:
                raise FrameError(f"no frame: kind {kind}, flags {flags}, length {length}")
            stop = at + head_size + length
            if stop > end:
                need = head_size + length
                break
            body = view[at + head_size : stop]
            at = stop
            whole = self._join(kind, key, flags, body) if flags else body
            if whole is not None:
                messages.append(decode(key, whole))
        if at < end:
            self._pieces, self._have, self._need = [data[at:]], end - at, need
        return messages

    def _join(self, kind: int, key: int, flags: int, body: memoryview) -> memoryview | None:
        """Adds a frame to its message; the whole body with the last one."""
        if not flags & CONTINUED:
            self._begin(kind, key, body)
            body = body[_U64.size :]
        if (kind, key) not in self._partial:
            raise FrameError(f"continuation of kind {kind}, key {key} without a beginning")
        whole, filled = self._partial[kind, key]
        if filled + len(body) > len(whole):
            raise FrameError(f"message of kind {kind}, key {key} is longer than its {len(whole)} bytes")
        whole[filled : filled + len(body)] = body
        self._partial[kind, key] = whole, filled + len(body)
        if flags & MORE:
            return None
        del self._partial[kind, key]
        if filled + len(body) != len(whole):
            raise FrameError(f"message of kind {kind}, key {key} ends at {filled + len(body)} of {len(whole)} bytes")
        return memoryview(whole)

    def _begin(self, kind: int, key: int, body: memoryview) -> None:
        if (kind, key) in self._partial:
            raise FrameError(f"message of kind {kind}, key {key} begins twice")
        (total,) = _Reader(body).unpack(_U64)
        if total > self.message_bytes_max:
            raise FrameError(f"message of {total} bytes is over the limit of {self.message_bytes_max}")
        self._partial[kind, key] = bytearray(total), 0


def decode_bytes(data: bytes) -> list[Message]:
    """The messages of a byte string of whole frames: what `encode_bytes` made."""
    return Decoder(len(data)).feed(data)
