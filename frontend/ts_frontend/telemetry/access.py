"""One line of the access log for every gRPC call, as TorchServe writes it: method, status code, milliseconds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from ts_frontend.errors import Code, ServeError
from ts_frontend.ingress.call import Call, ClientGone, Method, Shape
from ts_frontend.telemetry.logs import Logs

log = logging.getLogger(__name__)


def logged(method: Method, logs: Logs) -> Method:
    """The method, its calls written to the access log; the method itself when that log is off."""
    if not logs.access_enabled:
        return method
    words = f"gRPC {method.path[1:]} HTTP/2.0"
    run: Any = method.run

    def done(call: Call, begun_s: float, error: BaseException | None) -> None:
        logs.access(call.peer, words, code_of(call, error), (time.perf_counter() - begun_s) * 1000, call.request_id)
        if isinstance(error, ServeError):
            log.debug("%s ended %s: %s (request id %s)", method.path, error.code.name, error.message, call.request_id)

    return Method(method.path, method.shape, (_unary if method.shape is Shape.UNARY else _streaming)(run, done))


def code_of(call: Call, error: BaseException | None) -> int:
    """The status that a method's end became."""
    if error is None:
        return Code.OK
    if isinstance(error, ServeError):
        return error.code
    if isinstance(error, (asyncio.CancelledError, GeneratorExit, ClientGone)):
        return Code.DEADLINE_EXCEEDED if time.monotonic() >= call.deadline_s else Code.CANCELLED
    return Code.INTERNAL


Done = Callable[[Call, float, "BaseException | None"], None]


def _unary(run: Callable[[Call, bytes], Awaitable[bytes]], done: Done) -> Callable[[Call, bytes], Awaitable[bytes]]:
    async def unary(call: Call, data: bytes) -> bytes:
        begun_s = time.perf_counter()
        try:
            answer = await run(call, data)
        except BaseException as error:
            done(call, begun_s, error)
            raise
        done(call, begun_s, None)
        return answer

    return unary


def _streaming(run: Callable[[Call, Any], AsyncIterator[Sequence[bytes]]], done: Done) -> Any:
    async def streaming(call: Call, data: Any) -> AsyncIterator[Sequence[bytes]]:
        begun_s = time.perf_counter()
        answers = run(call, data)
        try:
            async for messages in answers:
                yield messages
        except BaseException as error:
            done(call, begun_s, error)
            raise
        else:
            done(call, begun_s, None)
        finally:
            await answers.aclose()  # type: ignore[attr-defined]

    return streaming
