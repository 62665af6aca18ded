"""OpenMetrics: its clients, its lines, and the requests that become exemplars."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from ts_frontend.job import Job, Ledger
from ts_frontend.telemetry.metrics.families import Definition, Family, MetricKind
from ts_frontend.telemetry.metrics.text import Examples, openmetrics, preferred, trace_of

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
