"""Requests that no honest client sends: each is refused by name, and nothing else is lost.

Each test may break anything; afterwards the server must answer a prediction, and no request may hang.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, ResponseReceived, StreamEnded, StreamReset

from e2e.servers import write_model
from support import GUARD_S, http_call, until

LIMIT_BYTES = 1_000_000
#: Two bodies of the size limit may arrive at a time, three may not.
ARRIVING_BYTES_MAX = 2_200_000
#: Less than this of a body of 300 MB may have been taken, sockets' buffers included.
TAKEN_BYTES_MAX = 32_000_000
MEMORY_BYTES_MAX = 40_000_000
POST = b"POST /predictions/probe HTTP/1.1\r\nHost: localhost\r\n"
GET = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"
HANDLER = """
def handle(data, context):
    if data is not None:
        return [{name: str(value) for name, value in row.items()} for row in data]
"""


@contextlib.contextmanager
def probed(serving: Any, directory: Path, **settings: object) -> Iterator[Any]:
    """A server with the model `probe` and small limits."""
    write_model(directory / "store", "probe", HANDLER)
    (directory / "outside.mar").write_text("not for the server")
    settings |= {"max_request_size": LIMIT_BYTES, "arriving_bytes_max": ARRIVING_BYTES_MAX}
    with serving(directory, directory / "store", settings, ["--ncs"]) as server:
        server.register("probe")
        yield server


@pytest.fixture(scope="module")
def server(serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """It waits a second for the rest of a request."""
    waits = {"request_body_timeout_s": 1, "request_head_timeout_s": 1}
    with probed(serving, tmp_path_factory.mktemp("requests"), **waits) as found:
        yield found


@pytest.fixture(scope="module")
def patient(serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """It waits as long for the rest of a request as the slowest machine takes for it."""
    waits = {"request_body_timeout_s": GUARD_S, "request_head_timeout_s": GUARD_S}
    with probed(serving, tmp_path_factory.mktemp("patient"), **waits) as found:
        yield found
        assert_healthy(found)


@pytest.fixture(autouse=True)
def still_healthy(server: Any) -> Iterator[None]:
    yield
    assert_healthy(server)


def assert_healthy(server: Any) -> None:
    assert good(server)
    assert "failed unexpectedly" not in server.log
    assert "Traceback" not in server.log


def good(server: Any) -> bool:
    """Whether a prediction on a connection of its own is answered."""
    answer = http_call(server.port("http_inference"), "POST", "/predictions/probe", b"x")
    return (answer.status, answer.body) == (200, b'{\n  "body": "bytearray(b\'x\')"\n}')


@contextlib.contextmanager
def connected(server: Any, api: str = "http_inference") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port(api)), timeout=GUARD_S) as one:
        yield one


def is_read(one: socket.socket) -> bool:
    """Whether the other side of this connection, on this machine, has read all that it has received."""
    ends = [f":{port:04X}" for port in (one.getpeername()[1], one.getsockname()[1])]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        if local.endswith(ends[0]) and remote.endswith(ends[1]):
            return int(queues.partition(":")[2], 16) == 0
    raise AssertionError("the connection has ended")


def until_closed(one: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := one.recv(65_536):
            found += piece
    return found


def exchange(server: Any, data: bytes, api: str = "http_inference", *, ends: bool = False) -> bytes:
    """The answer to these bytes until the server closes; meanwhile another client is served.

    `ends`: this side closes first, after its bytes."""
    with connected(server, api) as one:
        with contextlib.suppress(ConnectionError):
            one.sendall(data)
            if ends:
                one.shutdown(socket.SHUT_WR)
        assert good(server)
        return until_closed(one)


def head_of(answer: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers of the first answer."""
    line, *rest = answer.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    return int(line.split()[1]), dict(header.lower().split(": ", 1) for header in rest)


def status(answer: bytes) -> int:
    return head_of(answer)[0]


