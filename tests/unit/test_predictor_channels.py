"""What a transformer's user sees of its calls to a predictor, beside grpcio's server and Python's HTTP server."""

from __future__ import annotations

import asyncio
import random
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest

from support import GUARD_S, free_port, self_signed, until_async
from ts.compat.kserve_api.channels import BODY_BYTES_MAX, HEAD_BYTES_MAX, OPEN_MAX, Channel, Connections, Unanswered
from ts.compat.kserve_api.channels import address as address_of
from ts.compat.kserve_api.messages import InferInput, InferRequest
from ts.compat.kserve_api.predictor import GRPC_V2, V2, Predictor, PredictorConfig
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.codes import Code
from ts.utils.util import PredictionException

PATH = "/a.Service/Method"
HEAD = b"HTTP/1.1 200 OK\r\n"
YES = HEAD + b"content-length: 3\r\n\r\nyes"
Behaviour = Callable[[bytes, Any], bytes]
Asked = Channel | Connections | Predictor


def run(scenario: Callable[[], Awaitable[None]], *asked: Asked) -> None:
    async def through() -> None:
        try:
            await scenario()
        finally:
            for one in asked:
                closing = one.close()
                if closing is not None:
                    await closing

    asyncio.run(through())


async def failure(call: Awaitable[object]) -> Unanswered:
    with pytest.raises(Unanswered) as failed:
        await call
    return failed.value


