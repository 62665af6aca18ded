"""The limits of clients over HTTP: who asks, what is left in the headers of each answer, and the tokens of a model's
answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from ts_frontend.errors import LimitExceeded
from ts_frontend.http.errors import ErrorDialect, refusal
from ts_frontend.http.request import Body, Header, HttpAnswer, HttpRequest, Serve
from ts_frontend.limits.clients import Asker, Signs, asker
from ts_frontend.limits.limits import Limits, told
from ts_frontend.limits.tokens import used_tokens


class HttpLimits:
    """Answers requests as their clients' limits allow."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    async def serve(self, request: HttpRequest, serve: Serve, dialect: ErrorDialect) -> HttpAnswer:
        """As `serve`, with the headers of the limits that apply. Raises its errors but LimitExceeded, which it
        answers."""
        own = self._limits.clients.asker(_signs(request))
        token = asker.set(own)
        try:
            answer = await serve(request)
        except LimitExceeded as error:
            _settle(own, 0)
            answer = refusal(error, dialect, told=request.told)
        except BaseException:
            _settle(own, 0)
            raise
        finally:
            asker.reset(token)
        headers = self._told(own)
        if own.on_tokens is not None:
            answer = _counted(answer, own)
        return answer._replace(headers=(*answer.headers, *headers)) if headers else answer

    def _told(self, own: Asker) -> list[Header]:
        return [(name.encode(), value.encode()) for name, value in told(own, self._limits.clock())]


def _signs(request: HttpRequest) -> Signs:
    sent: Mapping[bytes, bytes] = request.sent

    def header(name: str) -> str:
        return sent.get(name.encode(), b"").decode("latin-1")

    return Signs(header, request.ends.certificate, request.ends.host)


def _settle(own: Asker, used: float) -> None:
    if own.on_tokens is not None:
        own.on_tokens(used)


def _counted(answer: HttpAnswer, own: Asker) -> HttpAnswer:
    """The answer, whose tokens are settled when it has ended."""
    body = answer.body
    if isinstance(body, (bytes, bytearray, memoryview)):
        _settle(own, used_tokens(bytes(body)) or 0)
        return answer
    return answer._replace(body=_pieces(body, own))


async def _pieces(pieces: AsyncIterator[Sequence[Body]], own: Asker) -> AsyncIterator[Sequence[Body]]:
    """The pieces of a stream. One that doesn't tell its tokens has one in each piece."""
    count, said = 0, 0
    try:
        async for ready in pieces:
            count += len(ready)
            for piece in ready:
                said = used_tokens(bytes(piece)) or said
            yield ready
    finally:
        _settle(own, said or count)
        await pieces.aclose()  # type: ignore[attr-defined]
