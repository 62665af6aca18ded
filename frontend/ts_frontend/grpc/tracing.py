"""A span for each call of a gRPC method, with the attributes of OpenTelemetry's conventions for RPC.

The present attribute names are set together with the former ones (`rpc.system`, `rpc.service`, `rpc.grpc.status_code`),
which dashboards read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from opentelemetry.trace import Tracer

from ts_frontend.errors import Code
from ts_frontend.grpc.call import Call, Method, Shape, code_of
from ts_frontend.telemetry.logging.writer import HEALTH_METHODS
from ts_frontend.telemetry.tracing.spans import REQUEST_ID, RequestSpan, current, leave

#: Statuses that the conventions count as errors of the server.
FAULTS = frozenset(
    {Code.UNKNOWN, Code.DEADLINE_EXCEEDED, Code.UNIMPLEMENTED, Code.INTERNAL, Code.UNAVAILABLE, Code.DATA_LOSS}
)

Begin = Callable[[Call], RequestSpan]


def traced(method: Method, tracer: Tracer) -> Method:
    name = method.path[1:]
    service, _, word = name.rpartition("/")
    if word in HEALTH_METHODS:
        return method
    fixed = {"rpc.system.name": "grpc", "rpc.method": name, "rpc.system": "grpc", "rpc.service": service}

    def begin(call: Call) -> RequestSpan:
        host, _, port = call.peer.rpartition(":")
        peer = {"network.peer.address": host, "network.peer.port": int(port)} if host and port.isdecimal() else {}
        return RequestSpan(tracer, name, _text(call, "traceparent"), _text(call, "tracestate"), {**fixed, **peer})

    wrap = _traced_unary if method.shape is Shape.UNARY else _traced_streaming
    return Method(method.path, method.shape, wrap(method.run, begin))


def _text(call: Call, key: str) -> str | None:
    value = call.value(key)
    return value if isinstance(value, str) else None


def _end(request: RequestSpan, call: Call, error: BaseException | None) -> None:
    code = Code(code_of(call, error))
    found: dict[str, Any] = {"rpc.response.status_code": code.name, "rpc.grpc.status_code": int(code)}
    if call.request_id:
        found[REQUEST_ID] = call.request_id
    request.end(code.name if code in FAULTS else "", found)


def _traced_unary(run: Any, begin: Begin) -> Callable[[Call, bytes], Awaitable[bytes]]:
    async def unary(call: Call, data: bytes) -> bytes:
        request = begin(call)
        token = current.set(request)
        error: BaseException | None = None
        try:
            answer: bytes = await run(call, data)
            return answer
        except BaseException as one:
            error = one
            raise
        finally:
            leave(token)
            _end(request, call, error)
            del error

    return unary


def _traced_streaming(run: Any, begin: Begin) -> Any:
    async def streaming(call: Call, data: Any) -> AsyncIterator[Sequence[bytes]]:
        request = begin(call)
        token = current.set(request)
        error: BaseException | None = None
        answers = run(call, data)
        try:
            async for messages in answers:
                yield messages
                del messages  # the stream may rest
        except BaseException as one:
            error = one
            raise
        finally:
            await answers.aclose()
            leave(token)
            _end(request, call, error)
            del error

    return streaming
