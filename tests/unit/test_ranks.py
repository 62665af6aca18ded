"""Priorities and times to wait, with time as an argument."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts.protocol.frames import Input
from ts_frontend.errors import InvalidArgument
from ts_frontend.job import Ledger
from ts_frontend.models.formats import triton as configs
from ts_frontend.scheduling.batcher import Full, Policy, Priorities, PriorityBatcher, PriorityJob, WaitPolicy
from ts_frontend.scheduling.queues import PRIORITY, TIMEOUT_US, PriorityJobFactory


def numbered(number: int, level: int = 0, wish_s: float = 0.0, alone: bool = False) -> PriorityJob:
    """A job with a number of the test's."""
    job = PriorityJob(Ledger(), [Input("data", "", bytes(10))], request_id="", alone=alone).ranked(level, wish_s)
    job.id = number
    return job


def filled(policy: Policy, priorities: Priorities, *jobs: PriorityJob, now_s: float = 0.0) -> PriorityBatcher:
    batcher = PriorityBatcher(policy, priorities)
    for job in jobs:
        batcher.add(job, now_s)
    return batcher


def ids(batch: list[Any]) -> list[int]:
    return [job.id for job in batch]


def test_what_goes_alone_goes_alone() -> None:
    batcher = filled(Policy(batch_size=3), Priorities(2, 1), numbered(1, 2), numbered(2, 1, alone=True), numbered(3, 2))
    assert [ids(batcher.take()) for _ in range(2)] == [[2], [1, 3]]


def test_what_comes_back_goes_first_in_its_level() -> None:
    batcher = filled(Policy(), Priorities(2, 1), numbered(1, 2), numbered(2, 1), numbered(3, 1))
    taken = batcher.take()
    batcher.restore(taken)
    assert [ids(batcher.take()) for _ in range(3)] == [[2], [3], [1]]


def test_a_level_may_be_full_alone() -> None:
    priorities = Priorities(2, 1, policies={2: WaitPolicy(jobs_max=1)})
    batcher = filled(Policy(), priorities, numbered(1, 2))
    with pytest.raises(Full, match="priority 2"):
        batcher.add(numbered(2, 2), 0.0)
    batcher.add(numbered(3, 1), 0.0)
    assert len(batcher) == 2 and priorities.jobs_max == 0


def test_the_levels_of_a_file_are_counted_without_a_look_at_each() -> None:
    own = {1: WaitPolicy(jobs_max=5), 7: WaitPolicy(jobs_max=2)}
    assert Priorities(10, 1, WaitPolicy(jobs_max=3), own).jobs_max == 5 + 2 + 8 * 3
    assert Priorities(22_222_222_222, 1, WaitPolicy(jobs_max=3)).jobs_max == 66_666_666_666
    assert Priorities(1, 1, policies={1: WaitPolicy(jobs_max=5)}).jobs_max == 5
    assert Priorities(2, 1, policies={1: WaitPolicy(jobs_max=5)}).jobs_max == 0


def test_who_has_waited_too_long_is_refused_or_goes_last() -> None:
    policies = {1: WaitPolicy(5.0, delays=True), 2: WaitPolicy(3.0)}
    jobs = [numbered(1, 1), numbered(2, 2), numbered(3, 3)]
    batcher = filled(Policy(batch_size=9), Priorities(3, 1, policies=policies), *jobs)
    batcher.add(numbered(4, 1), 4.0)
    assert batcher.settle(2.9) == [] and ids(batcher.settle(3.0)) == [2]
    assert batcher.settle(5.0) == [] and ids(batcher.take()) == [4, 1, 3]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))), st.integers(1, 4))
def test_everything_that_waits_is_taken_or_refused_once(jobs: list[tuple[int, int]], size: int) -> None:
    priorities = Priorities(3, 1, WaitPolicy(2.0, overridable=True), {2: WaitPolicy(1.0, delays=True)})
    batcher = PriorityBatcher(Policy(batch_size=size), priorities)
    for number, (level, wish_s) in enumerate(jobs):
        batcher.add(numbered(number, priorities.level(level), wish_s), 0.0)
    seen = ids(batcher.settle(1.5))
    while batch := batcher.take():
        assert len(batch) <= size
        seen += ids(batch)
    assert sorted(seen) == list(range(len(jobs))) and not len(batcher) and not batcher.size_bytes


@pytest.mark.parametrize(
    ("headers", "level", "wish_s"),
    [
        ([], 2, 0.0),
        ([(PRIORITY, "1"), (TIMEOUT_US, "1500000")], 1, 1.5),
        ([(PRIORITY, "9")], 2, 0.0),
        ([(PRIORITY, "-1"), (TIMEOUT_US, "x")], 2, 0.0),
    ],
)
def test_headers_say_the_priority(headers: Any, level: int, wish_s: float) -> None:
    job = PriorityJobFactory(Priorities(3, 2))(Ledger(), [], headers=headers, request_id="r")
    assert (job.level, job.wish_s) == (level, wish_s)


def config_of(text: str) -> Any:
    return configs.checked(configs.parse("dynamic_batching { " + text + " }", "here"), "m", "here")


def test_the_configuration_says_the_ranking() -> None:
    text = (
        "priority_levels: 2 default_priority_level: 1 "
        "default_queue_policy { default_timeout_microseconds: 500 max_queue_size: 4 } "
        "priority_queue_policy "
        "{ key: 2 value { timeout_action: DELAY allow_timeout_override: true max_queue_size: 6 } }"
    )
    config = config_of(text)
    late = WaitPolicy(math.inf, True, True, 6)
    assert configs.priorities(config) == Priorities(2, 1, WaitPolicy(0.0005, jobs_max=4), {2: late})
    assert configs.worker_settings(config, 0)["jobQueueSize"] == 10


@pytest.mark.parametrize(
    "text",
    ["priority_levels: 2", "priority_levels: 2 default_priority_level: 3", "priority_queue_policy { key: 1 value {} }"],
)
def test_levels_that_are_not_there_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="priority"):
        config_of(text)
