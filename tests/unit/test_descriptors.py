"""The connections that a listener may have, of the files that the process may open."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from collections.abc import Iterator

import pytest

from ts_frontend.listeners.descriptors import few_open_files, open_files_max, report_full, shared_out
from ts_frontend.listeners.listener import Listener
from ts_frontend.transport.limits import ListenerLimits

NAMES = ("http_inference", "http_management", "http_metrics", "grpc_inference", "grpc_management")


def shares(*names: str, open_files: int) -> dict[str, int]:
    listeners = [Listener(name, "127.0.0.1", 0, {}) for name in names]
    return {one.name: one.limits.connections_max for one in shared_out(listeners, open_files)}


@pytest.mark.parametrize("open_files", [256, 1024, 65_536])
@pytest.mark.parametrize("names", [NAMES, NAMES[:1], NAMES[1:3], (*NAMES, "grpc_inference_2")], ids=len)
def test_connections_leave_a_quarter_of_the_open_files(names: tuple[str, ...], open_files: int) -> None:
    found = shares(*names, open_files=open_files)
    assert list(found) == list(names)
    assert 0 < sum(found.values()) <= open_files * 3 // 4
    inference = [count for name, count in found.items() if "inference" in name]
    assert len(set(inference)) <= 1
    assert all(count <= inference[0] for count in found.values() if inference)


def test_a_listener_with_a_limit_keeps_it() -> None:
    (one,) = shared_out([Listener("test", "", 0, {}, ListenerLimits(connections_max=7))], 1000)
    assert one.limits.connections_max == 7


@pytest.mark.parametrize(
    ("soft", "hard", "most"),
    [
        (1024, 524_288, 65_536),
        (1024, 4096, 4096),
        (100_000, 524_288, 100_000),
        (1024, resource.RLIM_INFINITY, 65_536),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, sys.maxsize),
    ],
)
def test_the_soft_limit_is_raised(soft: int, hard: int, most: int) -> None:
    assert open_files_max(soft, hard) == most


def test_waiting_clients_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    looks: Iterator[int] = iter((0, 3, 0, 5, 6, 7, 0, 0, 8, 9, 10))

    async def report() -> None:
        await report_full("http_inference", 48, lambda: next(looks), 0.0)

    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError):  # a coroutine's StopIteration
        asyncio.run(report())
    assert [record.args for record in caplog.records] == [("http_inference", 48, 6), ("http_inference", 48, 9)]


def test_a_limit_that_leaves_no_connections_is_told() -> None:
    assert few_open_files(64).startswith("64 open files are allowed: the server itself needs 64, and more for each ")
    assert "ulimit -n 65536" in few_open_files(255)
    assert few_open_files(256) == few_open_files(resource.RLIM_INFINITY) == ""
