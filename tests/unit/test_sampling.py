"""Triton's trace settings: which requests they let be traced."""

from __future__ import annotations

from ts_frontend.telemetry.tracing.settings import Sampling


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


def test_one_of_so_many_and_so_many_in_all() -> None:
    sampling = Sampling(True, {"trace_rate": ("3",)})
    assert traced(sampling, 10) == [3, 6, 9]
    sampling.change({"trace_count": ["2"]})
    assert traced(sampling, 20) == [3, 6]
    assert sampling.read()["trace_count"] == ["0"]
    sampling.change({"trace_count": []})
    assert traced(sampling, 9) == [3, 6, 9]


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
