"""The pods of deploy/ on this machine: a server with a pod's command line, variables, mounts and ports."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch

from deploy.manifests import ROOT, Document, command_line, environment, kustomized, pods
from e2e.servers import Serving, write_model
from support import free_port, until

PODS = pods()
DIGITS = ROOT / "model_store" / "digits.mar"
#: What KServe's examples for TorchServe have in /mnt/models/config/config.properties.
KSERVE_CONFIG = """\
inference_address=http://0.0.0.0:8085
management_address=http://0.0.0.0:8085
metrics_address=http://0.0.0.0:8082
grpc_inference_port=7070
grpc_management_port=7071
enable_metrics_api=true
metrics_format=prometheus
number_of_netty_threads=4
job_queue_size=10
enable_envvars_config=true
install_py_dep_per_model=true
model_store=/mnt/models/model-store
model_snapshot={"name":"startup.cfg","modelCount":1,"models":{"doubling":{"1.0":{"defaultVersion":true,\
"marName":"doubling","minWorkers":1,"maxWorkers":5,"batchSize":1,"maxBatchDelay":5000,"responseTimeout":120}}}}
"""
#: Doubles numbers: an instance (of the envelope `kserve`), or the elements of a tensor (`kservev2`).
DOUBLING = """
import numpy

def handle(data, context):
    rows = data or ()  # None at load
    return [(2 * numpy.array(row["data"] if isinstance(row, dict) else row)).tolist() for row in rows]
"""


class Halves(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.part


class Pod:
    """A pod's server on this machine: folders below `place` instead of the mounts, free ports instead of its own."""

    def __init__(self, name: str, place: Path) -> None:
        self.spec = PODS[name]
        (self.container,) = self.spec["containers"]
        self.place, self.kserve = place, name.startswith("kserve/")
        self.ports: dict[int, int] = {}
        self._mounts = {mount["mountPath"]: place / mount["mountPath"].strip("/") for mount in self._mounted()}
        for folder in self._mounts.values():
            folder.mkdir(parents=True, exist_ok=True)
        models = self._mounts["/mnt/models"]
        if name == "kserve/kserve-torchrelay":
            (models / "config").mkdir()
            (models / "model-store").mkdir()
            (models / "config" / "config.properties").write_text(self.here(KSERVE_CONFIG))
            write_model(models / "model-store", "doubling", DOUBLING)
        elif name == "kserve/weights":
            torch.jit.script(Halves()).save(str(models / "model.pt"))
        elif not self.kserve:
            shutil.copy(DIGITS, models)
            (config,) = [one for one in kustomized() if one["kind"] == "ConfigMap"]
            for file, text in config["data"].items():
                (self._mounts["/etc/torchrelay"] / file).write_text(self.here(text))
        self.words = [self.here(word) for word in command_line(self.container)]
        self.environment = {key: self.here(value) for key, value in environment(self.container).items()}

    def _mounted(self) -> list[Document]:
        storage_initializer = [{"mountPath": "/mnt/models"}] if self.kserve else []
        mounts: list[Document] = [*self.container["volumeMounts"], *storage_initializer]
        volumes = {one["name"] for one in self.spec["volumes"]}
        assert all(one["name"] in volumes for one in self.container["volumeMounts"])
        return mounts

    def here(self, text: str) -> str:
        """The text with this machine's folders and ports."""
        any_mount = "|".join(sorted(self._mounts, key=len, reverse=True))
        text = re.sub(rf"(?<![\w/.-])({any_mount})(?=[/\s]|$)", lambda found: str(self._mounts[found[1]]), text)
        return re.sub(r"(?<=[=:])([789]\d{3})\b", lambda found: str(self.port(int(found[1]))), text)

    def port(self, inside: int) -> int:
        return self.ports.setdefault(inside, free_port())

    def named_port(self, port: int | str) -> int:
        """A port's number, of a probe or a service, inside."""
        return next((one["containerPort"] for one in self.container.get("ports", []) if one["name"] == port), 0) or int(
            port
        )

    def probes(self) -> Iterator[tuple[str, int]]:
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe := self.container.get(name):
                yield probe["httpGet"]["path"], self.named_port(probe["httpGet"]["port"])

    def scraped(self) -> tuple[str, int]:
        found: dict[str, str] = self.spec.get("annotations") or {}
        return (
            (found["prometheus.kserve.io/path"], int(found["prometheus.kserve.io/port"]))
            if found
            else ("/metrics", 8082)
        )


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Pod], Serving]]:
    """Starts the server of a pod with its own argv; listeners without a flag there get free ports."""
    running: list[Serving] = []

    def begin(pod: Pod) -> Serving:
        words = pod.words[1:] if pod.words[0] == "torchserve" else pod.words
        spare = ["--set", f"grpc_management_port={pod.port(7071)}", "--set", "drain_grace_s=0"]
        if pod.kserve and pod.scraped()[1] == 8002:
            spare += [f"--metrics-port={pod.port(8002)}"]
        if "--profile=mlserver" in words:  # MLSERVER_HTTP_PORT is weaker than the tests' own config.properties
            spare += [f"--http-port={pod.port(8080)}", f"--grpc-port={pod.port(9000)}"]
        if "--profile=kserve" in words:
            spare += ["--set", f"management_address=http://127.0.0.1:{pod.port(8083)}"]
        command = [
            sys.executable,
            "-c",
            "from ts_frontend.cli.main import main; main()",
            "--foreground",
            *words,
            *spare,
        ]
        (tmp_path / "server").mkdir()
        server = Serving(tmp_path / "server", None, {"env": pod.environment, "command": command}, [])
        running.append(server)
        return server.wait_started()

    yield begin
    for server in running:
        assert server.terminate() == 0, server.log


def code_of(port: int, path: str) -> int:
    return httpx.get(f"http://127.0.0.1:{port}{path}").status_code


def is_ready(pod: Pod) -> None:
    for path, port in pod.probes():
        until(lambda path=path, port=port: code_of(pod.port(port), path) == 200)  # type: ignore[misc]
