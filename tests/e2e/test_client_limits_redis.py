"""Limits that several servers divide, counted in a real Redis, and what happens to it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from redis_server import PROGRAM, Redis
from support import GUARD_S, until

pytestmark = [
    pytest.mark.external,
    pytest.mark.skipif(PROGRAM is None, reason="needs redis-server, Debian's package"),
]
ECHO = """
def handle(data, context):
    return None if data is None else [bytes(*row.values()) for row in data]
"""
LIMITS = "defaults: {requests_per_second: 0.1, burst: 60}"


@pytest.fixture
def serve(tmp_path: Path, serving: Any, write_to: Callable[..., str], redis: Redis) -> Iterator[Callable[[str], Any]]:
    servers = []

    def begin(name: str) -> Any:
        directory = tmp_path / name
        store = directory / "store"
        store.mkdir(parents=True)
        (directory / "limits.yaml").write_text(LIMITS)
        write_to(store, "m", ECHO)
        settings = {"limits_file": directory / "limits.yaml", "limits_redis": redis.url}
        server = serving(directory, store, settings, ["--ncs"])
        servers.append(server)
        server.wait_started().register("m")
        return server

    yield begin
    for server in servers:
        server.terminate()


def limit(server: Any) -> int:
    """The limit that an answer tells."""
    answer = httpx.post(f"{server.http}/predictions/m", content=b"a", timeout=GUARD_S)
    return int(answer.headers["x-ratelimit-limit-requests"])


def test_servers_divide_the_limits_and_go_on_without_redis(serve: Callable[[str], Any], redis: Redis) -> None:
    one = serve("one")
    assert limit(one) == 60
    two, three = serve("two"), serve("three")
    for server in (one, two, three):
        server.wait_for_log("divide the limits of clients: 3")
        assert limit(server) == 20
    three.terminate()
    until(lambda: limit(one) == 30)
    two.process.kill()
    two.wait()
    until(lambda: limit(one) == 60)
    redis.process.send_signal(signal.SIGSTOP)  # it takes connections and gives no answer
    one.wait_for_log("limits_redis")
    assert limit(one) == 60
    assert "redis://" not in one.log, "a password may be in it"


def test_limits_are_those_of_the_server_once_redis_is_gone(serve: Callable[[str], Any], redis: Redis) -> None:
    one = serve("one")
    serve("two")
    one.wait_for_log("divide the limits of clients: 2")
    redis.end()
    until(lambda: limit(one) == 60)
    assert one.log.count("limits_redis") == 1


def test_a_server_with_a_wrong_url_does_not_start(tmp_path: Path, torchserve: Callable[..., Any]) -> None:
    (tmp_path / "limits.yaml").write_text(LIMITS)
    words = ["--start", "--foreground", "--model-store", str(tmp_path), "--set", "limits_redis=nowhere"]
    assert "limits_redis" in str(torchserve(*words, "--limits-file", str(tmp_path / "limits.yaml"), code=1))
