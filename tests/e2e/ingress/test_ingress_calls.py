"""gRPC calls against both engines, with grpcio as the client."""

from __future__ import annotations

import json
import queue
import socket
import time

import grpc
import h2.connection
import h2.events
import pytest

from support import GUARD_S

LIMIT = 6_553_500


def test_unary(client):
    assert client.unary("Unary", b"hello") == b"hello"
    assert client.unary("Unary", b"") == b""


def test_server_stream_keeps_order_and_groups(client):
    groups = [1, 3, 0, 2]
    assert list(client.stream("Stream", json.dumps(groups).encode())) == [str(n).encode() for n in range(6)]


def test_bidi_is_full_duplex(client):
    """Each answer is read before the next request is written."""
    requests: queue.Queue[bytes | None] = queue.Queue()
    answers = client.bidi("Bidi", iter(requests.get, None))
    for number in range(20):
        message = str(number).encode()
        requests.put(message)
        assert [next(answers), next(answers)] == [message, message]
    requests.put(None)
    assert list(answers) == []
    assert answers.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("kind_of_error", "code"),
    [
        ("InvalidArgument", grpc.StatusCode.INVALID_ARGUMENT),
        ("InvalidArchive", grpc.StatusCode.INVALID_ARGUMENT),
        ("ModelNotFound", grpc.StatusCode.NOT_FOUND),
        ("QueueFull", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("NoWorker", grpc.StatusCode.UNAVAILABLE),
        ("PermissionDenied", grpc.StatusCode.PERMISSION_DENIED),
        ("ServeError", grpc.StatusCode.INTERNAL),
    ],
)
def test_status_of_an_error(client, kind_of_error, code):
    message = "größer als erlaubt: 100 % — \n 日本 "
    with pytest.raises(grpc.RpcError) as caught:
        client.unary("Fail", json.dumps({"kind": kind_of_error, "message": message}).encode())
    assert caught.value.code() is code
    assert caught.value.details().endswith(message)
    trailing = dict(caught.value.trailing_metadata())
    assert trailing["x-trailing"] == "of a failure"
    assert trailing["grpc-status-details-bin"] == b"\x08\x03"


def test_long_error_message_is_cut_and_not_lost(client):
    """A client refuses headers of more than 8 KiB, status and all."""
    with pytest.raises(grpc.RpcError) as caught:
        client.unary("Fail", json.dumps({"kind": "InvalidArgument", "message": "ü" * 100_000}).encode())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("üüü")
    assert caught.value.details().endswith(" ...")


def test_status_after_a_message(client):
    answers = client.stream("FailStream")
    assert next(answers) == b"before"
    with pytest.raises(grpc.RpcError) as caught:
        next(answers)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "failed after one message"


def test_unexpected_error_tells_no_secret(client):
    with pytest.raises(grpc.RpcError) as caught:
        client.unary("Crash")
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.details()


def test_metadata_both_ways(client):
    sent = (("x-text", "a, b"), ("x-twice", "1"), ("x-twice", "2"), ("x-data-bin", bytes(range(256))))
    answer, call = client.channel.unary_unary("/test.Echo/Metadata").with_call(b"", metadata=sent, timeout=60)
    seen = json.loads(answer)
    entries = [(key, value) for key, value in seen["metadata"]]
    for key, value in sent:
        assert (key, value if isinstance(value, str) else list(value)) in entries
    assert not [key for key, _ in entries if key.startswith("grpc-") or key in ("te", "content-type", "host")]
    initial, trailing = dict(call.initial_metadata()), dict(call.trailing_metadata())
    assert (initial["x-initial"], initial["x-initial-bin"]) == ("first", b"\x00\xff")
    assert (trailing["x-trailing"], trailing["x-trailing-bin"]) == ("last", b"\xfe,\x01")
    assert seen["peer"].startswith("127.0.0.1:")


def test_deadline_reaches_the_method(client):
    channel = client.channel
    assert json.loads(client.unary("Metadata"))["deadline"] > 0
    assert json.loads(channel.unary_unary("/test.Echo/Metadata")(b""))["deadline"] is None


