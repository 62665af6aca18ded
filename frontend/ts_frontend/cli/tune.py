"""`torchserve tune`: finds the batch size, delay, workers and load with the most answers a second.

It measures a copy of the model, registered under another name on the same server: the served model keeps its settings
and keeps answering, even if this process is killed.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import click

from ts_frontend.cli.client import CallFailed, Client, WorkersFailed, wait_for_workers
from ts_frontend.cli.commands import command, commands
from ts_frontend.cli.tune_requests import IN_FLIGHT_MAX, PROTOCOLS, read, sender
from ts_frontend.config.kinds import bytes_of
from ts_frontend.tuning import show
from ts_frontend.tuning.load import Durations, Length, Send, measure
from ts_frontend.tuning.search import Bounds, Found, Measurement, Space, Trial, best_within, search

#: The suffix of the copy's name.
SUFFIX = "-tuning"
DELAYS_MS = (0, 1, 2, 5, 10, 20, 50, 100)
#: The part of a grid's time after which no further measurement begins.
TIME_PART = 0.09
#: Reloads and scale calls take tenths of a second.
POLL_S = 0.02
WORKERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

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


#: Makes a sender of requests to the model with a name.
Requests = Callable[[str], AbstractAsyncContextManager[Send]]


class Copy:
    """The measured copy of a model, with the settings of the last trial."""

    def __init__(self, client: Client, name: str, url: str, requests: Requests, length: Length) -> None:
        self.name = name
        self._client = client
        self._url = url
        self._requests = requests
        self._length = length
        self._batching: tuple[int, int] | None = None
        self.durations = Durations()

    def try_out(self, trial: Trial, best_per_s: float = 0.0) -> Measurement:
        """Measures a trial, for a shorter time if it is far below `best_per_s`, the best answers a second so far."""
        try:
            self._set(trial)
            begun_s = time.monotonic()
            found = asyncio.run(self._load(trial.concurrency, best_per_s))
            memory_bytes = sum(worker["memoryUsage"] for worker in self._describe()["workers"])
        except (CallFailed, WorkersFailed) as error:
            return Measurement(0.0, failed=1, error=str(error))
        if not found.error:
            whole_s = self._length.whole_s(found.answers_per_s, trial.concurrency)
            self.durations.measurements_s[trial] = max(time.monotonic() - begun_s, whole_s)
        return Measurement(found.answers_per_s, found.p50_ms, found.p99_ms, memory_bytes, found.failed, found.error)

    def _describe(self) -> dict[str, Any]:
        return self._client.describe(self.name)[0]

    def _set(self, trial: Trial) -> None:
        batching, begun_s = (trial.batch_size, trial.delay_ms), time.monotonic()
        again = self._batching != batching
        if again:
            self.remove()
            self._batching = batching  # the copy may exist from now on, also if the call is interrupted
            settings = {"batch_size": trial.batch_size, "max_batch_delay": trial.delay_ms, "initial_workers": 0}
            self._client.register(self._url, model_name=self.name, synchronous=True, **settings)
        scaled = self._describe()["minWorkers"] != trial.workers
        if scaled:
            self._client.scale(self.name, "", trial.workers, trial.workers, None)
        wait_for_workers(self._describe, trial.workers, None, lambda _: None, lambda _: time.sleep(POLL_S))
        if again or scaled:
            (self.durations.loads_s if again else self.durations.scalings_s).append(time.monotonic() - begun_s)

    async def _load(self, concurrency: int, best_per_s: float) -> Measurement:
        async with self._requests(self.name) as send:
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
    begun_s = time.monotonic()

    def passed() -> float:
        return (time.monotonic() - begun_s) / (TIME_PART * copy.durations.grid_s(over) or math.inf)

    climb = search(over, bounds, start, passed)
    trials: list[tuple[Trial, Measurement]] = []
    trial = next(climb)
    while True:
        measured = copy.try_out(trial, best_within(trials, bounds))
        if measured.error and not trials:
            raise CallFailed("UNKNOWN", f"The first configuration already failed: {measured.error}")
        trials.append((trial, measured))
        best_per_s = max(it.answers_per_s for _, it in trials)
        say(show.row(trial, measured, bounds, best_per_s))
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


def _plot(_: Any, __: Any, path: Path | None) -> Path | None:
    """Refuses a plot that couldn't be drawn, before the first measurement instead of after the last."""
    if path is not None and path.suffix != ".svg":
        raise click.BadParameter(f"{path}: the name ends in .svg")
    return path


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
@click.option(
    "--protocol",
    type=click.Choice(PROTOCOLS),
    default="grpc",
    show_default=True,
    help="What the model's clients use: TorchServe's gRPC, its HTTP, or the Open Inference Protocol over HTTP.",
)
@click.option(
    "--http-port",
    envvar="TORCHSERVE_HTTP_PORT",
    default=8080,
    show_default=True,
    show_envvar=True,
    help="Port for --protocol http and v2.",
)
@click.option("--version", default="", help="[default: the default version]")
@click.option("--p99", type=click.FloatRange(0, min_open=True), metavar="MS", help="The longest acceptable p99.")
@click.option("--memory", callback=_memory, metavar="SIZE", help="The most memory for all workers: bytes, or 4GiB.")
@click.option("--batch-max", type=click.IntRange(1), default=64, show_default=True)
@click.option(
    "--workers-max", type=click.IntRange(1, 64), default=lambda: min(64, os.cpu_count() or 1), help="[default: CPUs]"
)
@click.option("--in-flight-max", type=click.IntRange(1, IN_FLIGHT_MAX), default=256, show_default=True)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=3.0,
    show_default=True,
    help="How long each configuration is measured, at least.",
)
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="Put the settings into this file.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_plot,
    help="Draw the measurements as FILE.svg.",
)
@command
def tune(
    client: Client,
    name: str,
    inputs: tuple[Path, ...],
    protocol: str,
    http_port: int,
    version: str,
    p99: float | None,
    memory: int | None,
    batch_max: int,
    workers_max: int,
    in_flight_max: int,
    seconds: float,
    write: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Find the batch size, delay and number of workers.

    The measurements use a temporary copy of the model; the model itself stays as it is.
    """
    before = client.describe(name, version)[0]
    bounds = Bounds(p99, memory)
    batch_size = before["batchSize"]
    start = Trial(batch_size, before["maxBatchDelay"] if batch_size > 1 else 0, before["minWorkers"], 1)
    recorded, length = read(inputs, protocol), Length(seconds, min(100, round(30 * seconds)))

    def requests(copied: str) -> AbstractAsyncContextManager[Send]:
        return sender(protocol, client.target, http_port, copied, recorded)

    copy = Copy(client, f"{name}{SUFFIX}", before["modelUrl"], requests, length)
    if copy.is_there():
        raise CallFailed("ALREADY_EXISTS", f"There is a {copy.name} already: torchserve unregister {copy.name}")
    click.echo(show.HEAD, err=as_json)
    try:
        over = space(batch_max, workers_max, in_flight_max)
        found, trials = _climb(copy, over, bounds, start, lambda line: click.echo(line, err=as_json))
    finally:
        copy.remove()
    if as_json:
        click.echo(json.dumps(show.as_json(found, trials), indent=2))
    else:
        click.echo(show.conclusion(found, trials, bounds))
    if plot is not None:
        plot.write_text(show.svg(f"{name} {before['modelVersion']}", trials, found, bounds))
    if found.best is not None and found.within and write is not None:
        there = write.read_text() if write.exists() else ""
        write.write_text(show.with_settings(there, show.settings_of(found.best)))
    if not found.within:
        sys.exit(1)
