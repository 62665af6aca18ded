"""The client while its server restarts, and behind TLS, client certificates and keys."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support import GUARD_S, free_port
from torchrelay_client import TLS, CallFailed, Client, Refused, Retry, Unavailable

PATIENT = Retry(attempts_max=1000, first_s=0.05, most_s=0.2)


def test_a_server_that_restarts(tmp_path: Path, serving: Callable[..., Any], stocked: Callable[[Path], Path]) -> None:
    store, port = stocked(tmp_path), free_port()

    def begin() -> Any:
        more = {"grpc_inference_port": port, "default_workers_per_model": 1}
        server = serving(tmp_path, store, more, ["--ncs", "--models", "upper"]).wait_started()
        server.scale("upper", 1)
        return server

    enough, stop = threading.Event(), threading.Event()

    def call_on(client: Client) -> int:
        """Calls until told to stop; how many were answered."""
        for at in range(1_000_000):
            if stop.is_set():
                return at
            assert client.infer("upper", {"text": f"n{at}"}, idempotent=True).text() == f"N{at}"
            if at == 20:
                enough.set()
        raise AssertionError("nobody stopped it")

    server = begin()
    try:
        with (
            Client(f"127.0.0.1:{port}", retry=PATIENT, timeout_s=GUARD_S) as client,
            Client(f"127.0.0.1:{port}", retry=PATIENT, timeout_s=GUARD_S) as careful,
            ThreadPoolExecutor(4) as pool,
        ):
            calling = [pool.submit(call_on, client) for _ in range(4)]
            assert enough.wait(GUARD_S)
            server.terminate()
            with pytest.raises(Unavailable) as caught:
                careful.infer("upper", {"text": "once"})
            assert caught.value.attempts == 1
            server = begin()
            before = client.infer("upper", {"text": "back"}, idempotent=True).text()
            stop.set()
            assert (before, all(one.result(GUARD_S) > 20 for one in calling)) == ("BACK", True)
            assert careful.live()
    finally:
        stop.set()
        server.terminate()


def test_nobody_there() -> None:
    few = Retry(attempts_max=3, first_s=0.01, most_s=0.02)
    with Client(f"127.0.0.1:{free_port()}", retry=few, timeout_s=GUARD_S) as client:
        with pytest.raises(Unavailable, match="tried 3 times") as caught:
            client.live()
        assert caught.value.attempts == 3
        with pytest.raises(Unavailable) as caught:
            next(client.stream("upper", {"text": "x"}))
        assert caught.value.attempts == 1


def test_tls_with_client_certificates_and_a_key(
    tmp_path: Path, serving: Callable[..., Any], stocked: Callable[[Path], Path], certificates: Path
) -> None:
    """Promises 001-12, 001-13."""
    secured = {
        "enable_grpc_ssl": "true",
        "certificate_file": certificates / "server.crt",
        "private_key_file": certificates / "server.key",
        "client_ca_file": certificates / "ca.crt",
        "disable_token_authorization": "false",
        "token_path": tmp_path / "keys",
        "load_models": "upper",
    }
    (tmp_path / "keys").mkdir()
    for name in ("inference", "management", "API"):
        (tmp_path / "keys" / name).write_text(f"key-of-{name}\n")
    server = serving(tmp_path, stocked(tmp_path), secured, ["--ncs"])
    ours = TLS(certificates / "ca.crt", certificates / "client.crt", certificates / "client.key")
    try:
        server.wait_started()
        patient: dict[str, Any] = {"timeout_s": GUARD_S, "retry": PATIENT, "idempotent": True}
        with Client(server.inference, tls=ours, token="key-of-inference", **patient) as client:
            assert client.predict("upper", "secret") == b"SECRET"
        with Client(server.inference, tls=ours, token="wrong") as client, pytest.raises(Refused, match="Token"):
            client.predict("upper", "x")
        once: dict[str, Any] = {"token": "key-of-inference", "retry": None, "timeout_s": GUARD_S}
        for tls in (None, TLS(certificates / "ca.crt")):
            with Client(server.inference, tls=tls, **once) as client, pytest.raises(Unavailable):
                client.predict("upper", "x")
        renamed = TLS(certificates / "ca.crt", ours.certificate, ours.key, server_name="elsewhere")
        with Client(server.inference, tls=renamed, **once) as client, pytest.raises(CallFailed):
            client.predict("upper", "x")
    finally:
        server.terminate()


def test_a_certificate_without_its_key() -> None:
    with pytest.raises(ValueError, match="belong together"):
        Client("localhost:1", tls=TLS(certificate="client.crt"))
    with pytest.raises(ValueError, match="channels=0"):
        Client("localhost:1", channels=0)
