"""What is done around the calls of a method: its caller's key is checked, the limits of its client apply, its line is
written to the access log as TorchServe writes it, it is counted, and it gets a span with the attributes of
OpenTelemetry's conventions for RPC.

The present names of attributes are set together with the former ones (`rpc.system`, `rpc.service`,
`rpc.grpc.status_code`), which dashboards read."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ts_frontend.authorization.authorization import Authorization
from ts_frontend.config.keys import KeyKind
from ts_frontend.errors import Code, LimitExceeded, ServeError
from ts_frontend.grpc.call import LABELS, TYPES, Call, Method, MethodCounts, Shape, code_of
from ts_frontend.limits.clients import Asker, Signs, asker
from ts_frontend.limits.limits import Limits, told
from ts_frontend.telemetry.logging.writer import HEALTH_METHODS, Logs
from ts_frontend.telemetry.metrics.families import Counter, Definition, Family, MetricKind

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)

AUTHORIZATION = "authorization"
#: Statuses that OpenTelemetry's conventions count as errors of the server.
FAULTS = frozenset(
    {Code.UNKNOWN, Code.DEADLINE_EXCEEDED, Code.UNIMPLEMENTED, Code.INTERNAL, Code.UNAVAILABLE, Code.DATA_LOSS}
)

#: Called at the end of a call, with its failure or None.
End = Callable[["BaseException | None"], None]


def around(method: Method, begin: Callable[[Call], End]) -> Method:
    """Wraps a method: `begin` is called before each call, and what it returns at the call's end. A ServeError of
    `begin` is the call's."""
    run: Any = method.run

    async def unary(call: Call, data: bytes) -> bytes:
        end = begin(call)
        try:
            answer: bytes = await run(call, data)
        except BaseException as error:
            end(error)
            raise
        end(None)
        return answer

    async def streaming(call: Call, data: Any) -> AsyncIterator[Sequence[bytes]]:
        end = begin(call)
        failure: BaseException | None = None
        answers = run(call, data)
        try:
            async for messages in answers:
                yield messages
                del messages  # the stream may rest
        except BaseException as error:
            failure = error
            raise
        finally:
            await answers.aclose()
            end(failure)
            del failure  # breaks the cycle of the exception and this frame

    return Method(method.path, method.shape, unary if method.shape is Shape.UNARY else streaming)


# --- keys: metadata `authorization: Bearer KEY`


def guarded(method: Method, authorization: Authorization, kind: KeyKind) -> Method:
    """Wraps a method so that only callers with a key of that kind may call it; leaves health methods as they are."""
    if method.path.rpartition("/")[2] in HEALTH_METHODS:
        return method
    run: Any = method.run

    def checked(call: Call, data: Any) -> Any:
        try:
            authorization.check(kind, presented(call), call.peer)
        except ServeError as error:
            if method.shape is Shape.UNARY:
                raise
            return _refused(error)
        # The metadata goes to handlers, which must not see the server's key.
        call.metadata = [entry for entry in call.metadata if entry[0] != AUTHORIZATION]
        return run(call, data)

    return Method(method.path, method.shape, checked)


def presented(call: Call) -> list[bytes]:
    """Returns the values of `authorization`; a value that isn't ASCII becomes b"", which is no key."""
    found = [value for name, value in call.metadata if name == AUTHORIZATION]
    return [value.encode() if isinstance(value, str) and value.isascii() else b"" for value in found]


async def _refused(error: ServeError) -> AsyncIterator[Sequence[bytes]]:
    raise error
    yield ()  # makes this an async generator


# --- limits of clients


def limited(method: Method, limits: Limits) -> Method:
    """Wraps a method whose calls are held to the limits of their clients. What is left is told in the metadata: of a
    refusal in the trailing one, of the answer of a unary call in the initial one."""

    def begin(call: Call) -> End:
        metadata = {name: value for name, value in call.metadata if isinstance(value, str)}
        ends = call.ends
        certificate, host = ("", "") if ends is None else (ends.certificate, ends.host)
        own = limits.clients.asker(Signs(lambda name: metadata.get(name, ""), certificate, host))
        asker.set(own)
        return partial(end, call, own)

    def end(call: Call, own: Asker, error: BaseException | None) -> None:
        if isinstance(error, LimitExceeded):
            call.trailing.extend(told(own, limits.clock()))
        elif error is None and own.accounts and method.shape is Shape.UNARY:
            call.initial.extend(told(own, limits.clock()))

    return around(method, begin)


# --- the access log


def logged(method: Method, logs: Logs, *, times_all: bool = False) -> Method:
    """Wraps a method so that its calls are written to the access log, with the times of timed calls (with `times_all`,
    of all calls); returns it unchanged when that log is off."""
    if not logs.access_enabled:
        return method
    words = f"gRPC {method.path[1:]} HTTP/2.0"

    def begin(call: Call) -> End:
        begun_s = time.perf_counter()
        if times_all:
            call.time_jobs(told=False)
        return partial(done, call, begun_s)

    def done(call: Call, begun_s: float, error: BaseException | None) -> None:
        took_ms = (time.perf_counter() - begun_s) * 1000
        logs.access(call.peer, words, code_of(call, error), took_ms, call.request_id, call.times)
        if isinstance(error, ServeError):
            log.debug("%s ended %s: %s (request id %s)", method.path, error.code.name, error.message, call.request_id)

    return around(method, begin)


