"""Counts the files of this project that one call crosses, in the frontend and in the worker.

A server is started on a model made for it. Python's profiler notes every function that runs in both processes while one
call is made; a file with such a function is one that the call crosses.

Usage: python ts_scripts/crossings.py [--files]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import grpc

from ts.protocol import open_inference_pb2
from ts_frontend.protos import inference_pb2, management_pb2

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (f"{ROOT}/frontend/ts_frontend/", f"{ROOT}/worker/ts/")
WAIT_S_MAX = 60.0
INFERENCE = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/"
MANAGEMENT = "/org.pytorch.serve.grpc.management.ManagementAPIsService/"
MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"

#: The code that runs in every Python process of the server: SIGUSR1 begins to note calls, SIGUSR2 writes them down.
PROFILE = """
import os, signal, sys

folder, sources = os.environ["CROSSINGS_FOLDER"], tuple(os.environ["CROSSINGS_SOURCES"].split(os.pathsep))
seen, noting = {}, False
clocks = {"tick", "_tick", "zombies", "reap"}

def note(frame, event, arg):
    file = frame.f_code.co_filename
    if not noting or event != "call" or not file.startswith(sources) or "_pb2" in file:
        return
    caller = frame
    while caller is not None and (caller.f_code.co_name not in clocks or "/worker/" in caller.f_code.co_filename):
        caller = caller.f_back
    if caller is None:  # else it runs from time to time, whether there is a call or not
        seen[file] = None

def begin(*_):
    global noting
    seen.clear()
    noting = True
    open(f"{folder}/{os.getpid()}.on", "w").close()

def end(*_):
    global noting
    noting = False
    with open(f"{folder}/{os.getpid()}.part", "w") as file:
        file.write("\\n".join(list(seen)))
    os.replace(f"{folder}/{os.getpid()}.part", f"{folder}/{os.getpid()}.calls")

signal.signal(signal.SIGUSR1, begin)
signal.signal(signal.SIGUSR2, end)
sys.setprofile(note)  # from the start: set by a signal's handler it misses the frames that already run
"""
HANDLER = """
from ts.protocol.otf_message_handler import send_intermediate_predict_response


def handle(data, context):
    if data is None:
        return None
    if context.get_request_header(0, "kind") == "stream":
        for _ in range(3):
            send_intermediate_predict_response(["piece"], context.request_ids, "OK", 200, context)
    return ["answer"] * len(data)
