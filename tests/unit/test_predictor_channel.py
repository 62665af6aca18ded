"""The channel over which transformers ask predictors by gRPC: beside grpcio's server, and beside one that sends frames
of its own choice."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from support import GUARD_S, free_port, until, until_async
from ts.compat.kserve_api.grpc_channel import HEAD_BYTES_MAX, REPLIES_BYTES_MAX, Channel, Unanswered
from ts.compat.kserve_api.header_fields import BadBlock, decoded, encoded
from ts.compat.kserve_api.messages import InferInput, InferRequest, InferResponse
from ts.compat.kserve_api.predictor import Predictor, PredictorConfig
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.codes import Code
from ts.utils.util import PredictionException

PATH = "/a.Service/Method"
FIELDS = frozenset((":status", "grpc-status", "grpc-message", "custom-key", "location", "www-authenticate"))


# --- header fields


@pytest.mark.parametrize(
    ("block", "fields"),
    [  # the first is RFC 7541's C.2.1, the fourth its C.6.1
        ("400a637573746f6d2d6b65790d637573746f6d2d686561646572", {"custom-key": "custom-header"}),
        ("88", {":status": "200"}),
        ("203f01" + "88", {":status": "200"}),
        ("488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad171863c78f0b97c8e9ae82ae43d3",
         {":status": "302", "location": "https://www.example.com"}),
        ("0f2e" + "86a8eb10649cbf", {"www-authenticate": "no-cache"}),
    ],
)  # fmt: skip
def test_blocks_of_others(block: str, fields: dict[str, str]) -> None:
    assert decoded(bytes.fromhex(block), FIELDS) == fields


def test_blocks_of_ours_are_read_again() -> None:
    fields = {":status": "200", "grpc-message": "é" * 200, "location": ""}
    assert decoded(encoded(fields.items()), FIELDS) == fields


BAD = ["be", "80", "00", "0085", "4083ffffffff01", "40" + "ff" * 9, "0084" + "ffffffff" + "00"]


@pytest.mark.parametrize("block", BAD)
def test_blocks_that_are_none(block: str) -> None:
    with pytest.raises(BadBlock):
        decoded(bytes.fromhex(block), frozenset(("", "a", *FIELDS)))


def test_any_bytes_are_fields_or_a_bad_block() -> None:
    numbers = random.Random(7)
    for _ in range(5000):
        try:
            decoded(numbers.randbytes(numbers.randrange(40)), FIELDS)
        except BadBlock:
            continue


# --- grpcio's server


Behaviour = Callable[[bytes, Any], bytes]


class Server:
    """Answers with the result of `behaviour`, and counts the calls in progress."""

    def __init__(self, behaviour: Behaviour, port: int = 0, pair: Any = None, **options: Any) -> None:
        self.seen, self._pool = 0, ThreadPoolExecutor(16)

        def answer(message: bytes, context: Any) -> bytes:
            self.seen += 1
            return behaviour(message, context)

        sizes = {"grpc.max_receive_message_length": -1, "grpc.max_send_message_length": -1, "grpc.so_reuseport": 0}
        self._server = grpc.server(self._pool, options=[*{**sizes, **options}.items()])
        methods = {"Method": grpc.unary_unary_rpc_method_handler(answer)}
        methods["ModelInfer"] = methods["Method"]
        for service in ("a.Service", "inference.GRPCInferenceService"):
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
        if pair is None:
            self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        else:
            self.port = self._server.add_secure_port("localhost:0", grpc.ssl_server_credentials([pair]))
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


def run(port: int, scenario: Callable[[Channel], Awaitable[None]]) -> None:
    async def through() -> None:
        channel = Channel(f"127.0.0.1:{port}")
        try:
            await scenario(channel)
        finally:
            await channel.close()

    asyncio.run(through())


async def failure(call: Awaitable[bytes]) -> Unanswered:
    with pytest.raises(Unanswered) as failed:
        await call
    return failed.value


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_many_calls_at_a_time_and_all_sizes(serve: Callable[..., Server], most: int) -> None:
    """More than the server takes at a time, and larger than its windows and frames."""
    server = serve(**{"grpc.max_concurrent_streams": most})
    sizes = [0, 1, 16_379, 16_384, 65_535, 1_000_000] * 5 + [9_000_000]

    async def scenario(channel: Channel) -> None:
        sent = [random.Random(size).randbytes(size) for size in sizes]
        assert await asyncio.gather(*(channel.call(PATH, one, (), GUARD_S) for one in sent)) == sent

    run(server.port, scenario)


def test_metadata_arrive_and_statuses_come_back(serve: Callable[..., Server]) -> None:
    def answer(message: bytes, context: Any) -> bytes:
        if message == b"fail":
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not today: 100 % é")
        given = dict(context.invocation_metadata())
        return f"{given['x-long'][-3:]} {given['x-request-id']} {context.time_remaining() > 1}".encode()

    async def scenario(channel: Channel) -> None:
        metadata = (("x-long", "y" * 7000 + "end"), ("x-request-id", "7"))
        assert await channel.call(PATH, b"", metadata, GUARD_S) == b"end 7 True"
        failed = await failure(channel.call(PATH, b"fail", (), GUARD_S))
        assert (failed.code, failed.message) == (Code.FAILED_PRECONDITION, "not today: 100 % é")
        failed = await failure(channel.call("/a.Service/Other", b"", (), GUARD_S))
        assert failed.code == Code.UNIMPLEMENTED

    run(serve(answer).port, scenario)


def test_a_predictor_gets_the_id_that_the_client_gave_and_no_other(serve: Callable[..., Server]) -> None:
    """An id of the transformer's own would go back in the answer, and keep the predictor from its usual path."""
    seen: list[tuple[str | None, str]] = []

    def answer(message: bytes, context: Any) -> bytes:
        given = dict(context.invocation_metadata())
        seen.append((given.get("x-request-id"), pb.ModelInferRequest.FromString(message).id))
        return b"\xff" if len(seen) == 4 else b""

    async def ask(predictor: Predictor, request_id: str | None, headers: dict[str, str] | None) -> InferResponse:
        tensor = InferInput("x", [2], "FP32", data=[1.0, 2.0])
        found = await predictor.predict("m", InferRequest("m", [tensor], request_id), headers)
        assert isinstance(found, InferResponse)
        return found

    async def scenario() -> None:
        predictor = Predictor(PredictorConfig(f"127.0.0.1:{serve(answer).port}", "grpc-v2"))
        await ask(predictor, None, None)
        await ask(predictor, None, {"X-Request-Id": "7", "te": "trailers"})
        assert (await ask(predictor, "8", {"x-request-id": "9"})).outputs == []
        assert seen == [(None, ""), ("7", "7"), ("9", "8")]
        with pytest.raises(PredictionException, match="1 bytes of the answer are not a ModelInferResponse") as failed:
            await ask(predictor, None, None)
        assert failed.value.error_code == 502
        await predictor.close()

    asyncio.run(scenario())


