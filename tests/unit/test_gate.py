"""The gate for workers of other machines, with guests that say nothing and without descriptors."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ts_frontend.workers.cluster.link
from support import GUARD_S, self_signed, until_async
from ts.protocol.secure import PeerCertificate, SecureSocket, client_context
from ts_frontend.workers.cluster.link import GUESTS_MAX, Gate

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
DESCRIPTORS = 24


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> PeerCertificate:
    """One that is its own authority."""
    folder = tmp_path_factory.mktemp("certificates")
    self_signed(folder, "certificate", "key")
    text = (folder / "certificate").read_text()
    return PeerCertificate(text, text, (folder / "key").read_text())


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + DESCRIPTORS, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def greet(port: int, certificate: PeerCertificate) -> dict[str, Any]:
    """A worker that connects with the token: what the gate answers."""
    plain = socket.create_connection(("127.0.0.1", port), timeout=GUARD_S)
    with client_context(certificate).wrap_socket(plain) as secured:
        secured.sendall(json.dumps({"token": "expected", "role": "worker"}).encode() + b"\n")
        return dict(json.loads(secured.recv(1000)))


async def test_silent_guests_keep_no_worker_out(certificate: PeerCertificate, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ts_frontend.workers.cluster.link")
    welcomed: list[SecureSocket] = []
    gate = Gate(certificate, "127.0.0.1", 0)
    gate.expect("expected", lambda role, sock, hello: welcomed.append(sock))
    guests: list[socket.socket] = []
    try:
        for _ in range(GUESTS_MAX + 20):
            guests.append(socket.create_connection(("127.0.0.1", gate.port), timeout=GUARD_S))
            await asyncio.sleep(0)
        assert "now" in await asyncio.to_thread(greet, gate.port, certificate)
        assert len(welcomed) == 1
        assert await asyncio.to_thread(guests[0].recv, 1) == b"", "the oldest silent one was closed"
        assert len(gate._guests) <= GUESTS_MAX
    finally:
        for guest in guests:
            guest.close()
        for sock in welcomed:
            sock.close()
        gate.close()
    assert sum("the oldest are closed" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system lists no descriptors")
@pytest.mark.usefixtures("few_descriptors")
async def test_without_descriptors_the_gate_waits(
    certificate: PeerCertificate, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither spins nor floods the log, and accepts as soon as there is room."""
    monkeypatch.setattr(ts_frontend.workers.cluster.link, "PAUSE_S", 0.2)
    caplog.set_level(logging.WARNING, "ts_frontend.workers.cluster.link")
    gate = Gate(certificate, "127.0.0.1", 0)
    gate.expect("expected", lambda role, sock, hello: sock.close())
    holders, guest = [], None
    try:
        while True:
            try:
                holders.append(os.dup(0))
            except OSError:
                break
        os.close(holders.pop())
        guest = socket.create_connection(("127.0.0.1", gate.port), timeout=GUARD_S)  # has the last one
        await until_async(lambda: gate._paused is not None)
        begun_s, computed_s = time.monotonic(), time.process_time()
        await until_async(lambda: time.monotonic() - begun_s > 1.0)
        assert time.process_time() - computed_s < 0.5 * (time.monotonic() - begun_s)
        guest.close()
        while holders:
            os.close(holders.pop())
        assert "now" in await asyncio.to_thread(greet, gate.port, certificate)
    finally:
        for holder in holders:
            os.close(holder)
        gate.close()
    assert sum("can't be accepted" in record.getMessage() for record in caplog.records) == 1
