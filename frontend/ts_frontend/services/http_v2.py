"""How calls of `/v2` are answered: their methods, errors in the protocol's form, bodies compressed or not."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Sequence

from ts_frontend.errors import Code, InvalidArgument, MessageTooLarge, ServeError
from ts_frontend.ingress.http import MethodNotAllowed, retry_headers
from ts_frontend.ingress.http_call import Header, HttpAnswer, HttpRequest, Serve
from ts_frontend.services.http_answers import compact_json

log = logging.getLogger(__name__)

ACCEPTED: Header = (b"accept-encoding", b"gzip, deflate")
#: Smaller answers go as they are: one packet holds them.
COMPRESSED_BYTES_MIN = 1400
#: Larger bodies are compressed and decompressed in a thread, beside other requests.
INLINE_BYTES_MAX = 16 * 1024
_GZIP, _ZLIB, _FAST = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, 1


class UnknownEncoding(ServeError):
    """A body in an encoding that isn't read here."""

    code, http_status, type_name = Code.UNIMPLEMENTED, 501, "NotImplementedException"


class UnknownPath(ServeError):
    code, http_status, type_name = Code.NOT_FOUND, 404, "ResourceNotFoundException"


def served(methods: Sequence[str], serve: Serve) -> Serve:
    """Answers these methods (HEAD with GET) and tells errors in the protocol's form."""

    async def run(request: HttpRequest) -> HttpAnswer:
        try:
            if request.method not in methods and not (request.method == "HEAD" and "GET" in methods):
                raise MethodNotAllowed
            return await serve(request)
        except ServeError as error:
            log.debug("%s %r ended %s: %s", request.method, request.path, error.http_status, error.message)
            return refusal(error)

    return run


def refusal(error: ServeError) -> HttpAnswer:
    """The protocol's form of an error."""
    status = error.http_status
    answer = compact_json(status if 400 <= status < 600 else 500, {"error": error.message})
    own = (ACCEPTED,) if isinstance(error, UnknownEncoding) else retry_headers(error)
    return answer._replace(headers=(*answer.headers, *own))


def unknown(request: HttpRequest) -> Serve | None:
    """The route of what no other knows under `/v2`."""
    return _unknown if request.segments[:1] == ["v2"] else None


async def _unknown(request: HttpRequest) -> HttpAnswer:
    return refusal(UnknownPath(f"Not Found: nothing answers {request.method} {request.path}"))


async def body_of(request: HttpRequest) -> bytes:
    """The body, decompressed. UnknownEncoding; InvalidArgument for one that can't be; MessageTooLarge."""
    data = await request.body()
    encoding = request.header(b"content-encoding").strip().lower()
    if encoding in ("", "identity"):
        return data
    if encoding not in ("gzip", "deflate"):
        raise UnknownEncoding(f"content-encoding {encoding!r} is not read; gzip and deflate are")
    limit = request.limits.bytes_max
    return await asyncio.to_thread(decompressed, data, encoding, limit)


def decompressed(data: bytes, encoding: str, bytes_max: int) -> bytes:
    """At most `bytes_max`. A deflate body may lack zlib's header, as of some clients."""
    bits = _GZIP if encoding == "gzip" else _ZLIB if data[:1] and data[0] & 15 == 8 else -zlib.MAX_WBITS
    reader = zlib.decompressobj(bits)
    try:
        found = reader.decompress(data, bytes_max + 1)
    except zlib.error as error:
        raise InvalidArgument(f"The body is not {encoding}, as its content-encoding says: {error}") from None
    if len(found) > bytes_max:
        raise MessageTooLarge(f"Request of over {bytes_max} bytes, decompressed, is over max_request_size")
    if not reader.eof or reader.unused_data:
        raise InvalidArgument(f"The body is not {encoding}, as its content-encoding says: it is cut short or too long")
    return found


async def compressed(request: HttpRequest, answer: HttpAnswer) -> HttpAnswer:
    """The answer as the request's accept-encoding wants it: gzip before deflate."""
    body = answer.body
    if not isinstance(body, (bytes, bytearray, memoryview)) or len(body) < COMPRESSED_BYTES_MIN:
        return answer
    wanted = _wanted(request.header(b"accept-encoding"))
    if not wanted:
        return answer
    small = len(body) <= INLINE_BYTES_MAX
    data = _packed(body, wanted) if small else await asyncio.to_thread(_packed, body, wanted)
    return answer._replace(headers=(*answer.headers, (b"content-encoding", wanted.encode())), body=data)


def _wanted(accepted: str) -> str:
    names = set()
    for part in accepted.lower().split(","):
        name, _, weight = part.partition(";")
        if weight.replace(" ", "").rstrip("0") not in ("q=", "q=0."):
            names.add(name.strip())
    return next((name for name in ("gzip", "deflate") if name in names), "")


def _packed(data: bytes | bytearray | memoryview, encoding: str) -> bytes:
    writer = zlib.compressobj(_FAST, zlib.DEFLATED, _GZIP if encoding == "gzip" else _ZLIB)
    return writer.compress(data) + writer.flush()
