"""The measurements for people: rows, bars, and the lines of a model-config.yaml. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ts_frontend.tuning.search import Bounds, Found, Measurement, Trial

HEAD = (
    f"{'batch':>5} {'delay':>6} {'workers':>7} {'in flight':>9} {'answers/s':>10} {'p50':>8} {'p99':>8} {'memory':>8}"
)
BAR_CHARS = 20
BARS = "▁▂▃▄▅▆▇█"
Trials = Sequence[tuple[Trial, Measurement]]


def row(trial: Trial, found: Measurement, bounds: Bounds, best_per_s: float) -> str:
    """The line of one measurement; its bar is relative to the best so far."""
    excess = bounds.excess(found)
    if math.isinf(excess):
        note = f"failed: {' '.join(found.error.split())[:80]}"
    else:
        filled = round(BAR_CHARS * found.answers_per_s / max(best_per_s, found.answers_per_s, 1e-9))
        note = "█" * filled + ("  over the bound" if excess > 0 else "")
    return (
        f"{trial.batch_size:>5} {trial.delay_ms:>3} ms {trial.workers:>7} {trial.concurrency:>9}"
        f" {found.answers_per_s:>10.1f} {_ms(found.p50_ms):>8} {_ms(found.p99_ms):>8}"
        f" {found.memory_bytes / 2**20:>4.0f} MiB  {note}"
    ).rstrip()


def sparkline(values: Sequence[float]) -> str:
    """One character for each value, from 0 to the greatest."""
    most = max(values, default=0.0) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int(value / most * len(BARS)))] for value in values)


def conclusion(found: Found, trials: Trials, bounds: Bounds) -> str:
    """The last lines: the course of the search, and its result."""
    lines = [f"{sparkline([it.answers_per_s for _, it in trials])}  answers a second, {found.evaluations} measurements"]
    if found.best is None or found.measured is None:
        return "\n".join([*lines, "No configuration answered."])
    best, it = found.best, found.measured
    if not found.within:
        lines.append(f"No configuration keeps {_bounds_text(bounds)}. The nearest:")
    lines.append(
        f"batchSize {best.batch_size}, maxBatchDelay {best.delay_ms} ms, {best.workers} workers: {it.answers_per_s:.1f}"
        f" answers a second with {best.concurrency} in flight, p99 {_ms(it.p99_ms)}, {it.memory_bytes / 2**20:.0f} MiB"
    )
    return "\n".join(lines)


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def _bounds_text(bounds: Bounds) -> str:
    texts = [f"p99 of {bounds.p99_ms:g} ms"] if bounds.p99_ms is not None else []
    texts += [f"memory of {bounds.memory_bytes / 2**20:.0f} MiB"] if bounds.memory_bytes is not None else []
    return " and ".join(texts)


def as_json(found: Found, trials: Trials) -> dict[str, Any]:
    def one(trial: Trial, it: Measurement) -> dict[str, Any]:
        return {**settings_of(trial), "inFlight": trial.concurrency, **asdict(it)}

    best = None if found.best is None or found.measured is None else one(found.best, found.measured)
    return {"best": best, "within": found.within, "trials": [one(trial, it) for trial, it in trials]}


def settings_of(trial: Trial) -> dict[str, int]:
    """The trial's settings by their keys in model-config.yaml."""
    return {
        "minWorkers": trial.workers,
        "maxWorkers": trial.workers,
        "batchSize": trial.batch_size,
        "maxBatchDelay": trial.delay_ms,
    }


def with_settings(text: str, settings: Mapping[str, int]) -> str:
    """The text of a model-config.yaml with these keys, changed in their lines or appended; all else stays."""
    left = dict(settings)
    lines = []
    for line in text.splitlines():
        key = re.match(r"(\w+)\s*:", line)
        lines.append(f"{key[1]}: {left.pop(key[1])}" if key and key[1] in left else line)
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in left.items())]) + "\n"
