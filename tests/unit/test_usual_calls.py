"""The short path of a usual gRPC call gives the same result as the general path, for any input, and counts the same.
The headers of an HTTP request are found as by a walk through them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams import Http2Client, asked, begin
from support import until_async
from ts_frontend.errors import ModelNotFound
from ts_frontend.grpc.around import CallMetrics
from ts_frontend.grpc.call import JOIN_BYTES_MAX, Call, Exchange, Method, Shape, identified
from ts_frontend.grpc.protocol import PREFIX, MalformedHeader, ReceivedMetadata, encode
from ts_frontend.http.app import ASKS, Cors, HttpApp
from ts_frontend.http.request import BodyLimits, HttpRequest
from ts_frontend.http.routing import Guard, Hosts, RouteTable
from ts_frontend.job import RequestIds
from ts_frontend.telemetry.metrics.text import exposition
from ts_frontend.transport.limits import ListenerLimits

PATH = "/x.Y/Do"
LIMITS = ListenerLimits(request_bytes_max=50, response_bytes_max=100_000)
HEADERS = [(b"content-type", b"application/grpc"), (b"te", b"trailers"), (b"user-agent", b"someone")]


class Case(NamedTuple):
    """The client's messages, and the method's end."""

    bodies: Sequence[bytes]
    ends_apart: bool
    leaves: bool
    headers: Sequence[tuple[bytes, bytes]]
    answer: int
    adds: str
    fails: Exception | None

    def ends(self, rest: Sequence[bytes]) -> bool:
        return not rest and not self.leaves


def message(data: bytes) -> bytes:
    return PREFIX.pack(0, len(data)) + data


whole = st.binary(max_size=60).map(message)
bodies = st.one_of(
    whole.map(lambda body: [body]),
    st.lists(whole, max_size=3),
    st.lists(st.binary(max_size=30), max_size=3),
    st.tuples(whole, st.integers(0, 64)).map(lambda cut: [cut[0][: cut[1]], cut[0][cut[1] :]]),
    st.just([PREFIX.pack(1, 2) + b"ab"]),
    st.just([encode([bytes(2000)], "gzip")]),
)
more_headers = st.lists(
    st.sampled_from(
        [
            (b"grpc-timeout", b"9S"),
            (b"grpc-timeout", b"nonsense"),
            (b"grpc-encoding", b"gzip"),
            (b"grpc-encoding", b"other"),
            (b"grpc-accept-encoding", b"gzip"),
            (b"x-request-id", b"mine"),
            (b"a-bin", b"YQ"),
            (b"a-bin", b"%"),
        ]
    ),
    max_size=2,
    unique_by=lambda header: header[0],
)
cases = st.builds(
    Case,
    bodies,
    st.booleans(),
    st.booleans(),
    more_headers,
    st.sampled_from([0, 2, JOIN_BYTES_MAX, JOIN_BYTES_MAX + 1, 100_001]),
    st.sampled_from(["", "initial", "trailing"]),
    st.sampled_from([None, None, ModelNotFound("m"), RuntimeError("boom")]),
)


class AnyWay(Exchange):
    """One that never takes the short way."""

    __slots__ = ()

    def _is_usual(self, method: Method) -> bool:
        return False


async def answer_of(case: Case, metrics: CallMetrics, kind: type[Exchange]) -> Any:
    """The client's answer; the body's pieces are joined, since HTTP/2 leaves their boundaries open."""

    async def run(call: Call, data: bytes) -> bytes:
        _, request_id = identified(call, RequestIds())
        if case.adds:
            getattr(call, case.adds).append(("key", call.peer))
        if case.fails is not None:
            raise case.fails
        own = request_id.encode() if request_id == "mine" else b""
        return (data + own).ljust(case.answer, b".")[: max(case.answer, len(data))]

    client, method = Http2Client(), metrics.counted(Method(PATH, Shape.UNARY, run))
    first, *rest = [*case.bodies, b""] if case.ends_apart or not case.bodies else case.bodies
    stream = client.request(target=PATH, headers=[*HEADERS, *case.headers], body=first, ended=case.ends(rest))
    task = begin(stream, kind(stream, LIMITS).run(method))
    while rest and not stream.done:
        await asyncio.sleep(0)
        data = rest.pop(0)
        if not stream.done:
            client.piece(stream, data, more=not case.ends(rest))
    if case.leaves and not stream.done:
        client.reset(stream)
    await asyncio.wait({task})
    assert task.cancelled() or task.exception() is None
    await until_async(lambda: stream.done)
    answer = client.answer(stream)
    return answer.status, answer.headers, answer.body, answer.trailers, answer.reset, task.cancelled()


def counted(metrics: CallMetrics) -> list[str]:
    """All series but those of durations."""
    shown = exposition(metrics.families()).splitlines()
    return [line for line in shown if "_bucket" not in line and "_sum" not in line]


@pytest.mark.pure_form  # it derives from Exchange
@settings(deadline=None)
@given(cases)
def test_both_ways_answer_and_count_alike(case: Case) -> None:
    short, long = CallMetrics(), CallMetrics()
    assert asyncio.run(answer_of(case, short, Exchange)) == asyncio.run(answer_of(case, long, AnyWay))
    assert counted(short) == counted(long)


names = st.sampled_from(
    [b"te", b"user-agent", b"Te", b"host", b"x-request-id", b"a", b"grpc-bin", b":path", b"grpc-tags-bin"]
)


@settings(deadline=None)
@given(st.lists(st.tuples(names, st.sampled_from([b"trailers", b"%", b"", b"YQ"])), max_size=4))
def test_metadata_that_nobody_asked_for_is_not_decoded_and_nothing_is_lost(headers: list[tuple[bytes, bytes]]) -> None:
    def found(call: Call) -> Any:
        try:
            passed_on, request_id = identified(call, RequestIds())
        except MalformedHeader:
            return "malformed"
        assert request_id == call.request_id
        return list(passed_on), call.initial, list(call.metadata)

    unread = found(Call(PATH, None, headers=(headers, dict(headers))))
    try:
        decoded = list(ReceivedMetadata(headers))
    except MalformedHeader:
        assert unread == "malformed"
    else:
        assert unread == found(Call(PATH, decoded))


# --- the headers of HTTP requests

header_names = st.sampled_from(
    [b"host", b"origin", b"x-request-id", b"ts-server-timing", b"content-type", b"authorization"]
)
pairs = st.lists(st.tuples(header_names, st.sampled_from([b"", b"1", b"a b", b"\xe9", b"mine"])), max_size=5)


def http_request(headers: Sequence[tuple[bytes, bytes]]) -> HttpRequest:
    return HttpRequest(asked("GET", headers=headers), "", BodyLimits(1, 1))


@given(pairs, header_names)
def test_headers_are_found_as_by_a_walk_through_them(headers: list[tuple[bytes, bytes]], name: bytes) -> None:
    request = http_request(headers)
    for gone in (False, True):
        if gone:
            request.drop(name)
            headers = [pair for pair in headers if pair[0] != name]
        assert list(request.headers) == headers
        for one in {name, *dict(headers)}:
            values = [value for key, value in headers if key == one]
            assert request.values(one) == values
            assert request.header(one) == (values[-1].decode("latin-1") if values else "")
            assert request.by_name.get(one) == (values[-1] if values else None)


@given(pairs | pairs.map(lambda found: [*found, (ASKS[0], ASKS[1])]), st.booleans())
def test_the_id_of_a_request_is_its_first_valid_one(headers: list[tuple[bytes, bytes]], times_all: bool) -> None:
    app = HttpApp(
        RouteTable((), ()),
        lambda: "made",
        guard=Guard(Hosts("")),
        log=None,
        cors=Cors(),
        limits=BodyLimits(1, 1),
        times_all=times_all,
    )
    valid = [value.decode() for name, value in headers if name == b"x-request-id" and value in (b"1", b"mine")]
    told = ASKS in headers
    assert app._asked(http_request(headers)) == ((valid or ["made"])[0], told or times_all, told)
