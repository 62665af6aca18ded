"""Which jobs go together, and when: time is an argument, so every case is exact."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts.protocol.frames import Input
from ts_frontend.job import Job, JobState, Ledger
from ts_frontend.scheduling.batcher import QUIET_S_MIN, Batcher, Full, Policy


def numbered(number: int, size_bytes: int = 10, alone: bool = False) -> Job:
    """A job with a number of the test's."""
    job = Job(Ledger(), [Input("data", "", bytes(size_bytes))], request_id="", alone=alone)
    job.id = number
    return job


def filled(policy: Policy, *jobs: Job, now_s: float = 0.0) -> Batcher[Job]:
    batcher: Batcher[Job] = Batcher(policy)
    for job in jobs:
        batcher.add(job, now_s)
    return batcher


def ids(batch: list[Job]) -> list[int]:
    return [job.id for job in batch]


def test_without_a_wish_a_lone_request_never_waits():
    assert filled(Policy(batch_size=8), numbered(1)).due_s(0.0) == 0.0


def test_an_empty_queue_is_never_due():
    assert Batcher(Policy()).due_s(5.0) == math.inf


def turn(batcher: Batcher[Job], now_s: float, answered: bool = True) -> list[float]:
    """Three requests that come together, and go to an idle worker when they are due, which answers them. Returns the
    times that they waited there, and would have waited on a busy worker, in seconds."""
    jobs = [numbered(number) for number in range(3)]
    for job in jobs:
        batcher.add(job, now_s)
        job.move(JobState.QUEUED)
    waits = [batcher.due_s(now_s, idle=True), batcher.due_s(now_s)]
    assert batcher.take() == jobs
    for job in jobs:
        job.send(None, now_s)
        if answered:
            job.answer(now_s)
    return waits


def test_requests_that_waited_in_vain_for_more_shorten_the_wait_of_the_next():
    batcher: Batcher[Job] = Batcher(Policy(batch_size=8, delay_s=0.1))
    waits = [turn(batcher, 10.0 + number) for number in range(40)]
    idle = [one for one, _ in waits]
    assert idle == sorted(idle, reverse=True)
    assert [idle[0], idle[1], idle[-1]] == pytest.approx([0.1, 0.08, QUIET_S_MIN])
    assert [busy for _, busy in waits] == [pytest.approx(0.1)] * 40


def test_every_request_waits_where_that_is_wished():
    batcher = filled(Policy(batch_size=8, delay_s=0.5, lone_waits=True), numbered(1), now_s=10.0)
    assert batcher.due_s(10.1, idle=True) == pytest.approx(0.4)
    batcher.take()
    assert [turn(batcher, 20.0 + number)[0] for number in range(5)] == [0.5] * 5


def test_a_job_that_goes_alone_waits_for_nobody_and_shares_with_nobody():
    batcher = filled(Policy(batch_size=4, delay_s=9.0), numbered(1, alone=True), numbered(2), numbered(3, alone=True))
    assert batcher.due_s(0.0) == 0.0
    assert [ids(batcher.take()) for _ in range(3)] == [[1], [2], [3]]


def test_one_job_too_many_is_refused_and_the_message_says_what_to_change():
    batcher = filled(Policy(jobs_max=2), numbered(1), numbered(2))
    with pytest.raises(Full, match="takes 2 .job_queue_size"):
        batcher.add(numbered(3), 0.0)
    assert len(batcher) == 2


def test_bytes_are_bounded_but_a_single_large_job_still_gets_in():
    batcher = filled(Policy(bytes_max=100), numbered(1, size_bytes=500))
    with pytest.raises(Full, match="job_queue_bytes_max"):
        batcher.add(numbered(2, size_bytes=1), 0.0)
    batcher.take()
    batcher.add(numbered(2, size_bytes=60), 0.0)
    with pytest.raises(Full, match="60 bytes are waiting; 41 more"):
        batcher.add(numbered(3, size_bytes=41), 0.0)
    batcher.add(numbered(3, size_bytes=40), 0.0)


def test_restored_jobs_go_to_the_head_in_their_order_even_when_full():
    batcher = filled(Policy(batch_size=2, jobs_max=3), *(numbered(number) for number in range(4, 7)))
    batcher.restore([numbered(1), numbered(2)])
    assert [ids(batcher.take()) for _ in range(3)] == [[1, 2], [4, 5], [6]]


@given(st.lists(st.sampled_from(["add", "take", "remove", "restore"]), max_size=60), st.integers(1, 4))
def test_whatever_happens_no_job_is_lost_or_doubled(actions, batch_size):
    batcher: Batcher[Job] = Batcher(Policy(batch_size=batch_size, jobs_max=10))
    waiting: list[Job] = []
    taken: list[Job] = []
    number = 0
    for action in actions:
        if action == "add" and len(waiting) < 10:
            job = numbered(number, size_bytes=number)
            number += 1
            batcher.add(job, 0.0)
            waiting.append(job)
        elif action == "take":
            taken = batcher.take()
            assert taken == waiting[:batch_size]
            waiting = waiting[batch_size:]
        elif action == "remove" and waiting:
            assert batcher.remove(waiting.pop(len(waiting) // 2))
        elif action == "restore":
            batcher.restore(taken)
            waiting, taken = taken + waiting, []
        assert batcher.waiting() == waiting
        assert batcher.size_bytes == sum(job.size_bytes for job in waiting)
