"""The registry: the recorded, shown and logged metrics in each mode."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts.protocol.frames import Chunk
from ts_frontend.config.kinds import ConfigError
from ts_frontend.grpc.around import CallMetrics
from ts_frontend.job import Job, JobState, Ledger
from ts_frontend.models.metrics import ServedModels, compatible_families
from ts_frontend.models.model import Registry
from ts_frontend.telemetry.metrics.families import BUCKETS, NEW, TIMES_MAX, Definitions, read_definitions
from ts_frontend.telemetry.metrics.registry import DEFAULT_FILE, MetricsRegistry
from ts_frontend.telemetry.metrics.requests import EVENTS_MAX, MetricLine, parse_record

#: What TorchServe 0.12.0 answered, in an order that differs run by run.
RECORDED = Path(__file__).parents[1] / "data" / "metrics"


def registry(mode: str = "prometheus", definitions: Definitions | None = None, **more: bool) -> MetricsRegistry:
    return MetricsRegistry(definitions or read_definitions(DEFAULT_FILE), mode, "vm", **more)


def answered_job(metrics: MetricsRegistry, *, name: str = "m", named: bool = False, request_id: str = "ID") -> Job:
    """A job that waited 1 s in the queue, was on the worker for 2 s, and is answered."""
    model = metrics.model(name, "1.0")
    recorder = model.requests(named)
    recorder.accepted()
    job = Job(Ledger(), [], request_id=request_id)
    for state in (JobState.QUEUED, JobState.SENT):
        job.move(state)
    job.deliver(Chunk(job.id, b"", last=True))
    recorder.answered(10.0, 11.0, 13.0)
    model.batches.answered([job], 0.5, 2.0, 13.0)
    return job


def shown(metrics: MetricsRegistry, *names: str) -> list[str]:
    return [line for line in metrics.text(frozenset(names)).splitlines() if not line.startswith("#")]


def logged(metrics: MetricsRegistry) -> dict[str, list[str]]:
    """The lines by log, times masked."""
    portions: Sequence[tuple[str, list[MetricLine]]] = [*metrics.event_log.portions(), *metrics.event_log.portions()]
    found: dict[str, list[str]] = {}
    for name, lines in portions:
        if lines:
            found.setdefault(name, []).extend(line.text().rpartition(":")[0] for line in lines)
    return found


def handler_line(text: str, metrics: MetricsRegistry) -> None:
    record = parse_record(text)
    assert record is not None
    metrics.model("probe", "1.0")
    metrics.handler_value(record, "probe_1.0")


def probe(name: str, value: float, kind: str = "COUNTER") -> str:
    return f"[METRICS]{name}.Count:{value}|#ModelName:probe,Level:Model|#type:{kind}|#hostname:vm,17,ID"


@given(st.lists(st.integers(0, 50_000), max_size=30), st.integers(0, 30))
def test_values_may_be_added_together(milliseconds: list[int], first: int) -> None:
    values = [number / 1024 for number in milliseconds]  # whose sums are exact
    values += list(BUCKETS) if first > 15 else []
    for new in NEW.values():
        together, one_by_one = new(), new()
        together.add_all(values[:first])
        together.add_all(values[first:])
        for value in values:
            one_by_one.add(value)
        found, wanted = together.read(), one_by_one.read()
        assert [one[:2] for one in found] == [one[:2] for one in wanted]
        assert [one[2] for one in found] == pytest.approx([one[2] for one in wanted])


@pytest.mark.parametrize("count", [1, TIMES_MAX - 1, TIMES_MAX, 2 * TIMES_MAX + 3])
def test_requests_that_nobody_has_read_are_counted(count: int) -> None:
    metrics = registry()
    recorder = metrics.model("m", "1.0").requests(False)
    for _ in range(count):
        recorder.answered(10.0, 10.5, 12.0)
    assert metrics.sums_s("m", "1.0") == (count * 2.0, count * 0.5)
    recorder.answered(10.0, 10.5, 12.0)
    own = shown(metrics, "ts_inference_latency_seconds_count", "ts_queue_latency_seconds_sum")
    assert [float(line.rpartition(" ")[2]) for line in own] == [count + 1, (count + 1) * 0.5]


def test_http_statuses_are_counted_by_class() -> None:
    metrics = registry()
    for status in (200, 201, 404, 499, 503, 301):
        metrics.http_answered(status)
    assert shown(metrics, "Requests2XX", "Requests4XX", "Requests5XX") == [
        f'Requests{kind}XX{{Level="Host",Hostname="vm",}} 2.0' for kind in (2, 4, 5)
    ]


def test_what_comes_too_fast_is_summed_exactly() -> None:
    metrics = registry("log")
    for number in range(1000):
        answered_job(metrics, request_id=str(number))
    found = logged(metrics)
    counts = [line for line in found["TS_METRICS"] if line.startswith("ts_inference_requests_total")]
    values = [float(line.partition(":")[2].partition("|")[0]) for line in counts]
    assert sum(values) == 1000
    assert max(values) > 900
    assert sum(map(len, found.values())) < 3 * EVENTS_MAX


def test_values_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    metrics, logs = registry(), registry("log")
    with caplog.at_level(logging.INFO, "TS_METRICS"):
        for one in (metrics, logs):
            one.server_value("WorkerLoadTime", 7597, "W-9001-mnist_1.0", "Host")
            one.server_value("WorkerLoadTime", 1, "too few labels")
            one.server_value("Unlisted", 1, "Host")
    assert shown(metrics) == ['WorkerLoadTime{WorkerName="W-9001-mnist_1.0",Level="Host",Hostname="vm",} 7597.0']
    (line,) = caplog.messages
    assert line.startswith("WorkerLoadTime.Milliseconds:7597.0|#WorkerName:W-9001-mnist_1.0,Level:Host|#hostname:vm,")


def test_a_batch_that_failed_has_no_prediction_time() -> None:
    metrics = registry("log")
    job = Job(Ledger(), [], request_id="r")
    job.move(JobState.QUEUED)
    job.cancel()
    metrics.model("m", "1.0").batches.answered([job], 0.0, 1.0, 2.0)
    assert not logged(metrics)


@pytest.mark.parametrize("auto_detect", [True, False])
def test_the_prediction_time_is_found_as_handlers_metrics_are(auto_detect: bool) -> None:
    unlisted = Definitions(read_definitions(DEFAULT_FILE).server, {})
    exposed = registry(definitions=unlisted, auto_detect=auto_detect)
    answered_job(exposed)
    series = 'PredictionTime{ModelName="m",Level="Model",Hostname="vm",} 2000.0'
    assert (series in exposed.text()) is auto_detect
    in_log = registry("log", unlisted, auto_detect=auto_detect)
    answered_job(in_log)
    assert ("PredictionTime.ms:2000.0|#ModelName:m,Level:Model" in str(logged(in_log))) is auto_detect


# --- TorchServe's own text


def recorded_registry() -> MetricsRegistry:
    """Repeats the events of the recorded server."""
    metrics = registry(auto_detect=True)
    host = {
        "DiskUtilization": 36.0,
        "DiskUsage": 36.505531311035156,
        "CPUUtilization": 0.0,
        "DiskAvailable": 64.95674896240234,
        "MemoryAvailable": 22852.046875,
        "MemoryUtilization": 5.2,
        "MemoryUsed": 1253.51953125,
    }
    for name, value in host.items():
        metrics.server_value(name, value, "Host")
    metrics.server_value("WorkerLoadTime", 7597, "W-9001-mnist_1.0", "Host")
    metrics.server_value("WorkerLoadTime", 5679, "W-9000-probe_1.0", "Host")
    for status in (200, 200, 200, 200, 404):
        metrics.http_answered(status)
    recorder = metrics.model("probe", "1.0").requests(False)
    for _ in range(2):
        recorder.accepted()
    for name, unit, value, kind in (
        ("ProbeGeneric", "widgets", 8, "COUNTER"),
        ("ProbeCounter", "Count", 4, "COUNTER"),
        ("ProbeTime", "Milliseconds", 12.5, "GAUGE"),
        ("ProbePercent", "Percent", 50, "GAUGE"),
        ("ProbeSize", "Megabytes", 3, "GAUGE"),
        ("PredictionTime", "ms", 0.18, "GAUGE"),
    ):
        text = f"[METRICS]{name}.{unit}:{value}|#ModelName:probe,Level:Model|#type:{kind}|#hostname:vm,17,ID"
        handler_line(text, metrics)
    return metrics


def settled(text: str) -> list[str]:
    """The lines in one order, without those of our own families, and without times that were measured."""
    measured = ("ts_inference_latency_micro", "ts_queue_latency_micro", "QueueTime", "WorkerThreadTime")
    lines = [line for line in text.splitlines() if "_latency_seconds" not in line]
    return sorted(line.rpartition(" ")[0] if line.startswith(measured) else line for line in lines)


def test_the_text_is_torchserves() -> None:
    metrics = recorded_registry()
    metrics.model("probe", "1.0").requests(False).answered(0.0, 0.0002, 0.02)
    job = Job(Ledger(), [], request_id="r")
    for state in (JobState.QUEUED, JobState.SENT, JobState.ANSWERED):
        job.move(state)
    metrics.model("probe", "1.0").batches.answered([job], 0.002, 0.000185, 1.0)
    assert settled(metrics.text()) == settled((RECORDED / "prometheus.txt").read_text())
    metrics.http_answered(200)
    names = frozenset({"Requests2XX", "ts_inference_requests_total"})
    assert metrics.text(names) == (RECORDED / "filtered.txt").read_text()


# --- metrics of handlers


def test_unlisted_metrics_are_dropped_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = registry()
    for _ in range(3):
        handler_line(probe("Probe", 2), metrics)
    assert not shown(metrics)
    assert [message.partition(":")[0] for message in caplog.messages] == ["Metric Probe of a handler is dropped"]


GATHERED = (
    *("ts_queued_requests", "ts_quarantined_requests_total", "ts_replaced_workers_total", "nv_inference_count"),
    *("model_infer_request_success_total", "grpc_server_handled_total"),
)


@pytest.mark.parametrize("name", ["Requests2XX", "ts_inference_latency_seconds", "Probe Counter", *GATHERED])
def test_a_handler_takes_no_name_that_is_taken(name: str) -> None:
    """Also none of the families that the server adds at each reading, whichever they are."""
    metrics = registry(auto_detect=True)
    metrics.gather(ServedModels([], "vm").families)
    metrics.gather(lambda: compatible_families(Registry(), metrics))
    metrics.gather(CallMetrics().families, always=True)
    handler_line(probe("Probe_Counter", 1), metrics)
    before = metrics.text()
    handler_line(probe(name, 5), metrics)
    assert metrics.text() == before


def test_wrong_dimensions_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    metrics = registry()
    handler_line("[METRICS]HandlerTime.ms:1|#ModelName:m|#type:GAUGE|#hostname:vm,17", metrics)
    assert not shown(metrics)
    assert "its dimensions are ['ModelName'], not ['ModelName', 'Level']" in caplog.text


# --- models that are gone


def one_life(metrics: MetricsRegistry, name: str, version: str = "1.0") -> None:
    """A version is registered, used in every way that is measured, and unregistered."""
    model = metrics.model(name, version)
    for named in (False, True):
        recorder = model.requests(named)
        recorder.accepted()
        recorder.answered(10.0, 11.0, 13.0)
    job = Job(Ledger(), [], request_id="r")
    for state in (JobState.QUEUED, JobState.SENT, JobState.ANSWERED):
        job.move(state)
    model.batches.answered([job], 0.5, 2.0, 13.0)
    model.batches.loaded(9000, 1.0)
    for metric in ("HandlerTime", f"Only{name}"):
        record = parse_record(f"[METRICS]{metric}.ms:1|#ModelName:{name},Level:Model|#type:GAUGE|#hostname:vm,17,ID")
        assert record is not None
        metrics.handler_value(record, f"{name}_{version}")
    assert name in metrics.text() or metrics.mode == "log"
    model.close()


@pytest.mark.parametrize("mode", ["prometheus", "legacy", "log"])
def test_so_many_registrations_leave_nothing_behind(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there may be series of a family, and families: the last model is measured as the first one was. The
    limits are the smaller ones of a test, since every registration is looked for in the whole text."""
    limit = 80
    for name in ("families.SERIES_MAX", "registry.FAMILIES_MAX"):
        monkeypatch.setattr(f"ts_frontend.telemetry.metrics.{name}", limit)
    metrics = registry(mode, auto_detect=True)
    answered_job(metrics, name="stays")
    logged(metrics)
    before, tallies = metrics.text(), len(metrics.event_log._tallies)
    for number in range(3 * limit):
        one_life(metrics, f"m{number}")
        if number % 40 == 0:
            logged(metrics)
    for _ in range(2):
        logged(metrics)
    assert settled(metrics.text()) == settled(before)
    assert len(metrics.event_log._tallies) == tallies
    answered_job(metrics, name="last")
    if mode != "log":
        assert shown(metrics, "ts_inference_requests_total")[-1].endswith(" 1.0")
        assert 'model_name="last"' in metrics.text()
    assert mode == "prometheus" or "ModelName:last" in str(logged(metrics))