def tensors(request_id: str | None = None) -> InferRequest:
    return InferRequest("m", [InferInput("x", [2], "FP32", data=[1.0, 2.0])], request_id)


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `key`, and `certificate` of localhost, which it also has under the name that OpenSSL looks for."""
    made = tmp_path_factory.mktemp("certified")
    self_signed(made, "certificate", "key")
    naming = ["openssl", "x509", "-hash", "-noout", "-in", "certificate"]
    name = subprocess.run(naming, cwd=made, check=True, capture_output=True, text=True).stdout.strip()
    (made / f"{name}.0").symlink_to("certificate")
    return made


def test_a_host_is_a_name_or_an_address_and_may_have_a_port() -> None:
    hosts = ("a", "a:1", "::1", "[::1]", "[::1]:2", "127.0.0.1:3")
    found = [address_of(host, 80) for host in hosts]
    assert found == [("a", 80), ("a", 1), ("::1", 80), ("::1", 80), ("::1", 2), ("127.0.0.1", 3)]
    with pytest.raises(ValueError, match="'host:port' is no HOST:PORT"):
        address_of("host:port", 80)


@asynccontextmanager
async def closing_of(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    try:
        yield
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], port: int = 0, **more: Any
) -> AsyncIterator[int]:
    """The port of a server that has ended, with all its connections, at the end of the block. `serve` handles one."""
    tasks: list[Any] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            async with closing_of(writer):
                await serve(reader, writer)

    async with await asyncio.start_server(handle, "127.0.0.1", port, **more) as server:
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for found in ended:
            if isinstance(found, Exception):
                raise found


# --- gRPC


class Server:
    """Answers with the result of `behaviour`, and counts the calls."""

    def __init__(self, behaviour: Behaviour, port: int = 0, pair: Any = None, **options: Any) -> None:
        self.seen, self._pool = 0, ThreadPoolExecutor(16)

        def answer(message: bytes, context: Any) -> bytes:
            self.seen += 1
            return behaviour(message, context)

        sizes = {"grpc.max_receive_message_length": -1, "grpc.max_send_message_length": -1, "grpc.so_reuseport": 0}
        self._server = grpc.server(self._pool, options=[*{**sizes, **options}.items()])
        methods = dict.fromkeys(("Method", "ModelInfer"), grpc.unary_unary_rpc_method_handler(answer))
        for service in ("a.Service", "inference.GRPCInferenceService"):
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
        if pair is None:
            self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        else:
            self.port = self._server.add_secure_port("localhost:0", grpc.ssl_server_credentials([pair]))
        self.host = f"{'localhost' if pair else '127.0.0.1'}:{self.port}"
        self._server.start()

    def stop(self, grace_s: float | None = None) -> None:
        self._server.stop(grace_s).wait(GUARD_S)
        self._pool.shutdown()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def served(behaviour: Behaviour = lambda message, context: message, **more: Any) -> Server:
        made.append(Server(behaviour, **more))
        return made[-1]

    yield served
    for one in made:
        one.stop()


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_many_calls_at_a_time_and_all_sizes(serve: Callable[..., Server], most: int) -> None:
    asked = Channel(serve(**{"grpc.max_concurrent_streams": most}).host)

    async def scenario() -> None:
        sent = [random.Random(size).randbytes(size) for size in [0, 1, 16_384, 1_000_000] * 5 + [9_000_000]]
        assert await asyncio.gather(*(asked.call(PATH, one, (), GUARD_S) for one in sent)) == sent

    run(scenario, asked)


def test_metadata_arrive_and_statuses_come_back(serve: Callable[..., Server]) -> None:
    def answer(message: bytes, context: Any) -> bytes:
        if message == b"fail":
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not today: 100 % é")
        if message == b"long":
            context.set_trailing_metadata((("x-long", "y" * HEAD_BYTES_MAX),))
        given = dict(context.invocation_metadata())
        return f"{given.get('x-long', '')[-3:]} {context.time_remaining() > 1}".encode()

    asked = Channel(serve(answer).host)

    async def scenario() -> None:
        assert await asked.call(PATH, b"", (("x-long", "y" * 7000 + "end"),), GUARD_S) == b"end True"
        failed = await failure(asked.call(PATH, b"fail", (), GUARD_S))
        assert (failed.code, failed.message) == (Code.FAILED_PRECONDITION, "not today: 100 % é")
        assert (await failure(asked.call(PATH, b"long", (), GUARD_S))).code == Code.RESOURCE_EXHAUSTED
        assert (await failure(asked.call("/a.Service/Other", b"", (), GUARD_S))).code == Code.UNIMPLEMENTED

    run(scenario, asked)


def test_a_predictor_gets_the_id_that_the_client_gave_and_no_other(serve: Callable[..., Server]) -> None:
    """An id of the transformer's own would go back in the answer, and keep the predictor from its usual path."""
    seen: list[tuple[str | None, str]] = []

    def answer(message: bytes, context: Any) -> bytes:
        given = dict(context.invocation_metadata())
        seen.append((given.get("x-request-id"), pb.ModelInferRequest.FromString(message).id))
        return b"\xff" if len(seen) == 4 else b""

    asked = Predictor(PredictorConfig(serve(answer).host, GRPC_V2))

    async def scenario() -> None:
        await asked.predict("m", tensors(), None)
        await asked.predict("m", tensors(), {"X-Request-Id": "7", "te": "trailers"})
        assert (await asked.predict("m", tensors("8"), {"x-request-id": "9"})).outputs == []
        assert seen == [(None, ""), ("7", "7"), ("9", "8")]
        with pytest.raises(PredictionException, match="1 bytes of the answer are not a ModelInferResponse") as failed:
            await asked.predict("m", tensors(), None)
        assert failed.value.error_code == 502
        with pytest.raises(PredictionException, match="the header baggage has characters") as failed:
            await asked.predict("m", tensors(), {"baggage": "é"})
        assert (failed.value.error_code, len(seen)) == (400, 4)

    run(scenario, asked)


def test_calls_over_grpc_are_repeated_after_unavailable_as_often_as_configured(serve: Callable[..., Server]) -> None:
    seen: list[bytes] = []

    def answer(message: bytes, context: Any) -> bytes:
        seen.append(message)
        if len(seen) % 3:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return b""

    host = serve(answer).host
    patient = Predictor(PredictorConfig(host, GRPC_V2, predictor_request_retries=2))
    impatient = Predictor(PredictorConfig(host, GRPC_V2, predictor_request_retries=1))

    async def scenario() -> None:
        assert (await patient.predict("m", tensors(), None)).outputs == []
        assert len(seen) == 3
        with pytest.raises(PredictionException, match="not now") as failed:
            await impatient.predict("m", tensors(), None)
        assert (failed.value.error_code, len(seen)) == (503, 5)

    run(scenario, patient, impatient)


