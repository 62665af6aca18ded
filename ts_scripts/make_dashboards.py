"""Makes Grafana's dashboards in deploy/monitoring/grafana/dashboards/ from the tables below.

Usage: python ts_scripts/make_dashboards.py [--check]

With `--check`: changes nothing, and exits with 1 if a file is out of date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

PLACE = Path(__file__).resolve().parent.parent / "deploy" / "monitoring" / "grafana" / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${source}"}
#: The number of columns in Grafana's grid.
WIDTH, HEIGHT = 24, 8
ALL, ONE = 'instance=~"$instance"', 'instance=~"$instance",model_name=~"$model"'
RATE = "[$__rate_interval]"


class Panel(NamedTuple):
    """A panel. `queries`: pairs of an expression and the legend of its series. `unit`: Grafana's name of the unit."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = 8
    about: str = ""


def quantiles(name: str, labels: str) -> tuple[tuple[str, str], ...]:
    """The median and two high quantiles of a histogram."""
    return tuple(
        (f"histogram_quantile({part}, sum by (le) (rate({name}_bucket{{{labels}}}{RATE})))", f"p{part * 100:g}")
        for part in (0.5, 0.95, 0.99)
    )


def outcomes(labels: str) -> tuple[tuple[str, str], ...]:
    return ((f"sum by (outcome) (rate(ts_ended_requests_total{{{labels}}}{RATE}))", "{{outcome}}"),)


OVERVIEW = (
    Panel("Servers ready", "none", ((f"sum(ts_server_ready{{{ALL}}})", ""),), "stat", 4),
    Panel("Models failing", "none", ((f"sum(ts_model_failing{{{ALL}}})", ""),), "stat", 4),
    Panel(
        "Workers ready",
        "percentunit",
        ((f"sum(ts_ready_workers{{{ALL}}}) / clamp_min(sum(ts_workers{{{ALL}}}), 1)", ""),),
        "stat",
        4,
        "Of those that the models should have.",
    ),
    Panel(
        "Requests answered",
        "percentunit",
        (
            (
                f'sum(rate(ts_ended_requests_total{{{ALL},outcome="answered"}}{RATE})) / '
                f"sum(rate(ts_ended_requests_total{{{ALL}}}{RATE}))",
                "",
            ),
        ),
        "stat",
        4,
        "Of those that ended; the others failed, were cancelled, or expired.",
    ),
    Panel("Requests waiting", "none", ((f"sum(ts_queued_requests{{{ALL}}})", ""),), "stat", 4),
    Panel(
        "Up since",
        "s",
        ((f"time() - min(process_start_time_seconds{{{ALL}}})", ""),),
        "stat",
        4,
        "The server that began first.",
    ),
    Panel("Requests by outcome", "reqps", outcomes(ALL)),
    Panel("Latency", "s", quantiles("ts_inference_latency_seconds", ALL), about="From queueing to the answer's end."),
    Panel(
        "Requests by model",
        "reqps",
        ((f"sum by (model_name) (rate(ts_ended_requests_total{{{ALL}}}{RATE}))", "{{model_name}}"),),
    ),
    Panel(
        "Waiting and running",
        "none",
        (
            (f"sum(ts_queued_requests{{{ALL}}})", "waiting"),
            (f"sum(ts_running_requests{{{ALL}}})", "running"),
        ),
    ),
    Panel(
        "Refused requests",
        "reqps",
        ((f"sum by (reason) (rate(ts_refused_requests_total{{{ALL}}}{RATE}))", "{{reason}}"),),
        about="Requests that the queue did not accept.",
    ),
    Panel(
        "Calls without a valid key",
        "reqps",
        ((f"sum by (api) (rate(ts_refused_calls_total{{{ALL}}}{RATE}))", "{{api}}"),),
        about="Servers that ask for keys have it.",
    ),
    Panel(
        "HTTP answers",
        "reqps",
        tuple((f"sum(rate(Requests{kind}XX{{{ALL}}}{RATE}))", f"{kind}xx") for kind in (2, 4, 5)),
    ),
    Panel(
        "gRPC calls by status",
        "reqps",
        ((f"sum by (grpc_code) (rate(grpc_server_handled_total{{{ALL}}}{RATE}))", "{{grpc_code}}"),),
    ),
    Panel(
        "Closed floods",
        "reqps",
        ((f"sum by (api) (rate(ts_flooded_connections_total{{{ALL}}}{RATE}))", "{{api}}"),),
        about="Connections that were closed because more than 200 of their calls were cancelled in 10 s.",
    ),
    Panel(
        "Server's CPU",
        "percentunit",
        ((f"rate(process_cpu_seconds_total{{{ALL}}}{RATE})", "{{instance}}"),),
        about="Of one core.",
    ),
    Panel("Server's memory", "bytes", ((f"process_resident_memory_bytes{{{ALL}}}", "{{instance}}"),)),
    Panel("Server's connections and files", "none", ((f"process_open_fds{{{ALL}}}", "{{instance}}"),)),
)

