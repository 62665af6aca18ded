"""The access log in asgi-logger's words. Promises 003-19."""

from __future__ import annotations

import logging

import pytest

from ts_frontend.telemetry.logging.formats import AccessFormatter
from ts_frontend.telemetry.logging.writer import Access

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
