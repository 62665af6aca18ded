"""Keys over HTTP: the check of each request's key, and the call that makes new keys (docs/security.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ts_frontend.authorization.authorization import NOT_RENEWED, Authorization
from ts_frontend.config.keys import KeyKind
from ts_frontend.errors import PermissionDenied
from ts_frontend.http.errors import ErrorDialect, Unauthorized
from ts_frontend.http.request import JSON, HttpAnswer, HttpRequest, Parameters, query_pairs
from ts_frontend.http.routing import Match

AUTHORIZATION: Final = b"authorization"
#: The kinds of keys that /token renews, by the value of `type`.
_RENEWED: Final = {"management": KeyKind.MANAGEMENT, "inference": KeyKind.INFERENCE}


class HttpKeys:
    """Checks the key of a request before its body is read."""

    def __init__(self, authorization: Authorization) -> None:
        self._authorization = authorization

    def check(self, request: HttpRequest, match: Match) -> bool:
        """Returns True if one of the keys that the match asks for is valid, and removes it from the headers for
        handlers; False if none was needed. Raises PermissionDenied for routes with TorchServe's errors, Unauthorized
        for others. /token checks its key itself."""
        if not match.keys or KeyKind.API in match.keys:
            return False
        try:
            self._check(request, match.keys)
            return True
        except PermissionDenied as error:
            if match.dialect is ErrorDialect.TORCHSERVE:
                raise
            raise Unauthorized(error.message) from error

    def _check(self, request: HttpRequest, kinds: Sequence[KeyKind]) -> None:
        values = presented(request)
        for kind in kinds:
            if self._authorization.opens(kind, values):
                request.drop(AUTHORIZATION)
                return
        self._authorization.refuse(kinds[0], values, request.peer)

    async def token(self, request: HttpRequest) -> HttpAnswer:
        """Answers /token?type=management (or inference): makes a new key and writes it to key_file.json."""
        values = presented(request)
        word = Parameters(query_pairs(request)).text("type") or ""
        kind = _RENEWED.get(word)
        if not self._authorization.opens(KeyKind.API, values):
            self._authorization.refuse(KeyKind.API, values, request.peer, NOT_RENEWED)
        if kind is None:
            raise PermissionDenied(f"{NOT_RENEWED} (type is {word[:80]!r}, not inference or management)")
        await self._authorization.renew(kind)
        return HttpAnswer(200, (JSON,), b"\n")


def presented(request: HttpRequest) -> list[bytes]:
    return request.values(AUTHORIZATION)
