"""The messages between frontend and worker, and their encoding. No I/O: messages in, bytes out; `ts.protocol.decoder`
decodes them.

A frame is a 16-byte header (`length u32, kind u8, flags u8, reserved u16, key u64`, little endian) and
`length` bytes of body. A message larger than `FRAME_BYTES_MAX` travels as several frames with the same
kind and key; the first one's body starts with the whole length (u64), so that the receiver allocates once.
Frames of different messages may be interleaved; those of one (kind, key) never overlap. A frame with the flag `SHARED`
has the place and the size of its body, which lies in an arena (`ts.protocol.shared`).

Strings are UTF-8. Times are seconds of `time.monotonic()`, which is one clock for all processes of a machine.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, overload

FRAME_BYTES_MAX: Final = 256 * 1024
JOINED_BYTES_MAX: Final = 16 * 1024
#: The most bytes of further inputs that a worker has and its handler has not taken, and the bytes that each message
#: counts in addition to its data.
FEED_BYTES: Final = 256 * 1024
FEED_COST_BYTES: Final = 64
#: The most bytes of answers to a worker's own call that it has not taken, and the bytes of a piece besides its data.
CALL_BYTES: Final = 256 * 1024
CALL_COST_BYTES: Final = 64
#: The cost of a stream's piece in its credit besides its data.
CHUNK_COST_BYTES: Final = 64
#: The first id of workers' calls, which ids of jobs never reach.
CALL_ID_MIN: Final = 1 << 63
HEADER: Final = struct.Struct("<IBBHQ")

Buffer: TypeAlias = "bytes | bytearray | memoryview"
Pairs: TypeAlias = "Sequence[tuple[str, str]]"

MORE: Final = 1
CONTINUED: Final = 2
SHARED: Final = 4

U64: Final = struct.Struct("<Q")
PLACE: Final = struct.Struct("<QQ")
ITEM_HEAD: Final = struct.Struct("<QdHIH")
SINGLE: Final = struct.Struct("<IQdHIH")  # COUNT and ITEM_HEAD
_REQUEST: Final = struct.Struct("<IBBHQIQdHIH")  # HEADER and SINGLE
PAIR_HEAD: Final = struct.Struct("<HI")
INPUT_HEAD: Final = struct.Struct("<HHQ")
_SINGLE_BYTES: Final = SINGLE.size + INPUT_HEAD.size
CHUNK_HEAD: Final = struct.Struct("<BHHH")
WHOLE_HEAD: Final = struct.Struct("<IBBHQBHHH")  # HEADER and CHUNK_HEAD
#: Their sizes: Python looks an attribute of a C object up each time.
HEADER_SIZE: Final = HEADER.size
SINGLE_SIZE: Final = SINGLE.size
ITEM_HEAD_SIZE: Final = ITEM_HEAD.size
INPUT_HEAD_SIZE: Final = INPUT_HEAD.size
CHUNK_HEAD_SIZE: Final = CHUNK_HEAD.size
WHOLE_HEAD_SIZE: Final = WHOLE_HEAD.size
FAILED_HEAD: Final = struct.Struct("<HBI")
#: The flags in FAILED_HEAD.
BY_HANDLER: Final = 1
WHOLE: Final = 2
NOT_BEGUN: Final = 4
COUNT: Final = struct.Struct("<I")
FEED_HEAD: Final = struct.Struct("<BH")
PIECES_HEAD: Final = struct.Struct("<BH")
TIMES: Final = struct.Struct("<ddd")
#: The most pieces in one frame.
PIECES_MAX: Final = 64
#: The sizes of that many pieces, by their number.
PIECE_SIZES: Final = tuple(struct.Struct(f"<{count}H") for count in range(PIECES_MAX + 1))


class FrameError(ValueError):
    """Bytes that aren't a frame: the peer is broken or foreign. The connection can't be used any more."""


class Input(NamedTuple):
    """One named input of a request, unchanged; `content_type` is "" if the client gave none."""

    name: str
    content_type: str
    data: Buffer


def size_of(inputs: Sequence[Input]) -> int:
    return len(inputs[0].data) if len(inputs) == 1 else sum([len(part.data) for part in inputs])


#: The content type of answers that a worker compares in place of running its handler (ts/runtime/running.py).
COMPARISON: Final = "\0compare"


class Item(NamedTuple):
    """One request of a batch. `deadline_s`: monotonic seconds, `math.inf` for none."""

    job_id: int
    request_id: str
    deadline_s: float
    headers: Pairs
    inputs: Sequence[Input]


class Load(NamedTuple):
    """The first message to a worker: the model to load and its settings (a JSON object)."""

    settings: dict[str, Any]


class Predict(NamedTuple):
    """A batch to run."""

    batch_id: int
    items: Sequence[Item]


class Cancel(NamedTuple):
    """The caller of this request has given up. From a worker: cancels its own call."""

    job_id: int


class Feed(NamedTuple):
    """Further inputs of a request whose handler reads a stream; `last`: the end of the inputs. Sent only after the
    worker's Credit, so that it never overtakes its request."""

    job_id: int
    inputs: Sequence[Input]
    last: bool


