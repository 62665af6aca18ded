"""Dashboards, alerts and the files that provision them: each metric is one of a running server, each query is answered
by a real Prometheus, each alert fires when it should."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.manifests import DEPLOY, ROOT
from deploy.monitoring import (
    ALERTS,
    DASHBOARDS,
    MONITORING,
    SELECTOR,
    Busy,
    Query,
    alerts,
    metrics_of,
    panels,
    rules,
)
from support import GUARD_S, free_port, module_of, until

PLACE = Path(sys.prefix) / "prometheus"
BIN = PLACE / "root" / "usr" / "bin"


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return found


def mounted(service: str) -> dict[str, Path]:
    """A service's mounts: the files of this repository by their places inside."""
    found = {}
    for volume in compose()[service]["volumes"]:
        here, there, mode = volume.split(":")
        assert mode == "ro"
        found[there] = (DEPLOY / here).resolve()
    return found


# --- the files


def test_the_dashboards_are_as_they_are_made() -> None:
    made = module_of(ROOT / "ts_scripts" / "make_dashboards.py").files()
    assert {path.name: path.read_text() for path in DASHBOARDS} == made, "run ts_scripts/make_dashboards.py"


@pytest.mark.external
def test_grafanas_own_models_know_every_member(client_python: Any, client_env: dict[str, str], tmp_path: Path) -> None:
    misspelt = tmp_path / "misspelt.json"
    dashboard = json.loads(DASHBOARDS[0].read_text())
    dashboard["panels"][1]["fieldConfig"]["defaults"]["unitt"] = "s"
    misspelt.write_text(json.dumps(dashboard))
    program = ROOT / "tests" / "e2e" / "clients" / "programs" / "grafana_models.py"
    command = [client_python("grafana"), program, *DASHBOARDS, misspelt]
    done = subprocess.run(command, env=client_env, capture_output=True, text=True, timeout=GUARD_S, check=True)
    assert done.stdout.splitlines() == ["misspelt.json.panels[1].fieldConfig.defaults.unitt"]


def test_what_is_provisioned_is_there() -> None:
    """compose.yaml, Prometheus' and Grafana's files name one another's services, ports, places and uids."""
    assert all(path.exists() for name in compose() for path in mounted(name).values())
    prometheus, grafana = mounted("prometheus"), mounted("grafana")
    config = yaml.safe_load(prometheus["/etc/prometheus/prometheus.yml"].read_text())
    assert [f"/etc/prometheus/{name}" for name in config["rule_files"]] == ["/etc/prometheus/alerts.yml"]
    assert prometheus["/etc/prometheus/alerts.yml"] == ALERTS
    (scrape,) = config["scrape_configs"]
    service, port = scrape["static_configs"][0]["targets"][0].split(":")
    assert any(one.endswith(f":{port}") for one in compose()[service]["ports"])
    assert scrape["job_name"] == "torchrelay" and "metrics_mode=prometheus" in compose()[service]["command"]
    provisioning = grafana["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert source["type"] == "prometheus" and f"127.0.0.1:{port}:{port}" in compose()[host]["ports"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "torchrelay.yaml").read_text())["providers"]
    assert grafana[provider["options"]["path"]] == DASHBOARDS[0].parent
    home = Path(compose()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (grafana[str(home.parent)] / home.name).is_file()


def test_dashboards_are_whole() -> None:
    uids = []
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        uids.append(board["uid"])
        variables = {one["name"] for one in board["templating"]["list"]} | {"__rate_interval"}
        assert set(re.findall(r"\$\{?(\w+)", path.read_text())) <= variables | {"__all"}
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            assert panel["title"] and panel["targets"] and panel["datasource"]["uid"] == "${source}"
            place = panel["gridPos"]
            cells = {(x + place["x"], y + place["y"]) for x in range(place["w"]) for y in range(place["h"])}
            assert not taken & cells and max(x for x, _ in cells) < 24, panel["title"]
            taken |= cells
    assert len(set(uids)) == len(uids) == 3


def test_alerts_say_what_is_wrong_and_where() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) >= 16
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert "$labels.instance" in rule["annotations"]["summary"], rule["alert"]


def test_the_pages_have_every_alert_and_metric() -> None:
    page, metrics = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("dashboards", "metrics"))
    assert not [rule["alert"] for rule in rules() if f"`{rule['alert']}`" not in page]
    asked = {name for query in [*panels(), *alerts()] for name in metrics_of(query.expression)} - {"up"}
    plain = {re.sub("_bucket$", "", name) for name in asked}
    assert not [name for name in plain if f"`{name}`" not in metrics]


