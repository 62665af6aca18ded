"""Sequences, decided purely: order, one worker each, limits, ends. Time is a number."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts.protocol.frames import Input
from ts_frontend.job import Ledger
from ts_frontend.scheduling.batcher import Full
from ts_frontend.scheduling.sequences import (
    OVER_MAX,
    SequenceBatcher,
    SequencedJob,
    SequenceLimits,
    SequenceLost,
    SequenceNotBegun,
)


def requested(sequence_id: str, starts: bool = False, ends: bool = False) -> SequencedJob:
    job = SequencedJob(Ledger(), [Input("data", "", b"x")], request_id="")
    job.in_sequence(sequence_id, starts, ends)
    return job


def batcher(**limits: object) -> SequenceBatcher[SequencedJob]:
    return SequenceBatcher(SequenceLimits(**{"sequences_max": 8, "jobs_max": 8, "idle_s": 10.0, **limits}))  # type: ignore[arg-type]


def put(to: SequenceBatcher[SequencedJob], *names: str, now_s: float = 0.0) -> list[SequencedJob]:
    requests = [requested(name) for name in names]
    for request in requests:
        to.add(request, now_s)
    return requests


def test_unbound_sequences_are_shared_out_and_older_ones_go_first() -> None:
    to = batcher(batch_size=4)
    a, b, c, d = put(to, "a", "b", "c", "d")
    assert to.take("w1", 2) == [a, b]
    assert to.take("w2", 1) == [c, d]
    narrow = batcher(batch_size=1)
    first, again = put(narrow, "a", "a")
    assert narrow.take("w") == [first]
    (new,) = put(narrow, "b")
    narrow.settled(first, 0.0)
    assert (narrow.take("w"), narrow.take("w")) == ([new], [again])  # the busy sequence doesn't starve the new one


def test_limits_say_which_setting_they_are() -> None:
    to = batcher(sequences_max=1, jobs_max=1)
    put(to, "a")
    with pytest.raises(Full, match="maxSequenceJobQueueSize"):
        put(to, "a")
    with pytest.raises(Full, match="maxNumSequence"):
        put(to, "b")


def test_what_is_too_old_runs_to_its_end_and_takes_no_more() -> None:
    to = batcher(life_s=5.0)
    first, second = put(to, "a", "a")
    to.take("w")
    with pytest.raises(Full, match="sequenceTimeoutMSec"):
        put(to, "a", now_s=5.0)
    to.settled(first, 6.0)
    assert to.take("w") == [second]
    to.settled(second, 6.0)
    assert to.sequences == 0


def test_what_goes_on_with_a_sequence_that_has_ended_is_refused() -> None:
    """By its last request, its handler and age; a request that begins it begins it. An idle one begins by its id."""
    to = batcher(idle_s=1.0, life_s=5.0, sequences_max=4, batch_size=4)
    last = requested("last", ends=True)
    to.add(last, 0.0)
    by_handler, old, idle = put(to, "handler", "old", "idle")
    assert to.take("w") == [last, by_handler, old, idle]
    to.end("handler", 0.0)
    for done in (last, by_handler, idle):
        to.settled(done, 0.0)
    to.expire(2.0)
    to.expire(6.0)
    to.settled(old, 6.0)
    why = {
        "last": "its last request has come",
        "handler": "its handler has ended it",
        "old": "it is older than sequenceTimeoutMSec",
    }
    for name, reason in why.items():
        for _ in range(2):
            with pytest.raises(SequenceLost, match=f"Sequence {name} is over, {reason}: start it again"):
                put(to, name, now_s=6.0)
    assert (to.sequences, len(to)) == (0, 0)
    anew = [requested(name, starts=True) for name in why]
    for request in anew:
        to.add(request, 6.0)
    anew += put(to, "idle", now_s=6.0)
    assert to.take("w") == anew
    triton = batcher(idle_s=1.0, told_start=True)
    triton.add(first := requested("idle", starts=True), 0.0)
    assert triton.take("w") == [first]
    triton.settled(first, 0.0)
    with pytest.raises(SequenceNotBegun):
        put(triton, "idle", now_s=6.0)


@pytest.mark.parametrize("told_start", [True, False])
def test_an_id_begins_its_next_sequence_while_the_last_request_of_the_former_runs(told_start: bool) -> None:
    to = batcher(idle_s=1.0, life_s=5.0, jobs_max=4, told_start=told_start)
    former, last = requested("a", starts=True), requested("a", ends=True)
    to.add(former, 0.0)
    to.add(last, 1.0)
    with pytest.raises(Full, match="its last request has come"):
        put(to, "a", now_s=1.0)
    first = requested("a", starts=True)
    to.add(first, 4.0)
    (second,) = put(to, "a", now_s=8.0)  # lives from its own first request on
    for one in (former, last, first, second):
        assert to.take("w") == [one]
        assert not to.take("w")
        to.settled(one, 8.0)
    assert to.sequences == 1


def test_a_first_request_that_never_started_runs_elsewhere_a_later_one_does_not() -> None:
    to = batcher()
    (first,) = put(to, "a")
    assert to.take("w1") == [first]
    assert to.lose("w1", 0.0) == []
    assert to.restore([first]) == []
    assert to.take("w2") == [first]
    to.settled(first, 0.0)
    (second,) = put(to, "a")
    assert to.take("w2") == [second]
    to.lose("w2", 0.0)
    assert to.restore([second]) == [second]
    to.settled(second, 0.0)
    assert (to.sequences, len(to)) == (0, 0)


def test_a_request_of_no_sequence_goes_alone() -> None:
    to = batcher(batch_size=4, jobs_alone_max=1)
    (a,) = put(to, "a")
    (alone,) = put(to, "")
    with pytest.raises(Full):
        put(to, "")
    assert (to.take("w"), to.take("w")) == ([alone], [a])
    assert to.restore([alone]) == []
    assert to.remove(alone)
    assert not to.remove(alone)


def test_a_removed_request_leaves_no_sequence_behind() -> None:
    to = batcher(sequences_max=1)
    (only,) = put(to, "a")
    assert to.remove(only, 0.0)
    assert (to.sequences, len(to)) == (0, 0)
    assert to.due_s(0.0) == math.inf
    put(to, "b")


def test_a_wished_delay_is_waited_for_company() -> None:
    to = batcher(batch_size=2, delay_s=1.0)
    put(to, "a", now_s=5.0)
    assert to.due_s(5.25) == 0.75
    put(to, "b", now_s=5.5)
    assert to.due_s(5.5) == 0.0


def test_an_idle_worker_takes_a_sequence_without_recent_company_at_once() -> None:
    to = batcher(batch_size=3, delay_s=1.0)
    put(to, "a", now_s=5.0)
    assert (to.due_s(5.0, idle=True), to.due_s(5.0)) == (0.0, 1.0)
    to.take("w")
    put(to, "b", "c", now_s=6.0)
    assert to.due_s(6.0, idle=True) == 1.0
    to.take("w")
    put(to, "d", now_s=7.0)
    assert to.due_s(7.0, idle=True) == pytest.approx(0.8)  # those before it have waited in vain for more
    to.take("w")
    put(to, "e", now_s=8.0)
    assert to.due_s(8.0, idle=True) == 0.0
    strict = batcher(batch_size=3, delay_s=1.0, lone_waits=True)
    put(strict, "a", now_s=5.0)
    assert strict.due_s(5.0, idle=True) == 1.0


def test_what_is_remembered_of_sequences_that_are_over_is_bounded() -> None:
    to = batcher(sequences_max=OVER_MAX + 10, batch_size=OVER_MAX + 10)
    requests = put(to, *(f"s{number}" for number in range(OVER_MAX + 5)))
    to.take("w")
    for request in requests:
        to.settled(request, 0.0)
    to.lose("w", 0.0)
    put(to, "s0")  # forgotten
    with pytest.raises(SequenceLost):
        put(to, f"s{OVER_MAX + 4}")


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "take", "settle", "lose", "restore", "end", "remove", "time"]), st.integers(0, 4)
    ),
    max_size=80,
)


@given(steps, st.booleans())
def test_whatever_happens_order_and_worker_hold_and_nothing_is_lost(
    course: list[tuple[str, int]], overlap: bool
) -> None:
    to = batcher(sequences_max=3, jobs_max=3, idle_s=2.0, life_s=20.0, batch_size=2, overlap=overlap)
    alive = {"w0", "w1"}
    out: dict[int, tuple[SequencedJob, str]] = {}
    waiting: dict[int, SequencedJob] = {}
    owner: dict[str, str] = {}
    now_s, fresh = 0.0, 2

    def drop(gone: list[SequencedJob]) -> None:
        for request in gone:
            del waiting[request.id]

    for step, number in course:
        worker = sorted(alive)[number % len(alive)]
        names = [request for request, _ in out.values()]
        if step == "add":
            request = requested(f"s{number}", ends=number == 4)
            try:
                to.add(request, now_s)
            except (Full, SequenceLost):
                continue
            waiting[request.id] = request
        elif step == "take":
            for request in to.take(worker):
                name = request.sequence_id
                older = [each for each in waiting.values() if each.sequence_id == name and each.id < request.id]
                assert not older
                assert overlap or not any(each.sequence_id == name for each, _ in out.values())
                if any(each.sequence_id == name for each, _ in out.values()):
                    assert owner[name] == worker
                owner[name] = worker
                out[request.id] = waiting.pop(request.id), worker
        elif step == "settle" and names:
            request = names[number % len(names)]
            to.begun(request)
            to.settled(request, now_s)
            del out[request.id]
        elif step == "lose":
            drop(to.lose(worker, now_s))
            alive = alive - {worker} | {f"w{fresh}"}
            fresh += 1
            back = [request for request, held_by in out.values() if held_by == worker][-1:]
            if back and not overlap:
                gone = to.restore(back)
                del out[back[0].id]
                for request in gone:
                    to.settled(request, now_s)
                if not gone:
                    waiting[back[0].id] = back[0]
            for request in [request for request, held_by in out.values() if held_by == worker]:
                to.settled(request, now_s)
                del out[request.id]
        elif step == "end":
            drop(to.end(f"s{number}", now_s))
        elif step == "remove" and waiting:
            request = list(waiting.values())[number % len(waiting)]
            assert to.remove(request, now_s)
            del waiting[request.id]
        elif step == "time":
            now_s += number
            to.expire(now_s)
        assert len(to) == len(waiting) == len(to.waiting())
        assert to.sequences <= 3
    # everything that waits can be served, and then all sequences end
    for _ in range(200):
        for request, _ in list(out.values()):
            to.settled(request, now_s)
            del out[request.id]
        for worker in sorted(alive):
            for request in to.take(worker):
                out[request.id] = waiting.pop(request.id), worker
        if not waiting and not out:
            break
    assert not waiting
    to.expire(now_s + 100)
    assert to.sequences == 0


def test_a_worker_holds_so_many_sequences_and_the_others_wait_for_an_end() -> None:
    to = batcher(batch_size=4, worker_max=1)
    first, second, third = put(to, "a", "b", "c")
    assert to.take("w1", 2) == [first] and to.take("w2", 1) == [second]
    assert not to.has_work("w1") and to.take("w1") == []
    to.settled(first, 0.0)
    assert not to.has_work("w1")
    last = requested("a", ends=True)
    to.add(last, 1.0)
    assert to.take("w1") == [last]
    to.settled(last, 1.0)
    assert to.has_work("w1") and not to.has_work("w2") and to.take("w1") == [third]


def test_a_sequence_that_idles_makes_room_on_its_worker() -> None:
    to = batcher(worker_max=1, idle_s=5.0)
    first, second = put(to, "a", "b")
    assert to.take("w") == [first]
    to.settled(first, 0.0)
    to.expire(4.0)
    assert not to.has_work("w")
    to.expire(5.0)
    assert to.take("w") == [second]
