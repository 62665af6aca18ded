"""`torchserve tune` on a model whose best configuration is evident: a call costs as much for any number of rows."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from support import GUARD_S, until
from ts_frontend.cli import main as cli

#: Calls of the handler of one worker overlap with nothing, and cost nothing but time.
FIXED = """
import time

def handle(data, context):
    if data is None:
        return None
    time.sleep(0.02)
    return ["ok" for row in data]
"""
COMMAND = (sys.executable, "-c", "import sys; from ts_frontend.cli.main import main; sys.exit(main())")


@pytest.fixture(scope="module")
def served(server_of: Any) -> Iterator[Any]:
    with server_of({"fixed": (FIXED, "")}) as server:
        yield server


@pytest.fixture
def words(served: Any, tmp_path: Path) -> list[str]:
    (tmp_path / "request").write_bytes(b"x")
    ports = ["--inference-port", str(served.port("grpc_inference"))]
    ports += ["--management-port", str(served.port("grpc_management"))]
    small = ["--batch-max", "4", "--workers-max", "1", "--in-flight-max", "4", "--seconds", "0.2"]
    return ["tune", "fixed", "--input", str(tmp_path / "request"), *ports, *small]


def known(served: Any, name: str) -> bool:
    try:
        served.describe(name)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.NOT_FOUND
        return False
    return True


def unchanged(description: dict[str, Any]) -> dict[str, Any]:
    pids = [worker["pid"] for worker in description["workers"]]
    return {key: value for key, value in description.items() if key not in ("workers", "jobQueueStatus")} | {
        "pids": pids
    }


@pytest.mark.long
def test_a_cost_per_batch_wants_the_largest(
    served: Any, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = unchanged(served.describe("fixed"))
    config = tmp_path / "model-config.yaml"
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--write", str(config), "--json"])
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert ended.value.code == 0 and found["within"], printed.err
    alone = statistics.median(trial["answers_per_s"] for trial in found["trials"] if trial["batchSize"] == 1)
    assert found["best"]["batchSize"] > 1 and found["best"]["answers_per_s"] > alone, printed.err
    assert config.read_text().splitlines()[2] == f"batchSize: {found['best']['batchSize']}"
    assert "answers/s" in printed.err
    assert unchanged(served.describe("fixed")) == before and not known(served, "fixed-tuning")


def test_an_interrupted_search_leaves_nothing(served: Any, words: list[str]) -> None:
    before = unchanged(served.describe("fixed"))
    command = ["env", "--default-signal=INT", *COMMAND, *words, "--seconds", "60"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        until(lambda: known(served, "fixed-tuning") and served.worker_pids("fixed-tuning"))
        process.send_signal(signal.SIGINT)
        assert process.wait(GUARD_S) == 130
    assert unchanged(served.describe("fixed")) == before and not known(served, "fixed-tuning")


def test_a_request_that_is_refused_ends_it(served: Any, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--version", "9"])
    assert ended.value.code == 1 and "does not exist for model" in capsys.readouterr().err
