"""The servers of the comparison: their start and readiness."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from measuring import torchserve_environment
from measuring.processes import Processes, ServerFailed, free_ports
from measuring.workloads import (
    GRPC,
    HTTP,
    HTTP_ANSWER,
    HTTP_BODY,
    Client,
    NoAnswer,
    Workload,
    check,
)

READY_S_MAX = 180.0
FIRST_ANSWER_S_MAX = 5.0
TRY_AGAIN_S = 0.2
BARE_INGRESS = Path(__file__).resolve().parent.parent / "bare_ingress.py"

TORCHSERVE_QUIET = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration>
  <Appenders><Console name="STDOUT" target="SYSTEM_OUT"><PatternLayout pattern="%d %p %c %m%n"/></Console></Appenders>
  <Loggers><Root level="warn"><AppenderRef ref="STDOUT"/></Root></Loggers>
</Configuration>
"""


@dataclass(frozen=True, slots=True)
class Served:
    """A running server that `client` calls at `port`. `answer`: the messages of its answer; if they aren't known
    beforehand, empty until its first answer. `warm_up_s`: the seconds of load that it needs to reach its best speed."""

    name: str
    port: int
    management_port: int
    process: psutil.Process
    answer: Sequence[bytes]
    warm_up_s: float
    client: Client = GRPC


@dataclass(frozen=True, slots=True)
class Running:
    """A process and the ports on which it listens; 0 for no port."""

    process: psutil.Process
    http_port: int = 0
    grpc_port: int = 0
    management_port: int = 0
    management_http_port: int = 0


@dataclass(frozen=True)
class Folder:
    """The folder with a server's files."""

    folder: Path
    processes: Processes

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def make(self) -> None:
        for name in ("store", "tmp", "logs"):
            (self.folder / name).mkdir(parents=True)

    def env(self) -> dict[str, str]:
        """Our environment without variables of a server's settings, and with separate temporary and log folders."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TS_")}
        own = {"TMPDIR": self.folder / "tmp", "TEMP": self.folder / "tmp"}
        own |= {"LOG_LOCATION": self.folder / "logs", "METRICS_LOCATION": self.folder / "logs"}
        return {**kept, **{name: str(value) for name, value in own.items()}}

    def run(self, words: Sequence[str], more: Mapping[str, str] | None = None) -> psutil.Process:
        return self.processes.start(words, {**self.env(), **(more or {})}, self.folder, self.folder / "console.log")


@dataclass(frozen=True)
class Place(Folder):
    """The folder with the models that the server serves."""

    workload: Workload

    def prepare(self) -> None:
        self.make()
        self.workload.prepare(self.store)


def start_ours(
    place: Place,
    more: Sequence[str] = (),
    quiet: bool = True,
    http: bool = False,
    command: Path | None = None,
) -> Served:
    """Our server with one worker and the workload's archive, called over gRPC or (`http`) HTTP. `command`: another
    installation's command."""
    running = run_ours(place, [*_archive_words(place), *more], {}, quiet, command=command)
    title = "ours" + ("-http" if http else "") + ("" if quiet else "-logging")
    if http:
        answer = HTTP_ANSWER if place.workload.answer else ()
        return Served(title, running.http_port, running.management_port, running.process, answer, 3, HTTP)
    return Served(title, running.grpc_port, running.management_port, running.process, place.workload.answer, 3)


def run_ours(
    folder: Folder,
    words: Sequence[str],
    settings: Mapping[str, object],
    quiet: bool = True,
    workers: int = 1,
    more_env: Mapping[str, str] | None = None,
    command: Path | None = None,
) -> Running:
    """Runs the real command with its default settings, except for free ports, the number of workers and no snapshots.

    `words`: the flags for its models. `quiet`: without access and metric logs, like TorchServe in this comparison.
    `command`: another installation's command.
    """
    inference, management, *addresses = free_ports(5)
    all_settings: dict[str, object] = {**_addresses(addresses), **settings}
    all_settings |= {
        "grpc_inference_port": inference,
        "grpc_management_port": management,
        "default_workers_per_model": workers,
        "access_log": str(not quiet).lower(),
        "metrics_mode": "prometheus" if quiet else "log",
    }
    line = [str(command or Path(sys.executable).parent / "torchserve"), "--start", "--foreground", "--ncs", *words]
    for key, value in all_settings.items():
        line += ["--set", f"{key}={value}"]
    return Running(folder.run(line, more_env), addresses[0], inference, management, addresses[1])


