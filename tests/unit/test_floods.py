"""Connections that h2corn closed, over tables of the kernel that a test writes."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import tracemalloc
from pathlib import Path

import pytest

from ts_frontend.http.departures import ConnectionKey
from ts_frontend.listeners import floods
from ts_frontend.listeners.floods import CONNECTIONS_MAX, SEEN_MIN, Floods, read_table

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue\n"
SCOPE: dict[str, object] = {"http_version": "2", "client": ("127.0.0.1", 4660), "server": ("127.0.0.1", 7070)}
TIME_WAIT, CLOSE_WAIT, ESTABLISHED = "06", "08", "01"


def row(state: str) -> str:
    return f"{HEAD}   0: 0100007F:{7070:04X} 0100007F:{4660:04X} {state} 00000000:00000000\n"


async def counted(table: Path, cancels: int, scope: dict[str, object] = SCOPE) -> int:
    closed: list[None] = []
    found = Floods("grpc_inference", lambda: closed.append(None), (table,))
    before = asyncio.all_tasks()
    for _ in range(cancels):
        found.cancelled(scope)
    tasks = asyncio.all_tasks() - before
    if tasks:
        await asyncio.wait(tasks)
    return len(closed)


@pytest.mark.parametrize(
    ("cancels", "state", "closed"),
    [
        (SEEN_MIN, TIME_WAIT, 0),
        (SEEN_MIN + 1, TIME_WAIT, 1),
        (SEEN_MIN + 100, TIME_WAIT, 1),
        (SEEN_MIN + 1, CLOSE_WAIT, 0),
        (SEEN_MIN + 1, "", 0),
    ],
)
def test_what_our_side_closed_after_so_many_cancels(
    tmp_path: Path, cancels: int, state: str, closed: int, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tcp").write_text(row(state) if state else HEAD)
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(counted(tmp_path / "tcp", cancels)) == closed
    assert len(caplog.records) == closed
    assert closed == 0 or "grpc_inference: h2corn closed the connection of 127.0.0.1:4660" in caplog.text


def test_it_is_told_when_the_connection_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GOAWAY is on its way when the calls end; the connection may still be there then."""
    monkeypatch.setattr(floods, "LOOK_EVERY_S", 0.001)
    table = tmp_path / "tcp"
    table.write_text(row(ESTABLISHED))

    async def close_later() -> int:
        telling = asyncio.create_task(counted(table, SEEN_MIN + 1))
        for _ in range(10):
            await asyncio.sleep(0)
        table.with_suffix(".new").write_text(row(TIME_WAIT))
        table.with_suffix(".new").replace(table)
        return await telling

    assert asyncio.run(close_later()) == 1


@pytest.mark.parametrize(
    "scope", [{"http_version": "1.1"}, {"client": None}, {"server": None}, {"server": ("/s", None)}]
)
def test_what_can_be_no_such_connection(tmp_path: Path, scope: dict[str, object]) -> None:
    (tmp_path / "tcp").write_text(row(TIME_WAIT))
    assert asyncio.run(counted(tmp_path / "tcp", SEEN_MIN + 1, SCOPE | scope)) == 0


@pytest.mark.parametrize("state", [CLOSE_WAIT, TIME_WAIT, ""])
def test_clients_that_close_first_when_told_to_go_away(
    tmp_path: Path, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """75 cancels a second did not come from the connection's end."""
    (tmp_path / "tcp").write_text(row(state) if state else HEAD)
    now_s = iter(range(1_000_000))
    monkeypatch.setattr(time, "monotonic", lambda: next(now_s) / 75)
    assert asyncio.run(counted(tmp_path / "tcp", SEEN_MIN + 11)) == 1


def test_slow_cancels_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tcp").write_text(row(TIME_WAIT))
    now_s = iter(range(1_000_000))
    monkeypatch.setattr(time, "monotonic", lambda: next(now_s) / 9)  # 9 in a second

    async def many() -> int:
        closed: list[None] = []
        found = Floods("g", lambda: closed.append(None), (tmp_path / "tcp",))
        for _ in range(1000):
            found.cancelled(SCOPE)
        assert not found._looking
        return len(closed)

    assert asyncio.run(many()) == 0


def test_so_many_connections_are_kept(tmp_path: Path) -> None:
    found = Floods("g", lambda: None, (tmp_path / "none",))
    for port in range(1, CONNECTIONS_MAX + 50):
        found.cancelled(SCOPE | {"client": ("127.0.0.1", port)})
    assert len(found._cancels) == CONNECTIONS_MAX


def test_connections_without_a_recent_cancel_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Floods("g", lambda: None, (tmp_path / "none",))
    for port in (1, 2, 3):
        found.cancelled(SCOPE | {"client": ("127.0.0.1", port)})
    now_s = time.monotonic() + floods.WINDOW_S + 1
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    found.cancelled(SCOPE | {"client": ("127.0.0.1", 2)})
    assert list(found._cancels) == [("127.0.0.1", 2)]


REST = "00000000:00000000 00:00000000 00000000     0        0 1 1 0 20 4 30 10 -1\n"


def line(local: str, remote: str, state: str) -> str:
    return f"   0: {local} {remote} {state} {REST}"


def test_tables_are_read() -> None:
    text = (
        HEAD
        + line("0100007F:1F90", "00000000:0000", "0A")
        + line("0100007F:1F90", "0100007F:D431", "01")
        + line("0500000A:1F90", "0601A8C0:0016", "08")
        + line("0100007F:1F91", "0100007F:D432", "01")
        + line("00000000000000000000000001000000:1F90", "00000000000000000000000001000000:D433", "01")
        + line("0000000000000000FFFF00000100007F:1F90", "0000000000000000FFFF00000100007F:D434", "06")
    )
    local = socket.inet_pton(socket.AF_INET, "127.0.0.1")
    assert dict(read_table(text.splitlines(), {8080})) == {
        ConnectionKey(b"\0\0\0\0", 0, 8080): "0A",
        ConnectionKey(local, 0xD431, 8080): "01",
        ConnectionKey(socket.inet_pton(socket.AF_INET, "192.168.1.6"), 22, 8080): "08",
        ConnectionKey(socket.inet_pton(socket.AF_INET6, "::1"), 0xD433, 8080): "01",
        ConnectionKey(local, 0xD434, 8080): "06",
    }
    assert list(read_table(HEAD.splitlines(), {8080})) == []


def test_a_table_of_many_connections_is_not_kept_in_memory(tmp_path: Path) -> None:
    """Clients that connect for each request leave tens of thousands that have ended, and it is read again and again."""
    others = "".join(line("0100007F:1F90", f"0100007F:{port:04X}", TIME_WAIT) for port in range(1024, 65536))
    (tmp_path / "tcp").write_text(HEAD + others + row(TIME_WAIT).removeprefix(HEAD))
    tracemalloc.start()
    try:
        assert asyncio.run(counted(tmp_path / "tcp", SEEN_MIN + 1)) == 1
        assert tracemalloc.get_traced_memory()[1] < len(others) / 10
    finally:
        tracemalloc.stop()
