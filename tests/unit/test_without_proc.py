"""Systems without Linux's /proc: its readers go on without it, or name the missing file."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from pathlib import Path

import pytest

from ts.runtime import forkable
from ts.runtime.forkable import Footprint, owned_files
from ts_frontend.http.departures import connections
from ts_frontend.listeners import floods, sockets
from ts_frontend.listeners.floods import SEEN_MIN, Floods
from ts_frontend.workers import limits, ranks


def test_a_process_is_looked_at_without_what_the_system_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkable, "PROC", str(tmp_path / "none"))
    now = Footprint.now()
    assert now.tasks == {} and now.files == {} and now.children == frozenset()
    assert now.refusal(now) == ""
    owned_files(())


def test_no_connections_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "DESCRIPTORS", tmp_path / "none")
    assert sockets.hold({8080}) == [] and sockets.listening({8080}) == []
    assert list(connections(tmp_path / "none")) == []


def test_a_connection_that_nobody_can_see_is_not_reported_as_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancels over some time would be reported, were the connection in no table that can be read."""
    monkeypatch.setattr(floods, "LOOK_EVERY_S", 0.0)
    seconds = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds) / 75)

    async def told() -> int:
        closed: list[None] = []
        found = Floods("grpc", lambda: closed.append(None), (tmp_path / "none", tmp_path / "none6"))
        for _ in range(SEEN_MIN + 11):
            found.cancelled({"http_version": "2", "client": ("127.0.0.1", 4660), "server": ("127.0.0.1", 7070)})
        await asyncio.gather(*found._looking.values())
        return len(closed)

    assert asyncio.run(told()) == 0


def test_a_path_that_is_too_long_for_a_socket_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match=r"longer than 100 bytes.*temp_dir"), ranks._short(tmp_path / ("x" * 100), "s"):
        pass


def test_free_memory_is_the_machines_without_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_CGROUP", tmp_path / "none")
    assert limits.available_bytes() > 0
