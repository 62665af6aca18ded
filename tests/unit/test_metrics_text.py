"""Metrics as text, for Prometheus and as OpenMetrics."""

from __future__ import annotations

import math

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from ts_frontend.http.torchserve import wanted
from ts_frontend.job import Job, Ledger
from ts_frontend.telemetry.metrics.families import SERIES_MAX, Definition, Family, MetricKind
from ts_frontend.telemetry.metrics.requests import Record, java_double, parse_record
from ts_frontend.telemetry.metrics.text import Examples, openmetrics, preferred, trace_of

LINE = "[METRICS]ProbeTime.Milliseconds:12.5|#ModelName:probe,Level:Model|#type:GAUGE|#hostname:vm,1795217651,ID-1,ID-2"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (4, "4.0"),
        (0, "0.0"),
        (-2.5, "-2.5"),
        (0.18, "0.18"),
        (453.847, "453.847"),
        (9999999.0, "9999999.0"),
        (1e7, "1.0E7"),
        (12345678.5, "1.23456785E7"),
        (0.001, "0.001"),
        (0.0005, "5.0E-4"),
        (-1.25e-7, "-1.25E-7"),
        (1e21, "1.0E21"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
        (math.nan, "NaN"),
    ],
)
def test_numbers_are_javas(value: float, text: str) -> None:
    assert java_double(value) == text


def test_series_have_a_limit() -> None:
    family = Family(Definition("M", MetricKind.COUNTER, "Count", ("A",)))
    for number in range(SERIES_MAX + 5):
        family.sample((str(number),)).add(1)
    assert len(family.samples) == SERIES_MAX
    family.sample(("1", "one too many")).add(1)
    assert len(family.samples) == SERIES_MAX


def test_the_line_of_a_worker() -> None:
    record = parse_record(LINE)
    assert record == Record(
        "ProbeTime",
        "Milliseconds",
        12.5,
        {"ModelName": "probe", "Level": "Model"},
        MetricKind.GAUGE,
        "vm",
        1795217651,
        "ID-1,ID-2",
    )
    assert record is not None
    listed = Definition("ProbeTime", MetricKind.GAUGE, "ms", ("Level", "ModelName", "Hostname"))
    values = record.values(listed)
    assert values == ("Model", "probe", "vm")
    assert record.text(listed, values) == (
        "ProbeTime.ms:12.5|#Level:Model,ModelName:probe|#hostname:vm,requestID:ID-1,ID-2,timestamp:1795217651"
    )


def test_labels_of_other_names_go_by_their_position() -> None:
    record = parse_record(LINE)
    assert record is not None
    assert record.values(Definition("ProbeTime", MetricKind.GAUGE, "ms", ("A", "B", "Hostname"))) == (
        "probe",
        "Model",
        "vm",
    )
    assert record.values(Definition("ProbeTime", MetricKind.GAUGE, "ms", ("A", "Hostname"))) is None


@pytest.mark.parametrize(
    "line",
    [
        "[METRICS]",
        "[METRICS]just text",
        "[METRICS]A.Count:x|#|#type:COUNTER|#hostname:vm,1",
        "[METRICS]A.Count:-1|#|#type:COUNTER|#hostname:vm,1",
        "[METRICS]A.Count:nan|#|#type:COUNTER|#hostname:vm,1",
        "[METRICS]A.Count:1|#|#type:SUM|#hostname:vm,1",
        "[METRICS]A.Count:1|#|#type:COUNTER|#hostname:vm,now",
        pytest.param("[METRICS]A.Count:1|#|#type:COUNTER|#hostname:vm," + "1" * 5000, id="too long a time"),
    ],
)
def test_other_lines_are_not_metrics(line: str) -> None:
    assert parse_record(line) is None


def test_names_in_a_query() -> None:
    assert wanted(b"") == frozenset()
    assert wanted(b"name[]=A&name%5B%5D=B&name=C&other[]=D") == {"A", "B"}
    assert wanted(b"&".join([b"a=1"] * 2000)) == frozenset()
    assert wanted(b"name[]=%ff") == {"\ufffd"}


COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM


@pytest.mark.parametrize(
    ("accept", "wants"),
    [
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
         "text/plain;version=0.0.4;q=0.5,*/*;q=0.1", True),
        ("text/plain;version=0.0.4;q=0.6,application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5", False),
        ("application/openmetrics-text;version=2.0.0,text/plain", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=many", False),
        ("*/*", False),
        ("text/html,application/xhtml+xml", False),
        ("", False),
    ],
)  # fmt: skip
def test_who_gets_it(accept: str, wants: bool) -> None:
    assert preferred(accept) is wants


def test_names_stay_and_every_line_is_valid() -> None:
    families = []
    for name, kind in (("a_total", COUNTER), ("Requests2XX", COUNTER), ("b", GAUGE), ("c.d", HISTOGRAM)):
        family = Family(Definition(name, kind, "Count", ("label",)), 'a "sentence" \\ and\nanother')
        family.sample(('x\\"\n',)).add(12345678.9)
        families.append(family)
    families.append(Family(Definition("empty", GAUGE, "Count", ())))
    text = openmetrics(families)
    found = {one.name: one for one in text_string_to_metric_families(text)}
    types = {"a": "counter", "Requests2XX": "unknown", "b": "gauge", "c_d": "histogram", "empty": "gauge"}
    assert {name: one.type for name, one in found.items()} == types
    assert found["a"].samples[0].name == "a_total" and found["a"].samples[0].value == 12345678.9
    assert found["Requests2XX"].samples[0].labels == {"label": 'x\\"\n'}
    assert found["a"].documentation == 'a "sentence" \\ and\nanother'
    assert openmetrics(families, {"b", "c.d_count"}).count("# TYPE") == 1


def test_each_bucket_has_its_latest_request() -> None:
    examples = Examples((0.1, 1.0))
    ledger = Ledger()
    for number, took_s in enumerate((0.05, 0.07, 30.0)):
        headers = [("TraceParent", f"00-{number:032}-{number:016}-01")] if number else []
        job = Job(ledger, [], request_id="r" * 100 if number == 2 else f"id{number}", headers=headers)
        job.queued_at_s, job.sent_at_s = 100.0, 100.5
        examples.add(job, 100 + took_s)
    assert [one and one.request_id[:3] for one in examples.took] == ["id1", None, "rrr"]
    assert [one and one.request_id[:3] for one in examples.queued] == [None, "rrr", None]
    family = Family(Definition("t", HISTOGRAM, "Seconds", ()))
    family.sample(()).add(0.07)
    ends = ["" if one is None else one.text(one.took_s) for one in examples.took]
    text = openmetrics([family], (), {("t", ()): [*ends[:1], *[""] * 13, ends[2]]})
    (parsed,) = text_string_to_metric_families(text)
    first, last = (one.exemplar for one in parsed.samples if one.exemplar is not None)
    assert first is not None and first.labels == {"trace_id": f"{1:032}", "request_id": "id1"}
    assert last is not None and len(last.labels["request_id"]) == 64 and last.value == 30.0


def test_a_traces_id() -> None:
    assert trace_of([("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")])[:4] == "4bf9"
    assert trace_of([("traceparent", "garbage")]) == trace_of([("traceparent", '00-"-1-1')]) == trace_of([]) == ""
