"""Everyday mistakes with a server's addresses: each message names the mistake and the remedy. A row has a user's
action, and parts of the output. `tests/unit/test_everyday_mistakes.py` has the mistakes that need no server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from support import GUARD_S
from torchrelay_client import CallFailed, Client
from ts_frontend.cli import main as cli

PLACES = ("http_inference", "http_management", "grpc_inference", "grpc_management")


class Desk(NamedTuple):
    """Two servers, one with TLS, that one's certificate, and the output."""

    plain: Any
    tls: Any
    certificate: Path
    capsys: pytest.CaptureFixture[str]

    def torchserve(self, *words: str) -> str:
        """The output of a command that fails."""
        status, printed = self.run(*words)
        assert status, printed
        return printed

    def run(self, *words: str) -> tuple[int, str]:
        """A command's status and output. `{grpc_inference}` is a port, `{tls_…}` one of the server with TLS."""
        ports = {place: str(self.plain.port(place)) for place in PLACES}
        secure = {f"tls_{place}": str(self.tls.port(place)) for place in PLACES}
        try:
            status = cli.main([word.format(**ports, **secure, certificate=self.certificate) for word in words])
        except SystemExit as end:
            status = int(str(end.code or 0))
        printed = self.capsys.readouterr()
        return status, printed.out + printed.err

    def http(self, method: str, place: str, path: str) -> str:
        return httpx.request(method, f"http://127.0.0.1:{self.plain.port(place)}{path}").text


@pytest.fixture(scope="module")
def servers(server_of: Any, probe_handler: Path, certificates: Path) -> Iterator[tuple[Any, Any, Path]]:
    secure = {
        "certificate_file": certificates / "own.crt",
        "private_key_file": certificates / "own.key",
        "enable_grpc_ssl": "true",
    }
    addresses = {f"{api}_address": "https://127.0.0.1:0" for api in ("inference", "management")}
    with server_of({"probe": (probe_handler, "")}) as plain, server_of({}, **secure, **addresses) as tls:
        yield plain, tls, certificates / "own.crt"


@pytest.fixture
def desk(servers: tuple[Any, Any, Path], capsys: pytest.CaptureFixture[str]) -> Desk:
    return Desk(*servers, capsys)


def client_says(place: str) -> Callable[[Desk], str]:
    def ask(desk: Desk) -> str:
        with pytest.raises(CallFailed) as failure, Client(f"127.0.0.1:{desk.plain.port(place)}") as client:
            client.ready()
        return str(failure.value)

    return ask


MISTAKES: tuple[tuple[str, Callable[[Desk], str], tuple[str, ...]], ...] = (
    (
        "a command at an HTTP port",
        lambda desk: desk.torchserve("list", "--management-port", "{http_management}"),
        ("answers, but not gRPC", "HTTP API", "The gRPC ports are 7070 and 7071", "--management-port"),
    ),
    (
        "the management API at the inference port",
        lambda desk: desk.torchserve("list", "--management-port", "{grpc_inference}"),
        ("ListModels is unimplemented", "have ports of their own", "--management-port (7071)"),
    ),
    (
        "the inference API at the management port",
        lambda desk: desk.torchserve("ping", "--inference-port", "{grpc_management}"),
        ("Ping is unimplemented", "have ports of their own", "--inference-port (7070)"),
    ),
    (
        "a command without TLS at a server with TLS",
        lambda desk: desk.torchserve("list", "--management-port", "{tls_grpc_management}"),
        ("Does it speak TLS? Name its authority's certificate with --ca-file",),
    ),
    (
        "a browser at a port of gRPC",
        lambda desk: desk.http("GET", "grpc_inference", "/predictions/m"),
        ('"code": 404', "This is an address for gRPC", "inference_address and management_address (8080, 8081)"),
    ),
    (
        "http:// at an address of https://",
        lambda desk: desk.torchserve("top", "--once", "--url", "http://127.0.0.1:{tls_http_management}"),
        ("if it speaks TLS, write https:// instead of http://",),
    ),
    (
        "a certificate that nobody has signed",
        lambda desk: desk.torchserve("top", "--once", "--url", "https://127.0.0.1:{tls_http_management}"),
        ("its certificate isn't trusted: self", "--ca-file"),
    ),
    (
        "top at the inference address",
        lambda desk: desk.torchserve("top", "--once", "--url", "http://127.0.0.1:{http_inference}"),
        ("has no console: it isn't torchrelay's management address",),
    ),
    (
        "a model misspelt",
        lambda desk: desk.torchserve("describe", "prob", "--management-port", "{grpc_management}"),
        ("NOT_FOUND: Model not found: prob; did you mean probe? Models here: probe.",),
    ),
    (
        "a version that isn't there",
        lambda desk: desk.torchserve("describe", "probe", "--version", "9", "--management-port", "{grpc_management}"),
        ("Model version: 9 does not exist for model: probe. Versions of probe: 1.0.",),
    ),
    (
        "the Python client at an HTTP port",
        client_says("http_inference"),
        ("it isn't gRPC that answers there, but HTTP", "7070"),
    ),
)


@pytest.mark.parametrize(("make", "parts"), [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_told_with_what_to_do(desk: Desk, make: Callable[[Desk], str], parts: tuple[str, ...]) -> None:
    text = make(desk)
    assert [part for part in parts if part not in text] == [], text


def test_commands_go_past_a_proxy(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of a proxy, which are set for the whole company, are for addresses elsewhere."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for words in (
        ["list", "--management-port", "{grpc_management}"],
        ["top", "--once", "--url", "http://127.0.0.1:{http_management}"],
    ):
        assert desk.run(*words)[0] == 0


def test_https_where_nobody_speaks_tls(desk: Desk) -> None:
    """With a stand-in for the server, whose patience with such a client is ten seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(GUARD_S)

        def hang_up() -> None:
            connection, _ = listening.accept()
            connection.settimeout(GUARD_S)
            connection.recv(1 << 16)
            connection.close()

        answering = threading.Thread(target=hang_up)
        answering.start()
        text = desk.torchserve("top", "--once", "--url", f"https://127.0.0.1:{listening.getsockname()[1]}")
        answering.join(GUARD_S)
    assert "it doesn't seem to speak TLS: write http:// instead of https://" in text
