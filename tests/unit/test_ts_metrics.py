"""Metrics of handlers: the output of each call."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from ts.metrics import metric_cache_errors as errors
from ts.metrics import records
from ts.metrics.caching_metric import CachingMetric
from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric
from ts.metrics.metric_cache import MetricCache
from ts.metrics.metric_cache_yaml_impl import DEFAULT_FILE, MetricsCacheYamlImpl
from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.metrics_store import MetricsStore
from ts.metrics.unit import Units

TAIL = rf"\|#hostname:{re.escape(records.hostname())},\d{{10}}"


@pytest.fixture
def metrics() -> MetricCache:
    cache = MetricCache("probe")
    cache.request_ids = {0: "id-0", 1: "id-1"}
    return cache


def assert_line(capsys: pytest.CaptureFixture[str], head: str, request_ids: str = "") -> None:
    """Exactly one line was written: `head`, host and time, ids."""
    out = capsys.readouterr().out
    ids = f",{request_ids}" if request_ids else ""
    assert re.fullmatch(re.escape(f"[METRICS]{head}") + TAIL + re.escape(ids) + "\n", out), out


DEFAULTS = "|#ModelName:probe,Level:Model|#type:"


def test_percent(metrics: MetricCache, capsys: pytest.CaptureFixture[str]) -> None:
    metrics.add_percent("ProbePercent", 50)
    assert_line(capsys, f"ProbePercent.Percent:50{DEFAULTS}GAUGE", "id-0,id-1")


def test_error_has_its_own_level(metrics: MetricCache, capsys: pytest.CaptureFixture[str]) -> None:
    metrics.request_ids = None
    metrics.add_error("DecodeFailed", 1)
    assert_line(capsys, "DecodeFailed.unit:1|#Level:Error|#type:COUNTER")


def test_an_error_that_is_declared_with_its_level_alone_is_recorded(
    metrics: MetricCache, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics.add_metric_to_cache("DecodeFailed", "", ["Level"])
    metrics.add_error("DecodeFailed", 1, [Dimension("Level", "Fatal")])
    assert_line(capsys, "DecodeFailed.unit:1|#Level:Fatal|#type:COUNTER", "id-0,id-1")


def test_one_id_for_whatever_follows(metrics: MetricCache, capsys: pytest.CaptureFixture[str]) -> None:
    metrics.set_request_ids("loading")
    metrics.add_counter("X", 1, 0)
    assert_line(capsys, f"X.Count:1{DEFAULTS}COUNTER", "loading")


def test_given_dimensions_take_the_declared_order(metrics: MetricCache, capsys: pytest.CaptureFixture[str]) -> None:
    metrics.add_metric_to_cache("X", "count", ["Level", "ModelName", "Shard"])
    metrics.add_counter("X", 1, 0, [Dimension("Shard", "7")])
    assert_line(capsys, "X.Count:1|#Level:Model,ModelName:probe,Shard:7|#type:COUNTER", "id-0")


def test_declared_metric_records_values_in_order(metrics: MetricCache, capsys: pytest.CaptureFixture[str]) -> None:
    metric = metrics.add_metric_to_cache("GenericTokens", "tokens", ["A", "B"], MetricTypes.GAUGE)
    metric.add_or_update(1.5, ["a", "b"], "rid")
    assert_line(capsys, "GenericTokens.tokens:1.5|#A:a,B:b|#type:GAUGE", "rid")
    metric.update(2.5, "rid", [Dimension("B", "y"), Dimension("A", "x")])
    assert_line(capsys, "GenericTokens.tokens:2.5|#A:x,B:y|#type:GAUGE", "rid")


def test_declaring_twice_is_one_metric(metrics: MetricCache) -> None:
    first = metrics.add_metric_to_cache("X", "count", ["A"])
    assert metrics.add_metric_to_cache("X", "count", ["A"]) is first
    assert metrics.get_metric("X") is first


def test_type_is_part_of_the_identity(metrics: MetricCache) -> None:
    metrics.add_metric_to_cache("X", "count", [], MetricTypes.GAUGE)
    with pytest.raises(errors.MetricsCacheKeyError, match="no metric 'X' of type counter"):
        metrics.get_metric("X")
    assert metrics.get_metric("X", MetricTypes.GAUGE).metric_type is MetricTypes.GAUGE


@pytest.mark.parametrize(
    ("value", "dimension_values", "reason"),
    [
        (-1, ["a"], "can't go down"),
        (1, [], "dimension values"),
        (1, ["a", "b"], "dimension values"),
        ("many", ["a"], "many"),
    ],
)
def test_a_wrong_value_is_an_error_record_and_no_metric(
    value: float,
    dimension_values: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    CachingMetric("X", "count", ["A"]).add_or_update(value, dimension_values)
    assert capsys.readouterr().out == ""
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert reason in caplog.text


def test_a_gauge_may_be_negative(capsys: pytest.CaptureFixture[str]) -> None:
    CachingMetric("X", "B", [], MetricTypes.GAUGE).add_or_update(-1)
    assert_line(capsys, "X.Bytes:-1|#|#type:GAUGE")


@pytest.mark.parametrize(
    "definition",
    [(7, "ms", []), ("a.b", "ms", []), ("a", 7, []), ("a", "ms", "A"), ("a", "ms", [1]), ("a", "ms", [], "counter")],
)
def test_wrong_definitions(metrics: MetricCache, definition: tuple[object, ...]) -> None:
    with pytest.raises(errors.MetricsCacheTypeError):
        metrics.add_metric_to_cache(*definition)  # type: ignore[arg-type]


def test_wrong_units_name_the_right_ones(metrics: MetricCache) -> None:
    with pytest.raises(errors.MetricUnitError, match="one of ms, s, not 'h'"):
        metrics.add_time("T", 1, unit="h")
    with pytest.raises(errors.MetricUnitError, match="one of MB, kB, GB, B, not 'TB'"):
        metrics.add_size("T", 1, unit="TB")


def test_batches_side_by_side_keep_their_request_ids(metrics: MetricCache, capsys: pytest.CaptureFixture[str]) -> None:
    other = metrics.bind({0: "id-9"})
    other.add_counter("X", 1)
    assert_line(capsys, f"X.Count:1{DEFAULTS}COUNTER", "id-9")
    metrics.add_counter("X", 1)
    assert_line(capsys, f"X.Count:1{DEFAULTS}COUNTER", "id-0,id-1")
    assert metrics.get_metric("X") is other.get_metric("X")


def test_default_file_lists_every_metric_once() -> None:
    content = yaml.safe_load(DEFAULT_FILE.read_text())
    listed = [m for section in ("ts_metrics", "model_metrics") for kind in content[section].values() for m in kind]
    names = [metric["name"] for metric in listed]
    assert len(names) == len(set(names)) == 21
    used = {name for metric in listed for name in metric["dimensions"]}
    assert used == set(content["dimensions"])


def cache_of(tmp_path: Path, text: str) -> MetricsCacheYamlImpl:
    (tmp_path / "metrics.yaml").write_text(text)
    return MetricsCacheYamlImpl(tmp_path / "metrics.yaml")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("ts_metrics: {}", errors.MetricsCacheKeyError),
        ("model_metrics: {speed: []}", errors.MetricsCacheTypeError),
        ("model_metrics: {gauge: [{name: X, unit: ms}]}", errors.MetricsCacheKeyError),
        ("model_metrics: {gauge: [{name: X, unit: ms, dimensions: 7}]}", errors.MetricsCacheTypeError),
    ],
)
def test_files_that_declare_nothing_usable(tmp_path: Path, text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        cache_of(tmp_path, text).initialize_cache()


@pytest.mark.parametrize("text", ["[", "- a list"])
def test_files_that_are_no_mapping(tmp_path: Path, text: str) -> None:
    with pytest.raises(errors.MetricsCachePyYamlError):
        cache_of(tmp_path, text)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(errors.MetricsCacheIOError, match="nowhere"):
        MetricsCacheYamlImpl(tmp_path / "nowhere.yaml")


def test_metric_as_values() -> None:
    plain = Metric("X", 1, None, [Dimension("A", "a")], "rid").to_dict()
    assert plain["Unit"] == "unit"
    assert plain["Dimensions"] == [{"Name": "A", "Value": "a"}]


def test_units_by_short_name() -> None:
    assert Units().units["GB"] == "Gigabytes"


def test_store_adds_counters_up_and_writes_once(capsys: pytest.CaptureFixture[str]) -> None:
    store = MetricsStore({0: "id-0"}, "probe")
    store.add_counter("C", 1, 0)
    store.add_counter("C", 2, 0)
    store.add_time("T", 1.0)
    store.add_time("T", 4.0)
    store.add_size("S", 1)
    store.add_percent("P", 1)
    store.add_error("E", 1)
    store.add_metric("M", 1, "widgets")
    assert [(metric.name, metric.value) for metric in store.store[:2]] == [("C", 3), ("T", 4.0)]
    store.emit()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[0] for line in lines] == [
        "[METRICS]C.Count:3",
        "[METRICS]T.Milliseconds:4.0",
        "[METRICS]S.Megabytes:1",
        "[METRICS]P.Percent:1",
        "[METRICS]E.unit:1",
        "[METRICS]M.widgets:1",
    ]
    store.emit()
    assert capsys.readouterr().out == ""


def test_what_a_cache_holds_and_what_its_file_says(tmp_path: Path) -> None:
    """Names that tests of handlers use."""
    file = tmp_path / "metrics.yaml"
    file.write_text(yaml.safe_dump({"model_metrics": {"counter": [{"name": "A", "unit": "ms", "dimensions": ["m"]}]}}))
    cache = MetricsCacheYamlImpl(file)
    assert cache.cache_keys() == []
    cache.initialize_cache()
    cache.add_metric_to_cache("B", "ms", [], MetricTypes.GAUGE)
    assert cache.cache_keys() == ["counter:A", "gauge:B"]
    assert cache._parse_metrics_section("model_metrics")["counter"][0]["name"] == "A"
    with pytest.raises(errors.MetricsCacheKeyError, match="no `ts_metrics` section"):
        cache._parse_metrics_section("ts_metrics")
