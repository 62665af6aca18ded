"""The parts of the benchmarks that decide the meaning of a figure: what is asked and what is a right answer, parsing,
percentiles, arrivals of an open loop, ratios, tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ts.protocol import open_inference_pb2 as pb
from ts_frontend.protos.inference_pb2 import PredictionResponse, PredictionsRequest

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


# A closed loop, with h2load


def load(done: int = 21, succeeded: int = 21, data: int = 189) -> Any:
    log = "1795229217774043\t200\t3000\n1795229217774016\t200\t1000\n1795229217774016\t-1\t9\n"
    text = OUTPUT.format(done=done, succeeded=succeeded, data=data)
    return import_module("measuring.h2load").parse(text, log, 2.0, 0.5)


def test_h2load_output_is_read() -> None:
    found = load()
    assert (found.requests, found.failed, found.data_bytes, found.rate) == (21, 0, 189, 10.5)
    assert found.latencies_s == [0.001, 0.003]
    for data in (189, 198):
        load(data=data).check(9, clients=1)


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"data": 180}, "some are errors"),
        ({"data": 207}, "some are errors"),
        ({"succeeded": 20}, "1 of 21"),
        ({"done": 0, "succeeded": 0, "data": 0}, "no request was answered within 2 s"),
    ],
)
def test_failed_and_missing_and_wrong_answers_are_noticed(figures: dict[str, int], said: str) -> None:
    with pytest.raises(import_module("measuring.h2load").LoadFailed, match=said):
        load(**figures).check(9, clients=1)


def test_answers_without_a_reason_phrase_count_and_their_bytes_are_checked() -> None:
    """TorchServe's status line is `HTTP/1.1 200 `, of which h2load makes status 0 and a failed request."""
    h2load = import_module("measuring.h2load")
    log = "1795229217774043\t0\t3000\n1795229217774016\t0\t1000\n1795229217774016\t-1\t9\n"
    found = h2load.parse(OUTPUT.format(done=2, succeeded=0, data=4), log, 2.0, 0.5)
    assert (found.requests, found.failed, found.latencies_s) == (2, 0, [0.001, 0.003])
    found.check(2, clients=0)
    with pytest.raises(h2load.LoadFailed, match="some are errors"):
        h2load.parse(OUTPUT.format(done=2, succeeded=0, data=150), log, 2.0, 0.5).check(2, clients=0)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.01, 1), (0.99, 99), (0.991, 100), (1.0, 100)])
def test_percentile_is_the_nearest_rank(share: float, value: int) -> None:
    assert import_module("measuring.h2load").percentile(range(1, 101), share) == value


# The comparison with other servers: which scenarios run, and what is asked


def test_a_usual_run_leaves_long_loads_and_scenarios_out() -> None:
    scenarios = import_module("peers.scenarios")
    usual = {one.name: one for one in scenarios.selected()}
    long = {one.name: one for one in scenarios.selected(long=True)}
    assert list(long) == list(scenarios.SCENARIOS) and set(usual) < set(long)
    assert [load.title for load in usual["echo-http"].loads] == ["1 MB"]
    found = scenarios.selected(["image-grpc", "noop-http"], ["mosec", "kserve"])
    assert [(one.name, one.systems) for one in found] == [("noop-http", ["mosec"]), ("image-grpc", ["kserve"])]


def test_every_server_of_a_scenario_has_its_models_and_protocol() -> None:
    scenarios, systems = import_module("peers.scenarios"), import_module("peers.systems").SYSTEMS
    for scenario in scenarios.SCENARIOS.values():
        for name in {*scenario.systems, *scenario.long_systems} - {scenarios.IN_PROCESS}:
            assert set(scenario.models) <= set(systems[name].models), (scenario.name, name)
            assert ("http" if scenario.http else "grpc") in systems[name].protocols, (scenario.name, name)
        assert not set(scenario.missing) & {*scenario.systems, *scenario.long_systems}, scenario.name


def test_only_right_answers_count() -> None:
    questions = import_module("peers.questions")
    call = questions.Call("echo", 1000)
    asked = questions.by_torchserve_grpc(call)
    sent = PredictionsRequest.FromString(asked.body).input["data"]
    right = PredictionResponse(prediction=sent).SerializeToString()
    wrong = PredictionResponse(prediction=sent[:-1]).SerializeToString()
    assert len(sent) == 1000 and asked.is_right([right]) and not asked.is_right([wrong])
    assert asked.answer_bytes([right]) == 5 + len(right)
    http = questions.by_path(call, "/predictions/echo")
    assert http.is_right([sent]) and not http.is_right([b""]) and http.answer_bytes([sent]) == 1000
    stream = questions.by_path(questions.Call("pieces"), "/pieces")
    assert stream.is_right([b"ok" * 200]) and stream.is_right([b"data: ok\n\n" * 200])
    assert not stream.is_right([b"ok" * 199]) and not stream.is_right([b"ok" * 200 + b"event: error\n\n"])


