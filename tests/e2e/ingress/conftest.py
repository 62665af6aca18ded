"""Servers in processes of their own (standin_server.py), and clients for them."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from raw import Http2
from support import GUARD_S
from warm_start import Program, Template

SERVER = Path(__file__).with_name("standin_server.py")

#: No client here may reuse another one's connection: stalled readers and big windows would be shared.
CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]


@dataclass
class Server:
    """A running stand-in server."""

    process: Program
    ports: dict[str, int]

    @property
    def port(self) -> int:
        return next(iter(self.ports.values()))

    def drain(self, grace_s: float) -> None:
        """Asks for a drain and returns at once."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{grace_s}\n")
        self.process.stdin.flush()

    def end(self) -> tuple[str, int]:
        """Its output after a drain, and its exit status."""
        printed = self.process.stdout.read()
        return printed, self.process.wait(GUARD_S)


@functools.cache
def template() -> Template:
    """The process that stand-in servers are forked from."""
    return Template("standin_server:run", "ts_frontend.listeners.serving", options=["-W", "error"], path=SERVER.parent)


@pytest.fixture(scope="session", autouse=True)
def end_of_template() -> Iterator[None]:
    yield
    if template.cache_info().currsize:
        template().close()


def start(*listeners: dict[str, Any], open_files: int = 0) -> tuple[Program, dict[str, Any]]:
    """The process and its first line. `open_files`: the most that it may have."""
    asked = {"listeners": listeners or [{"name": "test"}], "open_files": open_files}
    process = template().start([json.dumps(asked)], stdin=subprocess.PIPE)
    line = process.stdout.readline()
    return process, json.loads(line) if line else {}


@contextlib.contextmanager
def running(*listeners: dict[str, Any], open_files: int = 0) -> Iterator[Server]:
    process, said = start(*listeners, open_files=open_files)
    with process:
        assert process.stdin is not None
        try:
            assert "ports" in said, said
            yield Server(process, said["ports"])
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(GUARD_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server with default limits, shared by all tests that don't end it."""
    with running() as one:
        yield one


@pytest.fixture(scope="session")
def running_server() -> Callable[..., contextlib.AbstractContextManager[Server]]:
    """For a server that a module shares: running_server(listener, ...)."""
    return running


@pytest.fixture
def run_server() -> Callable[..., contextlib.AbstractContextManager[Server]]:
    """Starts a server of the test's own: run_server(listener, ...)."""
    return running


@pytest.fixture
def start_server() -> Iterator[Callable[..., dict[str, Any]]]:
    """Tries to start a server that shall fail; gives its first line."""
    with contextlib.ExitStack() as ends:

        def try_start(*listeners: dict[str, Any]) -> dict[str, Any]:
            process, said = start(*listeners)
            ends.enter_context(process)
            return said

        yield try_start


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    """connect(server_or_port, ...) -> Client, closed after the test."""
    with contextlib.ExitStack() as ends:

        def make(target: Server | int, **more: Any) -> Client:
            port = target if isinstance(target, int) else target.port
            return ends.enter_context(contextlib.closing(Client(port, **more)))

        yield make


@pytest.fixture
def client(server: Server, connect: Callable[..., Client]) -> Client:
    return connect(server)


class Client:
    """A grpcio channel with the stand-in methods, as bytes."""

    def __init__(
        self,
        port: int,
        *,
        host: str = "127.0.0.1",
        address: str = "",
        credentials: grpc.ChannelCredentials | None = None,
        options: tuple[tuple[str, Any], ...] = (),
    ) -> None:
        target, settings = address or f"{host}:{port}", [*CHANNEL_OPTIONS, *options]
        if credentials is None:
            self.channel = grpc.insecure_channel(target, options=settings)
        else:
            self.channel = grpc.secure_channel(target, credentials, options=settings)

    def close(self) -> None:
        self.channel.close()

    def unary(self, name: str, data: bytes = b"", timeout: float = GUARD_S, **more: Any) -> bytes:
        answer: bytes = self.channel.unary_unary(path(name))(data, timeout=timeout, **more)
        return answer

    def start_unary(self, name: str, data: bytes = b"", timeout: float = GUARD_S, **more: Any) -> Any:
        return self.channel.unary_unary(path(name)).future(data, timeout=timeout, **more)

    def stream(self, name: str, data: bytes = b"", timeout: float = GUARD_S, **more: Any) -> Any:
        return self.channel.unary_stream(path(name))(data, timeout=timeout, **more)

    def bidi(self, name: str, requests: Iterator[bytes], timeout: float = GUARD_S, **more: Any) -> Any:
        return self.channel.stream_stream(path(name))(requests, timeout=timeout, **more)

    def wait(self, event: str) -> None:
        """Returns when the server says that it happened."""
        self.unary("/test.Probe/Wait", event.encode())


def path(name: str) -> str:
    return name if name.startswith("/") else f"/test.Echo/{name}"


class RawAnswer(NamedTuple):
    """The answer on one HTTP/2 stream."""

    headers: dict[str, str]
    body: bytes
    trailers: dict[str, str]
    reset: int | None

    @property
    def status(self) -> str | None:
        """grpc-status, wherever it stood."""
        return self.headers.get("grpc-status")


GRPC_HEADERS = {"content-type": "application/grpc", "te": "trailers"}


@pytest.fixture
def raw_call(server: Server) -> Callable[..., RawAnswer]:
    """raw_call(path, body, headers=..., method=..., ended=...) -> RawAnswer."""

    def call(
        name: str, body: bytes = b"", headers: dict[str, str] | None = None, port: int | None = None, **how: Any
    ) -> RawAnswer:
        asked = Http2(port or server.port, path(name), body, GRPC_HEADERS if headers is None else headers, **how)
        found = asked.end().body
        return RawAnswer(asked.headers, found, asked.trailers, asked.reset)

    return call
