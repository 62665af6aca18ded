"""The lines of the access log, also in asgi-logger's words, and what becomes of calls that are cancelled."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from ts_frontend.errors import Code, ModelNotFound
from ts_frontend.grpc.around import logged
from ts_frontend.grpc.call import Call, Method, Shape
from ts_frontend.telemetry.logging.formats import AccessFormatter
from ts_frontend.telemetry.logging.writer import Access


class Lines:
    """Stands where the logs are."""

    access_enabled = True

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, int]] = []

    def access(
        self, peer: str, request: str, status: int, duration_ms: float, request_id: str, times: object = None
    ) -> None:
        assert duration_ms >= 0
        self.lines.append((peer, request, status))


def call(**more: Any) -> Call:
    return Call("/x.S/M", peer="127.0.0.1:5", **more)


def wrapped(run: Any, shape: Shape = Shape.UNARY) -> tuple[Any, Lines]:
    lines: Any = Lines()
    return logged(Method("/x.S/M", shape, run), lines), lines


async def answer(_: Call, data: bytes) -> bytes:
    return data


async def refuse(_: Call, data: bytes) -> bytes:
    raise ModelNotFound("m")


async def break_down(_: Call, data: bytes) -> bytes:
    raise KeyError("a bug")


async def wait(_: Call, data: bytes) -> bytes:
    await asyncio.Event().wait()
    return data


async def stream(_: Call, data: bytes):
    yield [data]
    yield [data]


@pytest.mark.parametrize(("run", "code"), [(answer, Code.OK), (refuse, Code.NOT_FOUND), (break_down, Code.INTERNAL)])
def test_a_unary_call_is_logged_with_its_status(run, code):
    method, lines = wrapped(run)
    try:
        asyncio.run(method.run(call(), b"x"))
    except (ModelNotFound, KeyError):
        pass
    assert lines.lines == [("127.0.0.1:5", "gRPC x.S/M HTTP/2.0", code)]


@pytest.mark.parametrize(("late", "code"), [(False, Code.CANCELLED), (True, Code.DEADLINE_EXCEEDED)])
async def test_a_cancelled_call_tells_whether_its_deadline_had_passed(late, code):
    method, lines = wrapped(wait)
    task = asyncio.ensure_future(method.run(call(deadline_s=time.monotonic() + (-1 if late else 60)), b"x"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [line[2] for line in lines.lines] == [code]


@pytest.mark.parametrize(("taken", "code"), [(2, Code.OK), (1, Code.CANCELLED)])
async def test_a_stream_is_logged_at_its_end_also_when_its_reader_leaves(taken, code):
    method, lines = wrapped(stream, Shape.SERVER_STREAM)
    answers = method.run(call(), b"x")
    for _ in range(taken):
        await anext(answers)
    if taken == 2:
        with pytest.raises(StopAsyncIteration):
            await anext(answers)
    await answers.aclose()
    assert [line[2] for line in lines.lines] == [code]


ENTRY = Access(0.0, "10.0.0.1:5", "GET /a?b=c HTTP/1.1", 404, 12.5, "id")


def line(text, entry=ENTRY):
    record = logging.makeLogRecord({"entries": [entry]})
    return AccessFormatter(text).format(record)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('%(h)s %(l)s "%(r)s" %(s)s %(D)d', '10.0.0.1 - "GET /a HTTP/1.1" 404 12500'),
        ("%(client_addr)s %(request_line)s %(status_code)s", "10.0.0.1:5 GET /a?b=c HTTP/1.1 404"),
        ("%(m)s %(U)s %(q)s %(H)s %(st)s %(M)s %(L)s 100%%", "GET /a b=c HTTP/1.1 Not Found 12 0.012500 100%"),
        ("%({user-agent}i)s", "-"),
    ],
)
def test_atoms(text, found):
    assert line(text) == found


def test_nobody_forges_a_line():
    forged = ENTRY._replace(request="GET /a\nforged HTTP/1.1")
    assert line("%(R)s", forged) == "GET /a\\nforged HTTP/1.1"


def test_a_grpc_call_has_its_path():
    call = ENTRY._replace(request="gRPC inference.GRPCInferenceService/ServerLive HTTP/2.0", status=0)
    assert line("%(m)s %(U)s %(s)s %(st)s", call) == "gRPC inference.GRPCInferenceService/ServerLive 0 -"


def test_unknown_atoms_are_refused_when_the_log_is_opened():
    with pytest.raises(ValueError, match=r"%\(nope\)s is unknown"):
        AccessFormatter("%(nope)s")