def test_tensors_are_raw_over_grpc_and_json_over_http() -> None:
    questions = import_module("peers.questions")
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


def test_arrivals_are_random_with_the_wanted_rate() -> None:
    open_loop = import_module("peers.open_loop")
    ticks = list(open_loop.arrivals(1000, 10, seed=1))
    assert ticks == list(open_loop.arrivals(1000, 10, seed=1)) != list(open_loop.arrivals(1000, 10, seed=2))
    assert sum(count for _, count in ticks) == pytest.approx(10_000, rel=0.05)
    assert ticks == sorted(ticks) and ticks[0][0] > 0 and ticks[-1][0] <= 10 + open_loop.TICK_S
    assert max(count for _, count in ticks) > 3, "some come together"


def test_answers_are_found_at_every_cut() -> None:
    open_loop = import_module("peers.open_loop")
    answer = b"HTTP/1.1 503 \r\nContent-Length: 3\r\nConnection: close\r\n\r\nbad"
    for cut in range(1, len(answer)):
        reader = open_loop.AnswerReader()
        assert reader.feed(answer[:cut]) is None
        assert reader.feed(answer[cut:]) == (b"503", False)
    assert reader.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") == (b"200", True)


def test_requests_that_a_full_queue_refuses_are_told_beside_the_answers() -> None:
    offered, loads = import_module("peers.open_loop").Offered, import_module("peers.loads")
    found = loads.of_an_open_loop(offered(2.0, offered=10, refused=2, latencies_s=[0.1, 0.3, 0.2], ended_s=1.0))
    assert found["offered/s"] == 5.0 and found["requests/s"] == 1.5 and found["p50 ms"] == 200.0
    assert found["refused %"] == 20.0 and found["no answer %"] == 50.0
    with pytest.raises(import_module("measuring.h2load").LoadFailed, match="none of 3"):
        loads.of_an_open_loop(offered(2.0, offered=3, refused=3))


# The page


def test_ratios_are_taken_within_rounds_and_of_the_same_model_files() -> None:
    rows, page, scenarios = (import_module(f"peers.{name}") for name in ("rows", "page", "scenarios"))
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
    assert tuple(rows.ratio(found.rows, "64 clients", "torchserve", "requests/s")) == (10.0, 12.5, 15.0)
    assert tuple(rows.ratio(found.rows, "64 clients", "bare", "requests/s")) == (0.5, 0.5, 0.5), "its only round"
    assert rows.ratio(found.rows, "64 clients", "ours", "requests/s") is None
    triton = [
        rows.Row("infer", "1", name, 0, {"s": value})
        for name, value in (("ours", 9.0), ("ours-triton", 1.0), ("triton", 4.0), ("compiled-triton", 0.5))
    ]
    assert rows.ratio(triton, "1", "triton", "s").median == 0.25
    assert rows.ratio(triton, "1", "compiled-triton", "s").median == 2.0

    text = page.page(found, {"cores": "2"}, "make bench")
    assert "| `noop-grpc` | 64 clients | requests/s | 12.5 |  |  |  |  |  |  | 0.5 |" in text
    assert "`triton` in `noop-grpc` (it / broke badly)" in text
    assert "Not measured: `litserve` (no such package)." in text
    assert "infer-grpc" not in text and "## A handler" not in text, "scenarios without a figure are left out"
    section = page.section(scenarios.SCENARIOS["noop-grpc"], found)
    assert "| 64 clients | `torchserve` | 20 | 550 (500 – 600) | **12.5 (10 – 15)** | **0.1** |" in section
    assert "| 64 clients | `ours` | 250 (200 – 300) | 55 (50 – 60) |  |  |" in section


def test_the_energy_is_that_of_all_packages_if_the_system_tells_it(tmp_path: Path) -> None:
    energy_j = import_module("measuring.machine").energy_j
    assert energy_j(tmp_path) is None
    for name, microjoules in (("intel-rapl:0", 1_500_000), ("intel-rapl:0:1", 700_000), ("intel-rapl:1", 250_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{microjoules}\n")
    assert energy_j(tmp_path) == 1.75
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert energy_j(tmp_path) is None
