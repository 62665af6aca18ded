"""The command line without processes: flags to settings, `torchserve config`, help and version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ts.version import __version__, is_compiled
from ts_frontend.cli import main as cli


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "TorchServe Version is 0.12.0\n"
    assert f"torchrelay {__version__} ({'compiled' if is_compiled() else 'pure Python'})" in captured.err


def test_help_names_flags_and_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in ("--model-store", "--foreground", "torchserve config", "example:"):
        assert word in text
    assert "--ready-fd" not in text
    assert not [line for line in text.splitlines() if len(line) > 80]


def test_config_shows_values_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.properties").write_text("job_queue_size=5\nvmargs=-X\n")
    assert cli.main(["config", "--model-store", "s"]) == 0
    captured = capsys.readouterr()
    rows = [line.split() for line in captured.out.splitlines()]
    assert ["job_queue_size", "5", "config.properties:1"] in rows
    assert ["model_store", "s", "--model-store"] in rows
    assert ["grpc_inference_port", "7070", "default"] in rows
    assert "note: vmargs" in captured.err


def test_config_as_json_and_only_the_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--json", "--changed", "--set", "job_queue_size=5"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["key"], row["value"], row["source"]) for row in rows] == [
        ("job_queue_size", "5", "--set job_queue_size")
    ]
