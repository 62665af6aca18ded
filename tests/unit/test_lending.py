"""What frontends keep of each other, and of the models that they lend workers for."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from support import until_async
from ts.protocol.decoder import Decoder
from ts.protocol.frames import CALL_ID_MIN, Cancel, Credit, Load, encode_bytes
from ts_frontend.config.table import ServerConfig
from ts_frontend.frontends import lead
from ts_frontend.frontends.lending import Borrowing, Lending, connected
from ts_frontend.job import Job, Ledger
from ts_frontend.models.model import Model, Registry
from ts_frontend.scheduling.batcher import Policy
from ts_frontend.scheduling.queues import JobQueue


class Served:
    """As much of a model as its lenders use while it has no requests."""

    def __init__(self) -> None:
        self.name, self.version = "who", "1.0"
        self.ledger, self.guests, self.queue = Ledger(), Ledger(), JobQueue(Policy())
        plan = SimpleNamespace(repeats=None)
        self.resident = None
        self.pool = SimpleNamespace(lenders=(), slots=(), ready_count=0, plan=plan, lent=lambda: None)


async def test_models_that_are_gone_are_forgotten_at_both_ends() -> None:
    ours, theirs = socket.socketpair()
    borrowing = Borrowing(1, ours, 1 << 20, lambda one: None)
    seen: list[weakref.ref[Any]] = []
    for _ in range(3):
        served = Served()
        seen.append(weakref.ref(served))
        borrowing.follow([cast(Model, served)])
        del served
    borrowing.follow([])
    borrowing.flush()
    gc.collect()
    assert [one() for one in seen] == [None] * 3
    told = Decoder(1 << 20).feed(theirs.recv(1 << 16))
    assert {one.settings["number"] for one in told if isinstance(one, Load)} == {0, 1, 2}
    assert {one.job_id - CALL_ID_MIN for one in told if isinstance(one, Cancel)} == {0, 1, 2}
    borrowing.close()
    theirs.close()


async def test_frontends_that_come_again_and_again_cost_a_job_nothing(tmp_path: Path) -> None:
    registry, served = Registry(), Served()
    registry.add(cast(Model, served))
    lending = Lending(registry, tmp_path / "f0", 1 << 20, 1)
    loop = asyncio.get_running_loop()
    asks = encode_bytes(Load({"number": 0, "name": "who", "version": "1.0"})) + encode_bytes(Credit(CALL_ID_MIN, 1))
    for _ in range(sys.getrecursionlimit()):
        sock = await connected(tmp_path / "f0")
        await loop.sock_sendall(sock, asks)
        assert await loop.sock_recv(sock, 1)  # it has read them
        sock.close()
    assert served.ledger.on_left is not None
    served.ledger.on_left(Job(served.ledger, (), "1"))
    await lending.close()


async def test_a_connection_that_ends_between_living_frontends_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lead, "AGAIN_S", 0.01)
    manager = cast(Any, SimpleNamespace(registry=Registry()))
    first, second = (lead.Neighbours(ServerConfig(), manager, number, tmp_path) for number in (0, 1))
    await first.meet([1])
    (before,) = first._borrowing.values()
    (link,) = await until_async(lambda: second._lending._links)
    link.close()
    await until_async(lambda: first._borrowing.get(1) not in (None, before))
    await first.close()
    await second.close()