async def test_a_connection_that_is_silent_is_not_used_again(serve: Callable[..., Server]) -> None:
    """What was between both has forgotten it, and says nothing, not even an end: a network that loses a machine."""
    port, passes = serve().port, [True, True]

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        number = len(made)
        made.append(None)

        async def passed(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                if passes[number]:
                    target.write(data)
            target.close()

        async with closing_of(back):
            await asyncio.gather(passed(reader, back), passed(there, writer))

    made: list[None] = []
    async with listening(connect) as between:
        asked = Channel(f"127.0.0.1:{between}")
        assert await asked.call(PATH, b"a", (), GUARD_S) == b"a"
        passes[0] = False
        assert (await failure(asked.call(PATH, b"b", (), 0.2))).code == Code.DEADLINE_EXCEEDED
        assert await asked.call(PATH, b"c", (), GUARD_S) == b"c"
        await asked.close()
    assert len(made) == 2


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"])
def test_tls_over_grpc(
    serve: Callable[..., Server], certified: Path, variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = serve(
        lambda message, context: b"", pair=((certified / "key").read_bytes(), (certified / "certificate").read_bytes())
    )
    for bundle in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(bundle, raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    monkeypatch.setenv(variable, str(certified if variable == "SSL_CERT_DIR" else certified / "certificate"))
    asked = Predictor(PredictorConfig(server.host, GRPC_V2, predictor_use_ssl=True))

    async def scenario() -> None:
        assert (await asked.predict("m", tensors(), None)).outputs == []

    run(scenario, asked)


@pytest.mark.parametrize("protocol", [V2, GRPC_V2])
def test_a_server_with_an_unknown_certificate_is_503(
    serve: Callable[..., Server], certified: Path, protocol: str
) -> None:
    pair = (certified / "key").read_bytes(), (certified / "certificate").read_bytes()
    asked = Predictor(PredictorConfig(serve(pair=pair).host, protocol, predictor_use_ssl=True))

    async def scenario() -> None:
        with pytest.raises(PredictionException, match="CERTIFICATE_VERIFY_FAILED") as failed:
            await asked.predict("m", tensors(), None)
        assert failed.value.error_code == 503

    run(scenario, asked)


# --- HTTP


class HttpServer:
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

            def handle_error(self, request: Any, client_address: Any) -> None: ...  # clients that have left

        self._server = Serving(("127.0.0.1", 0), Answering)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.host = f"{'127.0.0.1' if tls is None else 'localhost'}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._thread.join(GUARD_S)
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[HttpServer]:
    made = HttpServer()
    yield made
    made.close()


def test_requests_share_a_connection(server: HttpServer) -> None:
    asked = Connections(server.host)

    async def scenario() -> None:
        for size in (1, 70_000, 3_000_000):
            body = random.Random(size).randbytes(size)
            assert await asked.post("/a", body, {"said": "é"}, GUARD_S) == (200, "/a é ".encode() + body)
        assert await asked.post("/b", b"", {}, GUARD_S) == (404, b"/b None ")
        with pytest.raises(ValueError, match="Invalid header value"):
            await asked.post("/", b"", {"said": "x\r\ninjected: y"}, GUARD_S)

    run(scenario, asked)
    assert server.connections == 1


@pytest.mark.parametrize("is_secured", [False, True])
async def test_a_request_that_is_given_up_or_too_late_ends_its_connection(certified: Path, is_secured: bool) -> None:
    """The server sees the end of the connection."""
    ended, tls = [], None
    if is_secured:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certified / "certificate", certified / "key")
    trusted = ssl.create_default_context(cafile=str(certified / "certificate")) if is_secured else None

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST /on "):
            writer.write(YES)
        begun.append(head)
        with suppress(ConnectionError):
            while await reader.read(1 << 16):
                continue
        ended.append(head)

    begun: list[bytes] = []
    async with listening(serve, ssl=tls) as port:
        asked = Connections(f"localhost:{port}", trusted)
        assert (await failure(asked.post("/late", b"x", {}, 0.3))).code == Code.DEADLINE_EXCEEDED
        given_up = asyncio.ensure_future(asked.post("/given-up", b"x", {}, GUARD_S))
        await until_async(lambda: len(begun) == 2)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        await until_async(lambda: len(ended) == 2)
        assert await asked.post("/on", b"x", {}, GUARD_S) == (200, b"yes")
        asked.close()
        await until_async(lambda: len(ended) == 3)


# --- a server over HTTP that sends what a test says


@asynccontextmanager
async def scripted(*connections: list[bytes], made: list[None]) -> Any:
    """The host of a server whose n-th connection answers its requests with the n-th list: b"" ends the connection
    instead, and so does the end of the list after its last answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.append(None)
        for answer in connections[len(made) - 1]:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
            writer.write(answer)

    async with listening(serve) as port:
        yield f"127.0.0.1:{port}"


async def test_a_connection_that_was_closed_while_idle_is_replaced() -> None:
    made: list[None] = []
    async with scripted([YES], [YES, b""], [YES], made=made) as host:
        asked = Connections(host)
        for _ in range(3):
            assert await asked.post("/", b"", {}, GUARD_S) == (200, b"yes")
        asked.close()
    assert len(made) == 3


async def test_a_connection_that_ends_within_an_answer_or_at_the_first_request_is_not_asked_again() -> None:
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nyes\r\n"
    too_large = HEAD + b"content-length: %d\r\n\r\n" % (BODY_BYTES_MAX + 1)
    made: list[None] = []
    async with scripted([YES, YES[:-1]], [b""], [chunked], [b"\0\0\6\4\0\r\n\r\n"], [too_large], made=made) as host:
        asked = Connections(host)
        assert await asked.post("/", b"", {}, GUARD_S) == (200, b"yes")
        for says in ("IncompleteRead", "RemoteDisconnected", "Incomplete", "BadStatusLine", "over 2147483647"):
            failed = await failure(asked.post("/", b"", {}, GUARD_S))
            assert (failed.code, failed.unseen) == (Code.UNAVAILABLE, False) and says in failed.message
        asked.close()
    assert len(made) == 5


async def test_only_requests_that_did_not_reach_the_predictor_are_repeated() -> None:
    port, requests = free_port(), 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        head = await reader.readuntil(b"\r\n\r\n")
        requests += 1
        assert head.startswith(b"POST /v1/models/a%20b:predict HTTP/1.1\r\n")
        if requests == 1:
            writer.write(HEAD + b"content-length: 2\r\n\r\n{}")

    host = f"127.0.0.1:{port}"
    once, asked = (Predictor(PredictorConfig(host, predictor_request_retries=n)) for n in (0, 1_000_000))
    early = asyncio.ensure_future(asked.predict("a b", {}, None))
    with pytest.raises(PredictionException, match="can't be reached") as failed:
        await once.predict("a b", {}, None)
    assert failed.value.error_code == 503 and not early.done()
    async with listening(serve, port):
        assert await early == {}
        with pytest.raises(PredictionException, match="the connection was lost") as failed:
            await asked.predict("a b", {}, None)
    assert failed.value.error_code == 503
    for one in (once, asked):
        await one.close()
    assert requests == 2


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    [
        (HEAD + b"content-length: 2\r\n\r\n[]", 502, "has no outputs"),
        (HEAD + b"content-length: 15\r\n\r\n" + b'{"outputs":[1]}', 502, "no name, shape, datatype or data"),
        (HEAD + b"content-length: 16\r\n\r\n" + b'{"outputs":[{}]}', 502, "no name, shape, datatype or data"),
        (HEAD + b"content-length: 90000\r\n\r\n" + b"[" * 90_000, 502, "has no outputs"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n[]\r\n0\r\n\r\n", 502, "has no outputs"),
        (HEAD + b"\r\n[]", 502, "has no outputs"),
        (b"HTTP/1.1 204\r\n\r\n", 502, "HTTP status 204"),
        (b"HTTP/1.1 302 Found\r\ncontent-length: 0\r\n\r\n", 502, "HTTP status 302"),
        (b"HTTP/1.1 999 .\r\ncontent-length: 2\r\n\r\nno", 502, "no"),
        (b"HTTP/1.1 422 .\r\ncontent-length: 14\r\n\r\n" + b'{"error":"no"}', 422, "no"),
    ],
)
async def test_answers_of_a_predictor_that_are_none(answer: bytes, status: int, says: str) -> None:
    async with scripted([answer], made=[]) as host:
        asked = Predictor(PredictorConfig(host, V2))
        with pytest.raises(PredictionException, match=says) as failed:
            await asked.predict("m", {}, None)
        assert failed.value.error_code == status
        await asked.close()
