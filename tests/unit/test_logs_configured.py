"""log4j2 files of users: their effect, and the warnings about unsupported parts."""

from __future__ import annotations

import json
import logging
import re
from datetime import datetime
from pathlib import Path

import pytest

from ts_frontend.config.table import ServerConfig
from ts_frontend.telemetry.logging.formats import PatternFormatter, java_date
from ts_frontend.telemetry.logging.log_config import Appender, rotation
from ts_frontend.telemetry.logging.logs import setup_logs
from ts_frontend.telemetry.logging.writer import Logs

MOMENT = datetime(2026, 11, 3, 14, 5, 9, 83_000)


pytestmark = pytest.mark.usefixtures("logging_as_before")


def opened(tmp_path: Path, xml: str, **more: object) -> Logs:
    file = tmp_path / "log4j2.xml"
    file.write_text(xml)
    given = {"console_log": False, "log_location": tmp_path / "logs", "log_config": file, **more}
    return setup_logs(ServerConfig(**given))  # type: ignore[arg-type]


def write_some(logs: Logs) -> None:
    logging.getLogger("ts_frontend.server").warning("one")
    logging.getLogger("somelibrary").info("another")
    logs.model_line("W-9000-m_1.0-stdout", "said", request_id="r1")
    logs.access("127.0.0.1:5", "GET /models HTTP/1.1", 200, 17.6, "r2")
    logs.close()


#: What a user's file usually is: TorchServe's own, with a few things changed.
USUAL = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration status="WARN" packages="org.pytorch.serve.util.logging">
  <Properties><Property name="dir">${env:LOG_LOCATION:-nowhere}/mine</Property></Properties>
  <Appenders>
    <RollingFile name="access" fileName="${dir}/access.log" filePattern="${dir}/access.%d{dd-MMM}.log.gz">
      <PatternLayout pattern="%d{ISO8601} - %m%n"/>
      <Policies><SizeBasedTriggeringPolicy size="100 MB"/><TimeBasedTriggeringPolicy/></Policies>
      <DefaultRolloverStrategy max="5"/>
    </RollingFile>
    <File name="model" fileName="${sys:LOG_LOCATION}/mine/${env:TEAM:-nobody}.json"><JsonLayout compact="true"/></File>
    <File name="server" fileName="${dir}/server.log"><PatternLayout><Pattern>%p|%c{1}|%X{request_id}|%msg%n</Pattern>
      </PatternLayout></File>
    <Console name="STDOUT" target="SYSTEM_OUT"><PatternLayout pattern="%d{ISO8601} [%-5p] %t %c - %m%n"/></Console>
  </Appenders>
  <Loggers>
    <Logger name="ACCESS_LOG" level="info" additivity="false"><AppenderRef ref="access"/></Logger>
    <Logger name="MODEL_LOG" level="all"><AppenderRef ref="model"/></Logger>
    <Logger name="io.netty" level="error"/>
    <Logger name="org.pytorch.serve" level="debug"><AppenderRef ref="server"/></Logger>
    <Root level="info"><AppenderRef ref="server"/><AppenderRef ref="STDOUT"/></Root>
  </Loggers>