def _addresses(ports: Sequence[int]) -> dict[str, str]:
    names = ("inference", "management", "metrics")
    return {f"{name}_address": f"http://127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)}


def _archive_words(place: Place) -> list[str]:
    name = place.workload.name
    return ["--model-store", str(place.store), "--models", f"{name}={name}.mar"]


def start_bare(place: Place, http: bool = False) -> Served:
    """Our ingress alone, in a process of its own: it echoes the request."""
    (port,) = free_ports(1)
    pieces = len(place.workload.answer)
    words = [sys.executable, str(BARE_INGRESS), str(port), "--pieces", str(pieces)]
    process = place.run([*words, "--http"] if http else words)
    if http:
        return Served("bare-http", port, 0, process, [HTTP_BODY], warm_up_s=2, client=HTTP)
    answer = [place.workload.request] if pieces == 1 else place.workload.answer
    return Served("bare", port, 0, process, answer, warm_up_s=2)


def start_torchserve(place: Place, quiet: bool = True, http: bool = False) -> Served:
    """TorchServe with one worker, called over gRPC or (`http`) HTTP."""
    running = run_torchserve(place, _archive_words(place), {}, quiet)
    title = "torchserve" + ("-http" if http else "") + ("" if quiet else "-logging")
    if http:
        return Served(title, running.http_port, running.management_port, running.process, HTTP_ANSWER, 35, HTTP)
    return Served(title, running.grpc_port, running.management_port, running.process, place.workload.answer, 35)


def run_torchserve(
    folder: Folder, words: Sequence[str], settings: Mapping[str, object], quiet: bool = True, workers: int = 1
) -> Running:
    """TorchServe without tokens, with its model API. `quiet`: no access and metric logs. Raises NotInstalled."""
    bin_folder = torchserve_environment.ensure(print)
    inference, management, *addresses = free_ports(5)
    all_settings: dict[str, object] = {**_addresses(addresses), **settings}
    all_settings |= {"grpc_inference_port": inference, "grpc_management_port": management}
    all_settings |= {"default_workers_per_model": workers}
    command = [str(bin_folder / "torchserve"), "--start", "--foreground", "--ncs", "--disable-token-auth"]
    command += ["--enable-model-api", "--ts-config", "config.properties", *words]
    if quiet:
        (folder.folder / "log4j2.xml").write_text(TORCHSERVE_QUIET)
        command += ["--log-config", "log4j2.xml"]
        all_settings["disable_system_metrics"] = "true"
    lines = [f"{key}={value}\n" for key, value in all_settings.items()]
    (folder.folder / "config.properties").write_text("".join(lines))
    process = folder.run(command, torchserve_environment.command_environment(bin_folder))
    return Running(process, addresses[0], inference, management, addresses[1])


def wait_until_ready(served: Served, workload: Workload, processes: Processes) -> None:
    """Sends requests until one is answered, and checks the answer. Raises ServerFailed after READY_S_MAX seconds."""
    give_up_s = time.monotonic() + READY_S_MAX
    while True:
        processes.check()
        try:
            served.client.ask(served.port, workload, FIRST_ANSWER_S_MAX)
            break
        except NoAnswer as error:
            if time.monotonic() > give_up_s:
                raise ServerFailed(f"{served.name} hasn't answered within {READY_S_MAX:g} s: {error}") from error
        time.sleep(TRY_AGAIN_S)
    check(served.name, served.client, served.port, workload, served.answer)


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
NOTES: Mapping[str, str] = {
    "ours": "torchserve --foreground --ncs, access_log=false, metrics_mode=prometheus (no access and metric log); "
    "else defaults but for free ports and one worker",
    "ours-logging": "the same with its access and metric logs, as by default",
    "ours-http": "ours, asked over HTTP/1.1 with a body of the same 16 bytes",
    "ours-http-logging": "the same with its access and metric logs, as by default",
    "bare-http": "our transport with an HTTP application that echoes, no worker",
    "torchserve-http": "torchserve, asked over HTTP/1.1",
    "bare": "our transport with a method that echoes, no worker",
    "torchserve": "TorchServe with one worker; --log-config (level warn: no access and metric log) and "
    "disable_system_metrics=true; tokens off, model API on",
    "torchserve-logging": "TorchServe with one worker and its default logging; tokens off, model API on",
}


def start(target: str, folder: Path, workload: Workload, processes: Processes) -> Served:
    """The started server, which has given a right answer. Raises ServerFailed, NotInstalled, WrongAnswer."""
    place = Place(folder / target, processes, workload)
    place.prepare()
    served = STARTS[target](place)
    wait_until_ready(served, workload, processes)
    return served if served.answer else replace(served, answer=served.client.ask(served.port, workload))
