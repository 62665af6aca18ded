"""The measurements for people: rows, bars, a plot as SVG, and the lines of a model-config.yaml. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
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


# --- model-config.yaml


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


# --- the plot

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 420, 70, 50, 40


def svg(title: str, trials: Trials, found: Found, bounds: Bounds) -> str:
    """Answers a second over p99, a point for each measurement; those of the best and the bound are marked."""
    shown = [(trial, it) for trial, it in trials if it.answers_per_s > 0]
    most = max((it.answers_per_s for _, it in shown), default=1.0) * 1.05
    times = [it.p99_ms for _, it in shown] + ([bounds.p99_ms] if bounds.p99_ms else [])
    low, high = _decades(times)

    def x(ms: float) -> float:
        share = (math.log10(max(ms, low)) - math.log10(low)) / (math.log10(high) - math.log10(low))
        return round(_LEFT + share * (_WIDTH - _LEFT - 20), 1)

    def y(per_s: float) -> float:
        return round(_HEIGHT - _BOTTOM - per_s / most * (_HEIGHT - _BOTTOM - _TOP), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="{_WIDTH - 20}" y="{_HEIGHT - 10}" text-anchor="end">p99 in ms</text>',
        f'<text x="{_LEFT}" y="{_TOP - 4}">answers a second</text>',
    ]
    tick = low
    while tick <= high * 1.001:
        parts.append(_line(x(tick), _TOP, x(tick), _HEIGHT - _BOTTOM, "#ddd"))
        parts.append(f'<text x="{x(tick)}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
        tick *= 10
    for quarter in range(5):
        value = most * quarter / 4
        parts.append(_line(_LEFT, y(value), _WIDTH - 20, y(value), "#ddd"))
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{value:.0f}</text>')
    if bounds.p99_ms:
        parts.append(_line(x(bounds.p99_ms), _TOP, x(bounds.p99_ms), _HEIGHT - _BOTTOM, "#c00", "6 4"))
    for trial, it in shown:
        best = trial == found.best
        colour = "#c60" if best else "#369" if bounds.excess(it) == 0 else "#bbb"
        words = f"batch {trial.batch_size}, delay {trial.delay_ms} ms, {trial.workers} workers"
        gave = f"{it.answers_per_s:.1f} a second, p99 {it.p99_ms:.1f} ms"
        parts.append(
            f'<circle cx="{x(it.p99_ms)}" cy="{y(it.answers_per_s)}" r="{7 if best else 4}" fill="{colour}">'
            f"<title>{words}, {trial.concurrency} in flight: {gave}</title></circle>"
        )
    return "\n".join([*parts, "</svg>", ""])


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str = "") -> str:
    more = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"{more}/>'


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """The powers of ten around the values, at least one decade."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    return 10.0**low, 10.0 ** max(high, low + 1)
