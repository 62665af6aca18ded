"""Log lines as TorchServe writes them, rotation, log configurations."""

from __future__ import annotations

import gzip
import io
import json
import logging
import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from ts_frontend.config.kinds import ConfigError
from ts_frontend.config.table import Note, ServerConfig
from ts_frontend.telemetry.logging import writer as log_writer
from ts_frontend.telemetry.logging.files import Console, RotatedFile, daily
from ts_frontend.telemetry.logging.logs import Logs, setup_logs
from ts_frontend.telemetry.logging.writer import Access, ModelLine, Writer, is_poll

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3}"
FILES = ["access_log.log", "model_log.log", "model_metrics.log", "ts_log.log", "ts_metrics.log"]


@pytest.fixture(autouse=True)
def _levels() -> Iterator[None]:
    """`logging` as it was, for the other tests."""
    names = ["", "ts_frontend", "ACCESS_LOG", "MODEL_LOG", "TS_METRICS", "MODEL_METRICS"]
    before = [(logging.getLogger(n), logging.getLogger(n).level, logging.getLogger(n).propagate) for n in names]
    root_handlers = list(logging.getLogger().handlers)
    for logger, _, _ in before:  # also if a server ran in this process before
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
    yield
    for logger, level, propagate in before:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = []
    logging.getLogger().handlers[:] = root_handlers


def config(tmp_path: Path, **more: object) -> ServerConfig:
    return ServerConfig(log_location=tmp_path, **{"console_log": False, **more})  # type: ignore[arg-type]


def write_some(logs: Logs) -> None:
    logging.getLogger("ts_frontend.server").warning("one %s", "thing")
    logging.getLogger("somelibrary").info("another")
    logging.getLogger("somelibrary").debug("too small")
    logs.model_line("W-9000-m_1.0-stdout", "100 % of it")
    logs.model_line("W-9000-m_1.0-stderr", "oh", logging.WARNING)
    logging.getLogger("TS_METRICS").info("CPU.Percent:1.0|#Level:Host")
    logging.getLogger("MODEL_METRICS").info("PredictionTime.ms:0.02")
    logs.access("127.0.0.1:55006", "GET /models HTTP/1.1", 200, 17.6)
    logs.close()


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_the_five_files_are_there_from_the_start(tmp_path: Path) -> None:
    logs = setup_logs(config(tmp_path / "new"))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == FILES
    logs.close()


def test_the_patterns_are_torchserves(tmp_path: Path) -> None:
    write_some(setup_logs(config(tmp_path)))
    expected = {
        "access_log.log": [rf'{TIME} - /127\.0\.0\.1:55006 "GET /models HTTP/1\.1" 200 18'],
        "model_log.log": [
            rf"{TIME} \[INFO \] W-9000-m_1\.0-stdout MODEL_LOG - 100 % of it",
            rf"{TIME} \[WARN \] W-9000-m_1\.0-stderr MODEL_LOG - oh",
        ],
        "ts_log.log": [
            rf"{TIME} \[WARN \] main ts_frontend\.server - one thing",
            rf"{TIME} \[INFO \] main somelibrary - another",
        ],
        "ts_metrics.log": [rf"{TIME} - CPU\.Percent:1\.0\|#Level:Host"],
        "model_metrics.log": [rf"{TIME} - PredictionTime\.ms:0\.02"],
    }
    for name, patterns in expected.items():
        written = lines(tmp_path / name)
        assert len(written) == len(patterns), written
        assert all(map(re.fullmatch, patterns, written)), written


