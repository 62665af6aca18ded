"""The names of the servers that can be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from measuring.processes import Processes
from measuring.servers import Place, Served, start_bare, start_ours, start_torchserve, wait_until_ready
from measuring.workloads import Workload

STARTS: Mapping[str, Callable[[Place], Served]] = {
    "ours": start_ours,
    "bare": start_bare,
    "torchserve": start_torchserve,
    "ours-logging": lambda place: start_ours(place, quiet=False),
    "ours-http": lambda place: start_ours(place, http=True),
    "ours-http-logging": lambda place: start_ours(place, http=True, quiet=False),
    "bare-http": lambda place: start_bare(place, http=True),
    "torchserve-http": lambda place: start_torchserve(place, http=True),
    "ours-grpcio": lambda place: start_ours(place, "grpcio"),
    "bare-grpcio": lambda place: start_bare(place, "grpcio"),
    "torchserve-logging": lambda place: start_torchserve(place, quiet=False),
}
NOTES: Mapping[str, str] = {
    "ours": "torchserve --foreground --ncs, access_log=false, metrics_mode=prometheus (no access and metric log); "
    "else defaults but for free ports and one worker",
    "ours-logging": "the same with its access and metric logs, as by default",
    "ours-http": "ours, asked over HTTP/1.1 with a body of the same 16 bytes",
    "ours-http-logging": "the same with its access and metric logs, as by default",
    "bare-http": "our ingress on h2corn with an HTTP application that echoes, no worker",
    "torchserve-http": "torchserve, asked over HTTP/1.1",
    "bare": "our ingress on h2corn with a method that echoes, no worker",
    "torchserve": "TorchServe with one worker; --log-config (level warn: no access and metric log) and "
    "disable_system_metrics=true; tokens off, model API on",
    "ours-grpcio": "ours with grpc_engine=grpcio",
    "bare-grpcio": "our ingress on grpcio with a method that echoes, no worker",
    "torchserve-logging": "TorchServe with one worker and its default logging; tokens off, model API on",
}


def start(target: str, folder: Path, workload: Workload, processes: Processes) -> Served:
    """The started server, which has given a right answer. Raises ServerFailed, NotInstalled, WrongAnswer."""
    place = Place(folder / target, processes, workload)
    place.prepare()
    served = STARTS[target](place)
    wait_until_ready(served, workload, processes)
    return served if served.answer else replace(served, answer=served.client.ask(served.port, workload))
