"""The server from its constructor to its end, with worker processes that the test plays and a clock of the test's. The
listeners are real ones, on free ports."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from stage import Actor, Skipping, Stage
from support import GUARD_S, until_async
from ts.protocol.frames import Predict
from ts_frontend.config.load import Option, load_config
from ts_frontend.config.snapshot import SnapshotFiles
from ts_frontend.models.archive import PREFIX
from ts_frontend.protos.grpc_health_v1_health_pb2 import HealthCheckRequest, HealthCheckResponse
from ts_frontend.protos.inference_pb2 import PredictionResponse, PredictionsRequest
from ts_frontend.protos.management_pb2 import DescribeModelRequest, ManagementResponse
from ts_frontend.server import Server, StartRefused
from ts_frontend.telemetry.logging.writer import Logs, Writer
from ts_frontend.workers.pool import Clock

PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
DESCRIBE = "/org.pytorch.serve.grpc.management.ManagementAPIsService/DescribeModel"
CHECK = "/grpc.health.v1.Health/Check"
LOOPBACK = {
    **dict.fromkeys(("inference_address", "management_address", "metrics_address"), "http://127.0.0.1:0"),
    **dict.fromkeys(("grpc_inference_port", "grpc_management_port", "number_of_gpu"), "0"),
}


@pytest.fixture(autouse=True)
def as_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The collector's settings, which a server changes, as they were."""
    monkeypatch.chdir(tmp_path)
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class Held(Clock):
    """Each pause lasts until `go` is set; `pauses` are those that have begun, in seconds."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.go = asyncio.Event()

    async def pause(self, seconds: float, hurry: asyncio.Event) -> None:
        self.pauses.append(seconds)
        await self.go.wait()


class Life:
    """A server with the model `m` in its store, and its reports."""

    def __init__(self, directory: Path, stage: Stage, clock: Clock | None = None, **settings: str) -> None:
        self.directory, self.stage = directory, stage
        (directory / "tmp").mkdir(exist_ok=True)
        information = directory / "store" / "m" / "MAR-INF"
        information.mkdir(parents=True)
        manifest = {"runtime": "python", "model": {"modelName": "m", "handler": "handler.py", "modelVersion": "1.0"}}
        (information / "MANIFEST.json").write_text(json.dumps(manifest))
        (information.parent / "handler.py").write_text("def handle(data, context):\n    return data\n")
        places = {"model_store": "store", "temp_dir": str(directory / "tmp"), "log_location": str(directory / "logs")}
        given = {**LOOPBACK, **places, "default_workers_per_model": "1", **settings}
        self.config = load_config([Option(key, text, "the test") for key, text in given.items()], environ={})
        self._writer = Writer()
        self._writer.start()
        self.server = Server(self.config, Logs(self._writer, False), stage, clock or Skipping())
        self.steps: list[str] = []
        self.warnings: list[str] = []
        self.addresses: dict[str, str] = {}
        self.running = asyncio.create_task(self.server.run(self._on_ready, self.steps.append))

    def _on_ready(self, addresses: dict[str, str], warnings: list[str]) -> None:
        self.addresses, self.warnings = addresses, warnings

    async def ready(self) -> Life:
        await until_async(lambda: self.addresses or self.running.done())
        assert not self.running.done(), self.running.result()
        return self

    async def asked(self, method: str, request: bytes, listener: str = "grpc_inference") -> bytes:
        """The answer of the gRPC API, on a connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self.addresses[listener], options) as channel:
            answer: bytes = await channel.unary_unary(method)(request, timeout=GUARD_S)
        return answer

    def predicting(self) -> asyncio.Task[bytes]:
        message = PredictionsRequest(model_name="m", input={"data": b"x"})
        return asyncio.create_task(self._predict(message.SerializeToString()))

    async def _predict(self, message: bytes) -> bytes:
        return PredictionResponse.FromString(await self.asked(PREDICTIONS, message)).prediction

    async def begun(self) -> tuple[Actor, Predict]:
        """The worker that has the next request, and its batch."""

        def given() -> tuple[Actor, Predict] | None:
            found = ((actor, actor.heard(Predict)) for actor in self.stage.actors)
            return next((one for one in found if one[1] is not None), None)

        found = await until_async(given)
        assert found is not None
        return found

    async def predicted(self) -> bytes:
        """The answer to a request that a worker answers at once."""
        asking = self.predicting()
        actor, batch = await self.begun()
        actor.answer(batch)
        return await asking

    async def health(self) -> str:
        status = HealthCheckResponse.FromString(
            await self.asked(CHECK, HealthCheckRequest().SerializeToString())
        ).status
        return str(HealthCheckResponse.ServingStatus.Name(status))

    async def waiting(self) -> int:
        """The number of requests in the queue of `m`."""
        request = DescribeModelRequest(model_name="m").SerializeToString()
        answer = ManagementResponse.FromString(await self.asked(DESCRIBE, request, "grpc_management"))
        (described,) = json.loads(answer.msg)
        return int(described["jobQueueStatus"]["pendingRequests"])

    def ended(self) -> None:
        """Nothing of it may be left."""
        assert self.running.done()
        self._writer.close()
        assert not list((self.directory / "tmp").glob(f"{PREFIX}*"))
        assert all(actor.exited.done() for actor in self.stage.actors)


async def stopped(life: Life) -> None:
    life.server.stop()
    await life.running
    life.ended()


async def test_it_loads_then_listens_then_serves_and_leaves_nothing(tmp_path: Path) -> None:
    listened: list[bool] = []

    async def loads() -> None:
        listened.append(bool(life.addresses))

    stage = Stage(loads)
    life = Life(tmp_path, stage, load_models="m", exit_on_error="true")
    await life.ready()
    assert (listened, life.steps, life.warnings) == ([False], ["loading m", "starting the workers"], [])
    assert await life.health() == "SERVING"
    assert await life.predicted() == b"ok"
    found, skipped = SnapshotFiles(life.config.snapshot_dir).newest()
    assert found is not None and not skipped and list(found.snapshot.models) == ["m"]
    await stopped(life)
    assert stage.launched == 1


async def test_a_drain_tells_at_once_whoever_waits_for_a_model_that_loads(tmp_path: Path) -> None:
    stage = Stage("hangs")
    life = await Life(tmp_path, stage, load_models="m").ready()
    await until_async(lambda: stage.actors)
    asking = life.predicting()
    while not await life.waiting():
        assert not asking.done()
    life.server.stop()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await asking
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    await life.running
    life.ended()


async def test_a_second_stop_changes_nothing(tmp_path: Path) -> None:
    clock = Held()
    life = await Life(tmp_path, Stage(), clock, load_models="m", drain_grace_s="7").ready()
    life.server.stop()
    await until_async(lambda: clock.pauses)
    life.server.stop()
    assert await life.predicted() == b"ok" and clock.pauses == [7.0]
    clock.go.set()
    await life.running
    life.ended()


async def test_a_model_that_fails_ends_the_start_if_that_is_asked_for(tmp_path: Path) -> None:
    life = Life(tmp_path, Stage("fails"), load_models="m", exit_on_error="true")
    with pytest.raises(StartRefused, match=r"(?s)SyntaxError.*exit_on_error is on"):
        await life.running
    assert not life.addresses
    life.ended()