def test_what_was_counted_of_a_model_that_is_gone_is_logged_still() -> None:
    metrics = registry("log")
    for number in range(1000):
        answered_job(metrics, request_id=str(number))
    model = metrics.model("m", "1.0")
    for _ in range(1001):
        model.close()
    counts = [line for line in logged(metrics)["TS_METRICS"] if line.startswith("ts_inference_requests_total")]
    assert sum(float(line.partition(":")[2].partition("|")[0]) for line in counts) == 1000
    logged(metrics)
    assert len(metrics.event_log._tallies) == 0


# --- metrics.yaml


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "holds no mapping"),
        ("a: [", "can't be read"),
        ("[" * 600, "can't be read: maximum recursion depth"),
        ("dimensions: [" + "9" * 5000 + "]", "can't be read: Exceeds the limit"),
        ("ts_metrics: {sum: []}", "no metric type 'sum', only counter, gauge, histogram"),
        ("ts_metrics: [1]", "a section maps types to lists"),
        ("model_metrics: {gauge: [{name: A, unit: ms}]}", "needs name, unit and dimensions"),
        ("model_metrics: {gauge: [{name: A, unit: ms, dimensions: Level}]}", "dimensions of A must be a list"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "metrics.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="metrics_config") as caught:
        read_definitions(file)
    assert words in caught.value.message