MODEL = (
    Panel("Requests by outcome", "reqps", outcomes(ONE)),
    Panel("Latency", "s", quantiles("ts_inference_latency_seconds", ONE), about="From queueing to the answer's end."),
    Panel("Time in the queue", "s", quantiles("ts_queue_latency_seconds", ONE)),
    Panel(
        "Latencies",
        "s",
        ((f"sum by (le) (increase(ts_inference_latency_seconds_bucket{{{ONE}}}{RATE}))", "{{le}}"),),
        "heatmap",
    ),
    Panel(
        "Queue",
        "none",
        (
            (f"sum by (model_version) (ts_queued_requests{{{ONE}}})", "{{model_version}} waiting"),
            (f"sum by (model_version) (ts_queue_capacity{{{ONE}}})", "{{model_version}} at most"),
        ),
    ),
    Panel(
        "Running",
        "none",
        ((f"sum by (model_version) (ts_running_requests{{{ONE}}})", "{{model_version}}"),),
    ),
    Panel(
        "Batch size",
        "none",
        (
            (
                f'sum(rate(nv_inference_count{{{ALL},model=~"$model"}}{RATE})) / '
                f'sum(rate(nv_inference_exec_count{{{ALL},model=~"$model"}}{RATE}))',
                "mean",
            ),
        ),
    ),
    Panel(
        "Handler's time",
        "s",
        (
            (
                f'sum(rate(nv_inference_compute_infer_duration_us{{{ALL},model=~"$model"}}{RATE})) / '
                f'sum(rate(nv_inference_count{{{ALL},model=~"$model"}}{RATE})) / 1e6',
                "mean",
            ),
        ),
        about="Of the batch that a request was in.",
    ),
    Panel(
        "Refused requests",
        "reqps",
        ((f"sum by (reason) (rate(ts_refused_requests_total{{{ONE}}}{RATE}))", "{{reason}}"),),
    ),
    Panel(
        "Run again",
        "reqps",
        (
            (f"sum by (reason) (rate(ts_repeated_requests_total{{{ONE}}}{RATE}))", "{{reason}}"),
            (f"sum(rate(ts_quarantined_requests_total{{{ONE}}}{RATE}))", "given up"),
        ),
        about="Models that are declared idempotent have it.",
    ),
    Panel(
        "Calls by version",
        "reqps",
        ((f"sum by (model_version) (rate(ts_inference_requests_total{{{ONE}}}{RATE}))", "{{model_version}}"),),
        about="`default` are requests that name no version.",
    ),
    Panel(
        "Workers",
        "none",
        (
            (f"sum(ts_ready_workers{{{ONE}}})", "ready"),
            (f"sum(ts_workers{{{ONE}}})", "all"),
        ),
    ),
    Panel(
        "Tokens a second",
        "none",
        (
            (f"sum(rate(vllm:generation_tokens_total{{{ONE}}}{RATE}))", "of answers"),
            (f"sum(rate(vllm:prompt_tokens_total{{{ONE}}}{RATE}))", "of prompts"),
        ),
        about="Language models have it, as the next panels.",
    ),
    Panel("Time to the first token", "s", quantiles("vllm:time_to_first_token_seconds", ONE), about="Of streams."),
    Panel(
        "Time between tokens",
        "s",
        quantiles("vllm:request_time_per_output_token_seconds", ONE),
        about="The mean of each stream.",
    ),
    Panel(
        "In the engine",
        "none",
        ((f"sum by (model_name) (vllm:num_requests_running{{{ONE}}})", "{{model_name}}"),),
        about="Requests that a language model computes.",
    ),
    Panel(
        "Prompts found in the cache",
        "percentunit",
        (
            (
                f"sum(rate(vllm:prefix_cache_hits_total{{{ONE}}}{RATE})) / "
                f"sum(rate(vllm:prefix_cache_queries_total{{{ONE}}}{RATE}))",
                "of their tokens",
            ),
        ),
    ),
    Panel("Time in the engine", "s", quantiles("vllm:e2e_request_latency_seconds", ONE)),
)

