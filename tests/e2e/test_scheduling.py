"""Job tickets, async communication, and requests that wait in vain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from support import GUARD_S, until
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
SUMS = Path(__file__).parent.parent / "handlers" / "sequence_sums.py"

#: As TorchServe's documentation has it: a class, `async def handle`, pieces on the way, and an engine that
#: `initialize` starts on the loop which is current then.
ENGINE = """
import asyncio
from ts.handler_utils.utils import send_intermediate_predict_response

class Engine:
    def initialize(self, context):
        self.arrived = 0
        self.all_here = asyncio.Event()
        self.ticks = asyncio.get_event_loop().create_task(self.engine())

    async def engine(self):
        while True:
            await asyncio.sleep(0.001)
            if self.arrived >= 16:
                self.all_here.set()

    async def handle(self, data, context):
        text = bytes(data[0].get("body") or data[0].get("data")).decode()
        self.arrived += 1
        send_intermediate_predict_response([f"{text} 1 "], context.request_ids, "ok", 200, context)
        await self.all_here.wait()
        send_intermediate_predict_response([f"{text} 2 "], context.request_ids, "ok", 200, context)
        return [f"{text} 3"]
"""

#: An async function that only a switch tells apart from an ordinary one.
WRAPPED = """
import asyncio

here = []
both = None

async def answer(data):
    global both
    both = both or asyncio.Event()
    here.append(1)
    if len(here) == 2:
        both.set()
    await both.wait()
    return ["both"] * len(data)

def handle(data, context):
    return None if data is None else answer(data)
"""

MODELS: dict[str, tuple[Path | str, str]] = {
    "ticket": (SUMS, (GOLDEN / "handlers" / "ticket_cfg.yaml").read_text()),
    "tickets": (SUMS, "useJobTicket: true\nminWorkers: 2\n"),
    "engine": (ENGINE, "asyncCommunication: true\nminWorkers: 1\n"),
    "wrapped": (WRAPPED, "asyncCommunication: true\nminWorkers: 1\n"),
    "hasty": (SUMS, "clientTimeoutInMills: 300\njobQueueSize: 1\nminWorkers: 1\n"),
}


@pytest.fixture(scope="module")
def served(server_of: Any) -> Iterator[Any]:
    with server_of(MODELS) as server:
        yield server


def recorded(name: str) -> Any:
    """The JSON body of a recorded answer."""
    (path,) = GOLDEN.glob(f"{name}_*.txt")
    text = path.read_text()
    return json.loads(text[text.index("\n{") :])


def post(served: Any, model: str, body: str) -> httpx.Response:
    return httpx.post(f"{served.http}/predictions/{model}", content=body, timeout=GUARD_S)


class Gate:
    """Requests that occupy workers until `open`."""

    def __init__(self, served: Any, model: str, directory: Path, count: int = 1) -> None:
        self._paths = [directory / f"{model}-{number}" for number in range(count)]
        self._pool = ThreadPoolExecutor(count)
        self.answers = []
        for path in self._paths:
            self.answers.append(self._pool.submit(post, served, model, f"wait:{path}"))
            until(Path(f"{path}.begun").exists)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._paths:
            path.touch()
        self._pool.shutdown()


def test_with_tickets_a_busy_worker_means_no_at_once(served: Any, tmp_path: Path) -> None:
    served.unregister("ticket")
    registered = httpx.post(f"{served.http_management}/models?url=ticket", timeout=GUARD_S)
    assert registered.json() == recorded("232")
    with Gate(served, "ticket", tmp_path) as gate:
        busy = post(served, "ticket", "1")
        assert (busy.status_code, busy.json()) == (503, recorded("233"))
        with grpc.insecure_channel(served.inference) as channel, pytest.raises(grpc.RpcError) as error:
            request = PredictionsRequest(model_name="ticket", input={"data": b"1"})
            InferenceAPIsServiceStub(channel).Predictions(request, timeout=GUARD_S)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.value.details() == recorded("233")["message"]
    assert gate.answers[0].result().status_code == 200
    assert post(served, "ticket", "2").status_code == 200


def test_there_are_as_many_tickets_as_idle_workers(served: Any, tmp_path: Path) -> None:
    with Gate(served, "tickets", tmp_path, 2) as gate:
        assert post(served, "tickets", "1").status_code == 503
    assert [answer.result().status_code for answer in gate.answers] == [200, 200]


def test_async_communication_runs_many_requests_at_once_with_the_engine_of_initialize(served: Any) -> None:
    def pieces(number: int) -> bytes:
        url = f"{served.http}/predictions/engine"
        with httpx.stream("POST", url, content=f"r{number}", timeout=GUARD_S) as response:
            assert response.headers["ts_stream_next"] == "true"
            return b"".join(response.iter_raw())

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(pieces, range(16)))
    assert answers == [f"r{n} 1 r{n} 2 r{n} 3".encode() for n in range(16)]


def test_async_communication_makes_a_wrapped_coroutine_function_async(served: Any) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert [answer.text for answer in pool.map(lambda _: post(served, "wrapped", "x"), range(2))] == ["both"] * 2


def test_what_waits_is_answered_at_its_timeout_and_makes_room(served: Any, tmp_path: Path) -> None:
    with Gate(served, "hasty", tmp_path):
        late = post(served, "hasty", "1")  # while the worker is still busy
        assert (late.status_code, "never ran" in late.json()["message"]) == (504, True)
        assert post(served, "hasty", "2").status_code == 504  # the queue's one place was free again
