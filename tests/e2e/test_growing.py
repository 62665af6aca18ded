"""A server whose models get as many workers as their load needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support import GUARD_S, until

#: A request runs until the file that it names is there.
GATED = """
import os, time

def handle(data, context):
    if data is None:
        return None
    for row in data:
        while not os.path.exists(bytes(row.get("data") or row.get("body")).decode()):
            time.sleep(0.005)
    return [str(os.getpid())] * len(data)
"""
AUTOSCALED = "minWorkers: 1\nmaxWorkers: 3\nautoscale: {targetQueue: 0, upAfter: 0.2, downAfter: 1}\n"


@pytest.fixture(scope="module")
def server(server_of: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    with server_of({"busy": (GATED, AUTOSCALED)}, metrics_mode="prometheus") as running:
        yield running


def test_requests_that_wait_bring_workers_and_quiet_ends_them(server: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    assert len(server.worker_pids("busy")) == 1
    assert server.describe("busy")["autoscale"]["active"] is True
    with ThreadPoolExecutor(9) as clients:
        answers = [clients.submit(server.predict, "busy", bytes(gate)) for _ in range(9)]
        until(lambda: len(server.worker_pids("busy")) == 3, "the most")
        gate.write_text("")
        assert len({answer.result(GUARD_S) for answer in answers}) > 1, "the new workers had a part in it"
    until(lambda: len(server.worker_pids("busy")) == 1, "the least")
    said = server.describe("busy")
    assert (said["minWorkers"], said["maxWorkers"]) == (1, 3)
    assert said["autoscale"]["lastDecision"]["to"] == 1
    assert "were busy in 1 s" in said["autoscale"]["lastDecision"]["reason"]
    http = httpx.get(f"{server.http_management}/models/busy").json()[0]
    assert http["autoscale"]["lastDecision"]["to"] == 1
    text = httpx.get(f"http://127.0.0.1:{server.port('http_metrics')}/metrics").text
    assert 'direction="up"' in text and "ts_wanted_workers{" in text