def ask(server: Any, method: str, target: str, body: bytes = b"", api: str = "http_inference", **headers: str) -> Any:
    """Status and JSON of a call whose target goes out as it is."""
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    request = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{lines}{length}\r\n".encode(
        "latin-1"
    )
    with connected(server, api) as one:
        one.sendall(request + body)
        answer = until_closed(one)
    return status(answer), json.loads(answer.partition(b"\r\n\r\n")[2] or b"null")


def manage(server: Any, method: str, target: str, body: bytes = b"", **headers: str) -> Any:
    return ask(server, method, target, body, "http_management", **headers)


# --- too large


def memory_bytes(server: Any) -> int:
    return int(psutil.Process(server.process.pid).memory_info().rss)


def push(one: socket.socket, head: bytes, piece: bytes) -> int:
    """Bytes of a body of 300 MB that could be sent until the server closed."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        one.sendall(head)
        while sent < 300_000_000:
            one.sendall(piece)
            sent += len(piece)
    return sent


@pytest.mark.parametrize("form", ["content-length", "chunked"])
def test_a_body_over_the_limit_is_refused_before_it_is_buffered(server: Any, form: str) -> None:
    before = memory_bytes(server)
    size = b"Content-Length: 300000000\r\n\r\n" if form == "content-length" else b"Transfer-Encoding: chunked\r\n\r\n"
    piece = b"x" * 65_536 if form == "content-length" else b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    with connected(server) as one:
        assert push(one, POST + size, piece) < TAKEN_BYTES_MAX
        assert good(server)
        answer = until_closed(one)
    assert not answer or status(answer) == 413  # a system may drop what a client that still sends hasn't read
    assert memory_bytes(server) - before < MEMORY_BYTES_MAX


def test_the_refusal_names_the_limit(server: Any) -> None:
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % (LIMIT_BYTES + 1)
    for body in (b"Content-Length: %d\r\n\r\n" % (LIMIT_BYTES + 1), chunked):
        answer = exchange(server, POST + body + b"x" * (LIMIT_BYTES + 1) + b"\r\n0\r\n\r\n")
        found, headers = head_of(answer)
        error = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert (found, headers["connection"], error["code"], error["type"]) == (413, "close", 413, "TooLargeException")
        assert re.fullmatch(
            r"Request of at least \d+ bytes is over max_request_size of 1000000 bytes", error["message"]
        )


# --- slow and unfinished


@pytest.mark.parametrize(
    "body",
    [
        b"Content-Length: 10\r\n\r\nabc",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nabc",
    ],
)
def test_a_body_that_does_not_come_in_time_is_given_up(server: Any, body: bytes) -> None:
    answer = exchange(server, POST + body)
    assert status(answer) == 408
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {
        "code": 408,
        "type": "RequestTimeoutException",
        "message": "The request's body did not come within 1 s",
    }


@pytest.mark.parametrize("head", [b"", b"GET /ping HTTP/1.1\r\nHost: localhost\r\nX-More: "])
def test_a_head_that_stops_is_given_up(server: Any, head: bytes) -> None:
    assert exchange(server, head) == b""


# --- heads


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (GET + b"Connection: close\r\n" + b"".join(b"X-%d: a\r\n" % number for number in range(1000)), 200),
        (GET + b"".join(b"X-%d: a\r\n" % number for number in range(7000)), 431),
        (GET + b"X: " + b"a" * 70_000 + b"\r\n", 431),
        (GET + b"".join(b"X-%d: " % number + b"a" * 7_000 + b"\r\n" for number in range(12)), 431),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n", 414),
    ],
    ids=["not too many", "many", "one long", "many long", "long target"],
)
def test_heads_have_limits(server: Any, head: bytes, expected: int) -> None:
    assert status(exchange(server, head + b"\r\n")) == expected


def test_an_endless_head_ends(server: Any) -> None:
    before = memory_bytes(server)
    with connected(server) as one:
        assert push(one, b"GET /ping HTTP/1.1\r\n", b"X: " + b"y" * 1000 + b"\r\n") < TAKEN_BYTES_MAX
        assert status(until_closed(one) or b"HTTP/1.1 431 ") == 431
    assert memory_bytes(server) - before < MEMORY_BYTES_MAX


def test_a_body_of_very_many_chunks(server: Any) -> None:
    """Triton took some memory of its stack for each (CVE-2025-23310)."""
    count = 100_000
    answer = exchange(
        server,
        POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * count + b"0\r\n\r\n",
    )
    assert status(answer) == 200 and b"x" * count in answer


def test_a_header_that_is_not_utf_8_reaches_the_handler_as_bytes_do_in_http(server: Any) -> None:
    assert status(exchange(server, GET + b"X-Odd: \xff\xfe\r\nConnection: close\r\n\r\n")) == 200


# --- connections


def test_an_error_ends_its_connection_if_the_body_was_not_read(server: Any) -> None:
    last = b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    unread = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nx"
    answers = exchange(server, unread + last)
    assert (status(answers), head_of(answers)[1]["connection"]) == (404, "close")
    assert answers.count(b"HTTP/1.1 ") == 1
    answers = exchange(server, b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n" + last)
    assert (status(answers), head_of(answers)[1].get("connection")) == (404, None)
    assert answers.count(b"HTTP/1.1 ") == 2 and b'"Healthy"' in answers


def test_a_connection_lives_on_after_an_answer_that_did_not_need_the_body(server: Any) -> None:
    first = (
        b"PUT /models/probe?min_worker=1 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 400000\r\n\r\n" + b"x" * 400_000
    )
    last = b"GET /models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answers = exchange(server, first + last, "http_management")
    assert answers.count(b"HTTP/1.1 ") == 2
    assert b'"modelName": "probe"' in answers


@pytest.mark.parametrize("target", ["/ping", "/predictions/probe", "/nothing"])
def test_head_is_answered_like_get_without_the_body(server: Any, target: str) -> None:
    def answer(method: str) -> tuple[bytes, dict[str, str]]:
        found = exchange(server, f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        headers = head_of(found)[1]
        del headers["x-request-id"]
        return found.partition(b"\r\n\r\n")[2], headers

    body, headers = answer("GET")
    assert answer("HEAD") == (b"", headers)
    assert int(headers["content-length"]) == len(body)


# --- what is asked for

NOT_FOUND = (404, "ResourceNotFoundException", "Requested resource is not found, please refer to API document.")


def refused(answer: Any) -> tuple[int, str, str]:
    found, error = answer
    assert found == error["code"]
    return found, error["type"], error["message"]


@pytest.mark.parametrize(
    "target", ["/nothing", "/predictions", "/predictions/", "//ping", "/predictions//", "/%2e%2e/ping"]
)
def test_unknown_paths(server: Any, target: str) -> None:
    for answer in (ask(server, "GET", target), manage(server, "GET", target)):
        found, kind, message = refused(answer)
        assert (found, kind) == NOT_FOUND[:2] and message.startswith(NOT_FOUND[2])


@pytest.mark.parametrize(
    ("segment", "name"),
    [
        *[("..", ".."), ("%2e%2e", ".."), ("%2e%2e%2fprobe", ".."), ("nope", "nope"), ("%00", "\0")],
        ("probe%00", "probe\0"),
        *[("%ff", "%ff"), ("%0d%0aX:%20y", "\r\nX: y"), ("%F0%9F%98%80", "😀"), ("a" * 3000, "a" * 3000)],
    ],
)
def test_unknown_models(server: Any, segment: str, name: str) -> None:
    meant = "; did you mean probe?" if "probe" in name else "."
    expected = (404, "ModelNotFoundException", f"Model not found: {name}{meant} Models here: probe.")
    assert refused(ask(server, "POST", f"/predictions/{segment}", b"x")) == expected
    assert refused(ask(server, "POST", f"/explanations/{segment}", b"x")) == expected
    assert refused(ask(server, "OPTIONS", f"/predictions/{segment}")) == expected
    assert refused(manage(server, "GET", f"/models/{segment}")) == expected
    assert refused(manage(server, "PUT", f"/models/{segment}?min_worker=1")) == expected
    assert refused(manage(server, "DELETE", f"/models/{segment}")) == expected


@pytest.mark.parametrize("version", ["2.0", "..", "%2e%2e", "%00", "%ff"])
def test_unknown_versions(server: Any, version: str) -> None:
    for answer in (
        ask(server, "POST", f"/predictions/probe/{version}", b"x"),
        manage(server, "PUT", f"/models/probe/{version}?min_worker=1"),
        manage(server, "DELETE", f"/models/probe/{version}"),
        manage(server, "PUT", f"/models/probe/{version}/set-default"),
    ):
        found, kind, message = refused(answer)
        assert (found, kind) == (404, "ModelVersionNotFoundException")
        assert "does not exist for model" in message and message.endswith("probe. Versions of probe: 1.0.")


@pytest.mark.parametrize("method", ["PATCH", "POST", "TRACE"])
def test_methods_without_a_route(server: Any, method: str) -> None:
    assert refused(manage(server, method, "/models/probe"))[:2] == (405, "MethodNotAllowedException")
    assert refused(ask(server, method, "/"))[:2] == (405, "MethodNotAllowedException")


def test_a_method_that_nobody_knows(server: Any) -> None:
    assert refused(ask(server, "WHATEVER", "/ping"))[:2] == (501, "NotImplementedException")


NOT_THERE = """../outside.mar %2e%2e/outside.mar ..%2foutside.mar %252e%252e%252foutside.mar probe/../../outside.mar
/etc/passwd file:///etc/passwd http://127.0.0.1:1/x.mar nope.mar"""
NO_URLS = ("x%00.mar", "%ff.mar", "gopher://x/y.mar", "a" * 5000)