# --- traces


def traced(method: Method, tracer: Tracer) -> Method:
    """Wraps a method whose calls get a span; leaves health methods as they are."""
    from ts_frontend.telemetry.tracing.spans import REQUEST_ID, RequestSpan, current, leave  # OpenTelemetry is an extra

    name = method.path[1:]
    service, _, word = name.rpartition("/")
    if word in HEALTH_METHODS:
        return method
    fixed = {"rpc.system.name": "grpc", "rpc.method": name, "rpc.system": "grpc", "rpc.service": service}

    def begin(call: Call) -> End:
        host, _, port = call.peer.rpartition(":")
        peer = {"network.peer.address": host, "network.peer.port": int(port)} if host and port.isdecimal() else {}
        request = RequestSpan(tracer, name, _text(call, "traceparent"), _text(call, "tracestate"), {**fixed, **peer})
        return partial(end, call, request, current.set(request))

    def end(call: Call, request: RequestSpan, token: Any, error: BaseException | None) -> None:
        leave(token)
        code = Code(code_of(call, error))
        found: dict[str, Any] = {"rpc.response.status_code": code.name, "rpc.grpc.status_code": int(code)}
        if call.request_id:
            found[REQUEST_ID] = call.request_id
        request.end(code.name if code in FAULTS else "", found)

    return around(method, begin)


def _text(call: Call, key: str) -> str | None:
    value = call.value(key)
    return value if isinstance(value, str) else None


# --- counts


class CallMetrics:
    """The counters of all methods by path, shared by the listeners of a method."""

    def __init__(self) -> None:
        self._methods: dict[str, MethodCounts] = {}

    def counted(self, method: Method) -> Method:
        counts = self._methods.setdefault(method.path, MethodCounts(method))
        wrapped: Any = _counted_unary if method.shape is Shape.UNARY else _counted_streaming
        return Method(method.path, method.shape, wrapped(method.run, counts))

    def families(self) -> list[Family]:
        started = _family("started_total", MetricKind.COUNTER, "RPCs started on the server")
        handled = _family("handled_total", MetricKind.COUNTER, "RPCs completed on the server, by status", "grpc_code")
        received = _family("msg_received_total", MetricKind.COUNTER, "Messages received from clients")
        sent = _family("msg_sent_total", MetricKind.COUNTER, "Messages sent to clients")
        seconds = _family("handling_seconds", MetricKind.HISTOGRAM, "Seconds from an RPC's start to its completion")
        for counts in self._methods.values():
            if counts.started:
                times = counts.sum_up()
                started.samples[counts.labels] = Counter(counts.started)
                received.samples[counts.labels] = Counter(counts.received)
                sent.samples[counts.labels] = Counter(counts.sent)
                seconds.samples[counts.labels] = times
                for code in Code:
                    if counts.handled[code]:
                        handled.samples[(*counts.labels, code.name)] = Counter(counts.handled[code])
        return [started, handled, received, sent, seconds]


def _family(name: str, kind: MetricKind, sentence: str, *more: str) -> Family:
    return Family(Definition(f"grpc_server_{name}", kind, "Count", (*LABELS, *more)), sentence)


def _counted_unary(run: Any, counts: MethodCounts) -> Callable[[Call, bytes], Awaitable[bytes]]:
    async def unary(call: Call, data: bytes) -> bytes:
        begun_s = counts.begin()
        try:
            answer: bytes = await run(call, data)
        except BaseException as error:
            counts.failed(call, error, begun_s)
            raise
        counts.answered(begun_s)
        return answer

    return unary


def _counted_streaming(run: Any, counts: MethodCounts) -> Any:
    bidirectional = counts.labels[0] == TYPES[Shape.BIDI]

    async def streaming(call: Call, data: Any) -> AsyncIterator[Sequence[bytes]]:
        begun_s = time.perf_counter()
        counts.started += 1
        if bidirectional:
            data = _Received(data, counts)
        else:
            counts.received += 1
        answers = run(call, data)
        try:
            async for messages in answers:
                yield messages
                counts.sent += len(messages)
                del messages  # the stream may rest
        except BaseException as error:
            counts.ended(code_of(call, error), time.perf_counter() - begun_s)
            raise
        else:
            counts.ended(Code.OK, time.perf_counter() - begun_s)
        finally:
            await answers.aclose()

    return streaming


class _Received:
    """A call's messages, counted as they are read."""

    __slots__ = ("_counts", "_messages")

    def __init__(self, messages: AsyncIterator[bytes], counts: MethodCounts) -> None:
        self._messages, self._counts = messages, counts

    def __aiter__(self) -> _Received:
        return self

    async def __anext__(self) -> bytes:
        message = await self._messages.__anext__()
        self._counts.received += 1
        return message
