"""What `make run` does: starts the server on model_store/, calls it as a client would, and serves until Ctrl-C.

Usage: python ts_scripts/quickstart.py [--once] [--free-ports]

`--once` stops the server after the answers, `--free-ports` leaves 7070 and the other usual ports alone. The exit
status is 0 when every answer was right. The server's logs and its other files go to a temporary folder, which is
removed at the end unless something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import grpc

from ts_frontend.protos import inference_pb2, inference_pb2_grpc, management_pb2, management_pb2_grpc

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
STORE = ROOT / "model_store"
IMAGE = ROOT / "examples/digits/samples/3.png"
DIGIT = "3"
PROMPT = "Tyger Tyger"
CONTINUATION = " burning bright,\nIn the forests of the night:"
ARCHIVES = ("digits.mar", "digits_v2.mar", "text_stream.mar")
CALL_S_MAX = 120.0

#: Each listener: the key of config.properties, the port people know, and what to call it in a message.
LISTENERS = (
    ("grpc_inference_port", 7070, "gRPC inference"),
    ("grpc_management_port", 7071, "gRPC management"),
    ("inference_address", 8080, "HTTP inference"),
    ("management_address", 8081, "HTTP management"),
    ("metrics_address", 8082, "HTTP metrics"),
)


class Wrong(Exception):
    """An answer that isn't what it must be, or a server that didn't start."""


class Ports(NamedTuple):
    inference: int
    management: int


def say(text: str = "") -> None:
    print(text, flush=True)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_port(taken: set[int]) -> int:
    """A port that nobody listens on now, and that isn't one of `taken`."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port


def choose_ports(only_free: bool = False) -> dict[str, int]:
    """A port for each listener: the usual one, or a free one where something else has that."""
    chosen: dict[str, int] = {}
    for key, usual, title in LISTENERS:
        taken = not only_free and not is_free(usual)
        chosen[key] = free_port({usual, *chosen.values()}) if taken or only_free else usual
        if taken:
            say(f"Port {usual} ({title}) is taken by another program; using {chosen[key]} instead.")
    return chosen


def write_config(ports: dict[str, int], path: Path) -> None:
    lines = [
        f"{key}={port}" if key.startswith("grpc") else f"{key}=http://127.0.0.1:{port}" for key, port in ports.items()
    ]
    path.write_text("\n".join([*lines, "console_log=false"]) + "\n")


def server_env(state: Path) -> dict[str, str]:
    """The environment with the server's files in `state`, and without settings of another server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TS_")}
    path = f"{BIN}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "PATH": path, "TMPDIR": str(state), "LOG_LOCATION": str(state), "METRICS_LOCATION": str(state)}


@contextmanager
def server(state: Path, ports: dict[str, int], store: Path = STORE) -> Iterator[None]:
    """The server, started with the `torchserve` command and stopped with it."""
    config = state / "config.properties"
    write_config(ports, config)
    env = server_env(state)
    command = ["torchserve", "--start", "--ncs", "--model-store", str(store), "--ts-config", str(config)]
    say(f"$ {' '.join(command)}")
    try:
        if subprocess.run([BIN / "torchserve", *command[1:]], env=env, cwd=state).returncode:
            raise Wrong(f"The server didn't start. Its logs: {state}")
        yield
    finally:
        subprocess.run([BIN / "torchserve", "--stop"], env=env, cwd=state)


def register(channel: grpc.Channel) -> None:
    stub = management_pb2_grpc.ManagementAPIsServiceStub(channel)
    for archive in ARCHIVES:
        request = management_pb2.RegisterModelRequest(url=archive, initial_workers=1, synchronous=True)
        say(f"register {archive}: {stub.RegisterModel(request, timeout=CALL_S_MAX).msg.strip()}")


def classify(stub: Any, version: str) -> None:
    """One image to the digits model; Wrong when it doesn't see the digit that is there."""
    request = inference_pb2.PredictionsRequest(
        model_name="digits", model_version=version, input={"data": IMAGE.read_bytes()}
    )
    answer = json.loads(stub.Predictions(request, timeout=CALL_S_MAX).prediction)
    say(f"digits {version} on {IMAGE.relative_to(ROOT)}: class {answer['class']}, probability {answer['probability']}")
    if answer["class"] != DIGIT:
        raise Wrong(f"digits {version} answers {answer['class']} for an image of {DIGIT}")


