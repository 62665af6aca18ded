"""Random ensembles over real queues, jobs and ledgers: their values, and that nothing is left after failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import JobOwner, OneBatchWorker, run, until_async
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.frames import Chunk, Input, Pairs
from ts_frontend.errors import HandlerFailed, InvalidArgument, QueueFull, ServeError
from ts_frontend.graphs.graph import UNREAD_BYTES_MAX, Ensemble, Running, Runs, Step, make_ensemble
from ts_frontend.job import Job, JobState, Ledger
from ts_frontend.models.ensembles import EnsembleRequests, checked_signature
from ts_frontend.models.settings import Signature, TensorSpec
from ts_frontend.scheduling.batcher import Policy
from ts_frontend.scheduling.queues import FULL, IDLE, JobQueue
from ts_frontend.scheduling.stream import chunks

#: What a step does with a request: it answers, fails, has a full queue, or runs until it is cancelled.
ANSWERS, FAILS, IS_FULL, RUNS = "answers", "fails", "is full", "runs"


def signature_of(inputs: Sequence[str], outputs: Sequence[str]) -> Signature:
    def specs(names: Sequence[str]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(one, "INT64", (1,)) for one in names)

    return Signature("", specs(inputs), specs(outputs))


class Served(JobOwner, OneBatchWorker):
    """A model with a queue and one worker, which adds `number` to the sum of its inputs for each output."""

    def __init__(self, name: str, inputs: Sequence[str], outputs: Sequence[str], number: int, does: str) -> None:
        self.name, self.number, self.does = name, number, does
        super().__init__()
        self.signature = signature_of(inputs, outputs)
        self.stateful, self.ready, self.steps = False, True, ()
        self.archive = SimpleNamespace(adapter_settings={})
        self.ledger = Ledger()
        self.queue = JobQueue(Policy(batch_size=1, delay_s=0, lone_waits=False, jobs_max=100))
        self.queue.attach(self)
        self.cancelled = 0
        self._running: Job | None = None

    def submit(self, inputs: Sequence[Input], *, headers: Pairs, stream: bool, **more: Any) -> Job:
        if self.does == IS_FULL:
            raise QueueFull("The queue is full")
        more.pop("version_named")
        job = Job(self.ledger, inputs, headers=headers, stream=stream, **more)
        self.queue.put(job)
        return job

    # --- as the queue's worker

    def room(self, ahead_s: float = 0.0) -> float:
        return FULL if self._running is not None else IDLE

    def dispatch(self, jobs: list[Job], now_s: float) -> None:
        (job,) = jobs
        job.send(self, now_s)
        self._running = job
        if self.does != RUNS:
            asyncio.get_running_loop().call_later(random.choice((0, 0, 0.001)), self._end, job)

    def _end(self, job: Job) -> None:
        if self._running is job:
            self._running = None
            if self.does == FAILS:
                job.fail(HandlerFailed(500, f"{self.name} failed", by_handler=True))
            else:
                job.deliver(Chunk(job.id, self._answer(job), True))
            self.queue.wake()

    def _answer(self, job: Job) -> bytes:
        request = pb.ModelInferRequest.FromString(bytes(job.inputs[0].data))
        total = sum(int.from_bytes(raw, "little") for raw in request.raw_input_contents)
        answer = pb.ModelInferResponse(model_name=self.name)
        for at, output in enumerate(request.outputs):
            answer.outputs.add(name=output.name, datatype="INT64", shape=[1])
            answer.raw_output_contents.append((total + self.number + at).to_bytes(8, "little"))
        return answer.SerializeToString()

    def holds(self, job: Job) -> bool:
        return job is self._running

    # --- as the owner of a job that runs

    def release(self, job: Job) -> None:
        self.cancelled += 1
        self._running = None
        self.queue.wake()


class Stage:
    """An ensemble, its models, and the requests to it."""

    def __init__(self, ensemble: Ensemble, inputs: Sequence[str], models: dict[str, Served]) -> None:
        self.models, self.ensemble, self.ledger = models, ensemble, Ledger()
        self.signature = signature_of(inputs, ensemble.outputs)

        def find(name: str, version: str) -> Any:
            return models.get(name)

        checked_signature(ensemble, self.signature, "e", find, starting=False)
        self.recorded: list[Job] = []
        requests = EnsembleRequests(
            "e", "1", ensemble, self.signature, find, lambda job, waited_s, worked_s: self.recorded.append(job)
        )
        self.runs = Runs("ensemble e", requests.answer, lambda: "")

    def ask(self, values: dict[str, int], wanted: Sequence[str] = ()) -> Job:
        request = pb.ModelInferRequest(model_name="e", id="7")
        for name, value in values.items():
            request.inputs.add(name=name, datatype="INT64", shape=[1])
            request.raw_input_contents.append(value.to_bytes(8, "little"))
        for name in wanted:
            request.outputs.add(name=name)
        job = Job(self.ledger, [Input("", "\0grpc", request.SerializeToString())], "r")
        self.runs.put(job)
        return job

    async def nothing_left(self) -> None:
        ledgers = [self.ledger, *(model.ledger for model in self.models.values())]
        await until_async(lambda: not any(ledger.live for ledger in ledgers))
        assert not any(len(model.queue) for model in self.models.values())
        assert all(ledger.counts[state] == 0 for ledger in ledgers for state in (JobState.QUEUED, JobState.SENT))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Step], list[str], list[str]]:
    """Steps, each with inputs from those before it and from the ensemble's; the inputs, and the outputs."""
    inputs = [f"in{number}" for number in range(draw(st.integers(1, 3)))]
    made: list[str] = []
    steps = []
    for number in range(draw(st.integers(1, 7))):
        taken = draw(st.lists(st.sampled_from([*inputs, *made]), min_size=1, max_size=3))
        outputs = [f"t{number}_{at}" for at in range(draw(st.integers(1, 2)))]
        model_inputs = {f"X{at}": tensor for at, tensor in enumerate(taken)}
        steps.append(Step(f"step {number}", f"m{number}", "", model_inputs, dict(zip("YZ", outputs, strict=False))))
        made += outputs
    wanted = draw(st.lists(st.sampled_from(made), min_size=1, max_size=4, unique=True))
    return draw(st.permutations(steps)), inputs, wanted


