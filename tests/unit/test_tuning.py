"""`torchserve tune`: the measurement of load, the output, and the written settings."""

from __future__ import annotations

import asyncio
import socket
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import click
import pytest

from ts_frontend.cli import tune, tune_requests
from ts_frontend.cli.client import CallFailed, Target
from ts_frontend.tuning import show
from ts_frontend.tuning.load import Length, measure, summary
from ts_frontend.tuning.search import Bounds, Found, Measurement, Trial

TRIAL = Trial(8, 5, 2, 16)
GOOD = Measurement(100.0, 10.0, 20.0, 300 << 20)
BAD = Measurement(0.0, failed=1, error="no\nmemory")


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
    assert (most, now, found.failed, found.error) == (5, 0, 0, "")
    assert seen == set(range(len(seen))) and len(seen) > 50
    assert found.answers_per_s > 0 and 0 < found.p50_ms <= found.p99_ms


def test_a_failed_request_ends_the_measurement() -> None:
    async def send(number: int) -> None:
        if number == 7:
            raise ValueError("refused")

    found = asyncio.run(measure(send, 2, Length(seconds=60)))
    assert (found.failed, found.error) == (1, "refused")


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


def test_the_plot_is_xml_with_a_point_for_each_answered_trial() -> None:
    trials = [(TRIAL, GOOD), (Trial(1, 0, 1, 1), BAD), (Trial(1, 0, 1, 2), Measurement(50.0, 1.0, 2.0))]
    for bounds in (Bounds(), Bounds(p99_ms=15)):
        text = show.svg("a <b>", trials, Found(TRIAL, GOOD, True, 3), bounds)
        tree = xml.etree.ElementTree.fromstring(text)
        points = tree.findall("{http://www.w3.org/2000/svg}circle")
        assert [point.get("r") for point in points] == ["7", "4"]
    assert "a &lt;b&gt;" in text
    assert show.svg("x", [], Found(None, None, False, 0), Bounds()).endswith("</svg>\n")


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_search() -> None:
    assert tune._plot(None, None, None) is None
    assert tune._plot(None, None, Path("a.svg")) == Path("a.svg")
    with pytest.raises(click.BadParameter, match=r"a\.png: the name ends in \.svg"):
        tune._plot(None, None, Path("a.png"))


def test_requests_are_files_folders_and_lines(tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    folder.mkdir()
    (folder / "2.png").write_bytes(b"png")
    (folder / "1.txt").write_bytes(b"text")
    (folder / ".hidden").write_bytes(b"no")
    (tmp_path / "day.jsonl").write_bytes(b'{"a": 1}\n\n{"a": 2}\r\n')
    (tmp_path / "plain").write_bytes(b"\0")
    found = tune_requests.read([folder, tmp_path / "day.jsonl", tmp_path / "plain"], "http")
    assert [(one.body, one.media_type) for one in found] == [
        (b"text", "text/plain"),
        (b"png", "image/png"),
        (b'{"a": 1}', "application/json"),
        (b'{"a": 2}', "application/json"),
        (b"\0", ""),
    ]
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(click.BadParameter, match=r"none\.jsonl: it contains no request"):
        tune_requests.read([tmp_path / "none.jsonl"], "grpc")
    with pytest.raises(click.BadParameter, match=r"request 1 of \S*day\.jsonl is not a request of the Open Inference"):
        tune_requests.read([tmp_path / "day.jsonl"], "v2")
    (tmp_path / "v2.json").write_text('{"inputs": []}')
    assert len(tune_requests.read([tmp_path / "v2.json"], "v2")) == 1


def test_what_answers_without_http_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        async def asked() -> None:
            target = Target("127.0.0.1")
            async with tune_requests.sender("http", target, port, "m", [tune_requests.Recorded(b"x", "")]) as send:
                answering = asyncio.create_task(asyncio.to_thread(_answer, listening))
                with pytest.raises(CallFailed, match=f"127.0.0.1:{port} did not answer in HTTP"):
                    await send(0)
                await answering
                listening.close()
                with pytest.raises(CallFailed, match=rf"No server answers HTTP at 127.0.0.1:{port} .*--http-port"):
                    await send(1)

        asyncio.run(asked())


def _answer(listening: socket.socket) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(b"\x16\x03\x01\n")


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