@pytest.mark.parametrize(
    ("url", "found"), [("", 404), *((url, 404) for url in NOT_THERE.split()), *((url, 400) for url in NO_URLS)]
)
def test_urls_that_are_not_archives_of_the_store(server: Any, url: str, found: int) -> None:
    assert refused(manage(server, "POST", f"/models?url={url}&model_name=new"))[0] == found
    assert manage(server, "GET", "/models")[1] == {"models": [{"modelName": "probe", "modelUrl": "probe"}]}


@pytest.mark.parametrize(
    ("query", "word"),
    [
        *[("", "url is required"), ("url=probe&model_name=../x", "model_name")],
        ("url=probe&model_name=a%2fb", "model_name"),
        *[("url=probe&model_name=%00", "model_name"), ("url=probe&model_name=%ff", "UTF-8")],
        *[("url=probe&initial_workers=x", "initial_workers"), ("url=probe&initial_workers=-1", "initial_workers")],
        *[("url=probe&initial_workers=99999999999", "initial_workers"), ("url=probe&initial_workers=1025", "1024")],
        *[("url=probe&batch_size=0", "batch_size"), ("url=probe&batch_size=99999999999", "batch_size")],
        *[("url=probe&response_timeout=0", "response_timeout"), ("url=probe&runtime=java", "RuntimeType")],
        ("&".join(["a=b"] * 300), "256 parameters"),
    ],
)
def test_parameters_that_cannot_be_meant(server: Any, query: str, word: str) -> None:
    found, kind, message = refused(manage(server, "POST", f"/models?{query}"))
    assert (found, kind) == (400, "BadRequestException")
    assert word in message


