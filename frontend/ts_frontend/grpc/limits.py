"""The limits of clients over gRPC: who calls, and what is left in the metadata of each answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from ts_frontend.errors import LimitExceeded
from ts_frontend.grpc.call import Call, Method, Shape
from ts_frontend.limits.clients import Asker, Signs, asker
from ts_frontend.limits.limits import Limits, told


def limited(method: Method, limits: Limits) -> Method:
    """Wraps a method whose calls are held to the limits of their clients."""
    run: Any = method.run
    return Method(method.path, method.shape, (_unary if method.shape is Shape.UNARY else _streaming)(run, limits))


def _begin(call: Call, limits: Limits) -> Asker:
    metadata = {name: value for name, value in call.metadata if isinstance(value, str)}
    ends = call.ends
    signs = Signs(
        lambda name: metadata.get(name, ""), "" if ends is None else ends.certificate, "" if ends is None else ends.host
    )
    own = limits.clients.asker(signs)
    asker.set(own)
    return own


def _unary(run: Callable[[Call, bytes], Awaitable[bytes]], limits: Limits) -> Callable[[Call, bytes], Awaitable[bytes]]:
    async def unary(call: Call, data: bytes) -> bytes:
        own = _begin(call, limits)
        try:
            answer = await run(call, data)
        except LimitExceeded:
            call.trailing += told(own, limits.clock())
            raise
        if own.accounts:
            call.initial += told(own, limits.clock())
        return answer

    return unary


def _streaming(run: Callable[[Call, Any], AsyncIterator[Sequence[bytes]]], limits: Limits) -> Any:
    async def streaming(call: Call, data: Any) -> AsyncIterator[Sequence[bytes]]:
        own = _begin(call, limits)
        answers = run(call, data)
        try:
            async for messages in answers:
                yield messages
                del messages  # the stream may rest
        except LimitExceeded:
            call.trailing += told(own, limits.clock())
            raise
        finally:
            await answers.aclose()  # type: ignore[attr-defined]

    return streaming