def test_a_server_that_was_restarted_is_asked_again(serve: Callable[..., Server]) -> None:
    first = serve(lambda message, context: b"first")

    async def scenario(channel: Channel) -> None:
        assert await channel.call(PATH, b"", (), GUARD_S) == b"first"
        await asyncio.to_thread(first.stop, 0)
        assert (await failure(channel.call(PATH, b"", (), GUARD_S))).code == Code.UNAVAILABLE
        serve(lambda message, context: b"second", port=first.port)
        assert await channel.call(PATH, b"", (), GUARD_S) == b"second"

    run(first.port, scenario)


def test_calls_that_ran_out_of_time_or_are_given_up_end_at_the_server(serve: Callable[..., Server]) -> None:
    ended = []

    def wait(message: bytes, context: Any) -> bytes:
        if message:
            return message
        over = threading.Event()
        context.add_callback(over.set)
        assert over.wait(GUARD_S)
        ended.append(context.is_active())
        return b""

    server = serve(wait)

    async def scenario(channel: Channel) -> None:
        assert (await failure(channel.call(PATH, b"", (), 0.2))).code == Code.DEADLINE_EXCEEDED
        given_up = asyncio.ensure_future(channel.call(PATH, b"", (), GUARD_S))
        await until_async(lambda: server.seen == 2)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert await channel.call(PATH, b"on", (), GUARD_S) == b"on"

    run(server.port, scenario)
    until(lambda: ended == [False, False])