def stream(stub: Any) -> None:
    """One text, continued character by character; Wrong when it isn't the known one, or came in one piece."""
    data = json.dumps({"prompt": PROMPT, "max_tokens": len(CONTINUATION)}).encode()
    request = inference_pb2.PredictionsRequest(model_name="text_stream", input={"data": data})
    say(f"text_stream, after {PROMPT!r}, as it comes:\n")
    print(f"  {PROMPT}", end="", flush=True)
    pieces = []
    for response in stub.StreamPredictions(request, timeout=CALL_S_MAX):
        pieces.append(response.prediction.decode())
        print(pieces[-1].replace("\n", "\n  "), end="", flush=True)
    say(f"\n\n({len(pieces)} messages)")
    if "".join(pieces) != CONTINUATION or len(pieces) != len(CONTINUATION):
        raise Wrong(f"text_stream answers {''.join(pieces)!r} in {len(pieces)} messages, not {CONTINUATION!r}")


def call(ports: Ports) -> None:
    """Everything that a client does here; Wrong or grpc.RpcError when something isn't as it must be."""
    with grpc.insecure_channel(f"127.0.0.1:{ports.management}") as channel:
        register(channel)
    say()
    with grpc.insecure_channel(f"127.0.0.1:{ports.inference}") as channel:
        stub = inference_pb2_grpc.InferenceAPIsServiceStub(channel)
        for version in ("1.0", "2.0"):
            classify(stub, version)
        stream(stub)


def explain(ports: Ports) -> None:
    """How to call the server oneself. Commands name ports only where those aren't the usual ones."""
    bin_folder = os.path.relpath(BIN)
    say(f"""
Call it yourself, from another terminal in {ROOT}:

  {bin_folder}/python ts_scripts/torchserve_grpc_client.py infer digits {IMAGE.relative_to(ROOT)}
  {bin_folder}/python ts_scripts/torchserve_grpc_client.py infer_stream text_stream README.md
  {bin_folder}/torchserve list
  {bin_folder}/torchserve describe digits

gRPC inference is on 127.0.0.1:{ports.inference}, gRPC management on 127.0.0.1:{ports.management}.
""")


def serve(ports: Ports) -> None:
    """Until Ctrl-C or SIGTERM, or until the server is gone."""
    stopped = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    say("Serving. Ctrl-C ends it.")
    while not stopped.wait(2):
        if is_free(ports.inference):
            raise Wrong("The server has ended.")
    say()


def run(state: Path, once: bool, free_ports: bool) -> None:
    chosen = choose_ports(free_ports)
    ports = Ports(chosen["grpc_inference_port"], chosen["grpc_management_port"])
    with server(state, chosen):
        call(ports)
        explain(ports)
        if not once:
            serve(ports)


def main() -> None:
    parser = argparse.ArgumentParser(description="Start the server on the examples and call it.")
    parser.add_argument("--once", action="store_true", help="end after the answers")
    parser.add_argument("--free-ports", action="store_true", help="don't try the usual ports")
    options = parser.parse_args()
    state = Path(tempfile.mkdtemp(prefix="torchrelay-"))
    try:
        run(state, options.once, options.free_ports)
    except (Wrong, grpc.RpcError) as error:
        text = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
        sys.exit(f"\n{text}\nLogs are kept in {state}")
    shutil.rmtree(state, ignore_errors=True)


if __name__ == "__main__":
    main()
