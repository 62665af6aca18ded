"""The statistics of a model version, and which requests are traced as Triton's settings say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ts_frontend.job import Job, JobState, Ledger
from ts_frontend.models.model import CountedBatches
from ts_frontend.telemetry.tracing.tracing import Sampling


class Nobody:
    """A recorder of batches that keeps nothing."""

    def answered(self, jobs: Sequence[Job], waited_s: float, worked_s: float, now_s: float) -> None:
        pass

    def loaded(self, worker_id: int, seconds: float) -> None:
        pass


def ended(state: JobState) -> Job:
    job = Job(Ledger(), [], request_id="r")
    job.state = state
    return job


@pytest.mark.parametrize(("worked_s", "handler_s"), [(0.5, 0.5), (0.8, 0.8), (1.5, 0.8)])
def test_the_parts_are_never_more_than_the_whole(worked_s: float, handler_s: float) -> None:
    """Also where the end of a batch was seen late, as on a busy machine."""
    batches, ledger = CountedBatches(Nobody()), Ledger()
    ledger.answered, ledger.answered_s, ledger.queued_s = 1, 1.0, 0.1
    batches.answered([ended(JobState.ANSWERED)], 0.1, worked_s, 0.0)
    found = batches.read(ledger)
    assert found.queue_s == pytest.approx(0.2) and found.handler_s == pytest.approx(handler_s)
    assert found.batches == {1: (1, worked_s, 0.0, 0.0)}


def test_reading_and_writing_are_parts_of_the_time_on_the_worker() -> None:
    """Of workers that have ended, and of those that work; of a batch of two, one of which failed, half of it counts."""
    batches, ledger = CountedBatches(Nobody()), Ledger()
    ledger.answered, ledger.answered_s = 1, 10.0
    batches.answered([ended(JobState.ANSWERED), ended(JobState.FAILED)], 0.0, 4.0, 0.0)
    batches.spent({2: (0.5, 0.25), 3: (9.0, 9.0)})
    found = batches.read(ledger, [{2: (0.5, 0.0)}])
    assert found.batches == {2: (1, 4.0, 1.0, 0.25)}
    assert (found.read_s, found.written_s, found.handler_s) == (1.0, 0.25, 2.75)
    batches.spent({2: (6.0, 0.75)})
    found = batches.read(ledger)
    assert found.batches[2].read_s + found.batches[2].written_s == pytest.approx(4.0), "never more than the whole"
    assert found.handler_s == pytest.approx(0.0) and found.read_s + found.written_s == pytest.approx(4.0)


def test_a_failed_call_makes_no_sum_smaller() -> None:
    """Reading for the first request takes a worker far longer than for those after it."""
    batches, ledger = CountedBatches(Nobody()), Ledger()
    ledger.answered, ledger.answered_s = 1, 1.0
    batches.answered([ended(JobState.ANSWERED)], 0.0, 1.0, 0.0)
    before = batches.read(ledger, [{1: (0.5, 0.25)}])
    assert (before.read_s, before.written_s, before.handler_s) == (0.5, 0.25, 0.25)
    batches.answered([ended(JobState.FAILED)], 0.0, 1.0, 0.0)
    after = batches.read(ledger, [{1: (0.625, 0.25)}])
    assert (after.read_s, after.written_s, after.handler_s) == (0.5, 0.25, 0.25)
    assert after.batches == {1: (2, 2.0, 0.625, 0.25)}


def traced(sampling: Sampling, count: int, model: str = "m", continued: bool = False) -> list[int]:
    """The numbers of the requests that are, the first is 1."""
    return [number for number in range(1, count + 1) if sampling.wanted(model, continued)]


def test_every_request_when_nobody_said_anything() -> None:
    sampling = Sampling(True, {})
    assert sampling.read()["trace_level"] == ["TIMESTAMPS"] and sampling.read()["trace_mode"] == ["opentelemetry"]
    assert traced(sampling, 3) == [1, 2, 3]


def test_nothing_without_a_collector_or_a_level() -> None:
    assert Sampling(False, {}).read()["trace_level"] == ["OFF"]
    assert not traced(Sampling(False, {}), 3)
    sampling = Sampling(True, {"trace_level": ("OFF",)})
    assert not traced(sampling, 3) and not traced(sampling, 3, continued=True)


def test_a_clients_trace_goes_on_whatever_the_rate() -> None:
    sampling = Sampling(True, {"trace_rate": ("1000",), "trace_count": ("2",)})
    assert traced(sampling, 5, continued=True) == [1, 2]


def test_models_with_settings_of_their_own_are_counted_apart() -> None:
    sampling = Sampling(True, {"trace_rate": ("2",)})
    sampling.change({"trace_count": ["1"]}, "own")
    assert sampling.read("own") == sampling.read() | {"trace_count": ["1"]}
    assert traced(sampling, 6, "own") == [2]
    assert [sampling.wanted(model, False) for model in ("a", "b", "a", "b")] == [False, True, False, True]
    sampling.change({"trace_rate": ["1"]})
    assert traced(sampling, 3, "own") == [1], "what it hasn't set itself is the server's"
    sampling.change({"trace_count": []}, "own")
    assert traced(sampling, 3, "own") == [1, 2, 3]
