"""`torchserve migrate --check`: the files that it finds in a deployment's directory, and its findings."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from ts_frontend.cli import main as cli
from ts_frontend.diagnosis.lint import missing
from ts_frontend.diagnosis.migrate import read_deployment
from ts_frontend.telemetry.logging.log_config import plan_problems, read_plan
from workflow_archiver.workflow_packaging import make_archive


def tree(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def report(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> tuple[int, str]:
    status = cli.main(["migrate", "--check", str(folder), *words])
    return status, capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("Dockerfile", 'CMD ["torchserve", "--start", "--ncs"]', ["--start", "--ncs"]),
        ("Dockerfile", 'ENTRYPOINT ["/usr/bin/torchserve", "--foreground"]', ["--foreground"]),
        (
            "Dockerfile",
            'ENV STORE /models\nCMD ["torchserve", "--model-store", "$STORE"]',
            ["--model-store", "/models"],
        ),
        ("start.sh", "torchserve --start \\\n  --models all && tail -f log", ["--start", "--models", "all"]),
        ("start.sh", "# torchserve --stop\nexec torchserve --start >log 2>&1 &", ["--start"]),
        ("start.sh", "export A=b\ntorchserve --models $A $UNKNOWN", ["--models", "b", "$UNKNOWN"]),
        ("torchserve.service", "ExecStart=/opt/bin/torchserve --start --foreground", ["--start", "--foreground"]),
    ],
)
def test_commands_are_found(tmp_path: Path, file: str, text: str, words: list[str]) -> None:
    (_, found), *others = read_deployment(tree(tmp_path, **{file: text})).commands
    assert found == words and not others


HANDLER = """
import json, numpy, not_to_be_had_anywhere
from beside import helper
from ts.context import Context, NotThere
from ts.metrics.dimension import Dimension
import ts.torch_handler.nothing
try:
    from ts.gone import something
    import also_not_to_be_had
except ImportError:
    something = None
def handle(data, context):
    import loaded_late_or_never
    from ts.torch_handler.base_handler import BaseHandler, OldName
