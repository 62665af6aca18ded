"""Stateful sequences with real workers: order, the worker they stay on, limits, and their ends."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from support import GUARD_S, until
from ts_frontend.protos.inference_pb2 import PredictionResponse, PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

HANDLER = Path(__file__).parent.parent / "handlers" / "sequence_sums.py"
ID = "ts_request_sequence_id"
NO_WORKER = (
    "has no worker to serve inference request. Please use scale workers API to add workers. If this is a sequence"
)

CONFIG = """
sequenceBatching: true
sequenceMaxIdleMSec: {idle_ms}
maxNumSequence: {sequences}
maxSequenceJobQueueSize: {jobs}
batchSize: {batch}
minWorkers: {workers}
responseTimeout: 30
"""


def config(*, idle_ms: int = 60_000, sequences: int = 40, jobs: int = 40, batch: int = 4, workers: int = 1) -> str:
    return CONFIG.format(idle_ms=idle_ms, sequences=sequences, jobs=jobs, batch=batch, workers=workers)


MODELS = {
    "sums": config(workers=3),
    "single": config(batch=1),
    "few": config(sequences=2, jobs=1, batch=1),
    "brief": config(idle_ms=150, sequences=1),
    "plain": "batchSize: 4\n",
}


@pytest.fixture(scope="module")
def served(server_of: Any) -> Iterator[Any]:
    with server_of({name: (HANDLER, text) for name, text in MODELS.items()}) as server:
        yield server


@pytest.fixture
def client(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.http, timeout=GUARD_S) as client:
        yield client


class Ask:
    """Requests of one sequence; `known`: the names its answers had."""

    def __init__(self, client: httpx.Client, model: str, sequence: str = "") -> None:
        self.client, self.model, self.sequence = client, model, sequence

    def post(self, body: object, **headers: str) -> httpx.Response:
        named = {ID: self.sequence} if self.sequence else {}
        return self.client.post(f"/predictions/{self.model}", content=str(body), headers=named | headers)

    def __call__(self, body: object, **headers: str) -> dict[str, Any]:
        response = self.post(body, **headers)
        assert response.status_code == 200, response.text
        return dict(response.json())


def test_a_request_without_an_id_begins_a_sequence_whose_id_its_answer_tells(client: httpx.Client) -> None:
    response = Ask(client, "sums").post(1)
    sequence = response.headers[ID]
    assert sequence.startswith("ts-seq-")
    assert response.json()["start"] == "true"
    again = Ask(client, "sums", sequence)
    assert again(2)["numbers"] == [1, 2]
    assert again("=")["start"] is None
    again("=", ts_request_sequence_end="true")


def test_32_sequences_at_once_keep_their_order_and_their_worker(client: httpx.Client) -> None:
    def run(number: int) -> tuple[set[int], set[int]]:
        ask = Ask(client, "sums", f"many-{number}")
        pids, sizes = set(), set()
        for value in range(20):
            answer = ask(value, **({"ts_request_sequence_end": "true"} if value == 19 else {}))
            assert answer["numbers"] == list(range(value + 1))
            assert answer["sequence"] == ask.sequence
            pids.add(answer["pid"])
            sizes.add(answer["batch"])
        return pids, sizes

    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(run, range(32)))
    assert all(len(pids) == 1 for pids, _ in results)
    assert len(set.union(*(pids for pids, _ in results))) == 3  # all three workers have some
    assert max(max(sizes) for _, sizes in results) > 1  # different sequences share batches


def test_requests_of_a_sequence_that_come_together_run_one_by_one_in_order(
    served: Any, client: httpx.Client, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with ThreadPoolExecutor(12) as pool:
        first = pool.submit(Ask(client, "single", "burst"), f"wait:{gate}")
        until(Path(f"{gate}.begun").exists)
        others = []
        for value in range(10):
            others.append(pool.submit(Ask(client, "single", "burst"), value))
            until(lambda: waiting(served, "single") == len(others))
        gate.touch()
        assert first.result()["numbers"] == []
        assert [each.result()["numbers"] for each in others] == [list(range(value + 1)) for value in range(10)]


def test_more_sequences_or_requests_than_allowed_are_refused_at_once(
    served: Any, client: httpx.Client, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(Ask(client, "few", "a"), f"wait:{gate}")
        until(Path(f"{gate}.begun").exists)
        other = pool.submit(Ask(client, "few", "b"), 1)
        until(lambda: waiting(served, "few") == 1)
        for sequence, said in (("c", "maxNumSequence"), ("b", "maxSequenceJobQueueSize")):
            refused = Ask(client, "few", sequence).post(1)
            assert (refused.status_code, refused.json()["type"]) == (503, "ServiceUnavailableException")
            assert NO_WORKER in refused.json()["message"]
            assert said in refused.json()["message"]
        with grpc.insecure_channel(served.inference) as channel, pytest.raises(grpc.RpcError) as error:
            InferenceAPIsServiceStub(channel).Predictions(message("few", "c", "1"), timeout=GUARD_S)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        gate.touch()
        running.result(), other.result()
    for sequence in "ab":
        Ask(client, "few", sequence)("=", ts_request_sequence_end="true")
    assert Ask(client, "few", "c")(5, ts_request_sequence_end="true")["numbers"] == [5]


def test_an_idle_sequence_ends_and_makes_room_and_begins_again_by_its_id(served: Any, client: httpx.Client) -> None:
    first = Ask(client, "brief", "first")(1)
    until(lambda: Ask(client, "brief", "second").post("=").status_code == 200)
    assert first["numbers"] == [1]
    until(lambda: Ask(client, "brief", "first").post("=").status_code == 200)
    with grpc.insecure_channel(served.inference) as channel:
        stub = InferenceAPIsServiceStub(channel)
        for name in ("second", "first"):  # as TorchServe's own example does, with the ids of its last run
            request = PredictionsRequest(model_name="brief", sequence_id=name, input={"data": b"5"})
            until(functools.partial(is_taken, stub, request), name)


def is_taken(stub: InferenceAPIsServiceStub, request: PredictionsRequest) -> bool:
    (answer,) = stub.StreamPredictions2(iter([request]), timeout=GUARD_S)
    return not answer.status.message


def test_when_the_worker_dies_its_sequences_are_over_and_callers_are_told(
    served: Any, client: httpx.Client, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    bystander = Ask(client, "single", "idle-one")
    assert bystander(1)["numbers"] == [1]
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(Ask(client, "single", "dying").post, f"wait:{gate}")
        until(Path(f"{gate}.begun").exists)
        behind = pool.submit(Ask(client, "single", "dying").post, 2)
        until(lambda: waiting(served, "single") == 1)
        (pid,) = served.worker_pids("single")
        os.kill(pid, signal.SIGKILL)
        assert running.result().status_code == 507
        over = behind.result()
    assert (over.status_code, over.json()["type"]) == (503, "ServiceUnavailableException")
    assert over.json()["message"].startswith("Sequence dying is over, the worker that held it has ended")
    told = bystander.post(2)  # it had nothing running: its next request learns it
    assert (told.status_code, "start it again" in told.json()["message"]) == (503, True)
    answer = bystander(3, ts_request_sequence_start="true", ts_request_sequence_end="true")
    assert (answer["numbers"], answer["pid"] != pid) == ([3], True)


def test_scaling_down_ends_what_the_surplus_worker_held(served: Any, client: httpx.Client) -> None:
    asks = [Ask(client, "sums", f"scaled-{number}") for number in range(6)]
    held = {ask.sequence: ask(1)["pid"] for ask in asks}
    assert len(set(held.values())) == 3
    served.scale("sums", 1)
    (left,) = served.worker_pids("sums")
    for ask in asks:
        response = ask.post(2)
        assert response.status_code == (200 if held[ask.sequence] == left else 503)
    served.scale("sums", 3)
    for ask in asks:
        ask.post("=", ts_request_sequence_end="true")


def test_grpc_streams_carry_sequences(served: Any) -> None:
    """The recorded calls 328 to 331, where TorchServe itself ends with UNKNOWN or asks for an id."""
    with grpc.insecure_channel(served.inference) as channel:
        stub = InferenceAPIsServiceStub(channel)
        names = ["s1", "s2", "s1", "s2", "s1"]
        answers = talk(stub, [message("sums", name, str(n)) for n, name in enumerate(names)])
        found: dict[str, list[list[int]]] = {"s1": [], "s2": []}
        for answer in answers:
            found[answer.sequence_id].append(json.loads(answer.prediction)["numbers"])
        assert found == {"s1": [[0], [0, 2], [0, 2, 4]], "s2": [[1], [1, 3]]}
        (unnamed,) = talk(stub, [message("sums", None, "9")])
        assert unnamed.sequence_id.startswith("ts-seq-")
        (ended,) = talk(stub, [message("sums", "s1", "=", ts_request_sequence_end=b"true")])
        assert json.loads(ended.prediction)["end"] == "true"
        (over,) = talk(stub, [message("sums", "s1", "=")])
        assert (over.status.code, "is over, its last request has come" in over.status.message) == (10, True)
        (anew,) = talk(stub, [message("sums", "s1", "=", ts_request_sequence_start=b"true")])
        assert (json.loads(anew.prediction)["start"], json.loads(anew.prediction)["end"]) == ("true", None)


#: Recorded calls of StreamPredictions2, most of which end with UNKNOWN there: the requests, and what is answered here.
RECORDED: dict[str, tuple[list[tuple[str, str | None, str]], list[tuple[int, str] | None]]] = {
    "328": ([("plain", None, "1"), ("plain", None, "2")], [None, None]),
    "329": ([("plain", "s1", "1")], [None]),
    "330": ([("nope", "s1", "1"), ("plain", "s1", "1")], [(5, "Model not found: nope"), None]),
    "331": ([("plain", "s1", "fail"), ("plain", "s1", "3")], [(13, "Prediction failed"), None]),
}


@pytest.mark.parametrize("name", RECORDED)
def test_streams_where_torchserves_break(served: Any, name: str) -> None:
    requests, expected = RECORDED[name]
    with grpc.insecure_channel(served.inference) as channel:
        answers = talk(InferenceAPIsServiceStub(channel), [message(*request) for request in requests])
    found = [
        (one.status.code, re.split(r": ValueError|\. Models here", one.status.message)[0])
        if one.HasField("status")
        else None
        for one in answers
    ]
    assert sorted(found, key=str) == sorted(expected, key=str)
    if name in ("328", "331"):  # of one sequence, or without one: in order
        assert found == expected


def test_describing_a_model_with_sequences_asks_its_handler_apart(served: Any) -> None:
    described = httpx.get(f"{served.http_management}/models/few?customized=true", timeout=GUARD_S).json()
    assert described[0]["stateful"] is True
    assert described[0]["customizedMetadata"]["ids"] == [""]


# --- helpers


def message(model: str, sequence: str | None, body: str, **inputs: bytes) -> PredictionsRequest:
    return PredictionsRequest(model_name=model, sequence_id=sequence, input={"data": body.encode(), **inputs})


def talk(stub: InferenceAPIsServiceStub, requests: Sequence[PredictionsRequest]) -> list[PredictionResponse]:
    return list(stub.StreamPredictions2(iter(requests), timeout=GUARD_S))


def waiting(served: Any, model: str) -> int:
    """Requests in the model's queue, as its description says."""
    return int(served.describe(model)["jobQueueStatus"]["pendingRequests"])
