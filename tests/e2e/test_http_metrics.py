"""The metrics API and the metrics logs of a whole server."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from support import GUARD_S, until

if TYPE_CHECKING:
    from e2e.servers import Serving, Start

SAMPLE = re.compile(r"(\w+)(?:\{((?:\w+=\"[^\"]*\",)+)\})? (\S+)")

#: Families of this server's own, which every metrics_mode shows.
OURS = (
    *("ts_queued_requests", "ts_running_requests", "ts_ended_requests_total", "ts_ready_workers"),
    *("ts_repeated_requests_total", "ts_quarantined_requests_total", "ts_replaced_workers_total"),
    *("ts_refused_calls_total", "ts_flooded_connections_total", "ts_refused_requests_total", "ts_queue_capacity"),
    *("ts_workers", "ts_given_up_workers", "ts_model_failing", "ts_worker_failures_total", "ts_worker_memory_bytes"),
    *("ts_server_ready", "ts_server_draining", "ts_unread_answer", "process_"),
)

METRIC_HANDLER = """
def handle(data, context):
    if data is None:
        return None
    metrics = context.metrics
    metrics.add_counter("ProbeCounter", 2, None)
    metrics.add_time("ProbeTime", 12.5, None, "ms")
    metrics.add_time("HandlerTime", 0.25, None, "ms")
    metrics.add_metric("ProbeGeneric", 4, unit="widgets")
    return ["metrics sent"] * len(data)
"""


def read(server: Serving, query: str = "") -> str:
    server.wait_for_log("http_metrics listens")
    url = f"http://127.0.0.1:{server.port('http_metrics')}/metrics{query}"
    with urllib.request.urlopen(url, timeout=GUARD_S) as answer:
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert answer.headers["x-request-id"]
        return str(answer.read().decode())


def samples(text: str) -> dict[str, float]:
    """Value by series, the host's name masked."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = SAMPLE.fullmatch(line)
            assert match, line
            labels = re.sub(r'ostname="[^"]*"', 'ostname="vm"', match[2] or "")
            found[f"{match[1]}{{{labels}}}"] = float(match[3])
    return found


def post(url: str) -> int:
    return httpx.post(url, json={}, timeout=GUARD_S).status_code


def lines(server: Serving, name: str) -> list[str]:
    path = Path(server.directory) / "logs" / name
    return [line.partition(" - ")[2] for line in path.read_text().splitlines()]


