"""The connections over which transformers ask predictors by HTTP: beside Python's HTTP server, and beside one that
sends bytes of its own choice."""

from __future__ import annotations

import asyncio
import random
import ssl
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from support import GUARD_S, free_port, until_async
from ts.compat.kserve_api.grpc_channel import Unanswered
from ts.compat.kserve_api.http_channel import BODY_BYTES_MAX, OPEN_MAX, BadAnswer, Connections, PostAnswer
from ts.compat.kserve_api.predictor import Predictor, PredictorConfig
from ts.protocol.codes import Code
from ts.utils.util import PredictionException

HEAD = b"HTTP/1.1 200 OK\r\n"

# --- answers


@pytest.mark.parametrize(
    ("written", "status", "body", "keeps_open"),
    [
        (HEAD + b"Content-Length: 3\r\n\r\nyes", 200, b"yes", True),
        (HEAD + b"content-length: 0\r\n\r\n", 200, b"", True),
        (HEAD + b"content-length:3\r\nConnection: Close\r\n\r\nyes", 200, b"yes", False),
        (HEAD + b"Content-Length: 3\r\ncontent-length: 3\r\n\r\nyes", 200, b"yes", True),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\nyes", 200, b"yes", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\nconnection: keep-alive\r\n\r\nyes", 200, b"yes", True),
        (b"HTTP/1.1 503 Not now, and\tnot later\r\ncontent-length: 1\r\n\r\n.", 503, b".", True),
        (b"HTTP/1.1 204\r\n\r\n", 204, b"", True),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nlink: x\r\n\r\n" + HEAD + b"content-length: 1\r\n\r\n.",
         200, b".", True),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nye\r\n001;a=b\r\ns\r\n0\r\n\r\n", 200, b"yes", True),
        (HEAD + b"transfer-encoding: Chunked\r\n\r\nA\r\n0123456789\r\n0 \r\nx: y\r\nz:\r\n\r\n", 200, b"0123456789",
         True),
        (HEAD + b"transfer-encoding: chunked\r\ncontent-length: 9\r\n\r\n1\r\n.\r\n0\r\n\r\n", 200, b".", False),
    ],
)  # fmt: skip
def test_an_answer_is_read_whatever_its_pieces_are(written: bytes, status: int, body: bytes, keeps_open: bool) -> None:
    for size in range(1, len(written) + 1):
        answer, pieces = PostAnswer(), [written[at : at + size] for at in range(0, len(written), size)]
        assert [answer.feed(one) for one in pieces] == [False] * (len(pieces) - 1) + [True]
        assert (answer.status, answer.body, answer.keeps_open) == (status, body, keeps_open)
        assert not answer.ends()


def test_an_answer_without_a_size_ends_with_its_connection() -> None:
    answer = PostAnswer()
    assert not answer.is_begun and not answer.ends()
    assert not any(answer.feed(one) for one in (HEAD, b"a: b\r\n\r\n", b"ye", b"s"))
    assert (answer.ends(), answer.body, answer.keeps_open) == (True, b"yes", False)


def test_bytes_after_an_answer_end_the_use_of_its_connection() -> None:
    answer = PostAnswer()
    assert answer.feed(HEAD + b"content-length: 1\r\n\r\n.HTTP/1.1 200 OK")
    assert (answer.body, answer.keeps_open) == (b".", False)


BAD = [
    b"\0\0\6\4\0\0\0\0\0\0\5\0\0\x40\0\r\n\r\n",
    b"HTTP/2 200\r\n\r\n",
    b"HTTP/1.1 2x0 OK\r\n\r\n",
    b"HTTP/1.1 20\r\n\r\n",
    b"HTTP/1.1 101 Switching\r\n\r\n",
    HEAD + b"content-length: +3\r\n\r\n",
    HEAD + b"content-length: 3\r\ncontent-length: 4\r\n\r\n",
    HEAD + b"content-length: " + b"9" * 16 + b"\r\n\r\n",
    HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\n0x1\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nxy\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"0" * 5000,
    HEAD + b"a: " + b"b" * 70_000,
]


@pytest.mark.parametrize("written", BAD)
def test_bytes_that_are_no_answer(written: bytes) -> None:
    with pytest.raises(BadAnswer):
        PostAnswer().feed(written)


def test_any_bytes_are_an_answer_or_none() -> None:
    numbers, whole = random.Random(7), HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nye\r\n1\r\ns\r\n0\r\n\r\n"
    for _ in range(5000):
        written = bytearray(whole)
        for _ in range(numbers.randrange(4)):
            written[numbers.randrange(len(written))] = numbers.randrange(256)
        try:
            PostAnswer().feed(bytes(written))
        except BadAnswer:
            continue


# --- Python's server