def expected(steps: list[Step], values: dict[str, int]) -> dict[str, int]:
    """What each tensor is, computed in the order of the steps' numbers."""
    found = dict(values)
    for step in sorted(steps, key=lambda step: step.name):
        total = sum(found[tensor] for tensor in step.inputs.values()) + int(step.model[1:])
        found |= {tensor: total + at for at, tensor in enumerate(step.outputs.values())}
    return found


def stage_of(steps: list[Step], inputs: list[str], outputs: list[str], does: dict[str, str]) -> Stage:
    models = {
        step.model: Served(
            step.model, list(step.inputs), list(step.outputs), int(step.model[1:]), does.get(step.model, ANSWERS)
        )
        for step in steps
    }
    return Stage(make_ensemble(steps, inputs, outputs, "e"), inputs, models)


def read(body: Any) -> dict[str, int]:
    answer = pb.ModelInferResponse.FromString(bytes(body))
    assert (answer.model_name, answer.model_version, answer.id) == ("e", "1", "7")
    pairs = zip(answer.outputs, answer.raw_output_contents, strict=True)
    return {output.name: int.from_bytes(raw, "little") for output, raw in pairs}


@given(graphs(), st.data())
def test_every_output_has_its_value(found: tuple[list[Step], list[str], list[str]], data: st.DataObject) -> None:
    steps, inputs, outputs = found
    values = {name: data.draw(st.integers(0, 99)) for name in inputs}
    wanted = data.draw(st.lists(st.sampled_from(outputs), unique=True))

    async def scenario() -> None:
        stage = stage_of(steps, inputs, outputs, {})
        jobs = [stage.ask(values, wanted) for _ in range(3)]
        right = expected(steps, values)
        for job in jobs:
            assert read(await job.result()) == {name: right[name] for name in wanted or outputs}
        await stage.nothing_left()
        assert len(stage.recorded) == 3

    run(scenario())


@given(graphs(), st.data())
def test_random_failures_end_the_request_and_leave_nothing(
    found: tuple[list[Step], list[str], list[str]], data: st.DataObject
) -> None:
    steps, inputs, outputs = found
    does = {step.model: data.draw(st.sampled_from((ANSWERS, ANSWERS, FAILS, IS_FULL, RUNS))) for step in steps}
    turns = data.draw(st.integers(0, 30))

    async def scenario() -> None:
        stage = stage_of(steps, inputs, outputs, does)
        jobs = [stage.ask(dict.fromkeys(inputs, 1)) for _ in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for job in jobs if RUNS in does.values() else []:
            job.cancel()
        for job in jobs:
            try:
                assert read(await job.result()).keys() == set(outputs)
            except ServeError as error:
                assert error.message
        await stage.nothing_left()

    run(scenario())


SIDE_BY_SIDE = [
    Step("step 1", "m1", "", {"X0": "in0"}, {"Y": "a"}),
    Step("step 2", "m2", "", {"X0": "in0"}, {"Y": "b"}),
]


async def test_the_end_of_the_ensemble_ends_what_runs() -> None:
    stage = stage_of(SIDE_BY_SIDE, ["in0"], ["a", "b"], {"m1": RUNS, "m2": RUNS})
    job = stage.ask({"in0": 1})
    await until_async(lambda: all(model.ledger.sent for model in stage.models.values()))
    stage.runs.close()
    job.fail(ServeError("The model was unregistered"))
    await stage.nothing_left()
    assert [model.cancelled for model in stage.models.values()] == [1, 1]


async def test_a_large_streamed_answer_waits_for_its_reader() -> None:
    sent = 0

    async def answer(running: Running) -> None:
        nonlocal sent
        for _ in range(20):
            await running.send(bytes(UNREAD_BYTES_MAX // 4))
            sent += 1
        running.answer(b"")

    ledger = Ledger()
    runs = Runs("ensemble e", answer, lambda: "")
    job = Job(ledger, [Input("", "\0grpc;stream", b"")], "r", stream=True)
    runs.put(job)
    await until_async(lambda: sent == 4)
    for _ in range(20):
        await asyncio.sleep(0)
    assert sent == 4, "it waits"
    size = sum([len(piece) async for pieces in chunks(job) for piece in pieces])
    assert (size, sent) == (20 * (UNREAD_BYTES_MAX // 4), 20) and not ledger.live


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([Step("step 1", "m", "", {"X": "in0"}, {"Y": "a"}), Step("step 2", "m", "", {"X": "a"}, {"Y": "a"})], "both"),
        ([Step("step 1", "m", "", {"X": "in0"}, {"Y": "in0"})], "which is the ensemble's input"),
        ([Step("step 1", "", "", {}, {"Y": "a"})], "no model_name"),
        ([Step("step 1", "m", "", {"X": "in0"}, {})], "no output_map"),
        ([], "no step"),
    ],
)
def test_what_a_graph_cant_be(steps: list[Step], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        make_ensemble(steps, ["in0"], ["a"], "e")