"""
MANIFEST = '{"runtime": "python", "model": {"modelName": "%s", "handler": "handler.py:handle", "modelVersion": "1.0"}}'


class Crossing(NamedTuple):
    """The files that one call crossed, as paths from the root of the repository."""

    call: str
    frontend: Sequence[str]
    worker: Sequence[str]

    @property
    def files(self) -> int:
        """The number of files, each counted once, even if both processes ran code of it."""
        return len({*self.frontend, *self.worker})


def until(true: Callable[[], object], what: str) -> None:
    """Returns when the condition is true; raises TimeoutError with the text `what` after a minute."""
    end_s = time.monotonic() + WAIT_S_MAX
    while not true():
        if time.monotonic() > end_s:
            raise TimeoutError(what)
        time.sleep(0.02)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """A server with the model `plain`, and `fresh` in its store: its process id, and HOST:PORT of each API."""
    for name in ("plain", "fresh"):
        (folder / "store" / name / "MAR-INF").mkdir(parents=True)
        (folder / "store" / name / "MAR-INF/MANIFEST.json").write_text(MANIFEST % name)
        (folder / "store" / name / "handler.py").write_text(HANDLER)
    for made in ("site", "calls"):
        (folder / made).mkdir()
    (folder / "site/sitecustomize.py").write_text(PROFILE)
    lines = [f"{name}_address=http://127.0.0.1:0" for name in ("inference", "management", "metrics")]
    lines += [f"grpc_{name}_port=0" for name in ("inference", "management")]
    lines += ["default_workers_per_model=1"]
    (folder / "config.properties").write_text("\n".join(lines))
    program = (
        sys.executable,
        "-c",
        "from ts_frontend.cli.main import main; main()",
        "--start",
        "--foreground",
        "--ncs",
    )
    words = ("--model-store", str(folder / "store"), "--models", "plain", "--ts-config", "config.properties")
    more = {"PYTHONPATH": str(folder / "site"), "TMPDIR": str(folder), "CROSSINGS_FOLDER": str(folder / "calls")}
    environ = {**os.environ, **more, "CROSSINGS_SOURCES": os.pathsep.join(SOURCES)}
    output = folder / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen([*program, *words], env=environ, stdout=file, stderr=file, cwd=folder)
    try:
        until(lambda: process.poll() is not None or "http_metrics listens" in output.read_text(), output.read_text())
        found = re.findall(r"(\w+) listens on (?:\w+://)?(\S+:\d+)", output.read_text())
        if not found:
            raise RuntimeError(f"The server did not start:\n{output.read_text()}")
        yield process.pid, dict(found)
    finally:
        process.terminate()
        process.wait(WAIT_S_MAX)


def ready_worker(management: str) -> int:
    """The process id of the one worker of `plain`, once it serves. `management`: HOST:PORT."""
    found: list[int] = []

    def is_ready() -> bool:
        with urllib.request.urlopen(f"http://{management}/models/plain") as answer:
            workers = json.load(answer)[0]["workers"]
        found[:] = [worker["pid"] for worker in workers if worker["status"] == "READY"]
        return bool(found)

    until(is_ready, "the worker is not ready")
    return found[0]


def crossed(folder: Path, pids: Sequence[int], call: Callable[[], object]) -> list[list[str]]:
    """For each process, the files whose code ran during `call`, in the order in which they were first entered."""
    found = []
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
        until((folder / f"{pid}.on").exists, f"process {pid} does not note its calls")
    call()
    for pid in pids:
        os.kill(pid, signal.SIGUSR2)
        until((folder / f"{pid}.calls").exists, f"process {pid} did not write down its calls")
        (folder / f"{pid}.on").unlink()
        files = (folder / f"{pid}.calls").read_text().splitlines()
        (folder / f"{pid}.calls").unlink()
        found.append([str(Path(file).relative_to(ROOT)) for file in files])
    return found


def crossings() -> Iterator[Crossing]:
    """One crossing for each kind of call."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        server, addresses = stack.enter_context(serving(folder))
        inference = stack.enter_context(grpc.insecure_channel(addresses["grpc_inference"]))
        management = stack.enter_context(grpc.insecure_channel(addresses["grpc_management"]))
        request = inference_pb2.PredictionsRequest(model_name="plain", input={"data": b"hello"}).SerializeToString()
        infer = open_inference_pb2.ModelInferRequest(model_name="plain", raw_input_contents=[b"\0" * 8])
        infer.inputs.add(name="x", datatype="FP32", shape=[2])
        http = urllib.request.Request(f"http://{addresses['http_inference']}/predictions/plain", data=b"hello")

        def opened() -> bytes:
            with urllib.request.urlopen(http) as answer:
                return bytes(answer.read())

        def streamed() -> list[bytes]:
            call = inference.unary_stream(f"{INFERENCE}StreamPredictions")
            return list(call(request, metadata=[("kind", "stream")]))

        calls: dict[str, Callable[[], object]] = {
            "Predictions": lambda: inference.unary_unary(f"{INFERENCE}Predictions")(request),
            "StreamPredictions": streamed,
            "HTTP predictions": opened,
            "ModelInfer": lambda: inference.unary_unary(MODEL_INFER)(infer.SerializeToString()),
        }
        pids = [server, ready_worker(addresses["http_management"])]
        for title, call in calls.items():
            call()  # steps of a first call don't count
            frontend, worker = crossed(folder / "calls", pids, call)
            yield Crossing(title, frontend, worker)
        registration = management_pb2.RegisterModelRequest(url="fresh", initial_workers=1, synchronous=True)
        register = management.unary_unary(f"{MANAGEMENT}RegisterModel")
        [files] = crossed(folder / "calls", [server], lambda: register(registration.SerializeToString()))
        yield Crossing("RegisterModel", files, ())


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the files that one call crosses.")
    parser.add_argument("--files", action="store_true", help="name the files, too")
    with_files = parser.parse_args().files
    print(f"{'call':20}{'files':>6}{'frontend':>10}{'worker':>8}")
    for found in crossings():
        print(f"{found.call:20}{found.files:6}{len(found.frontend):10}{len(found.worker):8}")
        for file in (*found.frontend, *found.worker) if with_files else ():
            print(f"    {file}")


if __name__ == "__main__":
    main()
