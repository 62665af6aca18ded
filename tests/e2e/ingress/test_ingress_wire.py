"""The bytes on the wire, with a client that can make mistakes."""

from __future__ import annotations

import gzip
import json
import socket
import struct

from support import GUARD_S, http_call

GRPC = {"content-type": "application/grpc", "te": "trailers"}


def framed(data: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(data)) + data


def test_answer_on_the_wire(raw_call):
    answer = raw_call("Unary", framed(b"hello"))
    assert answer.headers[":status"] == "200"
    assert answer.headers["content-type"] == "application/grpc"
    assert answer.body == framed(b"hello")
    assert answer.trailers["grpc-status"] == "0"


def test_failure_is_trailers_only(raw_call):
    answer = raw_call("/no.Such/Method", framed(b""))
    assert answer.headers[":status"] == "200"
    assert answer.headers["grpc-status"] == "12"
    assert answer.headers["content-type"] == "application/grpc"
    assert answer.headers["grpc-message"] == "Method /no.Such/Method is unimplemented"
    assert (answer.body, answer.trailers) == (b"", {})


def test_server_enforces_the_deadline(raw_call):
    """The client names a deadline and then doesn't care."""
    answer = raw_call("Hang", framed(b"wire deadline"), headers={**GRPC, "grpc-timeout": "100m"})
    assert answer.status == "4" or answer.reset is not None
    assert raw_call("/test.Probe/Wait", framed(b"wire deadline cancelled")).status == "0"


def test_status_of_an_expired_deadline(raw_call):
    answer = raw_call("HangStream", framed(b"wire deadline 2"), headers={**GRPC, "grpc-timeout": "100000u"})
    assert answer.body == framed(b"first")
    assert answer.status == "4"
    assert "0.1 s" in answer.trailers["grpc-message"]


def test_malformed_timeout(raw_call):
    answer = raw_call("Unary", framed(b""), headers={**GRPC, "grpc-timeout": "soon"})
    assert answer.status == "13"
    assert "soon" in answer.headers["grpc-message"]


def test_missing_te(raw_call):
    answer = raw_call("Unary", framed(b""), headers={"content-type": "application/grpc"})
    assert answer.status == "13"
    assert "te: trailers" in answer.headers["grpc-message"]


def test_message_count(raw_call):
    assert raw_call("Unary", framed(b"1") + framed(b"2")).status == "12"
    assert raw_call("Unary").status == "12"


def test_oversize_is_refused_from_the_prefix(raw_call):
    """The message itself is never sent."""
    answer = raw_call("Unary", struct.pack(">BI", 0, 4_000_000_000), ended=False)
    assert answer.status == "8"
    assert answer.headers["grpc-message"] == (
        "Message of 4000000000 bytes is larger than the limit of 6553500 bytes (max_request_size)"
    )


def test_unknown_compression(raw_call):
    answer = raw_call("Unary", framed(b"abc", flag=1), headers={**GRPC, "grpc-encoding": "zstd"})
    assert answer.status == "12"
    assert answer.headers["grpc-accept-encoding"] == "identity,gzip,deflate"


def test_answer_is_compressed_for_who_sends_compressed(raw_call):
    data = b"compressible " * 1000
    request = framed(gzip.compress(data), flag=1)
    headers = {**GRPC, "grpc-encoding": "gzip", "grpc-accept-encoding": "identity, gzip"}
    answer = raw_call("Unary", request, headers=headers)
    assert answer.headers["grpc-encoding"] == "gzip"
    assert answer.body[0] == 1
    assert gzip.decompress(answer.body[5:]) == data
    headers["grpc-accept-encoding"] = "identity"
    assert raw_call("Unary", request, headers=headers).body == framed(data)
    assert raw_call("Unary", framed(data), headers={**GRPC, "grpc-accept-encoding": "gzip"}).body == framed(data)


def test_http_on_a_grpc_port(raw_call):
    answer = raw_call("/ping", headers={}, method="GET")
    assert answer.headers[":status"] == "404"
    assert json.loads(answer.body) == {
        "code": 404,
        "type": "ResourceNotFoundException",
        "message": (
            "This is an address for gRPC. The HTTP APIs are at inference_address and management_address (8080, 8081)"
        ),
    }
    assert answer.headers["x-content-type-options"] == "nosniff"  # nor is it a document in a browser
    assert answer.headers["content-security-policy"].startswith("sandbox; default-src 'none'")


def test_wrong_content_type(raw_call):
    for content_type in ("application/json", "application/grpc-web", "application/grpcish"):
        answer = raw_call("Unary", b"{}", headers={**GRPC, "content-type": content_type})
        assert answer.headers[":status"] == "415"
        assert json.loads(answer.body)["code"] == 415


def test_wrong_http_method(raw_call):
    answer = raw_call("Unary", headers=GRPC, method="GET")
    assert answer.headers[":status"] == "405"
    assert answer.headers["allow"] == "POST"


def over_http1(port: int, method: str, path: str, **headers: str) -> tuple[int, bytes]:
    answer = http_call(port, method, path, headers=headers)
    return answer.status, answer.body


def test_http_1(server):
    status, body = over_http1(server.port, "GET", "/ping")
    assert (status, json.loads(body)["type"]) == (404, "ResourceNotFoundException")
    status, body = over_http1(server.port, "POST", "/test.Echo/Unary", content_type="application/grpc", te="trailers")
    assert (status, json.loads(body)["message"]) == (505, "gRPC needs HTTP/2")


def test_a_client_that_has_closed_its_half_gets_its_answer(run_server):
    with (
        run_server({"name": "both", "http": True}) as server,
        socket.create_connection(("127.0.0.1", server.port), GUARD_S) as link,
    ):
        link.sendall(b"GET /ping HTTP/1.1\r\nHost: test\r\n\r\n")
        link.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: link.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"GET /ping HTTP/1.1")


def test_http_application_beside_grpc(run_server, connect, raw_call):
    with run_server({"name": "both", "http": True}) as server:
        assert over_http1(server.port, "GET", "/ping") == (200, b"GET /ping HTTP/1.1")
        answer = raw_call("/models", headers={}, method="GET", port=server.port)
        assert (answer.headers[":status"], answer.body) == ("200", b"GET /models HTTP/2")
        assert connect(server).unary("Unary", b"x") == b"x"