"""


def test_imports_that_find_nothing(tmp_path: Path) -> None:
    tree(tmp_path, **{"handler.py": HANDLER, "beside.py": "", "broken.py": "def ("})
    lacking, others = missing(tmp_path)
    assert [(one.line, one.dotted) for one in lacking] == [
        (4, "ts.context.NotThere"),
        (6, "ts.torch_handler.nothing"),
        (14, "ts.torch_handler.base_handler.OldName"),
    ]
    assert [one.dotted for one in others] == ["not_to_be_had_anywhere"]


def test_a_log4j2_file_is_judged_without_being_applied(tmp_path: Path) -> None:
    text = (
        '<Configuration><Appenders><RollingFile name="a" fileName="a.log" filePattern="a.%d{QQQ}.log"><PatternLayout '
        'pattern="%m %Q%n"/><Policies><TimeBasedTriggeringPolicy/></Policies></RollingFile></Appenders>'
        '<Loggers><Logger name="judged" level="loud"><AppenderRef ref="b"/></Logger></Loggers></Configuration>'
    )
    plan = read_plan(tree(tmp_path, **{"log4j2.xml": text}) / "log4j2.xml", {})
    told = "\n".join(plan_problems(plan))
    assert "level loud of logger judged isn't known" in told and "there is no appender b" in told
    assert "appender a: its file isn't rolled" in told and "TorchServe's pattern is used" in told
    assert logging.getLogger("judged").level == logging.NOTSET and not (tmp_path / "a.log").exists()


def test_a_directory_without_anything_has_torchserves_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told = report(capsys, tmp_path)
    assert status == 0
    assert "there is no config.properties" in told and "no archives were found" in told
    assert "disable_token_authorization=false keeps that" in told
    assert report(capsys, tmp_path, "--strict")[0] == 1


def test_a_report_has_nothing_that_moves_a_terminals_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    properties = "key\x1b[2J\u202e=1\nmodel_store=/store\x1b]0;title\x07\n"
    tree(tmp_path, **{"config.properties": properties, "Dockerfile": "CMD torchserve --start --models a\x1b[31m=b"})
    for words in ((), ("--json",)):
        _, told = report(capsys, tmp_path, *words)
        assert told.replace("\n", "").isprintable() and "[2J" in told


def test_settings_that_are_refused_are_errors_and_hide_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    properties = "job_queue_size=many\nmetrics_config=m.yaml\nipex_enable=true\nmodel_sore=x\nkey=$$NOT_SET_HERE$$\n"
    metrics = "ts_metrics:\n  counter:\n    - {name: Request2XX, unit: Count, dimensions: []}\n"
    metrics += "    - {name: Requests4XX, unit: Count, dimensions: [Level]}\n"
    tree(tmp_path, **{"config.properties": properties, "m.yaml": metrics})
    status, told = report(capsys, tmp_path, "--json")
    about = {one["about"]: one for section in json.loads(told)["sections"] for one in section["findings"]}
    texts = [one["text"] for section in json.loads(told)["sections"] for one in section["findings"]]
    assert status == 1
    assert any(text.startswith("job_queue_size = many") for text in texts)
    assert any("NOT_SET_HERE" in text for text in texts)
    assert about["ipex_enable, line 3"]["severity"] == "warning"
    assert "did you mean model_store" in about["model_sore, line 4"]["text"]
    assert "did you mean Requests2XX" in about["Request2XX"]["text"]
    assert about["Requests4XX"]["severity"] == "error" and "records 2 (Level, Hostname)" in about["Requests4XX"]["text"]


def test_flags_of_scripts_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree(tmp_path, **{"start.sh": "torchserve --start --model-stor here\ntorchserve --start --modle x"})
    status, told = report(capsys, tmp_path)
    assert status == 1 and "torchserve --start --modle x: unrecognized arguments: --modle" in told
    assert "torchserve --start --model-stor here: every flag stays" in told


def test_an_url_that_isnt_allowed_and_an_archive_that_isnt_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    properties = "model_store=store\nload_models=a=https://example.org/a.mar,b.mar\n"
    tree(tmp_path, **{"config.properties": properties, "store/readme.txt": ""})
    status, told = report(capsys, tmp_path, "--quiet")
    assert status == 1
    assert "https://example.org/a.mar: allowed_urls doesn't allow it" in told
    assert "load_models: b.mar isn't in the model store" in told and "b.mar: b.mar" not in told


def test_workflows_are_read_and_their_models_looked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = "models: {here: {url: here.mar}, gone: {url: gone.mar}}\ndag: {here: [gone]}\n"
    tree(tmp_path, **{"config.properties": "model_store=store\n", "store/here.mar": "", "spec.yaml": spec})
    store = str(tmp_path / "store")
    make_archive("flow", str(tmp_path / "spec.yaml"), export_path=store)
    tree(tmp_path, **{"store/broken.war": "no archive", "store/gone.mar": ""})
    told = report(capsys, tmp_path)[1]
    assert "store/flow.war\n  ok       workflow: 2 nodes: here, gone\n" in told
    assert "store/broken.war\n  error    workflow: Archive broken.war: neither a zip file" in told
    (tmp_path / "store/gone.mar").unlink()
    assert "store/flow.war\n  error    gone: gone.mar isn't in the model store\n" in report(capsys, tmp_path)[1]


def test_a_snapshot_whose_settings_and_archives_do_not_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = {"m": {"1.0": {"marName": "m.mar", "minWorkers": 1, "maxWorkers": 1, "defaultVersion": True}}}
    snapshot = "metrics_mode=prometheus\nmodel_snapshot=" + json.dumps({"models": models, "modelCount": 1, "name": "x"})
    tree(tmp_path, **{"logs/config/20240101000000000-shutdown.cfg": snapshot})
    told = report(capsys, tmp_path)[1]
    assert "20240101000000000-shutdown.cfg is restored: m" in told
    assert "m.mar isn't in the model store" in told and "metrics_mode=prometheus" in told


def test_what_is_no_directory_is_not_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["migrate", "--check", str(tmp_path / "none")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        cli.main(["migrate", str(tmp_path)])
    assert end.value.code == 2
