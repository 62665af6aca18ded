"""TLS, client certificates and renewed certificates, with certificates made here."""

from __future__ import annotations

import contextlib
import queue
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from support import GUARD_S, until


def server_files(certificates: Path, **more: str) -> dict[str, str]:
    files = {"certificate_file": "server.crt", "key_file": "server.key", **more}
    return {key: str(certificates / name) for key, name in files.items()}


def test_tls(run_server, connect, certificates):
    trusted = grpc.ssl_channel_credentials((certificates / "ca.crt").read_bytes())
    with run_server({"name": "tls", "tls": server_files(certificates)}) as server:
        assert connect(server, credentials=trusted).unary("Unary", b"secret") == b"secret"
        big = bytes(3_000_000)
        assert connect(server, credentials=trusted).unary("Unary", big) == big
        with pytest.raises(grpc.RpcError) as caught:
            connect(server).unary("Unary", b"plain", timeout=10)
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


# --- what is spoken


def presented(port: int) -> bytes:
    """The certificate that a new connection gets, DER."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(("127.0.0.1", port), GUARD_S) as link, context.wrap_socket(link) as secured:
        found = secured.getpeercert(binary_form=True)
        assert found
        return found


def until_presented(port: int, certificate: Path) -> None:
    wanted = ssl.PEM_cert_to_DER_cert(certificate.read_text())
    until(lambda: presented(port) == wanted, "the new certificate")


def renew(certificates: Path, folder: Path, name: str) -> None:
    for end in ("crt", "key"):
        shutil.copy(certificates / f"{name}.{end}", folder / "new")
        (folder / "new").rename(folder / f"server.{end}")


def test_a_renewed_certificate_loses_no_call(run_server, connect, certificates, tmp_path):
    """A stream that runs, an idle connection and calls that go on all live through several renewals."""
    renew(certificates, tmp_path, "server")
    files = {"certificate_file": str(tmp_path / "server.crt"), "key_file": str(tmp_path / "server.key")}
    trusted = grpc.ssl_channel_credentials((certificates / "ca.crt").read_bytes())
    with run_server({"name": "tls", "tls": {**files, "check_s": 0.05}}) as server, contextlib.ExitStack() as ends:
        stream, answered = connect(server, credentials=trusted), 0
        talk = ends.enter_context(contextlib.closing(Talk()))
        echoes = stream.bidi("Bidi", talk.requests())
        assert talk.say(b"before", echoes) == b"before"
        calling = connect(server, credentials=trusted)
        for name in ("client", "server", "client"):
            renew(certificates, tmp_path, name)
            wanted = ssl.PEM_cert_to_DER_cert((certificates / f"{name}.crt").read_text())
            end_s = time.monotonic() + GUARD_S
            while presented(server.port) != wanted:
                assert calling.unary("Unary", b"x") == b"x"
                answered += 1
                assert time.monotonic() < end_s, "the new certificate never came"
            assert calling.unary("Unary", b"y") == b"y"
            assert talk.say(name.encode(), echoes) == name.encode()
        assert answered
        talk.close()
        assert list(echoes) == []


class Talk:
    """The requests of a stream, one at a time."""

    def __init__(self) -> None:
        self._words: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def requests(self) -> Iterator[bytes]:
        return iter(self._words.get, None)

    def say(self, word: bytes, answers: Iterator[bytes]) -> bytes:
        """The answer, which comes twice."""
        self._words.put(word)
        first, second = next(answers), next(answers)
        assert first == second
        return first

    def close(self) -> None:
        self._words.put(None)


def test_a_bad_renewal_changes_nothing(run_server, connect, certificates, tmp_path):
    renew(certificates, tmp_path, "server")
    files = {"certificate_file": str(tmp_path / "server.crt"), "key_file": str(tmp_path / "server.key")}
    with run_server({"name": "tls", "tls": {**files, "check_s": 0.05}}) as server:
        shutil.copy(certificates / "client.key", tmp_path / "server.key")  # the certificate isn't there yet
        for _ in range(10):
            assert presented(server.port) == ssl.PEM_cert_to_DER_cert((certificates / "server.crt").read_text())
        shutil.copy(certificates / "client.crt", tmp_path / "server.crt")
        until_presented(server.port, certificates / "client.crt")


def test_a_drain_after_a_renewal_waits_for_old_connections(run_server, connect, certificates, tmp_path):
    renew(certificates, tmp_path, "server")
    files = {"certificate_file": str(tmp_path / "server.crt"), "key_file": str(tmp_path / "server.key")}
    trusted = grpc.ssl_channel_credentials((certificates / "ca.crt").read_bytes())
    with run_server({"name": "tls", "tls": {**files, "check_s": 0.05}}) as server, contextlib.ExitStack() as ends:
        talk = ends.enter_context(contextlib.closing(Talk()))
        echoes = connect(server, credentials=trusted).bidi("Bidi", talk.requests())
        assert talk.say(b"1", echoes) == b"1"
        renew(certificates, tmp_path, "client")
        until_presented(server.port, certificates / "client.crt")
        server.drain(GUARD_S)
        assert talk.say(b"2", echoes) == b"2"
        talk.close()
        assert list(echoes) == []
        assert server.end()[1] == 0
