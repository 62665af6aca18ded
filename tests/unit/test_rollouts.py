"""The verdict of rollouts, their settings, and the comparison of answers: pure, without a server."""

from __future__ import annotations

import json
import random
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ts.protocol import open_inference_pb2 as pb
from ts_frontend.errors import InvalidArgument, MessageTooLarge
from ts_frontend.rollouts.dividing import COLUMNS, POINTS_MAX, Record
from ts_frontend.rollouts.rule import (
    FALSE_SHARE_MAX,
    SETTINGS_BYTES_MAX,
    Answered,
    Judge,
    Limits,
    Rule,
    Tally,
    Word,
    difference,
    read_measures,
    read_rule,
    read_settings,
)

Seconds = Callable[[random.Random], float]
MEAN_S = 0.02


def narrow(mean_s: float) -> Seconds:
    return lambda chance: max(mean_s / 2, chance.gauss(mean_s, mean_s / 10))


def wide(mean_s: float) -> Seconds:
    return lambda chance: chance.expovariate(1 / mean_s)


def with_tail(mean_s: float) -> Seconds:
    """One of twenty takes ten times as long."""
    usual = narrow(mean_s)
    return lambda chance: usual(chance) * (10 if chance.random() < 0.05 else 1)


def rolled_out(seed: int, failing: tuple[float, float], seconds: tuple[Seconds, Seconds]) -> Word:
    """The end of a simulated rollout; `failing`, `seconds`: of the old version and the new one."""
    chance, steps, now_s = random.Random(seed), (5, 50), 0.0
    judge = Judge(Limits(), len(steps))
    for percent in steps:
        judge.begin_step()
        word = Word.WAIT
        while word is Word.WAIT:
            for _ in range(500):
                now_s += chance.expovariate(200)
                new = chance.random() * 100 < percent
                judge.observe(new, chance.random() < failing[new], seconds[new](chance), now_s)
            word = judge.verdict().word
            assert now_s < 3600 * 4, judge.verdict()
        if word is Word.GO_BACK:
            return word
    return Word.GO_ON


GOOD = [((0.001, 0.001), (wide(MEAN_S), wide(MEAN_S))), ((0.0, 0.0), (narrow(MEAN_S), narrow(MEAN_S)))]
BAD = [
    ((0.001, 0.05), (wide(MEAN_S), wide(MEAN_S))),
    ((0.0, 0.0), (narrow(MEAN_S), narrow(2 * MEAN_S))),
    ((0.0, 0.0), (wide(MEAN_S), wide(2 * MEAN_S))),
    ((0.0, 0.0), (narrow(MEAN_S), with_tail(MEAN_S))),
]


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 100), marks=pytest.mark.slow)])
@pytest.mark.parametrize(("cases", "word"), [(GOOD, Word.GO_ON), (BAD, Word.GO_BACK)], ids=["good", "bad"])
def test_at_most_one_of_a_hundred_simulated_rollouts_ends_wrongly(
    cases: list[Any], word: Word, seeds: Sequence[int]
) -> None:
    """100 of good versions and 100 of bad ones."""
    ended = Counter(rolled_out(seed, *cases[seed % len(cases)]) for seed in seeds)
    assert ended[word] >= len(seeds) - len(seeds) // 50, ended


def test_the_bounds_hold_at_all_times_together() -> None:
    """They are looked at after each observation, and only some in a hundred sequences ever leave them."""
    left = 0
    for seed in range(60):
        chance, tally = random.Random(seed), Tally()
        for _ in range(300):
            tally.add(chance.random() < 0.1)
            low, high = tally.bounds(0.05)
            assert low <= tally.bad / tally.count <= high
            if not low <= 0.1 <= high:
                left += 1
                break
    assert left <= 0.05 * 60


def test_both_versions_getting_worse_together_is_no_fault() -> None:
    chance, now_s = random.Random(7), 0.0
    judge = Judge(Limits(), 3)
    for number in range(20_000):
        now_s += 0.02
        worse = number > 10_000
        judge.observe(
            chance.random() < 0.5,
            chance.random() < (0.2 if worse else 0.0),
            chance.expovariate(1 / (0.2 if worse else 0.02)),
            now_s,
        )
        if number % 100 == 0:
            assert judge.verdict().word is not Word.GO_BACK


def test_differing_answers_of_copies() -> None:
    judge = Judge(Limits(differences=0.02), 1)
    for _ in range(2000):
        judge.compared(False)
    assert judge.verdict(shadow=True).word is Word.GO_ON
    restored = Judge(Limits(), 1)
    restored.restore(judge.state())
    assert restored.verdict(shadow=True).word is Word.GO_ON
    for _ in range(200):
        judge.compared(True)
    assert judge.verdict(shadow=True).word is Word.GO_BACK
    assert Judge(Limits(differences=0), 1).verdict(shadow=True).word is Word.GO_ON
    assert FALSE_SHARE_MAX <= 0.01