def test_prometheus_mode_shows_everything(start: Start, write: Callable[..., str]) -> None:
    write("measured", METRIC_HANDLER)
    server = start(metrics_mode="prometheus", model_metrics_auto_detect="true")
    until(lambda: "MemoryUsed{" in read(server))
    server.register("measured")
    server.predict("measured", {})
    server.predict("measured", {}, version="1.0")
    assert post(f"{server.http}/predictions/measured") == 200
    assert post(f"{server.http}/predictions/missing") == 404
    until(lambda: samples(read(server)).get('ProbeCounter{ModelName="measured",Level="Model",Hostname="vm",}') == 6)
    found = samples(read(server))
    asked, named = (f'model_name="measured",model_version="{one}",hostname="vm",' for one in ("default", "1.0"))
    model = '{ModelName="measured",Level="Model",Hostname="vm",}'
    expected = {
        f"ts_inference_requests_total{{{asked}}}": 2,
        f"ts_inference_requests_total{{{named}}}": 1,
        f"ts_queued_requests{{{named}}}": 0,
        f"ts_running_requests{{{named}}}": 0,
        f"ts_ready_workers{{{named}}}": 1,
        f'ts_ended_requests_total{{{named}outcome="answered",}}': 3,
        f"ts_inference_latency_seconds_count{{{named}}}": 3,
        'nv_inference_request_success{model="measured",version="1.0",}': 3,
        'nv_inference_request_failure{model="measured",version="1.0",reason="BACKEND",}': 0,
        'nv_inference_pending_request_count{model="measured",version="1.0",}': 0,
        'model_infer_request_success_total{model="measured",version="1.0",}': 3,
        'model_infer_request_failure_total{model="measured",version="1.0",}': 0,
        'Requests4XX{Level="Host",Hostname="vm",}': 1,
        f"ProbeTime{model}": 12.5,
        f"ProbeGeneric{model}": 12,
        f"HandlerTime{model}": 0.25,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert found[f"ts_inference_latency_microseconds{{{asked}}}"] > found[f"ts_queue_latency_microseconds{{{asked}}}"]
    spent_us = found['nv_inference_request_duration_us{model="measured",version="1.0",}']
    assert spent_us > found['nv_inference_queue_duration_us{model="measured",version="1.0",}'] > 0
    assert found[f"PredictionTime{model}"] > 0
    assert found['WorkerLoadTime{WorkerName="W-9000-measured_1.0",Level="Host",Hostname="vm",}'] > 0
    assert found['Requests2XX{Level="Host",Hostname="vm",}'] >= 2
    assert found['QueueTime{Level="Host",Hostname="vm",}'] >= 0
    assert "# TYPE GPUUtilization gauge\n" in read(server)
    some = read(server, "?name[]=ts_inference_requests_total&name[]=Requests4XX&name[]=Requests5XX")
    assert set(re.findall("# TYPE (\\w+)", some)) == {"Requests4XX", "ts_inference_requests_total"}
    assert lines(server, "ts_metrics.log") == lines(server, "model_metrics.log") == []


def test_log_mode_writes_what_torchserve_writes(start: Start, write: Callable[..., str]) -> None:
    write("measured", METRIC_HANDLER)
    server = start()
    until(lambda: len(lines(server, "ts_metrics.log")) >= 7)
    server.register("measured")
    server.predict("measured", {})
    assert post(f"{server.http}/predictions/measured") == 200
    shown = read(server)
    assert shown.startswith("# metrics_mode=log: ") and "metrics_mode=prometheus" in shown.partition("\n")[0]
    assert (
        samples(shown)[
            'ts_ended_requests_total{model_name="measured",model_version="1.0",hostname="vm",outcome="answered",}'
        ]
        == 2
    )
    assert all(name.startswith(OURS) for name in samples(shown))
    assert server.terminate() == 0
    found = [re.sub(r"#hostname:[^,]*,", "#hostname:vm,", line) for line in lines(server, "ts_metrics.log")]
    masked = [re.sub(r"\d+(\.\d+)?(E-?\d+)?(?=\||$)", "N", line) for line in found]
    asked, host = "|#model_name:measured,model_version:default|#hostname:vm,timestamp:N", "|#Level:Host|#hostname:vm"
    assert masked.count(f"ts_inference_requests_total.Count:N{asked}") == 2
    assert masked.count(f"ts_inference_latency_microseconds.Microseconds:N{asked}") == 2
    assert masked.count(f"ts_queue_latency_microseconds.Microseconds:N{asked}") == 2
    assert masked.count(f"QueueTime.Milliseconds:N{host},timestamp:N") == 2
    assert masked.count(f"WorkerThreadTime.Milliseconds:N{host},timestamp:N") == 2
    assert masked.count(f"Requests2XX.Count:N{host},timestamp:N") == 2
    assert f"CPUUtilization.Percent:N{host},timestamp:N" in masked
    assert any(
        line.startswith("WorkerLoadTime.Milliseconds:N|#WorkerName:W-9000-measured_1.0,Level") for line in masked
    )
    assert all(re.match(r"[\w ]+\.[\w ]+:\d+\.\d+(E-?\d+)?\|#", line) for line in found)
    model = lines(server, "model_metrics.log")
    pattern = r"(\w+)\.ms:(\S+)\|#ModelName:measured,Level:Model\|#hostname:[^,]*,requestID:[\w-]+,timestamp:\d+"
    matches = [re.fullmatch(pattern, line) for line in model]
    assert sorted(match[1] for match in matches if match) == ["HandlerTime"] * 2 + ["PredictionTime"] * 2
    assert all(matches), model
    assert "Metric ProbeCounter of a handler is dropped" in server.log


def test_legacy_mode_splits_them(start: Start) -> None:
    server = start(metrics_mode="legacy", disable_system_metrics="true")
    server.register("probe")
    server.predict("probe", {})
    shown = samples(read(server))
    label = '{model_name="probe",model_version="default",hostname="vm",}'
    names = ("ts_inference_requests_total", "ts_inference_latency_microseconds", "ts_queue_latency_microseconds")
    assert sorted(name for name in shown if not name.startswith(OURS)) == sorted(name + label for name in names)
    assert any(name.startswith("ts_ready_workers") for name in shown)
    assert shown[f"ts_inference_requests_total{label}"] == 1
    assert server.terminate() == 0
    logged = {line.partition(".")[0] for line in lines(server, "ts_metrics.log")}
    assert logged == {"WorkerLoadTime", "QueueTime", "WorkerThreadTime", "Requests2XX"}
    assert {line.partition(".")[0] for line in lines(server, "model_metrics.log")} == {"PredictionTime"}


def test_a_command_for_system_metrics(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "collect.py"
    script.write_text(
        "import sys\n"
        "assert sys.stdin.readline() == '\\n'\n"
        "print('MemoryUsed.Megabytes:77.5|#Level:Host|#hostname:vm,1795217591')\n"
        "print('MemoryAvailable.Megabytes:1.5|#Level:Host|#hostname:vm,timestamp:1795217591')\n"
        "print()\n"
        "print('9000:1024')\n"
    )
    server = start(metrics_mode="prometheus", system_metrics_cmd=str(script))
    until(lambda: "MemoryUsed{" in read(server))
    found = samples(read(server, "?name[]=MemoryUsed&name[]=MemoryAvailable&name[]=CPUUtilization"))
    assert found == {
        'MemoryUsed{Level="Host",Hostname="vm",}': 77.5,
        'MemoryAvailable{Level="Host",Hostname="vm",}': 1.5,
    }


def test_a_metrics_file_of_ones_own(start: Start, tmp_path: Path, write: Callable[..., str]) -> None:
    write("measured", METRIC_HANDLER)
    file = tmp_path / "own.yaml"
    file.write_text(
        "ts_metrics:\n  histogram:\n"
        "    - {name: QueueTime, unit: Milliseconds, dimensions: [Level, Hostname]}\n"
        "model_metrics:\n  histogram:\n"
        "    - {name: ProbeTime, unit: ms, dimensions: [Level, ModelName]}\n"
    )
    server = start(metrics_mode="prometheus", metrics_config=file)
    server.register("measured")
    server.predict("measured", {})
    series = 'ProbeTime_count{Level="Model",ModelName="measured",Hostname="vm",}'
    until(lambda: samples(read(server)).get(series) == 1)
    found = samples(read(server))
    assert found['QueueTime_count{Level="Host",Hostname="vm",}'] == 1
    assert found['ProbeTime_bucket{Level="Model",ModelName="measured",Hostname="vm",le="+Inf",}'] == 1
    assert found['ProbeTime_bucket{Level="Model",ModelName="measured",Hostname="vm",le="10.0",}'] == 0
    assert "Requests2XX" not in read(server)


def test_a_broken_metrics_file_stops_the_start(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("ts_metrics:\n  sum:\n    - {name: A, unit: B, dimensions: []}\n")
    server = start(wait=False, metrics_config=file)
    server.wait()
    assert "The server did not start" in server.log
    assert "no metric type 'sum', only counter, gauge, histogram" in server.log


def test_openmetrics_for_those_who_prefer_it(start: Start, write: Callable[..., str]) -> None:
    """Every family is valid and has its old name; the latencies have requests as examples."""
    write("measured", METRIC_HANDLER)
    server = start(metrics_mode="prometheus", model_metrics_auto_detect="true")
    server.register("measured")
    asked = {"accept": "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"}

    def families() -> dict[str, Metric]:
        answer = httpx.get(f"http://127.0.0.1:{server.port('http_metrics')}/metrics", headers=asked, timeout=GUARD_S)
        assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        return {family.name: family for family in text_string_to_metric_families(answer.text)}

    families()  # examples are kept from now on
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01", "x-request-id": "mine"}
    assert httpx.post(f"{server.http}/predictions/measured", content=b"1", headers=headers).status_code == 200
    found = families()
    assert {one.type for one in found.values()} == {"counter", "gauge", "histogram", "unknown"}
    series = {one.name for family in found.values() for one in family.samples}
    assert series == {name.partition("{")[0] for name in samples(read(server))}
    for name in ("ts_inference_latency_seconds", "ts_queue_latency_seconds"):
        (example,) = [one.exemplar for one in found[name].samples if one.exemplar is not None]
        assert example.labels == {"trace_id": trace, "request_id": "mine"} and example.value >= 0
        assert abs(float(example.timestamp or 0) - time.time()) < GUARD_S
