"""TLS and client certificates, with certificates made here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import grpc
import pytest


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def issue(folder: Path, name: str) -> None:
    """A key and a certificate for 127.0.0.1, signed by the test's authority."""
    openssl(folder, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
    (folder / "extensions").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
            "-extfile", "extensions", "-days", "2", "-out", f"{name}.crt")  # fmt: skip


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    openssl(folder, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-subj", "/CN=test authority", "-days", "2", "-keyout", "ca.key", "-out", "ca.crt")  # fmt: skip
    for name in ("server", "client"):
        issue(folder, name)
    return folder


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


def test_client_certificates(run_server, connect, certificates):
    authority = (certificates / "ca.crt").read_bytes()
    key, chain = (certificates / "client.key").read_bytes(), (certificates / "client.crt").read_bytes()
    files = server_files(certificates, client_ca_file="ca.crt")
    with run_server({"name": "mtls", "tls": files}) as server:
        known = grpc.ssl_channel_credentials(authority, key, chain)
        assert connect(server, credentials=known).unary("Unary", b"x") == b"x"
        with pytest.raises(grpc.RpcError) as caught:
            connect(server, credentials=grpc.ssl_channel_credentials(authority)).unary("Unary", b"x", timeout=10)
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def test_files_that_are_missing(start_server, certificates):
    files = {**server_files(certificates), "key_file": "/no/such.key"}
    assert "/no/such.key" in start_server({"name": "tls", "tls": files})["error"]