def test_tls(serve: Callable[..., Server], tmp_path: Path) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", "key", "-out", "certificate"],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    pair = (tmp_path / "key").read_bytes(), (tmp_path / "certificate").read_bytes()
    port = serve(pair=pair).port

    async def asked(context: ssl.SSLContext) -> bytes:
        channel = Channel(f"localhost:{port}", context)
        try:
            return await channel.call(PATH, b"x" * 100_000, (), GUARD_S)
        finally:
            await channel.close()

    assert asyncio.run(asked(ssl.create_default_context(cafile=str(tmp_path / "certificate")))) == b"x" * 100_000
    failed = asyncio.run(failure(asked(ssl.create_default_context())))
    assert failed.code == Code.UNAVAILABLE and "CERTIFICATE_VERIFY_FAILED" in failed.message


# --- a server that sends what a test says


def frame(kind: int, flags: int, number: int, content: bytes = b"") -> bytes:
    return len(content).to_bytes(3, "big") + bytes((kind, flags)) + number.to_bytes(4, "big") + content


DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 9
OK = encoded((("grpc-status", "0"),))


def answered(number: int, message: bytes = b"yes") -> bytes:
    body = b"\0" + len(message).to_bytes(4, "big") + message
    return frame(HEADERS, 4, number, b"\x88") + frame(DATA, 0, number, body) + frame(HEADERS, 5, number, OK)


