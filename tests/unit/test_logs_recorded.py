"""Lines that TorchServe 0.12 has written, and ours of the same values: letter by letter the same."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ts_frontend.telemetry.logging.formats import PatternFormatter, TextFormatter
from ts_frontend.telemetry.logging.writer import Access, Lines, LogEntry, ModelLine
from ts_frontend.telemetry.metrics.families import Definition, MetricKind
from ts_frontend.telemetry.metrics.requests import MetricLine
from ts_frontend.telemetry.metrics.text import log_text, parse_record

RECORDED = Path(__file__).parent.parent / "data" / "logs"
TIME = r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d),(?P<ms>\d{3})"
LEVELS = {"INFO ": logging.INFO, "WARN ": logging.WARNING, "DEBUG": logging.DEBUG, "ERROR": logging.ERROR}
SHORT, LONG = "%d{ISO8601} - %m%n", "%d{ISO8601} [%-5p] %t %c - %m%n"


def recorded(name: str) -> list[str]:
    return (RECORDED / name).read_text(encoding="utf-8").splitlines()


def seconds(match: re.Match[str]) -> float:
    # A little more than the millisecond: what is shown is cut off, not rounded.
    return time.mktime(time.strptime(match["time"], "%Y-%m-%dT%H:%M:%S")) + int(match["ms"]) / 1000 + 0.0001


def record_of(name: str, entry: LogEntry) -> logging.LogRecord:
    record = logging.LogRecord(name, entry.level, "", 0, "%s", (Lines([entry]),), None)
    record.entries, record.entry_lines, record.source = [entry], Lines([entry]), entry.source
    return record


def both(pattern: str) -> list[logging.Formatter]:
    """Our own formatter, and the one that a log4j2 file with TorchServe's pattern gets."""
    return [TextFormatter(bare=pattern == SHORT), PatternFormatter(pattern)]


def read(pattern: str, line: str) -> re.Match[str]:
    match = re.fullmatch(pattern, line)
    assert match is not None, line
    return match


def test_requests() -> None:
    for line in recorded("access_log.txt"):
        match = read(TIME + r' - /(?P<peer>\S+) "(?P<request>.*)" (?P<status>\d+) (?P<ms_taken>\d+)', line)
        entry = Access(seconds(match), match["peer"], match["request"], int(match["status"]), float(match["ms_taken"]))
        assert [one.format(record_of("ACCESS_LOG", entry)) for one in both(SHORT)] == [line, line]


def test_lines_of_workers() -> None:
    for line in recorded("model_log.txt"):
        match = read(TIME + r" \[(?P<level>.{5})\] (?P<thread>W-\S+) MODEL_LOG - (?P<text>.*)", line)
        entry = ModelLine(seconds(match), match["thread"], LEVELS[match["level"]], match["text"])
        assert [one.format(record_of("MODEL_LOG", entry)) for one in both(LONG)] == [line, line]


def test_the_console() -> None:
    for line in recorded("console.txt"):
        match = read(TIME + r" \[(?P<level>.{5})\] (?P<thread>\S+) (?P<logger>\S+) - (?P<text>.*)", line)
        record = logging.LogRecord(match["logger"], LEVELS[match["level"]], "", 0, match["text"], (), None)
        record.created, record.source = seconds(match), match["thread"]
        assert [one.format(record) for one in both(LONG)] == [line, line]


def of_server(text: str) -> str:
    match = read(r"([^.]+)\.([^:]+):([^|]+)\|#([^|]*)\|#hostname:([^,]+),timestamp:(\d+)", text)
    name, unit, value, labels, host, at_s = match.groups()
    pairs = dict(part.split(":") for part in labels.split(","))
    definition = Definition(name, MetricKind.GAUGE, unit, (*pairs, "Hostname"))
    return log_text(definition, float(value), pairs, host, float(at_s))


def of_handler(text: str) -> str:
    """The output that the worker had printed for it."""
    match = read(r"(.*\|#hostname:[^,]+),requestID:(.*),timestamp:(\d+)", text)
    record = parse_record(f"[METRICS]{match[1]},{match[3]},{match[2]}".replace("|#hostname", "|#type:GAUGE|#hostname"))
    assert record is not None
    definition = record.definition()
    values = record.values(definition)
    assert values is not None
    return record.text(definition, values)


@pytest.mark.parametrize(("name", "ours"), [("ts_metrics", of_server), ("model_metrics", of_handler)])
def test_metrics(name: str, ours: Callable[[str], str]) -> None:
    for line in recorded(f"{name}.txt"):
        match = read(TIME + r" - (?P<text>.*)", line)
        entry = MetricLine(seconds(match), ours(match["text"]))
        assert [one.format(record_of(name.upper(), entry)) for one in both(SHORT)] == [line, line]
