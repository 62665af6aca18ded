"""The bytes on the wire, with a client that can make mistakes."""

from __future__ import annotations

import gzip
import json
import socket
import struct

import h2.config
import h2.connection
import h2.errors
import h2.events
import pytest

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


def test_request_cut_at_every_byte(raw_call):
    body = framed(b"abc")
    for cut in range(1, len(body)):
        answer = raw_call("Unary", body[:cut], body[cut:])
        assert (answer.body, answer.status) == (body, "0")
    pieces = [body[index : index + 1] for index in range(len(body))]
    assert raw_call("Unary", *pieces, b"").body == body


@pytest.mark.parametrize("content_type", ["application/grpc+proto", "application/grpc;charset=utf-8"])
def test_content_types_of_grpc(raw_call, content_type):
    answer = raw_call("Unary", framed(b"x"), headers={**GRPC, "content-type": content_type})
    assert (answer.body, answer.status) == (framed(b"x"), "0")


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


def test_request_that_ends_inside_a_message(raw_call):
    for cut in range(1, len(framed(b"abc"))):
        assert raw_call("Unary", framed(b"abc")[:cut]).status == "13"


def test_unknown_flag(raw_call):
    assert raw_call("Unary", framed(b"abc", flag=2)).status == "13"


def test_oversize_is_refused_from_the_prefix(raw_call):
    """The message itself is never sent."""
    answer = raw_call("Unary", struct.pack(">BI", 0, 4_000_000_000), end=False)
    assert answer.status == "8"
    assert answer.headers["grpc-message"] == (
        "Message of 4000000000 bytes is larger than the limit of 6553500 bytes (max_request_size)"
    )


def test_unknown_compression(raw_call):
    answer = raw_call("Unary", framed(b"abc", flag=1), headers={**GRPC, "grpc-encoding": "zstd"})
    assert answer.status == "12"
    assert answer.headers["grpc-accept-encoding"] == "identity,gzip,deflate"


def test_compressed_message_without_a_compression(raw_call):
    assert raw_call("Unary", framed(b"abc", flag=1)).status == "13"


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


def test_binary_metadata_joined_by_commas(raw_call):
    answer = raw_call("Metadata", framed(b""), headers={**GRPC, "x-some-bin": "AA,AQI="})
    entries = json.loads(answer.body[5:])["metadata"]
    assert ["x-some-bin", [0]] in entries
    assert ["x-some-bin", [1, 2]] in entries


def test_broken_binary_metadata(raw_call):
    answer = raw_call("Metadata", framed(b""), headers={**GRPC, "x-some-bin": "?!"})
    assert answer.status == "13"


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


def cancelled_one_by_one(server, count: int) -> tuple[bytes, int | None]:
    """The answer to a call after `count` cancelled ones on its connection, and the reason why the server closed it."""
    with socket.create_connection(("127.0.0.1", server.port), GUARD_S) as link:
        sender = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        sender.initiate_connection()
        for _ in range(count):
            number = start_call(sender, "Hang", b"cancelled")
            sender.reset_stream(number, h2.errors.ErrorCodes.CANCEL)
        start_call(sender, "Unary", b"beside")
        link.sendall(sender.data_to_send())
        body = b""
        while data := link.recv(65536):
            for event in sender.receive_data(data):
                if isinstance(event, h2.events.ConnectionTerminated):
                    return body, event.error_code
                if isinstance(event, h2.events.DataReceived):
                    body += event.data
                if isinstance(event, h2.events.StreamEnded):
                    return body, None
            link.sendall(sender.data_to_send())
    return body, None


def start_call(sender: h2.connection.H2Connection, name: str, message: bytes) -> int:
    number = sender.get_next_available_stream_id()
    pseudo = {":method": "POST", ":scheme": "http", ":authority": "test", ":path": f"/test.Echo/{name}"}
    sender.send_headers(number, [*pseudo.items(), *GRPC.items()])
    sender.send_data(number, framed(message), end_stream=True)
    return number


def test_cancelled_calls_cost_nothing_else(server):
    assert cancelled_one_by_one(server, 150) == (framed(b"beside"), None)


def test_a_flood_of_cancelled_calls_costs_its_connection(run_server):
    """The "rapid reset" of CVE-2023-44487: more than the limit at once."""
    with run_server({"name": "test", "limits": {"resets_max": 200, "resets_per_s": 0.001}}) as server:
        assert cancelled_one_by_one(server, 250) == (b"", h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
        assert cancelled_one_by_one(server, 0) == (framed(b"beside"), None)