class Credit(NamedTuple):
    """The reader of this stream has taken this many bytes, and its sender may send as many more. To a worker: pieces
    of an answer. From a worker: inputs of the request, or pieces of the answer to its call."""

    job_id: int
    size_bytes: int


class Stop(NamedTuple):
    """Finish the requests that have been started, send their answers and exit with status 0."""


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


class Pieces(NamedTuple):
    """Pieces of one answer that were ready together; `chunks_of` gives each. `last`: the last ends the answer."""

    job_id: int
    data: Sequence[Buffer]
    last: bool = False


def chunks_of(pieces: Pieces) -> Iterator[Chunk]:
    end = len(pieces.data) - 1
    for index, data in enumerate(pieces.data):
        yield Chunk(pieces.job_id, data, pieces.last and index == end)


class Failed(NamedTuple):
    """The failure of a request. `code`: HTTP status, as set by TorchServe's handlers. `by_handler`: the handler
    itself is at fault, not its request; `traceback`: of its exception, if callers may see it; `whole`: the handler
    failed for a whole batch of several requests; `begun`: the handler got the request."""

    job_id: int
    code: int
    message: str
    by_handler: bool = False
    traceback: str = ""
    whole: bool = False
    begun: bool = True


class Call(NamedTuple):
    """From a worker: a call of its model to the server, for instance to another model. `what`: the call as a JSON
    object; `data`: its message. The answer comes as Chunks, or Failed, with the same id."""

    call_id: int
    what: dict[str, Any]
    data: Buffer = b""


class Measure(NamedTuple):
    """To a worker, before the request itself: a request for its times."""

    job_id: int


class Times(NamedTuple):
    """From a worker, before the end of a measured request; times in `time.monotonic()` seconds. `begun_s`: the call
    of the handler; `ended_s`: its return or last piece; `given_s`: the end of encoding the answer."""

    job_id: int
    begun_s: float
    ended_s: float
    given_s: float


Message: TypeAlias = (
    "Load | Predict | Cancel | Credit | Stop | Ready | LoadFailed | Chunk | Failed | Feed | Call | Pieces | Measure | "
    "Times"
)

LOAD: Final = 1
PREDICT: Final = 2
CANCEL: Final = 3
CREDIT: Final = 4
STOP: Final = 5
READY: Final = 6
LOAD_FAILED: Final = 7
CHUNK: Final = 8
FAILED: Final = 9
FEED: Final = 10
CALL: Final = 11
PIECES: Final = 12
MEASURE: Final = 13
TIMED: Final = 14
CONTROL_KINDS: Final = frozenset({LOAD, CANCEL, CREDIT, STOP, READY, LOAD_FAILED, FAILED, MEASURE, TIMED})


# --- encoding: message -> (kind, key, body segments)


def _pairs(out: list[Buffer], pairs: Pairs) -> None:
    for name, value in pairs:
        raw_name, raw_value = name.encode(), value.encode()
        out.append(PAIR_HEAD.pack(len(raw_name), len(raw_value)))
        out.append(raw_name)
        out.append(raw_value)


class PackedPairs(Sequence["tuple[str, str]"]):
    """Pairs of texts in a block of bytes made by `packed`, decoded at the first access: most handlers never read a
    request's headers. Access raises FrameError for an invalid block."""

    __slots__ = ("_found", "block")

    def __init__(self, block: Buffer) -> None:
        self.block = bytes(block)
        self._found: list[tuple[str, str]] | None = None

    def _pairs(self) -> list[tuple[str, str]]:
        if self._found is None:
            self._found = _unpacked(self.block)
        return self._found

    def __bool__(self) -> bool:
        return bool(self.block)

    def __len__(self) -> int:
        return len(self._pairs())

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._pairs())

    @overload
    def __getitem__(self, index: int) -> tuple[str, str]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[str, str]]: ...

    def __getitem__(self, index: int | slice) -> tuple[str, str] | list[tuple[str, str]]:
        return self._pairs()[index]

    def __reduce__(self) -> tuple[type[PackedPairs], tuple[bytes]]:
        return PackedPairs, (self.block,)

    def __repr__(self) -> str:
        return f"PackedPairs({self.block!r})"


