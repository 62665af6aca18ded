"""Real workers that die, fail and grow: the requests that idempotent models run again, and replaced workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest

from support import until

HANDLER = """
import json, os, signal, time

kept = []

def ask_of(row):
    return json.loads(bytes(row.get("data") or row.get("body")))

def handle(data, context):
    if data is None:
        return None
    asks = [ask_of(row) for row in data]
    for ask in asks:
        with open(ask["ran"], "a") as file:
            file.write(f"{os.getpid()}\\n")
    for ask in asks:
        if ask.get("until"):
            while not os.path.exists(ask["until"]):
                time.sleep(0.005)
        if ask.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if ask.get("grow"):
            kept.append(bytearray(os.urandom(1 << 20) * ask["grow"]))
            time.sleep(60)
        if ask.get("raise"):
            raise ValueError("a bad one")
    return [str(len(asks))] * len(asks)
"""


@pytest.fixture(scope="module")
def server(server_of: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    models = {
        "steady": (HANDLER, "idempotent: true\n"),
        "batching": (HANDLER, "idempotent: true\nbatchSize: 4\nmaxBatchDelay: 60000\n"),
    }
    models["recycled"] = (HANDLER, "recycleAfterRequests: 20\nminWorkers: 2\n")
    models["limited"] = (HANDLER, "workerMemoryMax: 256MiB\n")
    with server_of(models, metrics_mode="prometheus", lone_requests_wait="true") as running:
        yield running


def ran(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_an_idempotent_models_request_outlives_its_worker_and_a_killer_is_quarantined(
    server: Any, tmp_path: Path
) -> None:
    runs, go = tmp_path / "runs", tmp_path / "go"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.predict, "steady", {"ran": str(runs), "until": str(go)})
        until(lambda: ran(runs))
        os.kill(int(ran(runs)[0]), signal.SIGKILL)
        until(lambda: len(ran(runs)) == 2)
        go.touch()
        assert answer.result() == b"1"
    assert len(set(ran(runs))) == 2, "on another worker"

    killer = tmp_path / "killer"
    with pytest.raises(grpc.RpcError) as refused:
        server.predict("steady", {"ran": str(killer), "kill": True})
    assert refused.value.code() is grpc.StatusCode.INTERNAL
    assert "Two workers died while they ran this request" in refused.value.details()
    assert len(set(ran(killer))) == 2
    assert server.predict("steady", {"ran": str(runs)}) == b"1"

    assert server.metric("ts_repeated_requests_total", model_name="steady", reason="worker_died") == 2
    assert server.metric("ts_quarantined_requests_total", model_name="steady") == 1
    assert "runs once more: worker " in server.log and "is not run again: worker " in server.log
    assert server.describe("steady")["idempotent"] is True


def test_a_batch_that_raises_is_halved_until_the_culprit_fails_alone(server: Any, tmp_path: Path) -> None:
    files = [tmp_path / f"runs{number}" for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = [
            pool.submit(server.predict, "batching", {"ran": str(file), "raise": number == 2})
            for number, file in enumerate(files)
        ]
        for number, answer in enumerate(answers):
            if number != 2:
                assert answer.result() in (b"1", b"2")
        with pytest.raises(grpc.RpcError, match="Prediction failed"):
            answers[2].result()
    assert all(2 <= len(ran(file)) <= 3 for file in files) and len(ran(files[2])) == 3
    assert server.metric("ts_repeated_requests_total", model_name="batching", reason="batch_failed") == 6
    server.wait_for_log("4 requests that failed together (Prediction failed")


def test_workers_that_are_replaced_after_some_requests_lose_none(server: Any, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    count = 0
    with ThreadPoolExecutor(8) as pool:

        def replaced() -> bool:
            nonlocal count
            asked = [pool.submit(server.predict, "recycled", {"ran": str(runs)}) for _ in range(40)]
            count += len(asked)
            assert all(one.result() == b"1" for one in asked)
            return bool(server.metric("ts_replaced_workers_total", model_name="recycled", reason="requests") >= 4)

        until(replaced)
    assert len(ran(runs)) == count and len(set(ran(runs))) >= 5
    until(lambda: len(server.worker_pids("recycled")) == 2)
    told = server.describe("recycled")
    assert told["lastWorkerReplacement"]["reason"].endswith("requests (recycleAfterRequests: 20)")
    assert "lastWorkerFailure" not in told
    server.wait_for_log("of recycled_1.0 is replaced: it has answered ")


def test_a_worker_above_its_memory_is_ended_with_the_reason(server: Any, tmp_path: Path) -> None:
    with pytest.raises(grpc.RpcError, match=r"It used \d+ MiB of memory \(workerMemoryMax: 256 MiB\)"):
        server.predict("limited", {"ran": str(tmp_path / "runs"), "grow": 300})
    assert server.predict("limited", {"ran": str(tmp_path / "runs")}) == b"1"
    assert "workerMemoryMax" in server.describe("limited")["lastWorkerFailure"]["reason"]
    assert server.metric("ts_replaced_workers_total", model_name="limited", reason="memory_max") == 1
