"""The parts of the benchmarks that decide the meaning of a figure: parsing, checks, percentiles, ratios, accounts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"

OUTPUT = """
finished in 2.01s, 10.50 req/s, 97.56KB/s
requests: {done} total, 25 started, {done} done, {succeeded} succeeded, 0 failed, 0 errored, 0 timeout
status codes: {succeeded} 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 487.78KB (499488) total, 25.13KB (25728) headers (space savings 94.70%), 112.22KB ({data}) data
"""


@pytest.fixture(scope="module", autouse=True)
def path() -> Iterator[None]:
    sys.path.append(str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def h2load(path: None) -> ModuleType:
    from measuring import h2load

    return h2load


def load(h2load: ModuleType, done: int = 21, succeeded: int = 21, data: int = 189) -> Any:
    log = "1795229217774043\t200\t3000\n1795229217774016\t200\t1000\n1795229217774016\t-1\t9\n"
    return h2load.parse(OUTPUT.format(done=done, succeeded=succeeded, data=data), log, 2.0, 0.5)


def test_h2load_output_is_read(h2load: ModuleType) -> None:
    found = load(h2load)
    assert (found.requests, found.failed, found.data_bytes, found.rate) == (21, 0, 189, 10.5)
    assert found.latencies_s == [0.001, 0.003]


@pytest.mark.parametrize("data", [189, 198])
def test_answers_of_the_right_size_pass(h2load: ModuleType, data: int) -> None:
    load(h2load, data=data).check(9, clients=1)


@pytest.mark.parametrize("data", [180, 207])
def test_answers_without_data_or_with_too_much_are_noticed(h2load: ModuleType, data: int) -> None:
    with pytest.raises(h2load.LoadFailed, match="some are errors"):
        load(h2load, data=data).check(9, clients=1)


def test_answers_without_a_reason_phrase_count_and_their_bytes_are_checked(h2load: ModuleType) -> None:
    """TorchServe's status line is `HTTP/1.1 200 `, of which h2load makes status 0 and a failed request."""
    log = "1795229217774043\t0\t3000\n1795229217774016\t0\t1000\n1795229217774016\t-1\t9\n"
    found = h2load.parse(OUTPUT.format(done=2, succeeded=0, data=4), log, 2.0, 0.5)
    assert (found.requests, found.failed, found.latencies_s) == (2, 0, [0.001, 0.003])
    found.check(2, clients=0)
    with pytest.raises(h2load.LoadFailed, match="some are errors"):
        h2load.parse(OUTPUT.format(done=2, succeeded=0, data=150), log, 2.0, 0.5).check(2, clients=0)


def test_failed_and_missing_requests_are_noticed(h2load: ModuleType) -> None:
    with pytest.raises(h2load.LoadFailed, match="1 of 21"):
        load(h2load, succeeded=20).check(9, clients=1)
    with pytest.raises(h2load.LoadFailed, match="no request was answered within 2 s"):
        load(h2load, done=0, succeeded=0, data=0).check(9, clients=1)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.01, 1), (0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100)])
def test_percentile_is_the_nearest_rank(h2load: ModuleType, share: float, value: int) -> None:
    assert h2load.percentile(range(1, 101), share) == value


def test_http_is_asked_with_http1(h2load: ModuleType) -> None:
    words = h2load.command("u", Path("b"), Path("l"), 1, 1.0, http1={"content-type": "text/plain"})
    assert "--h1" in words and "content-type: text/plain" in words and not any("grpc" in word for word in words)


def test_a_benchmark_that_fails_ends_with_the_reason() -> None:
    from measuring.environments import NotInstalled
    from measuring.h2load import LoadFailed
    from measuring.processes import ServerFailed, failures_as_messages
    from peers.questions import WrongAnswer

    for failure in (LoadFailed, NotInstalled, ServerFailed, WrongAnswer):
        with pytest.raises(SystemExit) as ended, failures_as_messages():
            raise failure("the reason")
        assert ended.value.code == "\nthe reason"
    with pytest.raises(SystemExit) as ended, failures_as_messages():
        raise KeyboardInterrupt
    assert ended.value.code == 130
