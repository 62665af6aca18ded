"""Logs when things go wrong: full disks, files moved by others, floods, and text that wants to be something else."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from datetime import datetime
from pathlib import Path

import pytest

from support import GUARD_S, until
from ts.protocol.text import marked, unmarked
from ts_frontend.config.table import ServerConfig
from ts_frontend.telemetry.logging import logs as server_logs
from ts_frontend.telemetry.logging import writer as log_writer
from ts_frontend.telemetry.logging.logs import ModelLog, setup_logs
from ts_frontend.telemetry.logging.writer import RotatedFile, daily
from ts_frontend.telemetry.metrics.families import read_definitions
from ts_frontend.telemetry.metrics.registry import DEFAULT_FILE, MetricsRegistry, open_metrics
from ts_frontend.telemetry.metrics.requests import parse_record
from ts_frontend.workers.process import LineReader


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.INFO, "", 0, text, (), None)


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at, and tried again after an error, with each line."""
    monkeypatch.setattr(log_writer, "LOOK_S", 0.0)
    monkeypatch.setattr(log_writer, "RETRY_S", 0.0)


# --- files


def test_a_rotation_that_fails_leaves_a_file_that_grows(
    tmp_path: Path, looking: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    file = RotatedFile(path, daily(path, bytes_max=5), now=lambda: datetime(2026, 11, 20))

    def copy(source: object, target: object, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", copy)
    for text in ("one", "two"):
        file.emit(record(text))
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "one\ntwo\n"
    assert "can't be rotated" in capfd.readouterr().err
    monkeypatch.undo()
    file.emit(record("three"))
    file.close()
    assert path.read_text() == "three\n"


def test_a_directory_that_cannot_be_written_is_said_once_and_tried_again(
    tmp_path: Path, looking: None, logging_as_before: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """All five files lie below a file. The console has every line; once the way is free the files have them, too."""
    in_the_way = tmp_path / "logs"
    in_the_way.write_text("no directory")
    logs = setup_logs(ServerConfig(log_location=in_the_way, log_level="info"))
    for number in range(3):
        logging.getLogger("ts_frontend.x").info("line %s", number)
        logs.model_line("W-9000-m_1.0-stdout", f"printed {number}")
    assert logs.flush(GUARD_S)
    in_the_way.unlink()
    logging.getLogger("ts_frontend.x").info("at last")
    logs.close()
    said = capfd.readouterr()
    assert [line for line in said.err.splitlines() if "can't be written" in line] == said.err.splitlines()
    assert len(said.err.splitlines()) == 1 and "File exists" in said.err, said.err
    assert all(f"{word} {number}" in said.out for word in ("line", "printed") for number in range(3))
    found = (in_the_way / "ts_log.log").read_text().splitlines()
    assert found[0] == "3 lines are missing here: they couldn't be written" and found[1].endswith("at last")


# --- text


def test_names_in_messages_cannot_forge_lines(tmp_path: Path, logging_as_before: None) -> None:
    logs = setup_logs(ServerConfig(log_location=tmp_path, console_log=False))
    forged = "2026-11-20T00:00:00,000 [INFO ] main x - forged"
    logging.getLogger("ts_frontend").warning("Model %s isn't there", f"m\n{forged}")
    logs.access("127.0.0.1:1", "GET /\x1b[31m HTTP/1.1", 404, 1.0)
    logs.model_line("W-9000-m\n_1.0-stdout", "bad\x00\x1b[2Jline")
    logs.close()
    lines = {file.stem: file.read_text().splitlines() for file in tmp_path.glob("*.log")}
    assert all(line.isprintable() for these in lines.values() for line in these)
    assert lines["ts_log"][1] == f"    {forged} isn't there"
    assert {name: len(these) for name, these in lines.items() if these} == {
        "ts_log": 2,
        "access_log": 1,
        "model_log": 1,
    }


def test_json_escapes_everything(tmp_path: Path, logging_as_before: None) -> None:
    logs = setup_logs(ServerConfig(log_location=tmp_path, console_log=False, log_format="json"))
    logs.model_line("W", "a\nb\x1b\udcff", request_id="r1")
    logs.access("p:1", 'GET /"\n', 200, 1.0, "r2")
    logging.getLogger("ts_frontend").error("x", extra={"request_id": "r3"})
    logs.close()
    found = [json.loads(line) for path in sorted(tmp_path.glob("*.log")) for line in path.read_text().splitlines()]
    assert [one["request_id"] for one in found] == ["r2", "r1", "r3"]


async def test_garbage_and_long_lines_of_a_worker_become_lines(tmp_path: Path) -> None:
    lines: list[str] = []
    read, write = os.pipe()
    reader = LineReader(read, "stdout", lambda _, line: lines.append(line))
    os.write(write, b"\xff\xfe\x00ok\r\n" + b"x" * 50_000)
    reader.finish()
    os.close(write)
    assert lines == ["\\xff\\xfe\x00ok", "x" * 50_000]


# --- floods


def flooded(tmp_path: Path, count: int, line: str = "again") -> list[str]:
    logs = setup_logs(ServerConfig(log_location=tmp_path, console_log=False))
    log = ModelLog(logs, MetricsRegistry(read_definitions(DEFAULT_FILE), "log", "vm"))
    for _ in range(count):
        log.line(9000, "m_1.0", "stdout", line)
    log.line(9000, "m_1.0", "stderr", "another stream")
    logs.close()
    return (tmp_path / "model_log.log").read_text().splitlines()


def test_a_handler_that_prints_without_end_is_cut_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logging_as_before: None
) -> None:
    monkeypatch.setattr(server_logs, "LINES_PER_S_MAX", 3)
    monkeypatch.setattr(time, "monotonic", lambda: 1.0)
    lines = flooded(tmp_path, 10)
    assert [line.partition(" - ")[2] for line in lines[:4]] == ["again"] * 3 + ["another stream"]
    assert lines[4].endswith("W-9000-m_1.0-stdout MODEL_LOG - 7 lines were dropped: more than 3 lines or 16777216 "
                             "characters in a second")  # fmt: skip


def test_metrics_among_the_lines_are_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logging_as_before: None
) -> None:
    monkeypatch.setattr(server_logs, "LINES_PER_S_MAX", 0)
    line = "[METRICS]HandlerTime.ms:1|#ModelName:m,Level:Model|#type:GAUGE|#hostname:vm,17,ID"
    assert not any("2 lines" in one for one in flooded(tmp_path, 5, line))


def test_metrics_of_a_quiet_server_are_written_at_once_and_not_at_a_periods_end(
    tmp_path: Path, logging_as_before: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads the logs when a request is answered finds it there. The period doesn't end in this test."""
    monkeypatch.setattr(log_writer, "PERIOD_S", 10_000.0)
    logs = setup_logs(ServerConfig(log_location=tmp_path, console_log=False))
    metrics = open_metrics(ServerConfig(), logs)
    model = metrics.model("m", "1.0").requests(False)
    record = parse_record("[METRICS]HandlerTime.ms:1|#ModelName:m,Level:Model|#type:GAUGE|#hostname:vm,17,ID")
    assert record is not None
    model.accepted()
    until(lambda: "ts_inference_requests_total" in (tmp_path / "ts_metrics.log").read_text())
    metrics.handler_value(record, "m_1.0")
    until(lambda: "HandlerTime" in (tmp_path / "model_metrics.log").read_text())
    while len(metrics.event_log.feed) < 5:  # only a few times in a period: a busy server's lines are collected
        model.accepted()
        assert logs.flush(GUARD_S)
    written = (tmp_path / "ts_metrics.log").read_text().count("requests_total")
    assert 1 < written <= log_writer.HURRIES_MAX
    logs.close()
    found = (tmp_path / "ts_metrics.log").read_text()
    assert found.count("requests_total") == written + 5, "the rest comes at the end"


def test_requests_that_cannot_be_written_in_time_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logging_as_before: None
) -> None:
    logs = setup_logs(ServerConfig(log_location=tmp_path, console_log=False))
    monkeypatch.setattr(log_writer, "RECORDS_WAITING_MAX", 0)
    logs.access("p:1", "GET / HTTP/1.1", 200, 1.0)
    logs.model_line("W", "lost")
    monkeypatch.setattr(log_writer, "RECORDS_WAITING_MAX", 10)
    logging.getLogger("ts_frontend").info("kept")
    logs.close()
    assert "2 log records were dropped" in (tmp_path / "ts_log.log").read_text()


# --- requests of lines


@pytest.mark.parametrize("line", ["", "plain", "\x1e without an end", "a\x1eb\x1fc"])
def test_a_line_without_a_mark_stays(line: str) -> None:
    assert unmarked(line) == ("", line)
    assert unmarked(marked(line, "r1,r2")) == ("r1,r2", line)