def scripted(
    *connections: Callable[[int], bytes], then: Callable[[Channel], Awaitable[None]], greeting: bytes = b""
) -> None:
    """A server whose n-th connection answers the call `number` with the bytes that the n-th function gives."""

    async def scenario() -> None:
        waiting = list(connections)

        served: list[Any] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            served.append(asyncio.current_task())
            answer = waiting.pop(0)
            writer.write(greeting or frame(SETTINGS, 0, 0))
            try:
                await reader.readexactly(24)
                while True:
                    head = await reader.readexactly(9)
                    await reader.readexactly(int.from_bytes(head[:3], "big"))
                    if head[3] == DATA and head[4] & 1:
                        writer.write(answer(int.from_bytes(head[5:], "big")))
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()
                await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        channel = Channel(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with server:
            await then(channel)
            await channel.close()
            await asyncio.gather(*served)

    asyncio.run(scenario())


def setting(key: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, struct.pack(">HI", key, value))


def going(last: int) -> bytes:
    return frame(GOAWAY, 0, 0, struct.pack(">II", last, 0))


def test_calls_that_a_server_has_not_seen_are_repeated() -> None:
    async def then(channel: Channel) -> None:
        assert await channel.call(PATH, b"", (), GUARD_S) == b"yes"
        assert await channel.call(PATH, b"", (), GUARD_S) == b"again"

    refused = [True]

    def first(number: int) -> bytes:
        return frame(RST_STREAM, 0, number, struct.pack(">I", 7)) if refused and refused.pop() else going(1)

    def second(number: int) -> bytes:
        return answered(number) + going(number)

    scripted(first, second, lambda number: answered(number, b"again"), then=then)


def test_answers_in_other_frames() -> None:
    """Padding, priorities, fields in pieces, kinds that nobody knows, and one byte at a time."""

    def answer(number: int) -> bytes:
        return (
            frame(HEADERS, 8 | 32, number, b"\3" + bytes(5) + b"\x88" + bytes(3))
            + frame(CONTINUATION, 4, number, encoded((("x-more", "y" * 300),)))
            + frame(99, 0, number, b"?")
            + frame(PING, 0, 0, b"12345678")
            + frame(DATA, 8, number, b"\2" + b"\0\0\0\0\3y" + b"\0\0")
            + frame(DATA, 0, number, b"es")
            + frame(HEADERS, 5, number, OK)
        )

    async def then(channel: Channel) -> None:
        assert await channel.call(PATH, b"", (), GUARD_S) == b"yes"

    scripted(answer, then=then)


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        (lambda number: b"HTTP/1.1 400 Bad Request\r\n\r\n", Code.UNAVAILABLE, "it speaks no HTTP/2"),
        (lambda number: frame(HEADERS, 5, number, b"\x8d"), Code.UNIMPLEMENTED, "HTTP status 404"),
        (lambda number: frame(HEADERS, 5, number, b"\x88"), Code.UNKNOWN, "UNKNOWN"),
        (lambda number: frame(HEADERS, 5, number, b"\x88" + OK), Code.INTERNAL, "0 bytes of answer"),
        (lambda number: frame(HEADERS, 5, number, encoded((("grpc-status", "99"),))), Code.UNKNOWN, "UNKNOWN"),
        (lambda number: frame(RST_STREAM, 0, number, struct.pack(">I", 11)), Code.RESOURCE_EXHAUSTED, "error 11"),
        (lambda number: frame(HEADERS, 4, number, b"\xbe"), Code.UNAVAILABLE, "entry 62 of a table"),
        (lambda number: frame(PUSH_PROMISE, 4, number, bytes(4)), Code.UNAVAILABLE, "kind 5 out of its turn"),
        (lambda number: frame(HEADERS, 0, number) + frame(PING, 0, 0, bytes(8)), Code.UNAVAILABLE, "out of its turn"),
        (lambda number: frame(DATA, 8, number, b"\xff"), Code.UNAVAILABLE, "padded by more"),
        (lambda number: frame(HEADERS, 5, number, encoded(((":status", "²"),))), Code.UNKNOWN, "HTTP status ²"),
        (lambda number: frame(HEADERS, 5, number, encoded(((":status", "9" * 5000),))), Code.UNKNOWN, "status 999,"),
        (lambda number: frame(PING, 0, 0, bytes(9)), Code.UNAVAILABLE, "a PING has 9 bytes"),
        (lambda number: setting(5, 0), Code.UNAVAILABLE, "announces frames of 0 bytes"),
        (lambda number: setting(4, 1 << 31), Code.UNAVAILABLE, "announces windows of 2147483648 bytes"),
        (lambda number: frame(HEADERS, 4, number, bytes(HEAD_BYTES_MAX + 1)), Code.UNAVAILABLE, "over 65536 bytes"),
        (lambda number: frame(HEADERS, 0, number) + frame(CONTINUATION, 0, number, b"\x88") * 70_000, Code.UNAVAILABLE,
         "over 65536 bytes"),
    ],
)  # fmt: skip
def test_answers_that_are_none(answer: Callable[[int], bytes], code: Code, says: str) -> None:
    async def then(channel: Channel) -> None:
        failed = await failure(channel.call(PATH, b"", (), GUARD_S))
        assert failed.code == code and says in failed.message, (failed.code, failed.message)

    scripted(answer, then=then)


CALLS_MAX = 3


def test_a_turn_whose_call_is_cancelled_goes_to_the_next_one() -> None:
    """The cancel comes between the end of the call before, which gives the turn, and the next step of the task."""

    async def then(channel: Channel) -> None:
        first, second, third = (asyncio.ensure_future(channel.call(PATH, b"", (), GUARD_S)) for _ in range(3))
        connection = await until_sent(channel, 1)
        await until_async(lambda: len(connection._waiting) == 2)
        connection.data_received(answered(1))
        second.cancel()
        assert await first == b"yes"
        assert await third == b"third"
        with pytest.raises(asyncio.CancelledError):
            await second

    scripted(lambda number: setting(CALLS_MAX, 1) if number == 1 else answered(number, b"third"),
             then=then, greeting=setting(CALLS_MAX, 1))  # fmt: skip


async def until_sent(channel: Channel, calls: int) -> Any:
    """The connection, once so many calls are on it."""
    await until_async(lambda: channel._connection is not None and len(channel._connection._calls) == calls)
    return channel._connection


