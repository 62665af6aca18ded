"""tests/conform.py against TorchServe and Triton themselves, where they are installed for the benchmarks."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

import conform
from support import until

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
#: Until another server answers, in seconds: TorchServe starts a JVM, then workers that import torch.
START_S_MAX = 240
pytestmark = pytest.mark.external


@pytest.fixture(scope="module")
def benchmark_servers() -> Iterator[ModuleType]:
    """How the benchmarks start other servers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        from measuring import open_inference

        yield open_inference


@contextmanager
def place(benchmark_servers: ModuleType, directory: Path, name: str) -> Iterator[Any]:
    """A folder for a server whose environment must be there."""
    if not (BENCHMARKS / ".envs" / name / "installed.txt").exists():
        pytest.skip(f"{name} is not installed: benchmarks/run.py installs it")
    if name == "torchserve" and shutil.which("java") is None:
        pytest.skip("TorchServe needs Java")
    from measuring.processes import Processes
    from measuring.servers import Folder

    processes = Processes()
    folder = Folder(directory / name, processes)
    folder.make()
    try:
        yield folder
    finally:
        processes.end()


def support_of(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    conform.main([*map(str, words), "--json"])
    sections = json.loads(capsys.readouterr().out)["sections"]
    return {section["facts"]["dialect"]: section for section in sections}


def state(section: Any) -> Any:
    """The support, and the findings other than ok, which a failed assertion then shows."""
    return section["facts"]["support"], [one["text"] for one in section["findings"] if one["severity"] != "ok"]


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False


def test_torchserve(benchmark_servers: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with place(benchmark_servers, tmp_path, "torchserve") as folder:
        from measuring.servers import run_torchserve

        with zipfile.ZipFile(folder.store / "echo.mar", "w") as archive:
            archive.writestr("handler.py", "def handle(data, context):\n    return ['ok' for row in data or ()]\n")
            model = {"modelName": "echo", "handler": "handler.py", "modelVersion": "1.0"}
            archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
        words = ["--model-store", str(folder.store), "--models", "echo=echo.mar"]
        running = run_torchserve(folder, words, {"metrics_mode": "prometheus"})
        properties = (folder.folder / "config.properties").read_text().splitlines()
        places = dict(line.partition("=")[::2] for line in properties)
        inference, management = places["inference_address"], places["management_address"]

        def served() -> bool:
            folder.processes.check()
            found = httpx.get(f"{management}/models/echo").json() if answers(f"{inference}/ping") else []
            return bool(found) and any(one["status"] == "READY" for one in found[0]["workers"])

        until(served, timeout_s=START_S_MAX)
        body = tmp_path / "body.bin"
        body.write_bytes(b"x")
        found = support_of(
            capsys,
            *(inference, "--management", management, "--metrics", places["metrics_address"]),
            *("--grpc", f"127.0.0.1:{running.grpc_port}", "--grpc-management", f"127.0.0.1:{running.management_port}"),
            *("--model", "echo", "--input", body, "--change"),
        )
        for name in ("torchserve-inference", "torchserve-management", "torchserve-metrics", "torchserve-grpc"):
            support, words = state(found[name])
            assert support == "supported", words
        for name in ("torchserve-oip", "kserve-v1", "oip-grpc", "triton-rest", "triton-grpc", "mlserver", "openai"):
            assert state(found[name])[0] == "not there", name


def test_triton(benchmark_servers: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with place(benchmark_servers, tmp_path, "triton") as folder:
        shutil.copytree(BENCHMARKS / "models" / "triton", folder.store / "triton")
        running = benchmark_servers.run_triton(folder, folder.store / "triton")

        def served() -> bool:
            folder.processes.check()
            return answers(f"http://127.0.0.1:{running.http_port}/v2/health/ready")

        until(served, timeout_s=START_S_MAX)
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [float(one) for one in range(16)]}
        request = tmp_path / "request.json"
        request.write_text(json.dumps({"inputs": [tensor]}))
        found = support_of(
            capsys,
            *(f"http://127.0.0.1:{running.http_port}", "--grpc", f"127.0.0.1:{running.grpc_port}"),
            *("--model", "identity", "--input", request, "--change"),
        )
        for name in ("oip-rest", "oip-grpc", "triton-rest", "triton-grpc"):
            support, words = state(found[name])
            assert support == "supported", words
        for name in ("torchserve-inference", "torchserve-management", "torchserve-metrics", "openai", "kserve-v1"):
            assert state(found[name])[0] == "not there", name