def test_the_console_has_everything_in_the_long_form(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_some(setup_logs(config(tmp_path, console_log=True)))
    written = capfd.readouterr().out.splitlines()
    assert len(written) == 7
    assert any(
        re.fullmatch(rf'{TIME} \[INFO \] main ACCESS_LOG - /127.0.0.1:55006 "GET .*" 200 18', w) for w in written
    )


@pytest.mark.parametrize("after", ["record", "line", "metrics"])
def test_a_request_stands_before_what_is_logged_after_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """The period in which requests are collected doesn't end in this test."""
    monkeypatch.setattr(log_writer, "PERIOD_S", 10_000.0)
    logs = setup_logs(config(tmp_path, console_log=True))
    logs.access("127.0.0.1:55006", "GET /models HTTP/1.1", 200, 17.6)
    if after == "record":
        logging.getLogger("somelibrary").info("later")
    elif after == "line":
        logs.model_line("W-9000-m_1.0-stdout", "later")
    else:
        logs.writer.hurry(lambda: [("TS_METRICS", [ModelLine(0.0, "main", logging.INFO, "later")])])
    assert logs.flush(60)
    first, second = capfd.readouterr().out.splitlines()
    assert "GET /models" in first and second.endswith("later")
    logs.close()


def test_json_lines(tmp_path: Path) -> None:
    write_some(setup_logs(config(tmp_path, log_format="json")))
    access = json.loads(lines(tmp_path / "access_log.log")[0])
    assert (access["status"], access["peer"], access["duration_ms"]) == (200, "127.0.0.1:55006", 17.6)
    model = json.loads(lines(tmp_path / "model_log.log")[1])
    assert (model["level"], model["thread"], model["message"]) == ("WARNING", "W-9000-m_1.0-stderr", "oh")


def test_metrics_have_a_place_of_their_own(tmp_path: Path) -> None:
    write_some(setup_logs(config(tmp_path / "logs", metrics_location=tmp_path / "metrics")))
    assert sorted(path.name for path in (tmp_path / "metrics").iterdir()) == ["model_metrics.log", "ts_metrics.log"]


def test_the_access_log_can_be_off(tmp_path: Path) -> None:
    write_some(setup_logs(config(tmp_path, access_log=False)))
    assert lines(tmp_path / "access_log.log") == []


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


def test_the_level_of_the_server(tmp_path: Path) -> None:
    write_some(setup_logs(config(tmp_path, log_level="error")))
    assert len(lines(tmp_path / "ts_log.log")) == 1


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


def test_closing_leaves_no_handlers(tmp_path: Path) -> None:
    setup_logs(config(tmp_path)).close()
    assert logging.getLogger("ACCESS_LOG").handlers == []


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


def test_a_new_day_is_a_new_file(tmp_path: Path) -> None:
    days = iter([datetime(2026, 11, 20)] * 2 + [datetime(2026, 11, 21)] * 9)
    path = tmp_path / "ts_log.log"
    handler = RotatedFile(path, daily(path), now=lambda: next(days))
    for text in ("a", "b", "c"):
        handler.emit(record(text))
    handler.close()
    assert gzip.decompress((tmp_path / "ts_log.20-Nov.log.gz").read_bytes()) == b"a\nb\n"
    assert lines(tmp_path / "ts_log.log") == ["c"]


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


def test_a_dict_config_replaces_the_files(tmp_path: Path) -> None:
    file = tmp_path / "log.yaml"
    file.write_text(
        f"""
formatters: {{plain: {{format: "%(name)s %(message)s"}}}}
handlers: {{all: {{class: logging.FileHandler, filename: {tmp_path / "all.txt"}, formatter: plain}}}}
root: {{level: INFO, handlers: [all]}}
"""
    )
    write_some(setup_logs(config(tmp_path / "logs", log_config=file)))
    assert not (tmp_path / "logs").exists()
    written = lines(tmp_path / "all.txt")
    assert "ts_frontend.server one thing" in written
    assert 'ACCESS_LOG /127.0.0.1:55006 "GET /models HTTP/1.1" 200 18' in written


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.yaml", "handlers: 5"), ("a.json", "{"), ("a.xml", "<a"), ("b.yaml", "5"), ("deep.yaml", "[" * 1500)],
)
def test_a_log_config_that_cannot_be_used(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="log_config"):
        setup_logs(config(tmp_path / "logs", log_config=tmp_path / name))


def test_levels_of_a_log4j2_file(tmp_path: Path) -> None:
    file = tmp_path / "log4j2.xml"
    file.write_text(
        """<Configuration><Appenders/><Loggers>
        <Logger name="org.pytorch.serve" level="error"/><Logger name="ACCESS_LOG" level="off"/>
        <Logger name="io.netty" level="error"/><Root level="warn"/></Loggers></Configuration>"""
    )
    write_some(setup_logs(config(tmp_path, log_config=file)))
    assert lines(tmp_path / "access_log.log") == []
    assert len(lines(tmp_path / "model_log.log")) == 2
    text = (tmp_path / "ts_log.log").read_text()
    assert "somelibrary" not in text
    assert "one thing" not in text


@pytest.mark.parametrize(
    ("request_line", "status", "polled"),
    [
        ("GET /ping HTTP/1.1", 200, True),
        ("HEAD /ping/ HTTP/1.1", 200, True),
        ("GET /metrics?name[]=x HTTP/2.0", 200, True),
        ("GET /v2/health/ready HTTP/1.1", 200, True),
        ("GET /v2/models/m/versions/1/ready HTTP/1.1", 200, True),
        ("GET /console/events HTTP/1.1", 200, True),
        ("gRPC inference.GRPCInferenceService/ServerLive HTTP/2.0", 0, True),
        ("GET /ping HTTP/1.1", 500, False),
        ("GET /console/events HTTP/1.1", 499, False),
        ("gRPC inference.GRPCInferenceService/ServerReady HTTP/2.0", 14, False),
        ("POST /predictions/ping HTTP/1.1", 200, False),
        ("GET /models HTTP/1.1", 200, False),
        ("GET /pinger HTTP/1.1", 200, False),
        ("gRPC inference.GRPCInferenceService/ModelInfer HTTP/2.0", 0, False),
    ],
)
def test_polls_that_succeed_are_known(request_line: str, status: int, polled: bool) -> None:
    assert is_poll(Access(0.0, "p:1", request_line, status, 1.0)) == polled


@pytest.mark.parametrize("polls", [False, True])
def test_polls_are_left_out_unless_asked_for(polls: bool) -> None:
    writer = Writer(polls=polls)
    for path, status in (("/ping", 200), ("/ping", 500), ("/models", 200)):
        writer.put_access((0.0, "p:1", f"GET {path} HTTP/1.1", status, 1.0, "", ""))
    found = [f"{one.request.split()[1]} {one.status}" for _, entries in writer._access_portions() for one in entries]
    assert found == ["/ping 200"] * polls + ["/ping 500", "/models 200"]
