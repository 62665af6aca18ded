"""What a frontend keeps of the models that it borrows workers for."""

from __future__ import annotations

import gc
import socket
import weakref
from types import SimpleNamespace
from typing import Any, cast

from ts.protocol.decoder import Decoder
from ts.protocol.frames import CALL_ID_MIN, Cancel, Load
from ts_frontend.frontends.lending import Borrowing
from ts_frontend.job import Ledger
from ts_frontend.models.model import Model
from ts_frontend.scheduling.batcher import Policy
from ts_frontend.scheduling.queues import JobQueue


class Served:
    """As much of a model as its lenders use while it has no requests."""

    def __init__(self) -> None:
        self.name, self.version = "who", "1.0"
        self.ledger, self.guests, self.queue = Ledger(), Ledger(), JobQueue(Policy())
        plan = SimpleNamespace(repeats=None)
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
