"""`torchserve top`, `logs` and `completion` without a server."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from model_archiver.arg_parser import make_parser
from ts_frontend.cli import main as cli
from ts_frontend.cli import text
from ts_frontend.cli.commands import commands
from ts_frontend.cli.operating import ManagementUrl, WorkerLines, complete
from ts_frontend.cli.top import Board, seconds_text
from ts_frontend.tuning import BARS, sparkline
from workflow_archiver.arg_parser import ArgParser as WorkflowArgParser

COLUMNS = ["answered_per_s", "failed_per_s", "p50_ms", "p95_ms", "p99_ms", "queued", "running", "batch_size"]
MACHINE = {
    "cpu_percent": 12.0,
    "server_cpu_percent": 30.0,
    "server_memory_bytes": 50 << 20,
    "memory_used_bytes": 1,
    "memory_total_bytes": 2,
}


def model(name: str, **more: Any) -> dict[str, Any]:
    return {
        "key": f"{name}/1.0",
        "name": name,
        "version": "1.0",
        "default": True,
        "status": "ready",
        "workers": [{"id": "9000", "state": "ready", "pid": 7}],
        "loadFailure": None,
        "lastFailure": None,
        **more,
    }


def board(*models: dict[str, Any], **rows: list[float | None]) -> Board:
    found = Board()
    found.take("history", {"columns": COLUMNS, "samples": []})
    found.take("state", {"server": {"name": "torchrelay", "version": "0.1", "ready": True}, "models": models})
    assert not found.complete
    for _ in range(2):
        found.take("sample", {"machine": MACHINE, "models": {f"{name}/1.0": row for name, row in rows.items()}})
    assert found.complete
    return found


def shown(one: Board, sort: str = "name", only: str = "", lines_max: int | None = None, width: int = 160) -> str:
    out = io.StringIO()
    Console(file=out, width=width, no_color=True).print(one.shown(sort, only, lines_max, width))
    return out.getvalue()


def test_a_board_has_each_models_numbers() -> None:
    lines = shown(board(model("busy"), model("idle"), busy=[12.5, 0, 1.5, 2500.0, None, 3, 1, 4.0])).splitlines()
    assert lines[0].startswith("torchrelay 0.1 · ready · 12.5 calls/s · 0.0 failed/s · cpu 12 %")
    busy = next(line for line in lines if line.startswith("busy"))
    assert busy.split() == [
        "busy",
        "1.0",
        "*",
        "ready",
        "1/1",
        "12.5",
        "██",
        "1.5",
        "ms",
        "2.50",
        "s",
        "-",
        "3",
        "1",
        "4.0",
    ]
    assert next(line for line in lines if line.startswith("idle")).split()[5:] == ["0.0", *["-"] * 3, "0", "0", "-"]


def test_rows_are_ordered_filtered_and_cut() -> None:
    models = [model(name) for name in ("m10", "m2", "other")]
    one = board(*models, m10=[5.0, 0, 1, 9, 9, 0, 0, 1], m2=[1.0, 0, 1, 30, 40, 7, 0, 1])
    names = lambda *arguments: [row[0]["name"] for row in one.rows(*arguments)]  # noqa: E731
    assert names() == ["m2", "m10", "other"]
    assert names("rate") == ["m10", "m2", "other"] and names("p95") == names("queue") == ["m2", "m10", "other"]
    assert names("name", "M1") == ["m10"] and names("name", "m?") == ["m2"]
    assert "… and 2 more" in shown(one, "name", "", 1)
    assert "No model's name matches 'absent'" in shown(one, "name", "absent")
    assert "No model is registered." in shown(board())


@pytest.mark.parametrize(
    ("width", "heads"),
    [
        (160, "MODEL VERSION STATUS WORKERS CALLS/S P50 P95 P99 WAITING RUNNING BATCH"),
        (80, "MODEL VERSION STATUS WORKERS CALLS/S P95 WAITING RUNNING"),
        (60, "MODEL STATUS WORKERS CALLS/S P95 WAITING"),
        (40, "MODEL WORKERS CALLS/S P95"),
    ],
)
def test_narrow_terminals_have_what_matters_most(width: int, heads: str) -> None:
    long = "a-model-with-a-name-of-many-words"
    died = {"reason": "the weights are gone " * 9, "at": 1.0, "workerId": "9000", "lastLines": []}
    numbers: list[float | None] = [1234.5, 0, 1.5, 2500.0, 3e3, 3, 1, 4.0]
    one = board(model(long), model("m2", status="failing", lastFailure=died), **{long: numbers})
    lines = shown(one, width=width).splitlines()
    assert max(map(len, lines)) <= width
    table = next(index for index, line in enumerate(lines) if line.startswith("MODEL"))
    assert lines[table].split() == heads.split()
    assert lines[table + 1].startswith("a-model-with") and "2.50 s" in lines[table + 1] and "123" in lines[table + 1]
    assert lines[table + 3].startswith("m2 1.0: the weights are gone") and len(lines) == table + 4
    assert one.models_max(width, 24) <= 24 - table and one.models_max(40, 3) == 1


def test_gpus_are_in_the_summary() -> None:
    one = board(model("m"))
    gpu = {"index": 1, "busy_percent": 42.0, "used_bytes": 20 << 30, "total_bytes": 80 << 30}
    one.take("sample", {"machine": MACHINE | {"gpus": [gpu]}, "models": {}})
    assert "gpu 1 42 %, 20.0 of 80 GiB" in " ".join(shown(one).split())


def test_sparklines_and_times() -> None:
    assert (
        sparkline([]) == ""
        and sparkline([0, 0]) == BARS[0] * 2
        and sparkline([0, 1, 2]) == f"{BARS[0]}{BARS[4]}{BARS[7]}"
    )
    assert [seconds_text(one) for one in (3, 245, 3600, 183600)] == ["3 s", "4:05", "1:00:00", "2 d 3:00:00"]


class Told(ManagementUrl):
    """A server whose models and lines the test sets."""

    __slots__ = ()
    models: list[dict[str, Any]] = []
    lines: list[str] = []

    def events(self) -> Any:
        yield "state", {"models": self.models}

    def worker_lines(self, model: str, version: str, worker_id: str) -> list[str]:
        return list(self.lines)


def test_lines_of_a_worker_and_its_death_come_once() -> None:
    Told.models, Told.lines = [model("m")], ["one"]
    lines = WorkerLines(Told("http://h"), "m")
    assert list(lines.news()) == ["m 1.0 9000 | one"]
    Told.lines = ["one", "two"]
    assert list(lines.news()) == ["m 1.0 9000 | two"]
    died = {"reason": "exit code 3", "at": 1.0, "workerId": "9000", "lastLines": ["one", "two", "oh no"]}
    Told.models, Told.lines = [model("m", lastFailure=died, workers=[{"id": "9000", "state": "waiting"}])], []
    assert list(lines.news()) == ["m 1.0 9000 | oh no", "m 1.0 9000 | -- the worker ended: exit code 3"]
    assert list(lines.news()) == []


def test_words_are_completed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COMP_WORDS", "torchserve do")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert complete("bash_complete", {"doctor": "look"}, [("--start", "")]) == 0
    assert capsys.readouterr().out == "plain,doctor\n"
    assert complete("bash_what", {}, []) == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["completion", shell])
    assert ended.value.code == 0 and cli.COMPLETE_VARIABLE in capsys.readouterr().out


@pytest.mark.parametrize("command", sorted({*cli._OWN_COMMANDS, *commands.commands}))
def test_every_command_has_its_help_in_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "-h"])
    found = capsys.readouterr().out
    assert ended.value.code == 0 and "sage" in found
    assert not [line for line in found.splitlines() if len(line) > 80]


def test_every_archiver_has_its_help_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for parser in (make_parser(), WorkflowArgParser.workflow_archiver_args_parser()):
        assert not [line for line in parser.format_help().splitlines() if len(line) > 80]


def test_list_keeps_the_end_of_a_url_on_a_narrow_terminal() -> None:
    description = {
        "modelName": "m" * 30,
        "modelVersion": "1.0",
        "modelUrl": "https://example.org/a/long/way/to/model.mar",
        "minWorkers": 1,
        "workers": [],
        "jobQueueStatus": {"pendingRequests": 0},
    }
    assert max(map(len, text.overview([(description, True)], columns=90).splitlines())) == 90
    assert text.overview([(description, True)], columns=20).splitlines()[1].endswith("  …del.mar")
    assert text.overview([(description, True)]).endswith("  https://example.org/a/long/way/to/model.mar")


def test_a_closed_pipe_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; from ts_frontend.cli.main import main; sys.exit(main())"
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-c", code, "config"], stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
