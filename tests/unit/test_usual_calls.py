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
from ts_frontend.http.departures import Departures

from ts_frontend.errors import ClientGone, ModelNotFound
from ts_frontend.grpc.call import Call, ListenerLimits, Method, RequestIds, Shape, identified
from ts_frontend.grpc.exchange import JOIN_BYTES_MAX, Exchange
from ts_frontend.grpc.protocol import PREFIX, MalformedHeader, ReceivedMetadata, encode
from ts_frontend.grpc.telemetry import CallMetrics
from ts_frontend.http.app import ASKS, Cors, HttpApp
from ts_frontend.http.guard import Guard, Hosts
from ts_frontend.http.request import BodyLimits, Event, HttpRequest, Receive, Scope, Send
from ts_frontend.http.routing import RouteTable
from ts_frontend.listeners import application
from ts_frontend.listeners.listener import Listener
from ts_frontend.telemetry.metrics.text import exposition

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


async def events_of(case: Case, metrics: CallMetrics, kind: type[Exchange]) -> list[Any]:
    """The client's answer as one list; the body's pieces are joined, since HTTP/2 leaves their boundaries open."""

    async def run(call: Call, data: bytes) -> bytes:
        _, request_id = identified(call, RequestIds())
        if case.adds:
            getattr(call, case.adds).append(("key", call.peer))
        if case.fails is not None:
            raise case.fails
        own = request_id.encode() if request_id == "mine" else b""
        return (data + own).ljust(case.answer, b".")[: max(case.answer, len(data))]

    sent: list[Any] = []
    waiting: list[Any] = [{"type": "http.request", "body": body, "more_body": True} for body in case.bodies]
    if case.leaves:
        waiting.append({"type": "http.disconnect"})
    elif case.ends_apart or not waiting:
        waiting.append({"type": "http.request", "body": b"", "more_body": False})
    else:
        waiting[-1]["more_body"] = False

    async def receive() -> Any:
        return waiting.pop(0)

    async def send(event: Any) -> None:
        if event["type"] == "http.response.body" and sent and sent[-1]["type"] == event["type"]:
            sent[-1] = {**event, "body": sent[-1]["body"] + event["body"]}
        else:
            sent.append(dict(event, headers=[*event["headers"]]) if "headers" in event else dict(event))

    headers = [*HEADERS, *case.headers]
    scope = {"path": PATH, "headers": headers, "client": ("127.0.0.1", 5)}
    exchange = kind(scope, dict(headers), receive, send, LIMITS)
    try:
        await exchange.run(metrics.counted(Method(PATH, Shape.UNARY, run)))
    except ClientGone:
        sent.append("gone")
    return sent


def counted(metrics: CallMetrics) -> list[str]:
    """All series but those of durations."""
    shown = exposition(metrics.families()).splitlines()
    return [line for line in shown if "_bucket" not in line and "_sum" not in line]


@pytest.mark.pure_form  # it derives from Exchange
@settings(deadline=None)
@given(cases)
def test_both_ways_answer_and_count_alike(case: Case) -> None:
    short, long = CallMetrics(), CallMetrics()
    assert asyncio.run(events_of(case, short, Exchange)) == asyncio.run(events_of(case, long, AnyWay))
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


@pytest.mark.pure_form  # it derives from Exchange
def test_the_short_way_is_taken() -> None:
    taken = []

    class Watched(Exchange):
        async def _perform(self, method: Method | None) -> None:
            pytest.fail("the way of any call was taken")

        async def _perform_usual(self, method: Method) -> None:
            taken.append(method.path)
            await super()._perform_usual(method)

    for headers in ([], [(b"grpc-timeout", b"9S")]):
        case = Case([message(b"x")], True, False, headers, 2, "", None)
        asyncio.run(events_of(case, CallMetrics(), Watched))
    assert taken == [PATH, PATH]


# --- the headers of HTTP requests

header_names = st.sampled_from(
    [b"host", b"origin", b"x-request-id", b"ts-server-timing", b"content-type", b"authorization"]
)
pairs = st.lists(st.tuples(header_names, st.sampled_from([b"", b"1", b"a b", b"\xe9", b"mine"])), max_size=5)


def http_request(headers: Sequence[tuple[bytes, bytes]]) -> HttpRequest:
    scope = {"method": "GET", "path": "/", "headers": list(headers)}
    return HttpRequest(scope, None, "", BodyLimits(1, 1), Departures())  # type: ignore[arg-type]


@given(pairs, header_names)
def test_headers_are_found_as_by_a_walk_through_them(headers: list[tuple[bytes, bytes]], name: bytes) -> None:
    request = http_request(headers)
    for gone in (False, True):
        if gone:
            request.drop(name)
            headers = [pair for pair in headers if pair[0] != name]
        assert request.headers == headers
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
    asked = app._asked(http_request(headers))
    told = ASKS in headers
    assert asked == ((valid or ["made"])[0], told or times_all, told)


@pytest.mark.parametrize("with_grpc", [False, True])
@pytest.mark.parametrize("draining", [False, True])
def test_the_last_http_requests_of_a_drain_stay_open(
    with_grpc: bool, draining: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At an address of HTTP alone, and at one that it shares with gRPC."""
    monkeypatch.setattr(application, "LINGER_S", 3600.0)

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def one() -> bool:
        method = Method(PATH, Shape.UNARY, lambda call, data: asyncio.sleep(0, b""))
        routes = {PATH: method} if with_grpc else {}
        app = application.application(Listener("test", "127.0.0.1", 0, routes, http_app=answers))
        if draining:
            app.drain()
        sent: list[Event] = []

        async def send(event: Event) -> None:
            sent.append(event)

        scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": "/", "headers": []}
        task = asyncio.ensure_future(app(scope, never, send))
        for _ in range(5):
            await asyncio.sleep(0)
        assert sent
        is_open = not task.done()
        task.cancel()
        await asyncio.wait({task})
        return is_open

    assert asyncio.run(one()) is draining


@pytest.mark.parametrize("begun", [False, True])
def test_an_http2_answer_that_has_begun_gets_no_second_head_when_the_server_ends(begun: bool) -> None:
    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    async def heads() -> list[int]:
        app = application.application(Listener("test", "127.0.0.1", 0, {}, http_app=answers))
        sent: list[Event] = []

        async def send(event: Event) -> None:
            sent.append(event)

        scope = {"type": "http", "http_version": "2", "method": "GET", "path": "/", "headers": []}
        task = asyncio.ensure_future(app(scope, never, send))
        await asyncio.sleep(0)
        assert app.abort() == 1
        await task
        return [event["status"] for event in sent if event["type"] == "http.response.start"]

    assert asyncio.run(heads()) == [200 if begun else 503]


async def never() -> Event:
    raise AssertionError("the request isn't read")
