"""Measures the wait of a request while no pod runs: from the container's command to the first answer.

Usage: python benchmarks/scale_from_zero.py [--cases program,kserve-program,torch,onnx] [--rounds N]

Models are in a folder as KServe's storage initializer leaves them: `model.pt` or `model.onnx` and nothing else, served
with the arguments of deploy/kserve/weights.yaml, and a KServe program without torch, run by this server and by KServe's
(`kserve-program`). The times for pulling an image and fetching a model are not included. Rounds are interleaved.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import accounts, machine
from measuring.processes import ServerFailed, failures_as_messages, free_ports, processes
from measuring.results import Spread, aligned
from measuring.servers import Folder, Running
from peers.systems import run_kserve, run_ours_kserve

MODEL = "identity"
PROGRAM = ["--serve", MODEL]
START_S_MAX, TRY_AGAIN_S, CALL_S_MAX = 120.0, 0.01, 30.0
VALUES = [1.0, 2.0]


def torch_file(models: Path) -> None:
    """A network without weights that returns its input, as TorchScript."""
    import torch

    torch.jit.save(torch.jit.trace(torch.nn.Identity(), torch.zeros(1, 2)), str(models / "model.pt"))


def onnx_file(models: Path) -> None:
    """The same network as ONNX."""
    from onnx import TensorProto, helper, save

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "same", [x], [y])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), models / "model.onnx")


FILES = {"torch": torch_file, "onnx": onnx_file}
CASES = ("program", "kserve-program", *FILES)


def start(case: str, folder: Folder) -> Running:
    """Starts the server of a case. Raises NotInstalled."""
    if case == "kserve-program":
        return run_kserve(folder, "main.py", PROGRAM)
    if case == "program":
        return run_ours_kserve(folder, "main.py", PROGRAM)
    http_port, grpc_port, metrics_port, management_port, management_grpc_port = free_ports(5)
    words = [str(Path(sys.executable).parent / "torchserve"), "--profile=kserve", f"--model_name={MODEL}"]
    words += [f"--model_dir={folder.folder / 'mnt' / 'models'}", f"--http_port={http_port}", f"--grpc_port={grpc_port}"]
    words += [f"--metrics-port={metrics_port}", "--foreground", f"--work-dir={folder.folder / 'tmp'}"]
    words += ["--set", f"management_address=http://127.0.0.1:{management_port}"]
    words += ["--set", f"grpc_management_port={management_grpc_port}"]
    return Running(folder.run(words), http_port, grpc_port)


def measure(case: str) -> dict[str, float]:
    """Seconds to readiness and to the first answer, and CPU seconds of the process tree until then. Raises
    NotInstalled, ServerFailed."""
    with tempfile.TemporaryDirectory(prefix="bench-") as place, processes() as started:
        folder = Folder(Path(place), started)
        folder.make()
        if case in FILES:
            (folder.folder / "mnt" / "models").mkdir(parents=True)
            FILES[case](folder.folder / "mnt" / "models")
        begun_s = time.monotonic()
        running = start(case, folder)
        ready_s = 0.0
        while True:
            started.check()
            now_s = time.monotonic() - begun_s
            if now_s > START_S_MAX:
                raise ServerFailed(f"{case} hasn't answered within {START_S_MAX:g} s")
            if not ready_s and ask(running.http_port, "/v2/health/ready") is not None:
                ready_s = time.monotonic() - begun_s
            if ready_s and ask(running.http_port, f"/v2/models/{MODEL}/infer", infer()) == VALUES:
                answered_s = time.monotonic() - begun_s
                return {"ready": ready_s, "answer": answered_s, "CPU": accounts.cpu_s(running.process)}
            time.sleep(TRY_AGAIN_S)


def infer() -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [1, len(VALUES)], "datatype": "FP32", "data": VALUES}]}


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> object:
    """The elements of the only output; for another JSON answer, its value; None without an answer of 200."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=CALL_S_MAX) as answer:
            found = json.loads(answer.read())
    except (urllib.error.HTTPError, OSError):
        return None
    return found["outputs"][0]["data"] if "outputs" in found else found


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure starts from the container's command to the first answer.")
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma list of {', '.join(CASES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(words)
    options.cases = options.cases.split(",")
    if not set(options.cases) <= set(CASES):
        parser.error(f"cases are {', '.join(CASES)}")
    return options


def run(options: argparse.Namespace) -> None:
    print(f"From the command to readiness and the first answer. {machine.busy()}", flush=True)
    found: dict[str, list[dict[str, float]]] = {case: [] for case in options.cases}
    for number in range(options.rounds + 1):
        for case in options.cases:
            took = measure(case)
            if number:  # the first starts fill the disk's cache and write bytecode
                found[case].append(took)
                shown = ", ".join(f"{name} {value:.2f} s" for name, value in took.items())
                print(f"round {number}/{options.rounds}  {case}: {shown}", flush=True)
    lines = [["", "case", "s to readiness", "s to the first answer", "CPU s"]]
    for case, some in found.items():
        figures = (Spread.of([one[name] for one in some]).text() for name in ("ready", "answer", "CPU"))
        lines.append(["", case, *figures])
    print(f"\n{aligned(lines)}")


def main() -> None:
    options = parse()
    with failures_as_messages():
        run(options)


if __name__ == "__main__":
    main()
