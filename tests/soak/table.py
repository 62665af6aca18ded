"""The common parts of this folder's measurements: the server that they start, and the table at their end."""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from e2e.servers import Serving, write_model
from left_behind import end_with_this_process


class Row(NamedTuple):
    """One measure: its goal and its value, as text, and whether the value is good enough."""

    measure: str
    goal: str
    found: str
    good: bool


def show(rows: Sequence[Row]) -> None:
    width = max(len(row.measure) for row in rows)
    goal, found = max(len(row.goal) for row in rows), max(len(row.found) for row in rows)
    print(f"| {'measure':{width}} | {'goal':{goal}} | {'found':{found}} | |")
    print(f"|{'-' * (width + 2)}|{'-' * (goal + 2)}|{'-' * (found + 2)}|---|")
    for row in rows:
        print(f"| {row.measure:{width}} | {row.goal:{goal}} | {row.found:{found}} | {'' if row.good else 'MISSED'} |")
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"{os.cpu_count()} cores; load averages at the end: {load}")


def finish(rows: Sequence[Row]) -> None:
    """Prints the table and ends the process: status 1 when a goal was missed."""
    show(rows)
    sys.exit(0 if all(row.good for row in rows) else 1)


def difference(measure: str, before: float, after: float, most: float) -> Row:
    return Row(measure, f"<= +{most:.0f}", f"{before:.0f} -> {after:.0f}", after - before <= most)


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def milliseconds(values_s: Sequence[float]) -> str:
    """Median, 99th percentile and maximum."""
    found = (percentile(values_s, 0.5), percentile(values_s, 0.99), max(values_s, default=0.0))
    return "p50 {:.1f}, p99 {:.1f}, max {:.1f} ms".format(*(1000 * one for one in found))


def latency_row(measure: str, values_s: Sequence[float], goal_ms: float) -> Row:
    """Its 99th percentile may be `goal_ms`."""
    good = bool(values_s) and percentile(values_s, 0.99) * 1000 <= goal_ms
    return Row(measure, f"p99 <= {goal_ms:g} ms", f"{milliseconds(values_s)} of {len(values_s)}", good)


def options(description: str) -> argparse.ArgumentParser:
    """The options of a measurement. From now on, processes that this one starts end with it."""
    end_with_this_process()
    return argparse.ArgumentParser(description=description)


@contextmanager
def running(models: Callable[[Path], Mapping[str, tuple[str, str]]], **settings: object) -> Iterator[Serving]:
    """A server on free ports. `models(directory)`: the handler's text and the configuration of each model; a setting
    may be a function of the directory, too."""
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        directory = Path(name)
        store = directory / "store"
        store.mkdir()
        found = models(directory)
        for model, (handler, config) in found.items():
            write_model(store, model, handler, config=config)
        given = {name: value(directory) if callable(value) else value for name, value in settings.items()}
        server = Serving(directory, store, given, ["--ncs"])
        try:
            server.wait_started()
            for model in found:
                server.register(model)
            yield server
        finally:
            server.terminate()