@pytest.mark.parametrize(
    ("body", "word"),
    [
        *[(b"", "not JSON"), (b"{", "not JSON"), (b"\xff\xfe", "not JSON"), (b"[" * 100_000, "not JSON")],
        *[(b"[]", "object"), (b"null", "object"), (b"{}", "url")],
        *[(b'{"url": ["x"]}', "url"), (b'{"url": NaN}', "url"), (b'{"url": "\\ud800"}', "url")],
        *[(b'{"url": "a\\u0000b"}', "url"), (b'{"url": "probe", "initial_workers": 1.5}', "initial_workers")],
        (b'{"url": "probe", "batch_size": 1' + b"0" * 5000 + b"}", ""),
    ],
)
def test_register_bodies_that_are_not_what_they_should_be(server: Any, body: bytes, word: str) -> None:
    found, kind, message = refused(manage(server, "POST", "/models", body, Content_Type="application/json"))
    assert (found, kind) == (400, "BadRequestException")
    assert word in message


def test_json_that_is_not_json_is_the_handlers_to_judge(server: Any) -> None:
    for body in (b"{", b"\xff", b"[" * 50_000):
        found, answer = ask(server, "POST", "/predictions/probe", body, Content_Type="application/json")
        assert (found, answer) == (200, {"body": str(bytearray(body))})


