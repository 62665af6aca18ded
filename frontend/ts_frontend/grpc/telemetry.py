"""One line of the access log for every gRPC call, as TorchServe writes it: method, status code, milliseconds."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from ts_frontend.errors import Code, ServeError
from ts_frontend.grpc.call import LABELS, TYPES, Call, Method, MethodCounts, Shape, code_of
from ts_frontend.telemetry.logging.logs import Logs
from ts_frontend.telemetry.metrics.families import Counter, Definition, Family, MetricKind

log = logging.getLogger(__name__)


def logged(method: Method, logs: Logs, *, times_all: bool = False) -> Method:
    """Wraps a method so that its calls are written to the access log, with the times of timed calls (with `times_all`,
    of all calls); returns it unchanged when that log is off."""
    if not logs.access_enabled:
        return method
    words = f"gRPC {method.path[1:]} HTTP/2.0"
    run: Any = method.run

    def done(call: Call, begun_s: float, error: BaseException | None) -> None:
        took_ms = (time.perf_counter() - begun_s) * 1000
        logs.access(call.peer, words, code_of(call, error), took_ms, call.request_id, call.times)
        if isinstance(error, ServeError):
            log.debug("%s ended %s: %s (request id %s)", method.path, error.code.name, error.message, call.request_id)

    if times_all:
        run = _timed(run)
    return Method(
        method.path, method.shape, (_logged_unary if method.shape is Shape.UNARY else _logged_streaming)(run, done)
    )


def _timed(run: Any) -> Any:
    def timed(call: Call, data: Any) -> Any:
        call.time_jobs(told=False)
        return run(call, data)

    return timed


Done = Callable[[Call, float, "BaseException | None"], None]


def _logged_unary(
    run: Callable[[Call, bytes], Awaitable[bytes]], done: Done
) -> Callable[[Call, bytes], Awaitable[bytes]]:
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


def _logged_streaming(run: Callable[[Call, Any], AsyncIterator[Sequence[bytes]]], done: Done) -> Any:
    async def streaming(call: Call, data: Any) -> AsyncIterator[Sequence[bytes]]:
        begun_s = time.perf_counter()
        answers = run(call, data)
        try:
            async for messages in answers:
                yield messages
                del messages  # the stream may rest
        except BaseException as error:
            done(call, begun_s, error)
            raise
        else:
            done(call, begun_s, None)
        finally:
            await answers.aclose()  # type: ignore[attr-defined]

    return streaming


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
