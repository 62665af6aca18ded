"""The command line without processes: flags to settings, `torchserve config`, help and version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ts.version import __version__, is_compiled
from ts_frontend.cli import flags as command_line
from ts_frontend.cli import main as cli
from ts_frontend.config.load import Option


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def options(*words: str) -> list[Option]:
    return command_line.options(cli._parser().parse_args(words))


@pytest.mark.parametrize(
    ("words", "key", "text", "flag"),
    [
        (["--model-store", "s"], "model_store", "s", "--model-store"),
        (["--model-store=s"], "model_store", "s", "--model-store"),
        (["--model-st", "s"], "model_store", "s", "--model-store"),
        (["--models", "a=a.mar", "b.mar", "--ncs"], "load_models", "a=a.mar,b.mar", "--models"),
        (["--models", "a,b", "c"], "load_models", "a,b,c", "--models"),
        (["--models", "a", "--models", "b", "c"], "load_models", "a,b,c", "--models"),
        (["--no-config-snapshots"], "ncs", "true", "--ncs"),
        (["--dt"], "disable_token_authorization", "true", "--disable-token-auth"),
        (["--disable-token"], "disable_token_authorization", "true", "--disable-token-auth"),
        (["--model-api-enabled"], "enable_model_api", "true", "--enable-model-api"),
        (["--ppath", "p"], "plugins_path", "p", "--plugins-path"),
        (["--set", "a = b=c "], "a", " b=c ", "--set a"),
    ],
)
def test_flags_become_settings(words: list[str], key: str, text: str, flag: str) -> None:
    assert Option(key, text, flag) in options(*words)


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


def test_the_help_of_config_is_about_config(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["config", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: torchserve config ")
    assert "Show every setting" in text and "--changed" in text and "--model-store" in text
    for word in ("starts a server", "--stop", "--foreground", "commands (torchserve COMMAND"):
        assert word not in text


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