class Server:
    """Answers a POST with its path, its header `said` and its body, and counts the connections."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.connections, self.together, self.most = 0, 0, 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        lock = threading.Lock()

        class Answering(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(handler) -> None:
                self.connections += 1
                super().setup()

            def do_POST(handler) -> None:
                with lock:
                    self.together += 1
                    self.most = max(self.most, self.together)
                self.may_answer.wait(GUARD_S)
                body = handler.rfile.read(int(handler.headers["content-length"]))
                answer = f"{handler.path} {handler.headers['said']} ".encode() + body
                with lock:
                    self.together -= 1
                handler.send_response(200 if body else 404)
                handler.send_header("content-length", str(len(answer)))
                handler.end_headers()
                handler.wfile.write(answer)

            def log_message(handler, *arguments: object) -> None: ...

        class Serving(ThreadingHTTPServer):
            request_queue_size = 2 * OPEN_MAX

        self._server = Serving(("127.0.0.1", 0), Answering)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._thread.join(GUARD_S)
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


Scenario = Callable[[Connections], Awaitable[None]]


def run(host: str | int, scenario: Scenario, tls: ssl.SSLContext | None = None) -> None:
    async def through() -> None:
        connections = Connections(host if isinstance(host, str) else f"127.0.0.1:{host}", tls)
        try:
            await scenario(connections)
        finally:
            connections.close()

    asyncio.run(through())


async def failure(call: Awaitable[object]) -> Unanswered:
    with pytest.raises(Unanswered) as failed:
        await call
    return failed.value


def test_requests_share_a_connection(server: Server) -> None:
    async def scenario(asked: Connections) -> None:
        for size in (1, 70_000, 3_000_000):
            body = random.Random(size).randbytes(size)
            assert await asked.post("/a", body, {"said": "é"}, GUARD_S) == (200, "/a é ".encode() + body)
        assert await asked.post("/b", b"", {}, GUARD_S) == (404, b"/b None ")

    run(server.port, scenario)
    assert server.connections == 1


def test_more_requests_than_connections(server: Server) -> None:
    server.may_answer.clear()

    async def scenario(asked: Connections) -> None:
        sent = [b"%d" % one for one in range(3 * OPEN_MAX)]
        answers = asyncio.gather(*(asked.post("/", one, {}, GUARD_S) for one in sent))
        await until_async(lambda: server.together == OPEN_MAX)
        late = await failure(asked.post("/", b"late", {}, 0.05))
        assert late.code == Code.DEADLINE_EXCEEDED
        server.may_answer.set()
        assert await answers == [(200, b"/ None " + one) for one in sent]

    run(server.port, scenario)
    assert server.most == server.connections == OPEN_MAX


def test_a_request_that_is_given_up_or_too_late_ends_its_connection(server: Server) -> None:
    server.may_answer.clear()

    async def scenario(asked: Connections) -> None:
        assert (await failure(asked.post("/", b"late", {}, 0.1))).code == Code.DEADLINE_EXCEEDED
        given_up = asyncio.ensure_future(asked.post("/", b"given up", {}, GUARD_S))
        await until_async(lambda: server.together == 2)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        server.may_answer.set()
        assert await asked.post("/", b"on", {}, GUARD_S) == (200, b"/ None on")

    run(server.port, scenario)
    assert server.connections == 3


def test_a_header_with_a_line_end_is_refused(server: Server) -> None:
    async def scenario(asked: Connections) -> None:
        for value in ("x\r\ninjected: y", "x\n", "\0"):
            with pytest.raises(ValueError, match="the header said has a line end"):
                await asked.post("/", b"", {"said": value}, GUARD_S)

    run(server.port, scenario)
    assert server.connections == 0


def test_tls(tmp_path: Path) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", "key", "-out", "certificate"],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    server = Server(own)
    try:

        async def trusted(asked: Connections) -> None:
            for _ in range(2):
                assert (await asked.post("/", b"x" * 100_000, {}, GUARD_S))[1] == b"/ None " + b"x" * 100_000

        async def unknown(asked: Connections) -> None:
            failed = await failure(asked.post("/", b"", {}, GUARD_S))
            assert (failed.code, failed.unseen) == (Code.UNAVAILABLE, True)
            assert "CERTIFICATE_VERIFY_FAILED" in failed.message

        host = f"localhost:{server.port}"
        run(host, trusted, ssl.create_default_context(cafile=str(tmp_path / "certificate")))
        assert server.connections == 1
        run(host, unknown, ssl.create_default_context())
    finally:
        server.close()


def test_a_host_is_a_name_or_an_address_and_may_have_a_port() -> None:
    found = {
        host: (Connections(host)._name, Connections(host)._port)
        for host in ("a", "a:1", "::1", "[::1]", "[::1]:2", "127.0.0.1:3")
    }
    assert found == {
        "a": ("a", 80), "a:1": ("a", 1), "::1": ("::1", 80), "[::1]": ("::1", 80), "[::1]:2": ("::1", 2),
        "127.0.0.1:3": ("127.0.0.1", 3),
    }  # fmt: skip
    assert Connections("a", ssl.create_default_context())._port == 443
    with pytest.raises(ValueError, match="HOST:PORT"):
        Connections("a:b")


# --- a server that sends what a test says


def scripted(*connections: list[bytes], then: Scenario) -> int:
    """A server whose n-th connection answers its requests with the n-th list: b"" ends the connection instead, and so
    does the end of the list after its last answer. The number of connections that were made."""
    made = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal made
        answers, made = connections[made], made + 1
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        asked = Connections(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with server:
            await then(asked)
            asked.close()

    asyncio.run(scenario())
    return made


YES = HEAD + b"content-length: 3\r\n\r\nyes"


def test_a_connection_that_was_closed_while_idle_is_replaced() -> None:
    async def then(asked: Connections) -> None:
        for _ in range(3):
            assert await asked.post("/", b"", {}, GUARD_S) == (200, b"yes")

    assert scripted([YES], [YES, b""], [YES], then=then) == 3


def test_a_connection_that_ends_within_an_answer_or_at_the_first_request_is_not_asked_again() -> None:
    async def then(asked: Connections) -> None:
        assert await asked.post("/", b"", {}, GUARD_S) == (200, b"yes")
        for says in ("was lost", "was lost", "a chunk is longer"):
            failed = await failure(asked.post("/", b"", {}, GUARD_S))
            assert (failed.code, failed.unseen) == (Code.UNAVAILABLE, False) and says in failed.message

    broken = HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nyes\r\n"
    assert scripted([YES, YES[:-1]], [b""], [broken], then=then) == 3


def test_a_server_that_is_not_there_has_not_seen_the_request() -> None:
    async def scenario(asked: Connections) -> None:
        failed = await failure(asked.post("/", b"", {}, GUARD_S))
        assert (failed.code, failed.unseen) == (Code.UNAVAILABLE, True) and "can't be reached" in failed.message

    run(free_port(), scenario)


def test_only_calls_that_did_not_reach_the_predictor_are_repeated() -> None:
    port, requests = free_port(), 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        head = await reader.readuntil(b"\r\n\r\n")
        requests += 1
        assert head.startswith(b"POST /v1/models/a%20b:predict HTTP/1.1\r\n")
        if requests == 1:
            writer.write(HEAD + b"content-length: 2\r\n\r\n{}")
        writer.close()

    async def scenario() -> None:
        asked = Predictor(PredictorConfig(f"127.0.0.1:{port}", predictor_request_retries=1_000_000))
        early = asyncio.ensure_future(asked.predict("a b", {}, None))
        await until_async(lambda: asked._connections is not None)
        assert not early.done()
        async with await asyncio.start_server(serve, "127.0.0.1", port):
            assert await early == {}
            with pytest.raises(PredictionException, match="the connection was lost") as failed:
                await asked.predict("a b", {}, None)
        assert failed.value.error_code == 503
        await asked.close()

    asyncio.run(scenario())
    assert requests == 2


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    [
        (HEAD + b"content-length: 2\r\n\r\n[]", 502, "has no outputs"),
        (HEAD + b"content-length: 14\r\n\r\n" + b'{"outputs":[' + b"1]", 502, "has no outputs"),
        (HEAD + b"content-length: 15\r\n\r\n" + b'{"outputs":[1]}', 502, "no name, shape, datatype or data"),
        (HEAD + b"content-length: 16\r\n\r\n" + b'{"outputs":[{}]}', 502, "no name, shape, datatype or data"),
        (HEAD + b"content-length: 90000\r\n\r\n" + b"[" * 90_000, 502, "has no outputs"),
        (b"HTTP/1.1 204\r\n\r\n", 502, "HTTP status 204"),
        (b"HTTP/1.1 302 Found\r\ncontent-length: 0\r\n\r\n", 502, "HTTP status 302"),
        (b"HTTP/1.1 999 .\r\ncontent-length: 2\r\n\r\nno", 502, "no"),
        (b"HTTP/1.1 422 .\r\ncontent-length: 14\r\n\r\n" + b'{"error":"no"}', 422, "no"),
    ],
)
def test_answers_of_a_predictor_that_are_none(answer: bytes, status: int, says: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            asked = Predictor(PredictorConfig(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "v2"))
            with pytest.raises(PredictionException, match=says) as failed:
                await asked.predict("m", {}, None)
            assert failed.value.error_code == status
            await asked.close()

    asyncio.run(scenario())


def test_tiny_chunks_are_read_without_copies_of_what_follows() -> None:
    """Chunks of a byte, in one piece: copies of the rest for each would have 14 GB."""
    answer = PostAnswer()
    chunks = b"1\r\n.\r\n" * 40_000
    assert answer.feed(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert (len(answer.body), answer.keeps_open) == (40_000, True)


@pytest.mark.parametrize(
    "size", [b"content-length: 2147483648\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n80000000\r\n"]
)
def test_a_body_has_a_limit(size: bytes) -> None:
    with pytest.raises(BadAnswer, match=f"over {BODY_BYTES_MAX} bytes"):
        PostAnswer().feed(HEAD + size)
