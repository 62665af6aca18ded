"""`torchserve tune`: finds the batch size, delay, workers and load with the most answers a second.

It measures a copy of the model, registered under another name on the same server: the served model keeps its settings
and keeps answering, even if this process is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import grpc

from ts_frontend import tuning
from ts_frontend.cli.client import CallFailed, Client, Target, WorkersFailed, wait_for_workers
from ts_frontend.cli.commands import DEFAULT_INPUT, command, commands
from ts_frontend.config.keys import KeyKind
from ts_frontend.config.kinds import bytes_of
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub
from ts_frontend.tuning import Bounds, Found, Length, Measurement, Send, Space, Trial, best_within, measure, search

#: The suffix of the copy's name.
SUFFIX = "-tuning"
DELAYS_MS = (0, 1, 2, 5, 10, 20, 50, 100)
#: Reloads and scale calls take tenths of a second.
POLL_S = 0.02
WORKERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
REQUEST_S_MAX = 60.0

_INPUT = click.Path(exists=True, path_type=Path)


def space(batch_max: int, workers_max: int, in_flight_max: int) -> Space:
    """The values to try, up to these."""
    return Space(
        _doubled(batch_max),
        DELAYS_MS if batch_max > 1 else DELAYS_MS[:1],
        tuple(count for count in WORKERS if count < workers_max) + (workers_max,),
        _doubled(in_flight_max),
    )


def _doubled(most: int) -> tuple[int, ...]:
    return (*(1 << power for power in range(most.bit_length()) if 1 << power < most), most)


def read(paths: Sequence[Path]) -> list[bytes]:
    """The requests of these files in order: a folder's files by name, a `.jsonl` file's lines.

    :raises click.BadParameter: there is none.
    """
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    visible = [file for file in files if file.is_file() and not file.name.startswith(".")]
    found = [request for file in visible for request in _requests_of(file)]
    if not found:
        raise click.BadParameter(f"{', '.join(map(str, paths))}: it contains no request", param_hint="--input")
    return found


def _requests_of(file: Path) -> list[bytes]:
    body = file.read_bytes()
    return [line for line in map(bytes.strip, body.splitlines()) if line] if file.suffix == ".jsonl" else [body]


def _sender(channel: Any, target: Target, name: str, requests: Sequence[bytes]) -> Send:
    stub = InferenceAPIsServiceStub(channel)
    metadata = target.keys.metadata(KeyKind.INFERENCE)
    messages = [PredictionsRequest(model_name=name, input={DEFAULT_INPUT: body}) for body in requests]

    async def send(number: int) -> None:
        try:
            await stub.Predictions(messages[number % len(messages)], metadata=metadata, timeout=REQUEST_S_MAX)
        except grpc.RpcError as error:
            failed: Any = error
            raise CallFailed(failed.code().name, f"{failed.code().name}: {failed.details()}") from None

    return send


class Copy:
    """The measured copy of a model, with the settings of the last trial."""

    def __init__(self, client: Client, name: str, url: str, requests: Sequence[bytes], length: Length) -> None:
        self.name = name
        self._client = client
        self._url = url
        self._requests = requests
        self._length = length
        self._batching: tuple[int, int] | None = None

    def try_out(self, trial: Trial, best_per_s: float = 0.0) -> Measurement:
        """Measures a trial, for a shorter time if it is far below `best_per_s`, the best answers a second so far."""
        try:
            self._set(trial)
            found = asyncio.run(self._load(trial.concurrency, best_per_s))
            memory_bytes = sum(worker["memoryUsage"] for worker in self._describe()["workers"])
        except (CallFailed, WorkersFailed) as error:
            return Measurement(0.0, error=str(error))
        return replace(found, memory_bytes=memory_bytes)

    def _describe(self) -> dict[str, Any]:
        return self._client.describe(self.name)[0]

    def _set(self, trial: Trial) -> None:
        batching = (trial.batch_size, trial.delay_ms)
        if self._batching != batching:
            self.remove()
            self._batching = batching  # the copy may exist from now on, also if the call is interrupted
            settings = {"batch_size": trial.batch_size, "max_batch_delay": trial.delay_ms, "initial_workers": 0}
            self._client.register(self._url, model_name=self.name, synchronous=True, **settings)
        if self._describe()["minWorkers"] != trial.workers:
            self._client.scale(self.name, "", trial.workers, trial.workers, None)
        wait_for_workers(self._describe, trial.workers, None, lambda _: None, lambda _: time.sleep(POLL_S))

    async def _load(self, concurrency: int, best_per_s: float) -> Measurement:
        target = self._client.target
        async with target.channel(target.address(target.inference_port), grpc.aio) as channel:
            send = _sender(channel, target, self.name, self._requests)
            return await measure(send, concurrency, self._length, best_per_s)

    def remove(self) -> None:
        if self._batching is None:
            return
        self._batching = None
        try:
            self._client.unregister(self.name)
        except CallFailed as error:
            if error.code != "NOT_FOUND":  # it could not be registered
                raise

    def is_there(self) -> bool:
        try:
            self._describe()
        except CallFailed as error:
            if error.code == "NOT_FOUND":
                return False
            raise
        return True


def _climb(
    copy: Copy, over: Space, bounds: Bounds, start: Trial, say: Callable[[str], None]
) -> tuple[Found, list[tuple[Trial, Measurement]]]:
    climb = search(over, bounds, start)
    trials: list[tuple[Trial, Measurement]] = []
    trial = next(climb)
    while True:
        measured = copy.try_out(trial, best_within(trials, bounds))
        if measured.error and not trials:
            raise CallFailed("UNKNOWN", f"The first configuration already failed: {measured.error}")
        trials.append((trial, measured))
        best_per_s = max(it.answers_per_s for _, it in trials)
        say(tuning.row(trial, measured, bounds, best_per_s))
        try:
            trial = climb.send(measured)
        except StopIteration as end:
            return end.value, trials


def _memory(_: Any, __: Any, text: str | None) -> int | None:
    if text is None:
        return None
    if (size := bytes_of(int(text) if text.isdecimal() else text)) is None:
        raise click.BadParameter(f"{text!r} is not a size such as 2GiB")
    return size


@commands.command()
@click.argument("name")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    type=_INPUT,
    metavar="PATH",
    help="A request to send; a folder of them; or a .jsonl file, one on each line. Repeatable.",
)
@click.option("--version", default="", help="[default: the default version]")
@click.option("--p99", type=click.FloatRange(0, min_open=True), metavar="MS", help="The longest acceptable p99.")
@click.option("--memory", callback=_memory, metavar="SIZE", help="The most memory for all workers: bytes, or 4GiB.")
@click.option("--batch-max", type=click.IntRange(1), default=64, show_default=True)
@click.option(
    "--workers-max", type=click.IntRange(1, 64), default=lambda: min(64, os.cpu_count() or 1), help="[default: CPUs]"
)
@click.option("--in-flight-max", type=click.IntRange(1, 4096), default=256, show_default=True)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=3.0,
    show_default=True,
    help="How long each configuration is measured, at least.",
)
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="Put the settings into this file.")
@command
def tune(
    client: Client,
    name: str,
    inputs: tuple[Path, ...],
    version: str,
    p99: float | None,
    memory: int | None,
    batch_max: int,
    workers_max: int,
    in_flight_max: int,
    seconds: float,
    write: Path | None,
    as_json: bool,
) -> None:
    """Find the batch size, delay and number of workers.

    The measurements use a temporary copy of the model; the model itself stays as it is.
    """
    before = client.describe(name, version)[0]
    bounds = Bounds(p99, memory)
    batch_size = before["batchSize"]
    start = Trial(batch_size, before["maxBatchDelay"] if batch_size > 1 else 0, before["minWorkers"], 1)
    length = Length(seconds, min(100, round(30 * seconds)))
    copy = Copy(client, f"{name}{SUFFIX}", before["modelUrl"], read(inputs), length)
    if copy.is_there():
        raise CallFailed("ALREADY_EXISTS", f"There is a {copy.name} already: torchserve unregister {copy.name}")
    click.echo(tuning.HEAD, err=as_json)
    try:
        over = space(batch_max, workers_max, in_flight_max)
        found, trials = _climb(copy, over, bounds, start, lambda line: click.echo(line, err=as_json))
    finally:
        copy.remove()
    if as_json:
        click.echo(json.dumps(tuning.as_json(found, trials), indent=2))
    else:
        click.echo(tuning.conclusion(found, trials, bounds))
    if found.best is not None and found.within and write is not None:
        there = write.read_text() if write.exists() else ""
        write.write_text(tuning.with_settings(there, tuning.settings_of(found.best)))
    if not found.within:
        sys.exit(1)