# --- a running server


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    running = Busy(tmp_path_factory.mktemp("busy"))
    try:
        yield running
    finally:
        running.close()


def described(text: str) -> set[str]:
    """The series that a server's metrics have, or could have: histograms by their parts."""
    found = set()
    for name, kind in re.findall(r"^# TYPE ([\w:]+) (\w+)$", text, re.MULTILINE):
        found |= {f"{name}{part}" for part in ("_bucket", "_count", "_sum")} if kind == "histogram" else {name}
    return found


def test_every_metric_is_one_of_a_running_server(busy: Busy) -> None:
    """Also by its labels: those that a query filters or groups by."""
    busy.call_in_every_way()
    text = busy.metrics()
    there = described(text) | {"up"}
    for query in [*panels(), *alerts()]:
        assert metrics_of(query.expression), query
        assert metrics_of(query.expression) <= there, (query.place, metrics_of(query.expression) - there)
    for name in {name for query in panels() for name in metrics_of(query.expression)}:
        assert re.search(rf"^{name}(\{{| )", text, re.MULTILINE), f"{name} has no series"
    known = set(re.findall(r'[{,](\w+)="', text)) | {"instance", "job", "le"}
    for query in [*panels(), *alerts()]:
        grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", query.expression)
        used = {word.strip() for part in grouped for word in part.split(",")}
        for _, labels in SELECTOR.findall(query.expression):
            used |= set(re.findall(r"(\w+)=", labels))
        assert used <= known, (query.place, used - known)
    assert 'ts_gpu_utilization_percent{device="cuda:0"' in text
    assert 'device="cuda:0"' in re.findall(r"^ts_worker_memory_bytes.*", text, re.MULTILINE)[0]


# --- Prometheus


needs_prometheus = pytest.mark.skipif(
    not (BIN / "prometheus").is_file(),
    reason=(PLACE / "missing.txt").read_text().strip()
    if (PLACE / "missing.txt").is_file()
    else "ts_scripts/debian_packages.py prometheus has not been run",
)


