"""`torchserve tune`: the measurement of load, the output, and the written settings."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click
import pytest

from ts_frontend.cli import tune
from ts_frontend.tuning import show
from ts_frontend.tuning.load import Length, measure, summary
from ts_frontend.tuning.search import Bounds, Found, Measurement, Trial

TRIAL = Trial(8, 5, 2, 16)
GOOD = Measurement(100.0, 10.0, 20.0, 300 << 20)
BAD = Measurement(0.0, error="no\nmemory")


def test_so_many_requests_are_in_flight_and_all_bodies_are_sent() -> None:
    now, most, seen = 0, 0, set()

    async def send(number: int) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        seen.add(number)
        await asyncio.sleep(0)
        now -= 1

    found = asyncio.run(measure(send, 5, Length(seconds=0.01, answers=50)))
    assert (most, now, found.error) == (5, 0, "")
    assert seen == set(range(len(seen))) and len(seen) > 50
    assert found.answers_per_s > 0 and 0 < found.p50_ms <= found.p99_ms


def test_a_failed_request_ends_the_measurement() -> None:
    async def send(number: int) -> None:
        if number == 7:
            raise ValueError("refused")

    found = asyncio.run(measure(send, 2, Length(seconds=60)))
    assert found.error == "refused"


def test_nothing_answered() -> None:
    async def send(_: int) -> None:
        await asyncio.sleep(0.01)

    found = asyncio.run(measure(send, 1, Length(seconds=0, seconds_max=0)))
    assert (found.answers_per_s, found.error) == (0.0, "no request was answered in time")


def test_percentiles() -> None:
    found = summary([float(one) for one in range(1, 101)], 2.0)
    assert (found.answers_per_s, found.p50_ms, found.p99_ms) == (50.0, 51.0, 100.0)


def test_rows() -> None:
    bounds = Bounds(p99_ms=15)
    assert show.row(TRIAL, GOOD, Bounds(), 200).endswith("10.0 ms  20.0 ms  300 MiB  " + "█" * 10)
    assert show.row(TRIAL, GOOD, bounds, 100).endswith("█  over the bound")
    assert show.row(TRIAL, BAD, bounds, 100).endswith("failed: no memory")
    assert show.sparkline([0, 50, 100]) == "▁▅█" and show.sparkline([]) == ""
    nothing = show.conclusion(Found(None, None, False, 1), [(TRIAL, BAD)], bounds)
    assert nothing.endswith("No configuration answered.")
    text = show.conclusion(Found(TRIAL, GOOD, False, 3), [(TRIAL, GOOD)], bounds)
    assert "No configuration keeps p99 of 15 ms. The nearest:" in text and "batchSize 8, maxBatchDelay 5 ms" in text


def test_the_settings_are_put_into_a_file_that_keeps_the_rest() -> None:
    text = "# mine\nbatchSize: 1  # small\nresponseTimeout: 5\nhandler:\n  batchSize: 7\n"
    assert show.with_settings(text, show.settings_of(TRIAL)) == (
        "# mine\nbatchSize: 8\nresponseTimeout: 5\nhandler:\n  batchSize: 7\n"
        "minWorkers: 2\nmaxWorkers: 2\nmaxBatchDelay: 5\n"
    )
    assert show.with_settings("", {"batchSize": 2}) == "batchSize: 2\n"


def test_requests_are_files_folders_and_lines(tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    folder.mkdir()
    (folder / "2.png").write_bytes(b"png")
    (folder / "1.txt").write_bytes(b"text")
    (folder / ".hidden").write_bytes(b"no")
    (tmp_path / "day.jsonl").write_bytes(b'{"a": 1}\n\n{"a": 2}\r\n')
    (tmp_path / "plain").write_bytes(b"\0")
    found = tune.read([folder, tmp_path / "day.jsonl", tmp_path / "plain"])
    assert found == [b"text", b"png", b'{"a": 1}', b'{"a": 2}', b"\0"]
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(click.BadParameter, match=r"none\.jsonl: it contains no request"):
        tune.read([tmp_path / "none.jsonl"])


@pytest.mark.parametrize(
    ("text", "size"),
    [("1500", 1500), ("2GiB", 2 << 30), ("1.5 GB", 1_500_000_000), ("512mib", 512 << 20), ("1kB", 1000), (None, None)],
)
def test_sizes(text: Any, size: Any) -> None:
    assert tune._memory(None, None, text) == size
    with pytest.raises(click.BadParameter, match="is not a size"):
        tune._memory(None, None, "2 apples")


def test_the_space_ends_at_the_given_values() -> None:
    found = tune.space(6, 5, 8)
    assert (found.batch_sizes, found.workers, found.concurrencies) == ((1, 2, 4, 6), (1, 2, 3, 4, 5), (1, 2, 4, 8))
    assert tune.space(1, 1, 1).size == 1