def _unpacked(block: bytes) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    at = 0
    while at < len(block):
        try:
            name_size, value_size = PAIR_HEAD.unpack_from(block, at)
            value = at + PAIR_HEAD.size + name_size
            end = value + value_size
            found.append((str(block[at + PAIR_HEAD.size : value], "utf-8"), str(block[value:end], "utf-8")))
        except (struct.error, UnicodeDecodeError) as error:
            raise FrameError(f"a pair at {at} of {len(block)} bytes: {error}") from error
        at = end
    if at > len(block):
        raise FrameError(f"pairs end at {at} of {len(block)} bytes")
    return found


def packed(pairs: Pairs) -> bytes:
    """Pairs as one block of bytes. Raises struct.error, or UnicodeEncodeError for halves of surrogate pairs."""
    if type(pairs) is PackedPairs:
        return pairs.block
    if not pairs:
        return b""
    out: list[Buffer] = []
    _pairs(out, pairs)
    return b"".join(out)


#: The headers whose values are the same in most requests of a client; the values of others aren't cached.
REPEATED_HEADERS: Final = frozenset(
    b"host user-agent accept accept-encoding accept-language connection content-type content-length".split()
)
#: The most such headers that are cached, and the longest values.
REPEATED_MAX: Final = 512
REPEATED_BYTES_MAX: Final = 256


class _PackedHeaders(dict[tuple[bytes, bytes], bytes]):
    """Blocks of single headers, made on demand; repeated ones are kept, at most REPEATED_MAX."""

    def __missing__(self, header: tuple[bytes, bytes]) -> bytes:
        name, value = header
        if not name.isascii() or not value.isascii():
            name, value = name.decode("latin-1").encode(), value.decode("latin-1").encode()
        block = PAIR_HEAD.pack(len(name), len(value)) + name + value
        if name in REPEATED_HEADERS and len(value) <= REPEATED_BYTES_MAX:
            if len(self) >= REPEATED_MAX:
                self.clear()
            self[header] = block
        return block


_PACKED: Final = _PackedHeaders()


