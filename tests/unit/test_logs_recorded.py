"""Lines that TorchServe 0.12 has written, and ours of the same values: letter by letter the same."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

from ts_frontend.telemetry.logging.formats import PatternFormatter, TextFormatter
from ts_frontend.telemetry.logging.writer import Lines, LogEntry, ModelLine

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


def test_lines_of_workers() -> None:
    for line in recorded("model_log.txt"):
        match = read(TIME + r" \[(?P<level>.{5})\] (?P<thread>W-\S+) MODEL_LOG - (?P<text>.*)", line)
        entry = ModelLine(seconds(match), match["thread"], LEVELS[match["level"]], match["text"])
        assert [one.format(record_of("MODEL_LOG", entry)) for one in both(LONG)] == [line, line]
