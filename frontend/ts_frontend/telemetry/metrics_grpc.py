"""Calls of gRPC methods, counted under the names that Prometheus's interceptors for gRPC have (`grpc_server_…`)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from ts_frontend.errors import Code
from ts_frontend.ingress.call import Call, Method, Shape
from ts_frontend.telemetry.access import code_of
from ts_frontend.telemetry.metrics_definitions import Definition, Kind
from ts_frontend.telemetry.metrics_samples import Counter, Family, Histogram

TYPES = {Shape.UNARY: "UNARY", Shape.SERVER_STREAM: "SERVER_STREAMING", Shape.BIDI: "BIDI_STREAMING"}
LABELS = ("grpc_type", "grpc_service", "grpc_method")


class MethodCounts:
    """What happened to the calls of one method. `handled`: ended calls by status."""

    __slots__ = ("handled", "labels", "received", "seconds", "sent", "started")

    def __init__(self, method: Method) -> None:
        service, _, name = method.path[1:].rpartition("/")
        self.labels = (TYPES[method.shape], service, name)
        self.started = self.received = self.sent = 0
        self.handled = [0] * len(Code)
        self.seconds = Histogram()

    def ended(self, code: int, seconds: float) -> None:
        self.handled[code] += 1
        self.seconds.add(seconds)


class CallMetrics:
    """The counts of all methods, by path: a method that several listeners have is counted once."""

    def __init__(self) -> None:
        self._methods: dict[str, MethodCounts] = {}

    def counted(self, method: Method) -> Method:
        """The method, its calls counted from now on."""
        counts = self._methods.setdefault(method.path, MethodCounts(method))
        wrap = _unary if method.shape is Shape.UNARY else _streaming
        return Method(method.path, method.shape, wrap(method.run, counts))

    def families(self) -> list[Family]:
        """Everything as it is now, of the methods that were called."""
        started = _family("started_total", Kind.COUNTER, "RPCs started on the server")
        handled = _family("handled_total", Kind.COUNTER, "RPCs completed on the server, by status", "grpc_code")
        received = _family("msg_received_total", Kind.COUNTER, "Messages received from clients")
        sent = _family("msg_sent_total", Kind.COUNTER, "Messages sent to clients")
        seconds = _family("handling_seconds", Kind.HISTOGRAM, "Seconds from an RPC's start to its completion")
        for counts in self._methods.values():
            if counts.started:
                started.samples[counts.labels] = Counter(counts.started)
                received.samples[counts.labels] = Counter(counts.received)
                sent.samples[counts.labels] = Counter(counts.sent)
                seconds.samples[counts.labels] = counts.seconds
                for code in Code:
                    if counts.handled[code]:
                        handled.samples[(*counts.labels, code.name)] = Counter(counts.handled[code])
        return [started, handled, received, sent, seconds]


def _family(name: str, kind: Kind, sentence: str, *more: str) -> Family:
    return Family(Definition(f"grpc_server_{name}", kind, "Count", (*LABELS, *more)), sentence)


def _unary(run: Any, counts: MethodCounts) -> Callable[[Call, bytes], Awaitable[bytes]]:
    handled, add = counts.handled, counts.seconds.add
    clock = time.perf_counter

    async def unary(call: Call, data: bytes) -> bytes:
        begun_s = clock()
        counts.started += 1
        counts.received += 1
        try:
            answer: bytes = await run(call, data)
        except BaseException as error:
            counts.ended(code_of(call, error), clock() - begun_s)
            raise
        counts.sent += 1
        handled[0] += 1
        add(clock() - begun_s)
        return answer

    return unary


def _streaming(run: Any, counts: MethodCounts) -> Any:
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
