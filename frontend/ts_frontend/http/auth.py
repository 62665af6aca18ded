"""Keys over HTTP: a guard before the routes of an API, and the call that makes new keys (docs/security.md)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ts_frontend.authorization.authorization import NOT_RENEWED, Authorization
from ts_frontend.config.keys import KeyKind
from ts_frontend.errors import Code, PermissionDenied, ServeError
from ts_frontend.http.guard import REFUSALS
from ts_frontend.http.request import JSON, HttpAnswer, HttpRequest, Parameters, Route, Serve, query_pairs
from ts_frontend.http.routes import Effect, ErrorDialect, decision

AUTHORIZATION = b"authorization"
CHALLENGE = (b"www-authenticate", b"Bearer")
#: What /token renews, by the word for it.
_RENEWED = {"management": KeyKind.MANAGEMENT, "inference": KeyKind.INFERENCE}


class Unauthorized(ServeError):
    """What a missing or bad key is in protocols that aren't TorchServe's."""

    code, http_status, type_name = Code.UNAUTHENTICATED, 401, "InvalidKeyException"


class HttpGuard:
    """Asks for keys, before anything of a request's body is read."""

    def __init__(self, authorization: Authorization) -> None:
        self._authorization = authorization

    def guarded(self, route: Route, *kinds: KeyKind) -> Route:
        """The route, for those who have a key of one of the kinds. Health and the API description are everyone's."""

        def find(request: HttpRequest) -> Serve | None:
            try:
                serve = route(request)
            except ServeError:
                refused = self._refused(request, kinds)
                if refused is not None:
                    return refused
                raise
            if serve is None or is_open(request):
                return serve
            return self._refused(request, kinds) or serve

        return find

    def last(self, *kinds: KeyKind) -> Route:
        """Asked when no route knows the path: without any key of the listener nobody learns that there is none."""

        def find(request: HttpRequest) -> Serve | None:
            return self._refused(request, kinds)

        return find

    def _refused(self, request: HttpRequest, kinds: Sequence[KeyKind]) -> Serve | None:
        """None when a key is good; else what refuses the call in the form of its protocol. Raises PermissionDenied
        where that form is TorchServe's."""
        try:
            self._check(request, kinds)
        except PermissionDenied as error:
            dialect = decision(request.method, request.path).dialect
            if dialect is ErrorDialect.TORCHSERVE:
                raise
            answer = REFUSALS[dialect](Unauthorized(error.message))
            return partial(_answered, answer._replace(headers=(*answer.headers, CHALLENGE)))
        return None

    def _check(self, request: HttpRequest, kinds: Sequence[KeyKind]) -> None:
        """Returns when a key is good; handlers don't get to see it."""
        values = presented(request)
        for kind in kinds:
            if self._authorization.opens(kind, values):
                request.headers = [pair for pair in request.headers if pair[0] != AUTHORIZATION]
                return
        self._authorization.refuse(kinds[0], values, request.peer)

    # --- /token

    def token_route(self, request: HttpRequest) -> Serve | None:
        return self._token if request.segments == ["token"] else None

    async def _token(self, request: HttpRequest) -> HttpAnswer:
        """/token?type=management, or inference: a new key, found in key_file.json."""
        values = presented(request)
        word = Parameters(query_pairs(request)).text("type") or ""
        kind = _RENEWED.get(word)
        if kind is None or not self._authorization.opens(KeyKind.API, values):
            self._authorization.refuse(KeyKind.API, values, request.peer, NOT_RENEWED)
        else:
            await self._authorization.renew(kind)
        return HttpAnswer(200, (JSON,), b"\n")


async def _answered(answer: HttpAnswer, request: HttpRequest) -> HttpAnswer:
    return answer


def presented(request: HttpRequest) -> list[bytes]:
    """The values of the request's Authorization headers."""
    return [value for name, value in request.headers if name == AUTHORIZATION]


def is_open(request: HttpRequest) -> bool:
    """Is it for everyone? Probes have no keys, and the description tells nothing about what is served."""
    return decision(request.method, request.path).effect is Effect.OPEN