</Configuration>"""


def test_files_patterns_levels_and_lookups(tmp_path: Path) -> None:
    write_some(opened(tmp_path, USUAL, environment={"TEAM": "blue", "LOG_LOCATION": "the setting wins"}))
    mine = tmp_path / "logs" / "mine"
    assert sorted(path.name for path in mine.iterdir()) == ["access.log", "blue.json", "server.log"]
    (access,) = (mine / "access.log").read_text().splitlines()
    assert re.fullmatch(r'[-\dT:,]{23} - /127.0.0.1:5 "GET /models HTTP/1.1" 200 18', access)
    model = json.loads((mine / "blue.json").read_text())
    assert (model["message"], model["thread"], model["request_id"]) == ("said", "W-9000-m_1.0-stdout", "r1")
    # Additivity: the model's line reaches the root's appenders too, and one that is named twice writes once.
    lines = (mine / "server.log").read_text().splitlines()
    assert sorted(lines) == ["INFO|MODEL_LOG|r1|said", "INFO|somelibrary||another", "WARN|server||one"]


def test_the_console_of_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_some(opened(tmp_path, USUAL, console_log=True))
    written = capfd.readouterr().out
    assert "[WARN ] main ts_frontend.server - one" in written
    assert "GET /models" not in written  # additivity="false"


def test_what_is_not_understood_is_named(tmp_path: Path) -> None:
    xml = """<Configuration monitorInterval="30"><Appenders>
      <Kafka name="k" topic="t"/><File name="f" fileName="${nowhere}/a.log"><PatternLayout pattern="%q %m%n"/></File>
      <RollingFile name="r" fileName="LOGS/r.log" filePattern="LOGS/r.%d{bogus}"><Policies>
        <CronTriggeringPolicy schedule="* * * * *"/><SizeBasedTriggeringPolicy size="much"/><TimeBasedTriggeringPolicy/>
      </Policies></RollingFile>
      <File name="all" fileName="LOGS/all.log"/></Appenders>
      <Loggers><Logger name="org.pytorch.serve.wlm" level="debug"/><Root level="loud"><AppenderRef ref="all"/>
      <AppenderRef ref="r"/><AppenderRef ref="gone"/><Filter/></Root></Loggers></Configuration>"""
    opened(tmp_path, xml.replace("LOGS", str(tmp_path)), log_level="info").close()
    text = (tmp_path / "all.log").read_text()
    for word in (
        "monitorInterval",
        "Kafka",
        "${nowhere}",
        "CronTriggeringPolicy",
        "size 'much'",
        "b in the date pattern",
        "org.pytorch.serve.wlm",
        "level loud",
        "no appender gone",
        "Filter",
    ):
        assert word in text, text
    assert "appender f:" not in text  # nobody uses it


def test_levels_of_appenders_and_references(tmp_path: Path) -> None:
    xml = f"""<Configuration><Appenders><File name="f" fileName="{tmp_path}/f"/>
      <File name="g" fileName="{tmp_path}/g"><ThresholdFilter level="error"/></File>
      <Async name="a"><AppenderRef ref="f"/></Async></Appenders>
      <Loggers><Root level="all"><AppenderRef ref="a" level="warn"/><AppenderRef ref="g"/></Root></Loggers>
      </Configuration>"""
    write_some(opened(tmp_path, xml))
    assert ((tmp_path / "f").read_text(), (tmp_path / "g").read_text()) == ("one\n", "")


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("%d{ISO8601}", "2026-11-03T14:05:09,083"),
        ("%d", "2026-11-03 14:05:09,083"),
        ("%date{HH:mm:ss.SSS}", "14:05:09.083"),
        ("%d{yyyy-MM-dd'T'HH:mm:ss}{UTC}", "....-..-..T..:..:.."),
        ("%d{UNIX}", r"\d{10}"),
        ("[%-5p]", r"\[WARN \]"),
        ("%5level %.2c %c{1} %logger{2}", " WARN .b b a.b"),
        ("%t %thread", "main main"),
        ("%m%n%msg", "text\ntext"),
        ("100%% %message", "100% text"),
        ("%highlight{%p: %m}{FATAL=red}", "WARN: text"),
        ("%X{request_id}%X{other}", "r1"),
        ("%pid", r"\d+"),
        ("%msgx", "textx"),
    ],
)
def test_conversions(pattern: str, text: str) -> None:
    record = logging.LogRecord("a.b", logging.WARNING, "", 0, "text", (), None)
    record.created, record.request_id = MOMENT.timestamp() + 0.0001, "r1"
    assert re.fullmatch(text, PatternFormatter(pattern).format(record))


@pytest.mark.parametrize(
    ("pattern", "text"), [("%m%n", "text\n    Bad: x"), ("%m%n%ex{none}", "text"), ("%ex %m", None)]
)
def test_an_exception_stands_at_the_end_or_where_the_pattern_says(pattern: str, text: str | None) -> None:
    record = logging.LogRecord("a", logging.ERROR, "", 0, "text", (), None)
    record.exc_text = "Bad: x"
    expected = "\nBad: x text" if text is None else text.replace("    ", "")
    assert PatternFormatter(pattern).format(record) == expected


@pytest.mark.parametrize("pattern", ["%q", "%d{yyyy'}", "%d{", "%d{B}", "%d{HH}{Nowhere/At_all}"])
def test_a_pattern_that_cannot_be_used(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"known|closed|zone"):
        PatternFormatter(pattern)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("dd-MMM", "03-Nov"),
        ("yyyy.MMMM.d EEE", "2026.November.3 Tue"),
        ("HH:mm:ss,SSS", "14:05:09,083"),
        ("hh 'o''clock' a", "02 o'clock PM"),
        ("COMPACT", "20261103140509083"),
        ("yy", "26"),
    ],
)
def test_dates_of_java(pattern: str, text: str) -> None:
    assert java_date(pattern)(MOMENT) == text


def test_names_of_rolled_files() -> None:
    plain = rotation(Appender("a", file_pattern="logs/a.%d{dd-MMM}.log.gz"))
    assert [str(plain.name(MOMENT, number)) for number in (0, 1)] == ["logs/a.03-Nov.log.gz", "logs/a.03-Nov.1.log.gz"]
    numbered = rotation(Appender("a", file_pattern="logs/%d{yyyy}/a-%i.log"))
    assert [str(numbered.name(MOMENT, number)) for number in (0, 1)] == ["logs/2026/a-1.log", "logs/2026/a-2.log"]
    for one in (plain, numbered):
        assert all(one.name(MOMENT, number).match(one.found) for number in (0, 1, 12))