# --- what has become of it


def curves(record: Record) -> list[dict[str, Any]]:
    found = json.loads(json.dumps(record.history("1", "2")))
    return [dict(zip(COLUMNS, row, strict=True)) for row in found["rows"]]


def test_a_point_has_both_versions() -> None:
    record, begun_s = Record(), 1_700_000_000.0
    for number in range(100):
        record.ended("1", False, 0.01 if number < 90 else 0.2, percent=10, at_s=begun_s + number / 200)
    record.ended("2", True, 9.0, percent=10, at_s=begun_s + 0.6)
    record.ended("2", False, 0.02, percent=20, at_s=begun_s + 1.5)
    first, second = curves(record)
    assert (first["time"], first["percent"], second["time"], second["percent"]) == (begun_s, 10, begun_s + 1, 20)
    assert (first["old_answered"], first["old_failed"]) == (100, 0)
    assert first["old_p50_ms"] == pytest.approx(10, rel=0.13) and first["old_p99_ms"] == pytest.approx(200, rel=0.13)
    assert (first["new_answered"], first["new_failed"], first["new_p50_ms"]) == (0, 1, None)
    assert second["new_p50_ms"] == pytest.approx(20, rel=0.13) and second["old_p99_ms"] is None
    record.ended("2", False, 0.02, percent=20, at_s=begun_s - 60)  # the clock was set back
    assert len(curves(record)) == 2 and curves(record)[1]["new_answered"] == 2


@pytest.mark.parametrize("apart_s", [0.25, 40.0, 86_400.0])
def test_the_curves_are_bounded_and_lose_no_request(apart_s: float) -> None:
    """However long a rollout runs, and however few requests it has."""
    record, number = Record(), 3000
    for index in range(number):
        record.ended("12"[index % 2], index % 10 == 0, 0.01, percent=50, at_s=1_700_000_000 + index * apart_s)
    found = curves(record)
    assert POINTS_MAX / 4 <= len(found) <= POINTS_MAX
    assert sum(point[f"{version}_{end}"] for point in found for version in ("old", "new") for end in OUTCOMES) == number
    assert [point["time"] for point in found] == sorted({point["time"] for point in found})


OUTCOMES = ("answered", "failed")


def test_differences_are_bounded_whatever_clients_and_models_say() -> None:
    record = Record()
    for _ in range(100):
        record.differs("r" * 10_000, "w" * 10_000, (Answered(200, [b"x" * 10_000]).shown, ""))
    assert len(json.dumps(list(record.differences))) < 20 * 1000


# --- settings


def test_a_rule_and_its_json() -> None:
    rule = read_rule(
        {"version": "2.0", "steps": "1, 10,100", "every": "90s", "sticky": "X-User", "errors": "0.05"}, "1.0"
    )
    assert rule == Rule("2.0", (1, 10, 100), 90, "x-user", limits=Limits(errors=0.05))
    assert read_rule(json.loads(json.dumps(rule.as_json())), "1.0") == rule
    shadow = read_rule({"version": "2.0", "shadow": True, "compare": "top1"}, "1.0")
    assert shadow.stages[0] == (0.0, True) and shadow.measures["*"].kind == "top1"
    assert read_rule(shadow.as_json(), "1.0") == shadow
    authored = read_rule({"version": "2.0", "shadow": True, "compare": "code/judge.py:same"}, "1.0")
    assert authored.function == "code/judge.py:same" and not shadow.function
    assert read_rule(authored.as_json(), "1.0") == authored
    for given in ({"version": "2.0", "canaryTrafficPercent": 10}, {"weights": {"1.0": 9, "2.0": 1}}):
        assert read_rule(given, "1.0") == Rule("2.0", (10.0,), judged=False)
    assert [read_rule({"version": "2", "every": text}, "1").every_s for text in ("1.5h", 5, "250ms", "2m")] == [
        5400,
        5,
        0.25,
        120,
    ]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"steps": [1]},
        {"version": "2", "steps": [0, 101]},
        {"version": "2", "steps": [5, 5]},
        {"version": "2", "steps": 5},
        {"version": "2", "steps": []},
        {"version": "2", "steps": [True]},
        {"version": "2", "every": "-3s"},
        {"version": "2", "every": True},
        {"version": "2", "judge": "yes"},
        {"version": "2", "sticky": "a b"},
        {"version": "2", "p50": 0.5},
        {"version": "2", "errors": 2},
        {"version": "2", "errors": "nan"},
        {"version": ["2"]},
        {"version": "2", "compare": {"FP32": {"rtol": "x"}}},
        {"version": "2", "compare": {"*": "nearly"}},
        {"version": "2", "compare": "/etc/judge:same"},
        {"version": "2", "compare": "a/../../judge:same"},
        {"version": "2", "compare": {"*": "judge:same", "FP32": "exact"}},
        {"weights": {"1": 1}},
        {"weights": {"1": -1, "2": 2}},
        {"weights": 3},
        {"version": "2", "weights": {"1": 1, "3": 1}},
        {"version": "2", "colour": 1},
    ],
    ids=str,
)
def test_bad_rules_are_refused(given: Any) -> None:
    with pytest.raises(InvalidArgument):
        read_rule(given, "1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[1]", "a JSON object, not list"),
        (b"{", "no valid JSON"),
        (b"[" * 10_000, "no valid JSON"),
        (b"\xff", "no valid JSON"),
        (b" " * (SETTINGS_BYTES_MAX + 1), "over"),
    ],
    ids=("list", "open", "deep", "bytes", "large"),
)
def test_settings_that_are_no_json_object_are_refused(text: bytes, said: str) -> None:
    with pytest.raises((InvalidArgument, MessageTooLarge), match=said):
        read_settings(text)


