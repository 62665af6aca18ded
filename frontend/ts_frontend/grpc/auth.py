"""Keys over gRPC: metadata `authorization: Bearer KEY`, checked before a method runs; not for health, reflection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from ts_frontend.authorization.authorization import Authorization
from ts_frontend.config.keys import KeyKind
from ts_frontend.errors import ServeError
from ts_frontend.grpc.call import Call, Method, Shape
from ts_frontend.telemetry.logging.writer import HEALTH_METHODS

AUTHORIZATION = "authorization"


def guarded(method: Method, authorization: Authorization, kind: KeyKind) -> Method:
    """Wraps a method so that only callers with a key of that kind may call it; leaves health methods as they are."""
    if method.path.rpartition("/")[2] in HEALTH_METHODS:
        return method
    run: Any = method.run

    def check(call: Call) -> None:
        authorization.check(kind, presented(call), call.peer)
        # The metadata goes to handlers, which must not see the server's key.
        call.metadata = [entry for entry in call.metadata if entry[0] != AUTHORIZATION]

    return Method(method.path, method.shape, (_unary if method.shape is Shape.UNARY else _streaming)(run, check))


def presented(call: Call) -> list[bytes]:
    """Returns the values of `authorization`; a value that isn't ASCII becomes b"", which is no key."""
    found = [value for name, value in call.metadata if name == AUTHORIZATION]
    return [value.encode() if isinstance(value, str) and value.isascii() else b"" for value in found]


Check = Callable[[Call], None]


def _unary(run: Callable[[Call, bytes], Awaitable[bytes]], check: Check) -> Callable[[Call, bytes], Awaitable[bytes]]:
    def unary(call: Call, data: bytes) -> Awaitable[bytes]:
        check(call)
        return run(call, data)

    return unary


def _streaming(run: Callable[[Call, Any], AsyncIterator[Sequence[bytes]]], check: Check) -> Any:
    """Checks a streaming call before it runs; an allowed call returns its method's stream."""

    def streaming(call: Call, data: Any) -> AsyncIterator[Sequence[bytes]]:
        try:
            check(call)
        except ServeError as error:
            return _refused(error)
        return run(call, data)

    return streaming


async def _refused(error: ServeError) -> AsyncIterator[Sequence[bytes]]:
    raise error
    yield ()  # makes this an async generator