class Prometheus:
    """A Prometheus that scrapes `target` twice a second, with these rules."""

    def __init__(self, place: Path, target: str, rules: Path) -> None:
        self.log = place / "prometheus.log"
        scrape = {"job_name": "torchrelay", "static_configs": [{"targets": [target]}]}
        config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [str(rules)],
            "scrape_configs": [scrape],
        }
        (place / "prometheus.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        self.api = f"http://{address}/api/v1"
        command = [
            str(BIN / "prometheus"),
            f"--config.file={place / 'prometheus.yml'}",
            f"--web.listen-address={address}",
            "--enable-feature=exemplar-storage",
        ]
        with self.log.open("w") as log:
            command.append(f"--storage.tsdb.path={place / 'data'}")
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.client = httpx.Client(timeout=GUARD_S)
        until(self._ready, self.log.read_text)

    def _ready(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        try:
            return self.client.get(self.api.replace("/api/v1", "/-/ready")).status_code == 200
        except httpx.ConnectError:
            return False

    def ask(self, expression: str) -> list[Any]:
        answer = self.client.get(f"{self.api}/query", params={"query": expression}).json()
        assert answer["status"] == "success", (expression, answer)
        found: list[Any] = answer["data"]["result"]
        return found

    def has_examples(self, metric: str) -> bool:
        parameters = {"query": metric, "start": str(time.time() - GUARD_S), "end": str(time.time() + 1)}
        found = self.client.get(f"{self.api}/query_exemplars", params=parameters).json()["data"]
        return any("request_id" in example["labels"] for one in found for example in one["exemplars"])

    def firing(self) -> set[str]:
        found = self.ask('ALERTS{alertstate="firing"}')
        return {one["metric"]["alertname"] for one in found}

    def close(self) -> None:
        self.client.close()
        self._process.terminate()
        self._process.wait(GUARD_S)


@contextmanager
def scraping(place: Path, busy: Busy) -> Iterator[Prometheus]:
    """Prometheus with the alerts, which fire at once instead of after their time."""
    text = re.sub(r"^ +for: .*\n", "", ALERTS.read_text(), flags=re.MULTILINE)
    (place / "alerts.yml").write_text(text)
    prometheus = Prometheus(place, busy.target, place / "alerts.yml")
    try:
        yield prometheus
    finally:
        prometheus.close()


def has_data(prometheus: Prometheus, expression: str) -> bool:
    return any(one["value"][1] != "NaN" for one in prometheus.ask(expression))


@pytest.mark.external
@needs_prometheus
def test_a_real_prometheus_answers_every_query(busy: Busy, tmp_path: Path) -> None:
    with scraping(tmp_path, busy) as prometheus:
        busy.call_in_every_way()
        waiting = panels()
        # Of an alert's expression the parts before its comparisons.
        waiting += [
            Query(one.place, name + labels) for one in alerts() for name, labels in SELECTOR.findall(one.expression)
        ]

        def left() -> list[Query]:
            waiting[:] = [one for one in waiting if not has_data(prometheus, one.expression)]
            return waiting

        until(lambda: not left(), left)
        until(lambda: prometheus.has_examples("ts_inference_latency_seconds_bucket"))
        for query in alerts():
            prometheus.ask(query.expression)
        wanted = {"TorchrelayModelFails", "TorchrelayNoWorkerReady", "TorchrelayRequestsRefused", "TorchrelayLoadFails"}
        until(lambda: prometheus.firing() >= {"TorchrelayCertificateEnds"})
        assert "TorchrelayLoadFails" not in prometheus.firing()
        busy.break_down()
        until(lambda: wanted <= prometheus.firing(), prometheus.firing)
        groups = prometheus.client.get(f"{prometheus.api}/rules").json()["data"]["groups"]
        assert all(rule["health"] == "ok" for group in groups for rule in group["rules"]), groups


#: Series of a model, in promtool's notation, and the alerts that they set off within half an hour. `a+bxn` grows by b
#: each minute, n times; `a*n`: a value n times.
ON = 'instance="i:1",hostname="h"'
OF = f'{ON},model_name="m",model_version="1.0"'
FAULTS: dict[str, dict[str, str]] = {
    "TorchrelayDown": {'up{job="torchrelay",instance="i:1"}': "0x30"},
    "TorchrelayNotReady": {f"ts_server_ready{{{ON}}}": "0x30", f"ts_server_draining{{{ON}}}": "0x30"},
    "TorchrelayRestarts": {f'process_start_time_seconds{{job="torchrelay",{ON}}}': "0+300x30"},
    "TorchrelayDrainTakesLong": {f"ts_server_ready{{{ON}}}": "0x30", f"ts_server_draining{{{ON}}}": "1x30"},
    "TorchrelayCertificateEnds": {
        f'ts_certificate_expiry_timestamp_seconds{{setting="certificate_file",{ON}}}': "864000x30"
    },
    "TorchrelayCallsWithoutKey": {f'ts_refused_calls_total{{api="inference",{ON}}}': "0+120x30"},
    "TorchrelayFloodedConnections": {f'ts_flooded_connections_total{{api="inference",{ON}}}': "0+1x30"},
    "TorchrelayQueueNearlyFull": {f"ts_queued_requests{{{OF}}}": "90x30", f"ts_queue_capacity{{{OF}}}": "100x30"},
    "TorchrelayRequestsRefused": {f'ts_refused_requests_total{{reason="queue_full",{OF}}}': "0+1x30"},
    "TorchrelayDeadlinesMissed": {
        f'ts_ended_requests_total{{outcome="expired",{OF}}}': "0+2x30",
        f'ts_ended_requests_total{{outcome="answered",{OF}}}': "0+98x30",
    },
    "TorchrelayRequestsFail": {
        f'ts_ended_requests_total{{outcome="failed",{OF}}}': "0+6x30",
        f'ts_ended_requests_total{{outcome="answered",{OF}}}': "0+94x30",
    },
    "TorchrelayRequestsQuarantined": {f"ts_quarantined_requests_total{{{OF}}}": "0+1x30"},
    "TorchrelaySlow": {
        f'ts_inference_latency_seconds_bucket{{le="10.0",{OF}}}': "0+100x30",
        f'ts_inference_latency_seconds_bucket{{le="+Inf",{OF}}}': "0+100x30",
        f'ts_inference_latency_seconds_bucket{{le="1.0",{OF}}}': "0+10x30",
    },
    "TorchrelayNoWorkerReady": {f"ts_workers{{{OF}}}": "2x10", f"ts_ready_workers{{{OF}}}": "0x10"},
    "TorchrelayModelFails": {f"ts_model_failing{{{OF}}}": "1x30"},
    "TorchrelayLoadFails": {f'ts_worker_failures_total{{reason="not_loaded",{OF}}}': "0+1x30"},
    "TorchrelayWorkersDie": {f'ts_worker_failures_total{{reason="died",{OF}}}': "0+1x30"},
    "TorchrelayWorkersHang": {f'ts_worker_failures_total{{reason="hung",{OF}}}': "0+1x30"},
    "TorchrelayWorkersGivenUp": {f"ts_given_up_workers{{{OF}}}": "1x30"},
    "TorchrelayWorkersMissing": {f"ts_workers{{{OF}}}": "2x30", f"ts_ready_workers{{{OF}}}": "1x30"},
    "TorchrelayWorkersReplacedOften": {f'ts_replaced_workers_total{{reason="memory",{OF}}}': "0+1x30"},
    "TorchrelayAutoscalingAtItsMaximum": {
        f"ts_wanted_workers{{{OF}}}": "4x30",
        f"ts_workers_max{{{OF}}}": "4x30",
        f"ts_queued_requests{{{OF}}}": "3x30",
    },
    "TorchrelayMemoryNearlyFull": {f'MemoryUtilization{{job="torchrelay",{ON}}}': "95x30"},
    "TorchrelayDiskNearlyFull": {f'DiskUtilization{{job="torchrelay",{ON}}}': "95x30"},
    "TorchrelayGpuMemoryNearlyFull": {
        f'ts_gpu_memory_used_bytes{{device="cuda:0",{ON}}}': "99x30",
        f'ts_gpu_memory_total_bytes{{device="cuda:0",{ON}}}': "100x30",
    },
}
#: A server that is well: the same series with other values.
WELL = {
    'up{job="torchrelay",instance="i:1"}': "1x30",
    f"ts_server_ready{{{ON}}}": "1x30",
    f"ts_server_draining{{{ON}}}": "0x30",
    f'process_start_time_seconds{{job="torchrelay",{ON}}}': "5x30",
    f'ts_certificate_expiry_timestamp_seconds{{setting="certificate_file",{ON}}}': "86400000x30",
    f'ts_ended_requests_total{{outcome="expired",{OF}}}': "0x30",
    f'ts_ended_requests_total{{outcome="failed",{OF}}}': "0+1x30",
    f'ts_ended_requests_total{{outcome="answered",{OF}}}': "0+100x30",
    f"ts_queued_requests{{{OF}}}": "9x30",
    f"ts_queue_capacity{{{OF}}}": "100x30",
    f"ts_workers{{{OF}}}": "2x30",
    f"ts_ready_workers{{{OF}}}": "2x30",
    f"ts_model_failing{{{OF}}}": "0x30",
    f"ts_given_up_workers{{{OF}}}": "0x30",
    f'ts_worker_failures_total{{reason="died",{OF}}}': "7x30",
    f'MemoryUtilization{{job="torchrelay",{ON}}}': "50x30",
}


def fault_test(series: dict[str, str], minute: int, firing: list[str]) -> dict[str, Any]:
    expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing]
    asked = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": f"{minute}m"}
    given = [{"series": name, "values": values} for name, values in series.items()]
    return {"interval": "1m", "input_series": given, "promql_expr_test": [{**asked, "exp_samples": expected}]}


@pytest.mark.external
@needs_prometheus
def test_every_alert_fires_at_its_fault_and_at_no_other(tmp_path: Path) -> None:
    assert set(FAULTS) == {rule["alert"] for rule in rules()}
    tests = [fault_test(series, 8 if "NoWorkerReady" in name else 30, [name]) for name, series in FAULTS.items()]
    tests.append(fault_test(WELL, 30, []))
    file = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(file))
    for words in (("check", "config", MONITORING / "prometheus.yml"), ("test", "rules", tmp_path / "tests.yml")):
        done = subprocess.run([BIN / "promtool", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_failures_and_refusals_are_counted(busy: Busy) -> None:
    """The last test of the server: it breaks a model."""
    busy.break_down()
    line = re.compile(r'^(ts_\w+)\{model_name="frail".*reason="(\w+)",\} (\S+)', re.MULTILINE)

    def counted() -> dict[tuple[str, str], float]:
        return {(name, reason): float(value) for name, reason, value in line.findall(busy.metrics())}

    until(lambda: counted()["ts_worker_failures_total", "not_loaded"] > 0, counted)
    until(lambda: counted()["ts_refused_requests_total", "not_loaded"] > 0, counted)
    found = counted()
    assert found["ts_worker_failures_total", "died"] == 1 and found["ts_worker_failures_total", "hung"] == 0
    assert found["ts_refused_requests_total", "queue_full"] == 0