MULTIPART = "multipart/form-data; boundary=B"
PART = b'--B\r\nContent-Disposition: form-data; name="data"\r\n\r\n1\r\n'


@pytest.mark.parametrize(
    ("content_type", "body", "word"),
    [
        ("multipart/form-data", PART + b"--B--", "boundary"),
        (MULTIPART, b"", "closing boundary"),
        (MULTIPART, PART, "closing boundary"),
        (MULTIPART, b"nothing of the kind", "closing boundary"),
        (MULTIPART, b"--B\r\nno headers\r\n--B--", "Part 1"),
        (MULTIPART, PART + b"--B\r\nX: " + b"a" * 20_000 + b"\r\n\r\n1\r\n--B--", "Part 2"),
        (MULTIPART, PART * 5000 + b"--B--", "4096 parts"),
        ("application/x-www-form-urlencoded", b"&".join([b"a=b"] * 5000), "4096 fields"),
    ],
)
def test_malformed_forms(server: Any, content_type: str, body: bytes, word: str) -> None:
    found, kind, message = refused(ask(server, "POST", "/predictions/probe", body, Content_Type=content_type))
    assert (found, kind) == (400, "BadRequestException")
    assert word in message


def test_a_form_with_odd_parts_keeps_the_good_ones(server: Any) -> None:
    odd = b"--B\r\nContent-Disposition: form-data\r\n\r\nwithout a name\r\n"
    found, answer = ask(server, "POST", "/predictions/probe", odd + PART + b"--B--\r\n", Content_Type=MULTIPART)
    assert (found, answer) == (200, {"data": "bytearray(b'1')"})


# --- HTTP/2

Pairs = list[tuple[bytes, bytes]]
GET2: Pairs = [(b":method", b"GET"), (b":scheme", b"http"), (b":authority", b"localhost"), (b":path", b"/ping")]
POST2: Pairs = [(b":method", b"POST"), *GET2[1:3], (b":path", b"/predictions/probe")]


class Talk:
    """One HTTP/2 connection whose client checks nothing. `status`, `body`, `reset`: the answer on stream 1."""

    def __init__(self, one: socket.socket) -> None:
        self._socket = one
        checks = {"validate_outbound_headers": False, "normalize_outbound_headers": False, "header_encoding": None}
        self.h2 = H2Connection(H2Configuration(client_side=True, **checks))  # type: ignore[arg-type]
        self.h2.initiate_connection()
        self.status, self.body, self.reset, self.ended = 0, b"", False, False
        self.trailers: dict[bytes, bytes] = {}
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(self.h2.data_to_send())

    def send(self, headers: Pairs, body: bytes, *, end: bool) -> Talk:
        """Sends as much as is taken, until the stream has ended or `end` is False and all is sent."""
        self.h2.send_headers(1, headers, end_stream=end and not body)
        sent = 0
        while sent < len(body) and not self.ended:
            size = min(self.h2.local_flow_control_window(1), self.h2.max_outbound_frame_size, len(body) - sent)
            if size > 0:
                self.h2.send_data(1, body[sent : sent + size], end_stream=end and sent + size == len(body))
                sent += size
            else:
                self.read()
            self.flush()
        self.flush()
        return self

    def read(self) -> None:
        data = self._socket.recv(65_536)
        self.ended |= not data
        for event in self.h2.receive_data(data):
            if isinstance(event, ResponseReceived):
                self.trailers = dict(event.headers)  # gRPC's status, in an answer without messages
                self.status = int(self.trailers[b":status"])
            elif isinstance(event, DataReceived):
                self.body += event.data
            elif isinstance(event, (StreamReset, ConnectionTerminated)):
                self.reset = self.ended = True
            elif isinstance(event, StreamEnded):
                self.ended = True
        self.flush()

    def finish(self) -> Talk:
        while not self.ended:
            self.read()
        return self


