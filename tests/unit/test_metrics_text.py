"""Metrics as text: Java's numbers, Prometheus's format, the lines of logs and of workers."""

from __future__ import annotations

import math

import pytest

from ts_frontend.http.torchserve import wanted
from ts_frontend.telemetry.metrics.families import SERIES_MAX, Definition, Family, MetricKind
from ts_frontend.telemetry.metrics.text import Record, exposition, java_double, log_text, parse_record, prometheus_name

REQUESTS = Definition("Requests2XX", MetricKind.COUNTER, "Count", ("Level", "Hostname"))
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


def test_a_family_as_torchserve_writes_it() -> None:
    family = Family(REQUESTS)
    family.sample(("Host", "vm")).add(1)
    family.sample(("Host", "vm")).add(3.0)
    assert exposition([family]) == (
        "# HELP Requests2XX Torchserve prometheus counter metric with unit: Count\n"
        "# TYPE Requests2XX counter\n"
        'Requests2XX{Level="Host",Hostname="vm",} 4.0\n'
    )


def test_a_family_without_values_shows_what_it_is() -> None:
    text = exposition([Family(Definition("GPUUtilization", MetricKind.GAUGE, "Percent", ("Level",)))])
    assert text == (
        "# HELP GPUUtilization Torchserve prometheus gauge metric with unit: Percent\n# TYPE GPUUtilization gauge\n"
    )


def test_a_histogram_has_the_java_clients_buckets() -> None:
    family = Family(Definition("T", MetricKind.HISTOGRAM, "s", ("A",)))
    for value in (0.005, 0.3, 99.0):
        family.sample(("x",)).add(value)
    lines = exposition([family]).splitlines()[2:]
    assert lines[0] == 'T_bucket{A="x",le="0.005",} 1.0'
    assert lines[7:9] == ['T_bucket{A="x",le="0.5",} 2.0', 'T_bucket{A="x",le="0.75",} 2.0']
    assert lines[13:] == [
        'T_bucket{A="x",le="10.0",} 2.0',
        'T_bucket{A="x",le="+Inf",} 3.0',
        'T_count{A="x",} 3.0',
        'T_sum{A="x",} 99.305',
    ]


def test_names_choose_families_or_series() -> None:
    one, none = Family(REQUESTS), Family(Definition("Requests5XX", MetricKind.COUNTER, "Count", ("Level", "Hostname")))
    times = Family(Definition("T", MetricKind.HISTOGRAM, "s", ()))
    one.sample(("Host", "vm")).add(1)
    times.sample(()).add(1)
    families = [one, none, times]
    assert exposition(families, {"Requests5XX", "Nowhere"}) == ""
    assert exposition(families, {"Requests2XX"}) == exposition([one])
    assert exposition(families, {"T"}) == exposition([times])
    assert exposition(families, {"T_count"}).splitlines()[2:] == ["T_count 1.0"]


def test_what_would_break_the_text_is_escaped() -> None:
    family = Family(Definition("My metric", MetricKind.GAUGE, "a\nb", ("the label",)))
    family.sample(('say "\\"\n',)).add(1)
    assert exposition([family]).splitlines() == [
        "# HELP My_metric Torchserve prometheus gauge metric with unit: a\\nb",
        "# TYPE My_metric gauge",
        'My_metric{the_label="say \\"\\\\\\"\\n",} 1.0',
    ]
    assert prometheus_name("1x") == "_1x"


def test_series_have_a_limit() -> None:
    family = Family(Definition("M", MetricKind.COUNTER, "Count", ("A",)))
    for number in range(SERIES_MAX + 5):
        family.sample((str(number),)).add(1)
    assert len(family.samples) == SERIES_MAX
    family.sample(("1", "one too many")).add(1)
    assert len(family.samples) == SERIES_MAX


def test_the_line_of_a_log() -> None:
    assert (
        log_text(REQUESTS, 1, {"Level": "Host"}, "vm", 1795217593.9)
        == "Requests2XX.Count:1.0|#Level:Host|#hostname:vm,timestamp:1795217593"
    )


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
