"""Calls of models to their server: limits, cancels, credit, and calls without an answer."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from support import turns
from ts.protocol.frames import CALL_ID_MIN, Buffer, Call, Chunk, Credit, Failed, Message
from ts_frontend.errors import DeadlineExceeded, ModelNotFound, ServeError
from ts_frontend.job import Job, JobState, Ledger
from ts_frontend.models.settings import Signature
from ts_frontend.open_inference.calls import ModelCalls
from ts_frontend.scheduling.batcher import Policy
from ts_frontend.scheduling.queues import JobQueue, SequenceHeaders
from ts_frontend.workers import calls as worker_calls
from ts_frontend.workers.calls import Caller, HandlerCalls
from ts_frontend.workers.in_flight import Batch, InFlight

NAMED = {"operation": "infer", "model": "b", "version": "", "stream": False, "request_id": "", "parameters": {}}


class Scripted:
    """Answers each call with its `pieces`; with None for one it waits for ever. `ended`: those that are over."""

    def __init__(self, *pieces: bytes | None) -> None:
        self.pieces = pieces
        self.callers: list[Caller] = []
        self.ended = 0

    async def answer(
        self, what: Mapping[str, Any], data: Buffer, caller: Caller
    ) -> AsyncGenerator[tuple[Buffer, bool], None]:
        self.callers.append(caller)
        try:
            if what.get("missing"):
                raise ModelNotFound("b")
            for piece in self.pieces:
                if piece is None:
                    await asyncio.get_running_loop().create_future()
                else:
                    yield piece, False
        finally:
            self.ended += 1


def calls_of(answers: Scripted) -> tuple[HandlerCalls, list[Message], list[Batch]]:
    sent: list[Message] = []
    alive: list[Batch] = []
    return HandlerCalls(answers.answer, "a", sent.append, alive.append, 1.0), sent, alive


def batch_with(*jobs: Job) -> Batch:
    return InFlight().begin(list(jobs), None, time.monotonic())


def job(deadline_s: float = math.inf) -> Job:
    made = Job(Ledger(), [], request_id="r", deadline_s=deadline_s)
    made.move(JobState.QUEUED)
    return made


async def test_pieces_go_back_in_order_and_end() -> None:
    calls, sent, _ = calls_of(Scripted(b"x", b"y"))
    calls.begin(Call(CALL_ID_MIN, {}), None)
    await turns(20)
    assert sent == [Chunk(CALL_ID_MIN, b"x", False), Chunk(CALL_ID_MIN, b"y", False), Chunk(CALL_ID_MIN, b"")]


async def test_a_refusal_is_told_with_its_status() -> None:
    calls, sent, _ = calls_of(Scripted())
    calls.begin(Call(CALL_ID_MIN, {"missing": True}), None)
    await turns(20)
    assert sent == [Failed(CALL_ID_MIN, 404, "Model not found: b")]


async def test_a_model_that_takes_nothing_gets_no_more_than_its_credit() -> None:
    calls, sent, _ = calls_of(Scripted(*[bytes(100_000)] * 7))
    calls.begin(Call(CALL_ID_MIN, {}), None)
    await turns(20)
    assert len(sent) == 3
    calls.grant(Credit(CALL_ID_MIN, 200_000))
    await turns(20)
    assert len(sent) == 5
    calls.grant(Credit(CALL_ID_MIN, 200_000))
    await turns(20)
    assert sent[-1] == Chunk(CALL_ID_MIN, b"")


async def test_there_is_a_limit_to_calls_at_a_time(monkeypatch: Any) -> None:
    monkeypatch.setattr(worker_calls, "CALLS_MAX", 2)
    calls, sent, _ = calls_of(Scripted(None))
    for number in range(3):
        calls.begin(Call(CALL_ID_MIN + number, {}), None)
    (refused,) = sent
    assert isinstance(refused, Failed) and refused.code == 503 and "2 calls" in refused.message
    calls.close()
    await turns(20)


async def test_a_cancel_may_come_before_its_call() -> None:
    answers = Scripted(None)
    calls, sent, _ = calls_of(answers)
    calls.cancel(CALL_ID_MIN)
    calls.begin(Call(CALL_ID_MIN, {}), None)
    await turns(20)
    assert [type(one) for one in sent] == [Failed] and not answers.callers


async def test_a_call_may_be_cancelled_before_it_has_begun_to_run() -> None:
    calls, sent, _ = calls_of(Scripted(None))
    calls.begin(Call(CALL_ID_MIN, {}), None)
    calls.cancel(CALL_ID_MIN)
    await turns(20)
    assert sent == [Failed(CALL_ID_MIN, 499, worker_calls.CANCELLED)] and not calls._open


async def test_a_call_ends_with_the_last_request_of_its_batch() -> None:
    answers = Scripted(None)
    calls, sent, alive = calls_of(answers)
    first, second = job(), job(time.monotonic() + 50)
    batch, other = batch_with(first, second), batch_with(job())
    calls.begin(Call(CALL_ID_MIN, {}), batch)
    calls.begin(Call(CALL_ID_MIN + 1, {}), other)
    await turns(20)
    assert [caller.deadline_s for caller in answers.callers] == [math.inf, math.inf] and alive == [batch, other]
    first.cancel()
    calls.release(batch)
    await turns(20)
    assert not sent
    second.cancel()
    calls.release(batch)
    await turns(20)
    (failed,) = sent
    assert isinstance(failed, Failed) and (failed.job_id, failed.code) == (CALL_ID_MIN, 499)
    assert "nobody waits" in failed.message and answers.ended == 1
    calls.close()
    await turns(20)
    assert answers.ended == 2


def test_a_worker_that_waits_for_another_model_does_not_hang() -> None:
    running = InFlight()
    begun_s = time.monotonic()
    batch = running.begin([job()], None, begun_s - 10)
    assert running.overdue(begun_s, 5)
    running.alive(batch)
    assert not running.overdue(begun_s, 5) and running.overdue(begun_s + 20, 5)


def test_nothing_is_sent_ahead_to_a_worker_that_waits_for_others() -> None:
    running = InFlight()
    running.mean_s = 0.0
    running.set_concurrency("blocking", 1)
    running.begin([job()], None, time.monotonic())
    assert running.room() == 1
    running.hold_nothing_ahead()
    assert running.room() == 0


# --- the service


class Lone:
    """A model without workers: its requests wait."""

    name = "b"
    stateful = ready = has_priorities = False
    signature = Signature()

    def __init__(self, job_queue_size: int = 100) -> None:
        self.queue, self.ledger = JobQueue(Policy(jobs_max=job_queue_size)), Ledger()
        self.jobs: list[Job] = []

    def submit(
        self, inputs: Any, *, headers: Any, deadline_s: float, request_id: Any, stream: bool, **more: Any
    ) -> Job:
        made = Job(self.ledger, inputs, request_id=request_id or "r", headers=headers, deadline_s=deadline_s)
        self.queue.put(made)
        self.jobs.append(made)
        return made

    def find(self, name: str, version: str | None = None) -> Any:
        return self


async def answer_of(service: ModelCalls, caller: Caller, **what: Any) -> list[tuple[Buffer, bool]]:
    return [one async for one in service.answer({**NAMED, **what}, b"", caller)]


async def test_a_call_carries_the_trace_of_its_request_and_no_other_header() -> None:
    lone: Any = Lone()
    headers = [("authorization", "secret"), ("traceparent", "00-1-2-01")]
    caller = Caller("a", time.monotonic() + 0.01, 60.0, "outer", headers)
    try:
        await answer_of(ModelCalls(lone, SequenceHeaders("", "", "")), caller)
    except DeadlineExceeded:
        pass
    (asked,) = lone.jobs
    assert asked.request_headers == [("traceparent", "00-1-2-01")] and asked.request_id == "outer"


async def test_readiness_and_what_is_not_known() -> None:
    lone: Any = Lone()
    service, caller = ModelCalls(lone, SequenceHeaders("", "", "")), Caller("a", math.inf, 1.0)
    ((data, last),) = await answer_of(service, caller, operation="ready")
    assert last and json.loads(bytes(data)) == {"ready": False}
    for operation in ("load", "dance"):
        try:
            await answer_of(service, caller, operation=operation)
            raise AssertionError(operation)
        except ServeError as error:
            assert error.http_status == 400