class Counted:
    """A transport that counts its writes."""

    def __init__(self, transport: Any) -> None:
        self._transport, self.writes = transport, 0

    def write(self, data: bytes) -> None:
        self.writes += 1
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def test_calls_that_begin_together_share_a_write() -> None:
    """The first is written at once, since nobody shares it; one that is cancelled before the write ends as usual."""

    async def then(channel: Channel) -> None:
        def call(word: bytes) -> asyncio.Task[bytes]:
            return asyncio.ensure_future(channel.call(PATH, word, (), GUARD_S))

        first = call(b"")
        connection = await until_sent(channel, 1)
        counted = connection._transport = Counted(connection._transport)
        together = [call(b"x") for _ in range(8)]
        await until_sent(channel, 9)
        together[3].cancel()
        assert await asyncio.gather(*together[:3], *together[4:]) == [b"yes"] * 7
        assert counted.writes <= 2  # the second, if the cancel came after the write
        assert not first.done()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert counted.writes <= 3

    scripted(lambda number: b"" if number == 1 else answered(number), then=then)


def test_waiting_calls_begin_when_the_server_accepts_more() -> None:
    async def then(channel: Channel) -> None:
        call = asyncio.ensure_future(channel.call(PATH, b"", (), GUARD_S))
        late = asyncio.ensure_future(failure(channel.call(PATH, b"", (), 0.1)))
        connection = await until_sent(channel, 0)
        assert (await late).code == Code.DEADLINE_EXCEEDED
        assert len(connection._waiting) == 1
        connection.data_received(setting(CALLS_MAX, 100))
        assert await call == b"yes"

    scripted(answered, then=then, greeting=setting(CALLS_MAX, 0))


def test_a_server_that_asks_for_replies_without_reading_them_loses_its_connection() -> None:
    async def then(channel: Channel) -> None:
        call = asyncio.ensure_future(failure(channel.call(PATH, b"", (), GUARD_S)))
        connection = await until_sent(channel, 1)
        connection._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sent = 0
        while connection.usable:
            connection.data_received(frame(PING, 0, 0, bytes(8)) * 1000)
            sent += 17_000
            assert sent < 32 << 20
        assert "doesn't read the replies" in (await call).message
        assert sent > REPLIES_BYTES_MAX

    scripted(lambda number: b"", then=then)


def test_a_frame_in_many_pieces_is_joined_once() -> None:
    """A frame of 1 MiB, one byte at a time: a copy of the rest for each would take minutes."""

    async def then(channel: Channel) -> None:
        call = asyncio.ensure_future(channel.call(PATH, b"", (), GUARD_S))
        connection = await until_sent(channel, 1)
        answer = answered(1, bytes((1 << 20) - 5))
        for at in range(len(answer)):
            connection.data_received(answer[at : at + 1])
        assert len(await call) == (1 << 20) - 5

    scripted(lambda number: b"", then=then)


def test_a_silent_connection_is_not_used_again() -> None:
    async def then(channel: Channel) -> None:
        assert (await failure(channel.call(PATH, b"", (), 0.2))).code == Code.DEADLINE_EXCEEDED
        assert await channel.call(PATH, b"", (), GUARD_S) == b"yes"

    silent = [b""]
    scripted(lambda number: silent.pop() if silent else b"", answered, then=then)


def test_each_call_has_its_own_time_whatever_the_others_have() -> None:
    async def then(channel: Channel) -> None:
        ended: list[str] = []

        async def ask(name: str, timeout_s: float) -> None:
            assert (await failure(channel.call(PATH, b"", (), timeout_s))).code == Code.DEADLINE_EXCEEDED
            ended.append(name)

        long = asyncio.ensure_future(channel.call(PATH, b"", (), GUARD_S))
        await asyncio.gather(ask("third", 0.5), ask("first", 0.1), ask("second", 0.3))
        assert ended == ["first", "second", "third"] and not long.done()
        long.cancel()
        await asyncio.wait([long])

    scripted(lambda number: b"", then=then)


def test_addresses() -> None:
    with pytest.raises(ValueError, match="'host:port' is no HOST:PORT"):
        Channel("host:port")

    async def nobody() -> Unanswered:
        return await failure(Channel(f"127.0.0.1:{free_port()}").call(PATH, b"", (), GUARD_S))

    failed = asyncio.run(nobody())
    assert failed.code == Code.UNAVAILABLE and "can't be reached" in failed.message