def talk(server: Any, headers: Pairs, body: bytes = b"", *, end: bool = True) -> Talk:
    with connected(server) as one:
        found = Talk(one).send(headers, body, end=end)
        assert good(server)
        return found.finish()


def test_http_2_is_answered(server: Any) -> None:
    assert talk(server, POST2, b"x").body == b'{\n  "body": "bytearray(b\'x\')"\n}'
    assert talk(server, [(b":method", b"HEAD"), *GET2[1:]]).status == 200


def test_http_2_refuses_a_body_over_the_limit(server: Any) -> None:
    before = memory_bytes(server)
    found = talk(server, POST2, bytes(20_000_000))
    assert found.status == 413
    assert memory_bytes(server) - before < MEMORY_BYTES_MAX


def test_bodies_that_arrive_at_the_same_time_share_a_limit(patient: Any) -> None:
    head = POST + b"Content-Length: %d\r\n\r\n" % LIMIT_BYTES
    with connected(patient) as first, connected(patient) as second, connected(patient) as third:
        for one in (first, second, third):
            one.sendall(head + b"x" * (LIMIT_BYTES - 1))
            until(partial(is_read, one))  # of a body that is given up, nothing is left to discard
        code, headers = head_of(until_closed(first))
        assert (code, headers["connection"]) == (503, "close")
        for one in (second, third):
            one.sendall(b"x")
            assert one.recv(65_536).startswith(b"HTTP/1.1 200 ")


def test_messages_of_grpc_that_arrive_share_the_limit_with_them(patient: Any) -> None:
    path = b"/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
    names = [*POST2[:3], (b":path", path), (b"content-type", b"application/grpc"), (b"te", b"trailers")]
    part = b"\0" + LIMIT_BYTES.to_bytes(4, "big") + b"x" * (LIMIT_BYTES - 1)
    with contextlib.ExitStack() as open_ones:
        first, *others = [
            Talk(open_ones.enter_context(connected(patient, "grpc_inference"))).send(names, part, end=False)
            for _ in range(2)
        ]
        third = open_ones.enter_context(connected(patient))
        third.sendall(POST + b"Content-Length: %d\r\n\r\n" % LIMIT_BYTES + b"x" * (LIMIT_BYTES - 1))
        assert first.finish().trailers[b"grpc-status"] == b"8"
        third.sendall(b"x")
        assert third.recv(65_536).startswith(b"HTTP/1.1 200 ")
        assert not others[0].ended


def test_http_2_gives_up_a_body_that_does_not_come(server: Any) -> None:
    found = talk(server, POST2, b"abc", end=False)
    assert (found.status, json.loads(found.body)["type"]) == (408, "RequestTimeoutException")


def test_an_endless_http_2_head_ends(server: Any) -> None:
    """CONTINUATION frames without end: each small, none the last."""

    def frame(kind: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 1]) + payload

    before = memory_bytes(server)
    with connected(server) as one:
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0" + frame(1, b"\x82")
        push(one, preface, frame(9, b"\x00\x01x\x7f\x00" + b"a" * 127) * 100)
        assert b"A header block is larger than" in until_closed(one)
    assert memory_bytes(server) - before < MEMORY_BYTES_MAX