def test_calls_without_settings() -> None:
    assert read_settings(b" \n") == read_settings(b"") == {} and read_settings(b'{"version": "2"}') == {"version": "2"}


# --- answers


def message(values: list[float], version: str, *, raw: bool = True, datatype: str = "FP32") -> Answered:
    found = pb.ModelInferResponse(model_name="m", model_version=version, id=version)
    output = found.outputs.add(name="y", datatype=datatype, shape=[len(values)])
    if raw:
        found.raw_output_contents.append(struct.pack(f"<{len(values)}f", *values))
    else:
        output.contents.fp32_contents.extend(values)
    return Answered(200, [found.SerializeToString()])


def told(one: Any, other: Any, form: str = "", **compare: Any) -> str:
    answers = [
        each if isinstance(each, Answered) else Answered(200, [json.dumps(each).encode()]) for each in (one, other)
    ]
    old, new = answers
    return difference(form, old, new, read_measures(compare))


def test_tensors_are_compared_by_their_datatype() -> None:
    for raw in (True, False):
        assert not told(message([1.0, 2.0], "1", raw=raw), message([1.0, 2.001], "2", raw=raw), "\0grpc")
    assert "element 1" in told(message([1.0, 2.0], "1"), message([1.0, 2.1], "2"), "\0grpc")
    assert told(message([1.0], "1"), message([1.0001], "2"), "\0grpc", FP32="exact")
    assert not told(message([1.0], "1"), message([1.2], "2"), "\0grpc", FP32={"rtol": 0.5})
    assert not told(message([1.0, 9.0], "1"), message([2.0, 7.0], "2"), "\0grpc", FP32="top1")
    assert "largest" in told(message([1.0, 9.0], "1"), message([9.0, 1.0], "2"), "\0grpc", FP32="top1")
    assert not told(message([1.0, 9.0], "1"), message([2.0, 18.0], "2"), "\0grpc", FP32={"cosine": 0.99})
    assert "cosine" in told(message([1.0, 9.0], "1"), message([9.0, 1.0], "2"), "\0grpc", FP32="cosine")
    assert "y: it is" in told(message([1.0], "1"), message([1.0, 1.0], "2"), "\0grpc")
    nan = float("nan")
    assert not told(message([nan], "1"), message([nan], "2"), "\0grpc")
    assert told(message([nan], "1"), message([1.0], "2"), "\0grpc")


def tensor(data: Any, datatype: str, version: str = "1") -> Any:
    output = {"name": "y", "datatype": datatype, "shape": [1], "data": data}
    return {"model_name": "m", "model_version": version, "outputs": [output]}


def test_json_is_compared_by_its_numbers() -> None:
    assert not told(tensor([1.0], "FP32"), tensor([1.0005], "FP32", "2"), "\0json")
    assert told(tensor([1], "INT64"), tensor([2], "INT64", "2"), "\0json")
    assert told(tensor(["a"], "BYTES"), tensor(["b"], "BYTES", "2"), "\0json")
    assert told(tensor(["a"], "BYTES"), {"outputs": []}, "\0json") == "it has the outputs  instead of y"
    assert not told({"id": "1", "scores": [0.5, 1]}, {"id": "2", "scores": [0.5001, 1]})
    assert told({"scores": [0.5]}, {"scores": [0.6]})
    assert told({"label": "cat"}, {"label": "dog"})
    assert told({"good": True}, {"good": False})
    assert told([1, [2]], [1, 2])


def test_other_answers_are_compared_as_bytes() -> None:
    text = Answered(200, [b"a cat"])
    assert not difference("", text, Answered(200, [b"a cat"]), {})
    assert difference("", text, Answered(200, [b"a dog"]), {})
    assert difference("\0grpc", text, Answered(200, [b"a dog"]), {})
    assert difference("", text, Answered(404, [b"a cat"]), {}) == "the status is 404 instead of 200"
    assert "pieces" in difference("", text, Answered(200, [b"a", b" cat"]), {})
    assert Answered(200, [b"x" * 1000]).shown == "x" * 200