def test_expired_deadline_cancels_the_method(client, request):
    name = request.node.name
    with pytest.raises(grpc.RpcError) as caught:
        client.unary("Hang", name.encode(), timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    client.wait(f"{name} cancelled")


def test_cancelled_unary_call_cancels_the_method(client, request):
    name = request.node.name
    future = client.start_unary("Hang", name.encode())
    client.wait(f"{name} started")
    future.cancel()
    client.wait(f"{name} cancelled")


def test_cancelled_reader_closes_the_generator(client, request):
    name = request.node.name
    answers = client.stream("Endless", name.encode())
    next(answers)
    answers.cancel()
    client.wait(f"{name} closed")


def test_closed_connection_cancels_the_methods(server, client, connect, request):
    name = request.node.name
    leaving = connect(server)
    answers = leaving.stream("HangStream", name.encode())
    assert next(answers) == b"first"
    leaving.close()
    client.wait(f"{name} cancelled")
    assert answers.code() is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests(client, algorithm):
    data = b"compressible " * 10_000
    assert client.unary("Size", data, compression=algorithm) == str(len(data)).encode()
    assert client.unary("Unary", data, compression=algorithm) == data
    big = b"0123456789" * 600_000
    assert client.unary("Unary", big, compression=algorithm) == big


def test_compressed_stream(client):
    messages = [b"a" * 5000, b"", b"b" * 70_000]
    assert list(client.bidi("Bidi", iter(messages), compression=grpc.Compression.Gzip)) == [
        message for message in messages for _ in range(2)
    ]


def test_oversize_request_is_refused(client):
    with pytest.raises(grpc.RpcError) as caught:
        client.unary("Size", bytes(LIMIT + 1))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(LIMIT + 1) in caught.value.details()
    assert str(LIMIT) in caught.value.details().replace(str(LIMIT + 1), "")
    assert client.unary("Size", bytes(LIMIT)) == str(LIMIT).encode()


def test_decompression_bomb_is_refused(client):
    with pytest.raises(grpc.RpcError) as caught:
        client.unary("Size", bytes(3 * LIMIT), compression=grpc.Compression.Gzip)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"more than the limit of {LIMIT} bytes (max_request_size)" in caught.value.details()


def test_oversize_answer_is_refused(client):
    with pytest.raises(grpc.RpcError) as caught:
        client.unary("Zeros", str(LIMIT + 1).encode())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == (
        f"Answer of {LIMIT + 1} bytes is larger than the limit of {LIMIT} bytes (max_response_size)"
    )


def test_big_messages_with_raised_limits(run_server, connect):
    size = 32 * 1024 * 1024
    limits = {"request_bytes_max": size, "response_bytes_max": size}
    with run_server({"name": "big", "limits": limits}) as server:
        data = bytes(range(256)) * (size // 256)
        assert connect(server).unary("Unary", data) == data


def test_many_calls_at_once_on_one_connection(client):
    futures = [client.start_unary("Unary", str(number).encode()) for number in range(1000)]
    assert [int(future.result()) for future in futures] == list(range(1000))


# --- too many cancels on one connection

CANCELS_MAX = 200


def floods(client, expected):
    """How many connections were closed for their cancels, once there are as many as expected."""
    give_up_s = time.monotonic() + GUARD_S
    while (found := int(client.unary("/test.Probe/CountFloods"))) < expected and time.monotonic() < give_up_s:
        pass
    return found


def test_too_many_cancels_end_no_neighbours_and_are_counted(run_server, connect):
    """The connection takes no more calls; those that run go on."""
    with run_server({"name": "test", "limits": {"resets_max": CANCELS_MAX, "resets_per_s": 0.001}}) as server:
        client, other = connect(server), connect(server)
        neighbours = [client.start_unary("/test.Probe/Wait", b"released started") for _ in range(10)]
        calls = [client.start_unary("Hang", b"%d" % number) for number in range(CANCELS_MAX + 10)]
        for number in range(len(calls)):
            other.wait(f"{number} started")
        for call in calls:
            call.cancel()
        assert floods(other, 1) == 1
        assert client.unary("Unary", b"on a new connection", wait_for_ready=True) == b"on a new connection"
        releasing = other.start_unary("Hang", b"released")
        assert [one.result() for one in neighbours] == [b"released started"] * 10
        releasing.cancel()


@pytest.mark.long
def test_as_many_cancels_as_clients_make_end_nothing(run_server, connect):
    """359 cancelled calls beside ten streams on one connection, with the default limits."""
    with run_server({"name": "test"}) as server:
        client, other = connect(server), connect(server)
        streams = [client.stream("Stream", json.dumps([1] * 2000).encode()) for _ in range(10)]
        for number in range(359):
            call = client.start_unary("Hang", b"%d" % number)
            other.wait(f"{number} started")
            call.cancel()
        assert [sum(1 for _ in stream) for stream in streams] == [2000] * 10
        assert floods(other, 0) == 0


def test_clients_that_leave_with_many_calls_are_no_flood(run_server, connect):
    with run_server({"name": "test"}) as server:
        other = connect(server)
        with socket.create_connection(("127.0.0.1", server.port), GUARD_S) as link:
            sender = h2.connection.H2Connection()
            sender.initiate_connection()
            names = {":method": "POST", ":scheme": "http", ":authority": "test", ":path": "/test.Echo/Hang"}
            for number in range(CANCELS_MAX + 10):
                stream, name = 1 + 2 * number, b"%d" % number
                sender.send_headers(stream, [*names.items(), ("content-type", "application/grpc"), ("te", "trailers")])
                sender.send_data(stream, b"\0" + len(name).to_bytes(4, "big") + name, end_stream=True)
                link.sendall(sender.data_to_send())
            for number in range(CANCELS_MAX + 10):
                other.wait(f"{number} started")
        for number in range(CANCELS_MAX + 10):
            other.wait(f"{number} cancelled")
        assert floods(other, 0) == 0


def test_cancels_over_http_count_too(run_server, connect):
    limits = {"resets_max": CANCELS_MAX, "resets_per_s": 0.001}
    with run_server({"name": "test", "http": True, "limits": limits}) as server:
        with socket.create_connection(("127.0.0.1", server.port), GUARD_S) as link:
            sender = h2.connection.H2Connection()
            sender.initiate_connection()
            names = {":method": "GET", ":scheme": "http", ":authority": "test", ":path": "/hang"}
            for number in range(CANCELS_MAX + 10):
                sender.send_headers(1 + 2 * number, list(names.items()), end_stream=True)
            link.sendall(sender.data_to_send())
            # An answer to a later request says that the earlier ones have begun.
            last = 1 + 2 * (CANCELS_MAX + 10)
            sender.send_headers(last, [*names.items()][:3] + [(":path", "/other")], end_stream=True)
            link.sendall(sender.data_to_send())
            ended = False
            while not ended:
                events = sender.receive_data(link.recv(65536))
                ended = any(isinstance(one, h2.events.StreamEnded) for one in events)
            for number in range(CANCELS_MAX + 10):
                sender.reset_stream(1 + 2 * number, 8)
            link.sendall(sender.data_to_send())
            while link.recv(65536):
                pass
        assert floods(connect(server), 1) == 1
