"""The parts of the comparison with other servers that decide the content of its page: the scenarios that run, requests
and right answers, arrivals of an open loop, ratios, tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ts.protocol import open_inference_pb2 as pb
from ts_frontend.protos.inference_pb2 import PredictionResponse, PredictionsRequest

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def path() -> Iterator[None]:
    sys.path.append(str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def scenarios(path: None) -> ModuleType:
    from peers import scenarios

    return scenarios


@pytest.fixture(scope="module")
def questions(path: None) -> ModuleType:
    from peers import questions

    return questions


@pytest.fixture(scope="module")
def rows(path: None) -> ModuleType:
    from peers import rows

    return rows


@pytest.fixture(scope="module")
def page(path: None) -> ModuleType:
    from peers import page

    return page


@pytest.fixture(scope="module")
def open_loop(path: None) -> ModuleType:
    from peers import open_loop

    return open_loop


@pytest.fixture(scope="module")
def compare(path: None) -> ModuleType:
    import compare

    return compare


# Which scenarios run


def test_a_usual_run_leaves_long_loads_and_scenarios_out(scenarios: ModuleType) -> None:
    usual = {one.name: one for one in scenarios.selected()}
    long = {one.name: one for one in scenarios.selected(long=True)}
    assert list(long) == list(scenarios.SCENARIOS) and set(usual) < set(long)
    assert [load.title for load in usual["echo-http"].loads] == ["1 MB"]
    assert [load.title for load in long["echo-http"].loads] == ["1 KB", "100 KB", "1 MB", "10 MB"]
    assert "torchserve" in long["models"].systems and "torchserve" not in usual["models"].systems


def test_named_scenarios_and_servers_are_selected(scenarios: ModuleType) -> None:
    found = scenarios.selected(["image-grpc", "noop-http"], ["mosec", "kserve"])
    assert [(one.name, one.systems) for one in found] == [("noop-http", ["mosec"]), ("image-grpc", ["kserve"])]
    assert scenarios.selected(["noop-http"], ["kserve"]) == [], "it isn't in that one"


def test_unknown_names_are_refused_with_the_known_ones(compare: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for words, known in ((["--only", "no-op"], "noop-http, noop-grpc"), (["--systems", "seldon"], "ours, compiled")):
        with pytest.raises(SystemExit):
            compare.parse(words)
        assert f"there are {known}" in capsys.readouterr().err


def test_every_server_of_a_scenario_has_its_models_and_protocol(scenarios: ModuleType) -> None:
    from peers.systems import SYSTEMS

    for scenario in scenarios.SCENARIOS.values():
        for name in {*scenario.systems, *scenario.long_systems} - {scenarios.IN_PROCESS}:
            assert set(scenario.models) <= set(SYSTEMS[name].models), (scenario.name, name)
            assert ("http" if scenario.http else "grpc") in SYSTEMS[name].protocols, (scenario.name, name)
        assert not set(scenario.missing) & {*scenario.systems, *scenario.long_systems}, scenario.name


# What is asked


def test_bytes_go_to_torchserves_paths(questions: ModuleType) -> None:
    call = questions.Call("echo", 1000)
    asked = questions.by_torchserve_grpc(call)
    sent = PredictionsRequest.FromString(asked.body).input["data"]
    right = PredictionResponse(prediction=sent).SerializeToString()
    wrong = PredictionResponse(prediction=sent[:-1]).SerializeToString()
    assert len(sent) == 1000 and asked.is_right([right]) and not asked.is_right([wrong])
    assert asked.answer_bytes([right]) == 5 + len(right)
    http = questions.by_path(call, "/predictions/echo")
    assert http.is_right([sent]) and not http.is_right([b""]) and http.answer_bytes([sent]) == 1000


def test_a_stream_has_all_its_pieces_and_no_error(questions: ModuleType) -> None:
    asked = questions.by_path(questions.Call("pieces"), "/pieces")
    assert asked.is_right([b"ok" * 200]) and asked.is_right([b"data: ok\n\n" * 200])
    assert not asked.is_right([b"ok" * 199])
    assert not asked.is_right([b"ok" * 200 + b"event: error\n\n"])


def test_tensors_are_raw_over_grpc_and_json_over_http(questions: ModuleType) -> None:
    call = questions.Call("noop")
    asked = questions.by_open_inference(call, http=False)
    raw = pb.ModelInferRequest.FromString(asked.body).raw_input_contents[0]
    typed = pb.ModelInferResponse.InferOutputTensor(
        contents=pb.InferTensorContents(fp32_contents=[float(number) for number in range(16)])
    )
    assert asked.is_right([pb.ModelInferResponse(raw_output_contents=[raw]).SerializeToString()])
    assert asked.is_right([pb.ModelInferResponse(outputs=[typed]).SerializeToString()])
    assert not asked.is_right([pb.ModelInferResponse(raw_output_contents=[raw[:-4]]).SerializeToString()])
    http = questions.by_open_inference(call, http=True)
    data = json.loads(http.body)["inputs"][0]["data"]
    assert http.path == "/v2/models/identity/infer"
    assert http.is_right([json.dumps({"outputs": [{"datatype": "FP32", "data": data}]}).encode()])
    assert not http.is_right([json.dumps({"outputs": [{"datatype": "FP32", "data": data[1:]}]}).encode()])


# An open loop


def test_arrivals_are_random_with_the_wanted_rate(open_loop: ModuleType) -> None:
    ticks = list(open_loop.arrivals(1000, 10, seed=1))
    assert ticks == list(open_loop.arrivals(1000, 10, seed=1)) != list(open_loop.arrivals(1000, 10, seed=2))
    assert sum(count for _, count in ticks) == pytest.approx(10_000, rel=0.05)
    assert ticks == sorted(ticks) and ticks[0][0] > 0 and ticks[-1][0] <= 10 + open_loop.TICK_S
    assert max(count for _, count in ticks) > 3, "some come together"


def test_answers_are_found_at_every_cut(open_loop: ModuleType) -> None:
    answer = b"HTTP/1.1 503 \r\nContent-Length: 3\r\nConnection: close\r\n\r\nbad"
    for cut in range(1, len(answer)):
        reader = open_loop.AnswerReader()
        assert reader.feed(answer[:cut]) is None
        assert reader.feed(answer[cut:]) == (b"503", False)
    assert reader.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") == (b"200", True)


def test_what_was_not_answered_is_counted(open_loop: ModuleType) -> None:
    found = open_loop.Offered(2.0, offered=10, refused=2, latencies_s=[0.1, 0.3, 0.2], ended_s=3.0)
    assert (found.unanswered, found.rate, found.part(found.refused)) == (5, 1.0, 20.0)
    assert found.percentile_ms(0.5) == 200.0


def test_requests_that_a_full_queue_refuses_are_told_beside_the_answers(open_loop: ModuleType) -> None:
    from measuring.h2load import LoadFailed
    from peers.loads import of_an_open_loop

    found = of_an_open_loop(open_loop.Offered(2.0, offered=10, refused=2, latencies_s=[0.1, 0.3, 0.2], ended_s=1.0))
    assert found["offered/s"] == 5.0 and found["requests/s"] == 1.5 and found["p50 ms"] == 200.0
    assert found["refused %"] == 20.0 and found["no answer %"] == 50.0
    with pytest.raises(LoadFailed, match="none of 3"):
        of_an_open_loop(open_loop.Offered(2.0, offered=3, refused=3))


# Lifecycles


def test_memory_is_read_when_it_has_settled(path: None) -> None:
    from peers.lifecycles import SETTLE_S_MAX, settled

    now, values = [0.0], [100.0, 150.0, 170.0, 171.0, 200.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    assert settled(lambda: values[int(now[0])], lambda: now[0], sleep) == 171.0
    now[0] = 0.0
    assert settled(lambda: 2.0 ** now[0], lambda: now[0], sleep) == 2.0**SETTLE_S_MAX, "one that grows on and on"


# The page


def results_of(rows: ModuleType) -> Any:
    figures = {
        "ours": [(200.0, 50.0), (300.0, 60.0)],
        "torchserve": [(20.0, 500.0), (20.0, 600.0)],
        "bare": [(400.0, 5.0)],
    }
    found = rows.Results()
    for system, these in figures.items():
        for number, (rate, cpu) in enumerate(these):
            row = rows.Row("noop-grpc", "64 clients", system, number, {"requests/s": rate, "CPU µs/request": cpu})
            found.rows.append(row)
    found.skipped = {("noop-grpc", "triton"): "it | broke\nbadly", ("", "litserve"): "no such package"}
    return found


def test_ratios_are_taken_within_rounds_and_of_the_same_model_files(rows: ModuleType) -> None:
    found = results_of(rows).rows
    assert tuple(rows.ratio(found, "64 clients", "torchserve", "requests/s")) == (10.0, 12.5, 15.0)
    assert tuple(rows.ratio(found, "64 clients", "bare", "requests/s")) == (0.5, 0.5, 0.5), "its only round"
    assert rows.ratio(found, "64 clients", "ours", "requests/s") is None
    triton = [
        rows.Row("infer", "1", name, 0, {"s": value})
        for name, value in (("ours", 9.0), ("ours-triton", 1.0), ("triton", 4.0), ("compiled-triton", 0.5))
    ]
    assert rows.ratio(triton, "1", "triton", "s").median == 0.25
    assert rows.ratio(triton, "1", "compiled-triton", "s").median == 2.0


def test_the_page_has_ratios_and_who_was_left_out(page: ModuleType, rows: ModuleType) -> None:
    found = results_of(rows)
    text = page.page(found, {"cores": "2"}, "make bench")
    assert "| `noop-grpc` | 64 clients | requests/s | 12.5 |  |  |  |  |  | 0.5 |" in text
    assert "`triton` in `noop-grpc` (it / broke badly)" in text
    assert "Not measured: `litserve` (no such package)." in text
    assert "infer-grpc" not in text and "## A handler" not in text, "scenarios without a figure are left out"
    assert text.startswith("# Benchmarks") and text.endswith(".\n")


def test_a_scenario_has_its_figures_ratios_and_who_was_left_out(
    page: ModuleType, rows: ModuleType, scenarios: ModuleType
) -> None:
    text = page.section(scenarios.SCENARIOS["noop-grpc"], results_of(rows))
    assert "| 64 clients | `torchserve` | 20 | 550 (500 – 600) | **12.5 (10 – 15)** | **0.1** |" in text
    assert "| 64 clients | `ours` | 250 (200 – 300) | 55 (50 – 60) |  |  |" in text
    assert "`triton` (it / broke badly)" in text and "`mosec` (HTTP only)" in text
