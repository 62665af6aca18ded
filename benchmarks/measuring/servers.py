"""The servers of the comparison: the folder of each, its archives, and the commands of ours and of TorchServe."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from measuring import environments, torchserve_environment
from measuring.processes import Processes, free_ports

HANDLERS = Path(__file__).resolve().parent.parent / "handlers"
BARE_INGRESS = Path(__file__).resolve().parent.parent / "bare_ingress.py"

#: The variable with the packages of the sentence model, for networks that need them.
TEXTS = {"TEXTS": str(environments.PLACE / "texts" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages")}

TORCHSERVE_QUIET = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration>
  <Appenders><Console name="STDOUT" target="SYSTEM_OUT"><PatternLayout pattern="%d %p %c %m%n"/></Console></Appenders>
  <Loggers><Root level="warn"><AppenderRef ref="STDOUT"/></Root></Loggers>
</Configuration>
"""


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
        return {**kept, **TEXTS, **{name: str(value) for name, value in own.items()}}

    def run(self, words: Sequence[str], more: Mapping[str, str] | None = None) -> psutil.Process:
        return self.processes.start(words, {**self.env(), **(more or {})}, self.folder, self.folder / "console.log")


def run_ours(
    folder: Folder,
    words: Sequence[str],
    settings: Mapping[str, object],
    workers: int = 1,
    more_env: Mapping[str, str] | None = None,
    command: Path | None = None,
) -> Running:
    """Runs the real command with its default settings, except for free ports, the number of workers and no snapshots.

    `words`: the flags for its models. It writes no access and metric logs, like TorchServe in this comparison.
    `command`: another installation's command.
    """
    inference, management, *addresses = free_ports(5)
    all_settings: dict[str, object] = {**_addresses(addresses), **settings}
    all_settings |= {
        "grpc_inference_port": inference,
        "grpc_management_port": management,
        "default_workers_per_model": workers,
        "access_log": "false",
        "metrics_mode": "prometheus",
    }
    line = [str(command or Path(sys.executable).parent / "torchserve"), "--start", "--foreground", "--ncs", *words]
    for key, value in all_settings.items():
        line += ["--set", f"{key}={value}"]
    return Running(folder.run(line, more_env), addresses[0], inference, management, addresses[1])


def _addresses(ports: Sequence[int]) -> dict[str, str]:
    names = ("inference", "management", "metrics")
    return {f"{name}_address": f"http://127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)}


def run_torchserve(folder: Folder, words: Sequence[str], settings: Mapping[str, object], workers: int = 1) -> Running:
    """TorchServe without tokens, with its model API, without access and metric logs. Raises NotInstalled."""
    bin_folder = torchserve_environment.ensure(print)
    inference, management, *addresses = free_ports(5)
    all_settings: dict[str, object] = {**_addresses(addresses), **settings}
    all_settings |= {"grpc_inference_port": inference, "grpc_management_port": management}
    all_settings |= {"default_workers_per_model": workers, "disable_system_metrics": "true"}
    command = [str(bin_folder / "torchserve"), "--start", "--foreground", "--ncs", "--disable-token-auth"]
    command += ["--enable-model-api", "--ts-config", "config.properties", *words]
    (folder.folder / "log4j2.xml").write_text(TORCHSERVE_QUIET)
    command += ["--log-config", "log4j2.xml"]
    lines = [f"{key}={value}\n" for key, value in all_settings.items()]
    (folder.folder / "config.properties").write_text("".join(lines))
    process = folder.run(command, torchserve_environment.command_environment(bin_folder))
    return Running(process, addresses[0], inference, management, addresses[1])


def build_archive(
    name: str,
    handler: Path,
    store: Path,
    settings: Mapping[str, object] | None = None,
    more: Mapping[str, str] | None = None,
) -> Path:
    """A model archive of one handler file, with `settings` as its model-config.yaml and the files `more` (name to
    text), in the format that both servers read."""
    model = {"modelName": name, "modelVersion": "1.0", "handler": handler.name}
    files = {**(more or {})}
    if settings:
        model["configFile"] = "model-config.yaml"
        files["model-config.yaml"] = "".join(f"{key}: {value}\n" for key, value in settings.items())
    manifest = {"createdOn": "", "runtime": "python", "archiverVersion": "0", "model": model}
    path = store / f"{name}.mar"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        archive.write(handler, handler.name)
        for file, text in files.items():
            archive.writestr(file, text)
    return path