def packed_headers(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """`packed` of the headers of an HTTP request, which are Latin-1."""
    blocks = _PACKED
    return b"".join([blocks[header] for header in headers])


def request_frame(
    batch_id: int, job_id: int, request_id: str, deadline_s: float, headers: Pairs, inputs: Sequence[Input]
) -> bytes | None:
    """The whole frame of a batch of one request with one input, equal to that of its `Predict`; None if it isn't
    small. Raises ValueError as `encode`."""
    if len(inputs) != 1:
        return None
    name, content_type, data = inputs[0]
    data_size = len(data)
    if data_size >= JOINED_BYTES_MAX:
        return None
    raw_id, raw_name, raw_type = request_id.encode(), name.encode(), content_type.encode()
    raw_pairs = packed(headers) if headers else b""
    id_size, pairs_size, name_size, type_size = len(raw_id), len(raw_pairs), len(raw_name), len(raw_type)
    size = _SINGLE_BYTES + id_size + pairs_size + name_size + type_size + data_size
    if size >= JOINED_BYTES_MAX:
        return None
    try:
        return b"".join(
            (
                _REQUEST.pack(size, PREDICT, 0, 0, batch_id, 1, job_id, deadline_s, id_size, pairs_size, 1),
                raw_id,
                raw_pairs,
                INPUT_HEAD.pack(name_size, type_size, data_size),
                raw_name,
                raw_type,
                data,
            )
        )
    except struct.error as error:
        raise ValueError(f"a request doesn't fit a frame: {error}") from error


def _encode_predict(message: Predict) -> tuple[int, int, list[Buffer]]:
    out: list[Buffer] = [COUNT.pack(len(message.items))]
    for job_id, request_id, deadline_s, pairs, inputs in message.items:
        raw_id, headers = request_id.encode(), packed(pairs)
        out += (ITEM_HEAD.pack(job_id, deadline_s, len(raw_id), len(headers), len(inputs)), raw_id, headers)
        for name, content_type, data in inputs:
            raw_name, raw_type = name.encode(), content_type.encode()
            out += (INPUT_HEAD.pack(len(raw_name), len(raw_type), len(data)), raw_name, raw_type, data)
    return PREDICT, message.batch_id, out


def _encode_chunk(message: Chunk) -> tuple[int, int, list[Buffer]]:
    job_id, data, last, status, text, headers = message
    phrase = text.encode()
    out: list[Buffer] = [CHUNK_HEAD.pack(last, status, len(phrase), len(headers)), phrase]
    if headers:
        _pairs(out, headers)
    out.append(data)
    return CHUNK, job_id, out


def _encode_pieces(message: Pieces) -> tuple[int, int, list[Buffer]]:
    job_id, data, last = message
    count = len(data)
    if not 0 < count <= PIECES_MAX:
        raise ValueError(f"{count} pieces don't fit a frame of 1 to {PIECES_MAX}")
    return PIECES, job_id, [PIECES_HEAD.pack(last, count), PIECE_SIZES[count].pack(*map(len, data)), *data]


def _encode_failed(message: Failed) -> tuple[int, int, list[Buffer]]:
    text, more = message.message.encode("utf-8", "replace"), message.traceback.encode("utf-8", "replace")
    flags = BY_HANDLER * message.by_handler | WHOLE * message.whole | NOT_BEGUN * (not message.begun)
    head = FAILED_HEAD.pack(message.code, flags, len(text))
    return FAILED, message.job_id, [head, text, more]


def _encode_feed(message: Feed) -> tuple[int, int, list[Buffer]]:
    out: list[Buffer] = [FEED_HEAD.pack(message.last, len(message.inputs))]
    for name, content_type, data in message.inputs:
        raw_name, raw_type = name.encode(), content_type.encode()
        out += (INPUT_HEAD.pack(len(raw_name), len(raw_type), len(data)), raw_name, raw_type, data)
    return FEED, message.job_id, out


def _encode_call(message: Call) -> tuple[int, int, list[Buffer]]:
    what = json.dumps(message.what).encode()
    return CALL, message.call_id, [COUNT.pack(len(what)), what, message.data]


def _encode_control(message: Any) -> tuple[int, int, list[Buffer]]:
    """The messages whose body is one part at most."""
    if isinstance(message, Cancel):
        return CANCEL, message.job_id, []
    if isinstance(message, Credit):
        return CREDIT, message.job_id, [U64.pack(message.size_bytes)]
    if isinstance(message, Measure):
        return MEASURE, message.job_id, []
    if isinstance(message, Times):
        return TIMED, message.job_id, [TIMES.pack(*message[1:])]
    if isinstance(message, Stop):
        return STOP, 0, []
    if isinstance(message, Load):
        return LOAD, 0, [json.dumps(message.settings).encode()]
    # Names and texts of a handler, without halves of surrogate pairs, which answers couldn't have.
    told = json.dumps(message.info, ensure_ascii=False).encode("utf-8", "replace")
    return READY if isinstance(message, Ready) else LOAD_FAILED, 0, [told]


_ENCODERS: Final[dict[type, Callable[[Any], tuple[int, int, list[Buffer]]]]] = {
    Chunk: _encode_chunk,
    Pieces: _encode_pieces,
    Predict: _encode_predict,
    Cancel: _encode_control,
    Credit: _encode_control,
    Failed: _encode_failed,
    Load: _encode_control,
    Ready: _encode_control,
    LoadFailed: _encode_control,
    Stop: _encode_control,
    Feed: _encode_feed,
    Call: _encode_call,
    Measure: _encode_control,
    Times: _encode_control,
}


def encode(message: Message) -> tuple[int, int, list[Buffer]]:
    """`message` as (kind, key, body segments); payloads are not copied.

    Raises ValueError for a value that doesn't fit its field: more than 65 535 bytes of a name, an id or a phrase.
    """
    try:
        return _ENCODERS[type(message)](message)
    except struct.error as error:
        raise ValueError(f"{type(message).__name__} doesn't fit a frame: {error}") from error


def check(message: Message) -> None:
    """Raises ValueError for a message that `encode` can't encode, for messages that are encoded later."""
    encode(message)


def frames(kind: int, key: int, body: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    """One message's frames, each as its buffers; small ones are joined to a single buffer."""
    total = sum(map(len, body))
    if total <= FRAME_BYTES_MAX:
        head = HEADER.pack(total, kind, 0, 0, key)
        yield [b"".join((head, *body))] if total < JOINED_BYTES_MAX else [head, *body]
        return
    yield from _fragments(kind, key, U64.pack(total), body)


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
    """The single frame of a small message; None for a larger message, which is sent as `frames`."""
    total = sum(map(len, body))
    if total >= JOINED_BYTES_MAX:
        return None
    return HEADER.pack(total, kind, 0, 0, key) + b"".join(body)


def shared_frame(kind: int, key: int, place: int, size: int) -> bytes:
    """The frame of a message whose body, of `size` bytes, lies at a place of an arena."""
    return HEADER.pack(PLACE.size, kind, SHARED, 0, key) + PLACE.pack(place, size)


#: The most bytes of a whole answer that is a small frame.
ANSWER_BYTES_MAX: Final = JOINED_BYTES_MAX - CHUNK_HEAD_SIZE - 1


def answer_frame(job_id: int, data: bytes) -> bytes:
    """The frame of `Chunk(job_id, data)`, a whole answer without headers, of at most ANSWER_BYTES_MAX."""
    return WHOLE_HEAD.pack(CHUNK_HEAD_SIZE + len(data), CHUNK, 0, 0, job_id, 1, 200, 0, 0) + data


def encode_bytes(message: Message) -> bytes:
    """`message` as one byte string of whole frames (tests, and senders that don't interleave)."""
    return b"".join(b"".join(frame) for frame in frames(*encode(message)))
