"""The names of the servers that can be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from measuring.open_inference import start_mlserver, start_ours_with, start_triton
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
    "torchserve-logging": lambda place: start_torchserve(place, quiet=False),
}
#: The targets of the Open Inference Protocol.
INFER_STARTS: Mapping[str, Callable[[Place], Served]] = {
    "ours-triton": lambda place: start_ours_with(place, "triton"),
    "triton": start_triton,
    "ours-mlserver": lambda place: start_ours_with(place, "mlserver"),
    "mlserver": start_mlserver,
    "ours-triton-http": lambda place: start_ours_with(place, "triton", http=True),
    "triton-http": lambda place: start_triton(place, http=True),
    "ours-mlserver-http": lambda place: start_ours_with(place, "mlserver", http=True),
    "mlserver-http": lambda place: start_mlserver(place, http=True),
}
NOTES: Mapping[str, str] = {
    "ours": "torchserve --foreground --ncs, access_log=false, metrics_mode=prometheus (no access and metric log); "
    "else defaults but for free ports and one worker",
    "ours-logging": "the same with its access and metric logs, as by default",
    "ours-http": "ours, asked over HTTP/1.1 with a body of the same 16 bytes",
    "ours-http-logging": "the same with its access and metric logs, as by default",
    "bare-http": "our ingress with an HTTP service that echoes, no worker",
    "torchserve-http": "torchserve, asked over HTTP/1.1",
    "bare": "our ingress with a method that echoes, no worker",
    "torchserve": "TorchServe with one worker; --log-config (level warn: no access and metric log) and "
    "disable_system_metrics=true; tokens off, model API on",
    "torchserve-logging": "TorchServe with one worker and its default logging; tokens off, model API on",
    "ours-triton": "ours, logs off, with a Triton model repository: one Python model, one instance, dynamic batching",
    "triton": "the Triton in nvidia-pytriton, with the same repository; metrics and info log off",
    "ours-mlserver": "ours, logs off, with an MLServer runtime, one worker",
    "mlserver": "MLServer with the same runtime, one worker process, debug off",
    "ours-triton-http": "ours-triton, asked over HTTP/1.1 with JSON",
    "triton-http": "triton, asked over HTTP/1.1 with JSON",
    "ours-mlserver-http": "ours-mlserver, asked over HTTP/1.1 with JSON",
    "mlserver-http": "mlserver, asked over HTTP/1.1 with JSON",
}


def start(target: str, folder: Path, workload: Workload, processes: Processes) -> Served:
    """The started server, which has given a right answer. Raises ServerFailed, NotInstalled, WrongAnswer."""
    place = Place(folder / target, processes, workload)
    place.prepare()
    served = {**STARTS, **INFER_STARTS}[target](place)
    wait_until_ready(served, workload, processes)
    return served if served.answer else replace(served, answer=served.client.ask(served.port, workload))
