"""Log lines as TorchServe writes them, rotation, log configurations."""

from __future__ import annotations

import gzip
import io
import logging
import os
import re
from datetime import datetime
from pathlib import Path

import pytest

from ts_frontend.config.kinds import ConfigError
from ts_frontend.config.table import Note, ServerConfig
from ts_frontend.telemetry.logging import writer as log_writer
from ts_frontend.telemetry.logging.logs import setup_logs
from ts_frontend.telemetry.logging.writer import Console, RotatedFile, daily

pytestmark = pytest.mark.usefixtures("logging_as_before")


def config(tmp_path: Path, **more: object) -> ServerConfig:
    return ServerConfig(log_location=tmp_path, **{"console_log": False, **more})  # type: ignore[arg-type]


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_notes_about_settings_and_exceptions_are_logged(tmp_path: Path) -> None:
    logs = setup_logs(config(tmp_path, notes=(Note(logging.WARNING, "100 % odd"),)))
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("ts_frontend").exception("failed")
    logs.close()
    text = (tmp_path / "ts_log.log").read_text()
    assert "[WARN ] main ts_frontend.config - 100 % odd" in text
    assert "ValueError: broken" in text


def test_a_flood_is_cut_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "RECORDS_WAITING_MAX", 0)
    logs = setup_logs(config(tmp_path))
    logging.getLogger("ts_frontend").info("lost")
    monkeypatch.setattr(log_writer, "RECORDS_WAITING_MAX", 100)
    logging.getLogger("ts_frontend").info("kept")
    logs.close()
    text = (tmp_path / "ts_log.log").read_text()
    assert "kept" in text
    assert "1 log records were dropped" in text
    assert "lost" not in text


# --- rotation


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.INFO, "", 0, text, (), None)


def test_a_full_file_is_compressed_and_the_newest_stay(tmp_path: Path) -> None:
    """Others on the machine can read none of them: they hold what clients sent."""
    path = tmp_path / "ts_log.log"
    handler = RotatedFile(path, daily(path, bytes_max=10, kept_max=2), now=lambda: datetime(2026, 11, 20))
    for number in range(5):
        handler.emit(record(f"line {number}"))
    handler.close()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}
    packed = {path.name: gzip.decompress(path.read_bytes()).decode() for path in tmp_path.glob("*.gz")}
    assert lines(tmp_path / "ts_log.log") == ["line 4"]
    assert sorted(packed.values()) == ["line 2\n", "line 3\n"]
    assert all(re.fullmatch(r"ts_log\.20-Nov(\.\d+)?\.log\.gz", name) for name in packed)


def test_a_console_whose_reader_is_gone_falls_silent() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stream:
        handler = Console(stream)
        handler.emit(record("nobody reads"))
        handler.emit(record("nor this"))


def test_a_closed_console_is_no_error() -> None:
    stream = io.StringIO()
    stream.close()
    Console(stream).emit(record("x"))


# --- log_config


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.yaml", "handlers: 5"), ("a.json", "{"), ("a.xml", "<a"), ("b.yaml", "5"), ("deep.yaml", "[" * 600)],
)
def test_a_log_config_that_cannot_be_used(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="log_config"):
        setup_logs(config(tmp_path / "logs", log_config=tmp_path / name))