WORKERS = (
    Panel("Ready", "none", ((f"sum by (model_name) (ts_ready_workers{{{ALL}}})", "{{model_name}}"),)),
    Panel(
        "Missing",
        "none",
        ((f"sum by (model_name) (ts_workers{{{ALL}}} - ts_ready_workers{{{ALL}}})", "{{model_name}}"),),
        about="Workers that a model should have, and that aren't ready.",
    ),
    Panel("Given up", "none", ((f"sum by (model_name) (ts_given_up_workers{{{ALL}}})", "{{model_name}}"),)),
    Panel(
        "Failures",
        "none",
        (
            (
                f"sum by (model_name, reason) (increase(ts_worker_failures_total{{{ALL}}}{RATE}))",
                "{{model_name}} {{reason}}",
            ),
        ),
    ),
    Panel(
        "Replaced because of a limit",
        "none",
        (
            (
                f"sum by (model_name, reason) (increase(ts_replaced_workers_total{{{ALL}}}{RATE}))",
                "{{model_name}} {{reason}}",
            ),
        ),
    ),
    Panel(
        "Autoscaling",
        "none",
        (
            (f"sum by (model_name) (ts_wanted_workers{{{ALL}}})", "{{model_name}} wanted"),
            (f"sum by (model_name) (ts_workers_max{{{ALL}}})", "{{model_name}} at most"),
            (
                f"sum by (direction) (increase(ts_autoscaling_decisions_total{{{ALL}}}{RATE}))",
                "decisions {{direction}}",
            ),
        ),
        about="Models whose number of workers is a range have it.",
    ),
    Panel(
        "Memory by worker",
        "bytes",
        ((f"ts_worker_memory_bytes{{{ALL}}}", "{{model_name}} {{worker_id}} {{device}}"),),
        about="Pages that workers share count for each of them.",
    ),
    Panel(
        "Load time",
        "ms",
        ((f"WorkerLoadTime{{{ALL}}}", "{{WorkerName}}"),),
        about="From a worker's creation until its model was loaded.",
    ),
    Panel("Machine's CPU", "percent", ((f"CPUUtilization{{{ALL}}}", "{{instance}}"),)),
    Panel("Machine's memory", "percent", ((f"MemoryUtilization{{{ALL}}}", "{{instance}}"),)),
    Panel("Machine's disk", "percent", ((f"DiskUtilization{{{ALL}}}", "{{instance}}"),)),
    Panel("GPUs", "percent", ((f"ts_gpu_utilization_percent{{{ALL}}}", "{{instance}} {{device}}"),)),
    Panel(
        "GPUs' memory",
        "percentunit",
        ((f"ts_gpu_memory_used_bytes{{{ALL}}} / ts_gpu_memory_total_bytes{{{ALL}}}", "{{instance}} {{device}}"),),
    ),
)

#: The dashboards: file and uid, title, panels, and whether a model can be chosen.
DASHBOARDS = (
    ("overview", "torchrelay: overview", OVERVIEW, False),
    ("model", "torchrelay: a model", MODEL, True),
    ("workers", "torchrelay: workers and devices", WORKERS, False),
)


def panel(number: int, one: Panel, x: int, y: int) -> dict[str, Any]:
    targets = [
        {
            "datasource": SOURCE,
            "expr": expression,
            "legendFormat": legend,
            "refId": chr(ord("A") + index),
            "exemplar": "histogram_quantile" in expression,
        }
        for index, (expression, legend) in enumerate(one.queries)
    ]
    made: dict[str, Any] = {
        "id": number,
        "type": one.kind,
        "title": one.title,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": one.width, "h": HEIGHT // 2 if one.kind == "stat" else HEIGHT},
        "fieldConfig": {"defaults": {"unit": one.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }
    if one.about:
        made["description"] = one.about
    if one.kind == "heatmap":
        made["options"] = {"calculate": False, "yAxis": {"unit": one.unit}}
        targets[0]["format"] = "heatmap"
    return made


def placed(panels: tuple[Panel, ...]) -> list[dict[str, Any]]:
    """The panels in rows, from left to right."""
    found, x, y, lowest = [], 0, 0, 0
    for number, one in enumerate(panels, 1):
        if x + one.width > WIDTH:
            x, y = 0, lowest
        found.append(panel(number, one, x, y))
        x, lowest = x + one.width, max(lowest, y + found[-1]["gridPos"]["h"])
    return found


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard(name: str, title: str, panels: tuple[Panel, ...], by_model: bool) -> dict[str, Any]:
    chosen = [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        variable("instance", "Server", "label_values(ts_server_ready, instance)"),
    ]
    if by_model:
        chosen.append(variable("model", "Model", 'label_values(ts_workers{instance=~"$instance"}, model_name)'))
    return {
        "uid": f"torchrelay-{name}",
        "title": title,
        "tags": ["torchrelay"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["torchrelay"], "title": "torchrelay", "keepTime": True}],
        "templating": {"list": chosen},
        "panels": placed(panels),
    }


def files() -> dict[str, str]:
    """The text of each file, by its name."""
    made = {f"{name}.json": dashboard(name, title, panels, one) for name, title, panels, one in DASHBOARDS}
    return {name: json.dumps(one, indent=2, ensure_ascii=False) + "\n" for name, one in made.items()}


def main() -> None:
    for name, text in files().items():
        path = PLACE / name
        if sys.argv[1:] != ["--check"]:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            sys.exit(f"{path} isn't what ts_scripts/make_dashboards.py writes")


if __name__ == "__main__":
    main()
