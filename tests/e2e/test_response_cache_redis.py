"""Answers in a real Redis: servers share them, and what happens to it costs a miss, never a request."""

from __future__ import annotations

import itertools
import signal
import subprocess
import time
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
#: Answers with the worker and the number of its call in it.
HANDLER = """
import os

count = 0

def handle(data, context):
    global count
    if data is None:
        return None
    count += 1
    return [f"MARK {os.getpid()} {count} {bytes(row['body']).decode()}" for row in data]
"""


@pytest.fixture
def serve(tmp_path: Path, serving: Any, write_to: Callable[..., str], redis: Redis) -> Iterator[Callable[..., Any]]:
    """`serve(name, handler)`: a server of its own, whose handler is MARKed; its answers are kept in Redis alone."""
    servers = []

    def begin(name: str, mark: str, **settings: Any) -> Any:
        directory = tmp_path / name
        store = directory / "store"
        store.mkdir(parents=True)
        write_to(store, "m", HANDLER.replace("MARK", mark), config="cache: true\n")
        settings = {"response_cache_redis": redis.url, "response_cache_size": 0, **settings}
        server = serving(directory, store, settings, ["--ncs"])
        servers.append(server)
        server.wait_started().register("m")
        return server

    yield begin
    for server in servers:
        server.terminate()


def ask(server: Any, text: str) -> tuple[str, str]:
    found = httpx.post(f"{server.http}/predictions/m", content=text.encode(), timeout=GUARD_S)
    assert found.status_code == 200, found.text
    return found.text, found.headers["x-cache"]


def kept(server: Any, text: str) -> str:
    """The answer that Redis has. On a busy machine it may answer too late for the first request."""
    return until(lambda: next((answer for answer, word in [ask(server, text)] if word == "HIT"), ""))


def told(server: Any, since_s: float) -> bool:
    """Whether the log has a line about Redis, and not more than one for each minute."""
    return bool(1 <= server.log.count("response_cache_redis") <= 1 + (time.monotonic() - since_s) / 60)


def test_servers_share_the_answers_of_the_same_model_alone(serve: Callable[..., Any], redis: Redis) -> None:
    one, other, newer = serve("one", "old"), serve("other", "old"), serve("newer", "new")
    texts = (f"text {number}" for number in itertools.count())

    def shared() -> bool:
        text = next(texts)
        return (kept(one, text), "HIT") == ask(other, text)

    until(shared)
    ask(one, "a")
    assert ask(newer, "a")[1] == "MISS" and kept(newer, "a").startswith("new ")
    assert "redis://" not in one.log, "a password may be in it"
    assert all(redis.client.pttl(key) > 0 for key in redis.client.scan_iter()), "answers of old models must go too"


def test_a_broken_or_foreign_value_is_a_miss(serve: Callable[..., Any], redis: Redis) -> None:
    begun_s, server, client = time.monotonic(), serve("one", "old"), redis.client
    kept(server, "a")
    (first,) = client.keys()
    kept(server, "b")
    (second,) = set(client.keys()) - {first}
    other: Any = client.get(second)
    ours: Any = client.get(first)
    for poison in (b"", b"OK", bytes(100), b"x" * (9 << 20), other, ours[:-1], ours.replace(b"answer 1", b"answer 2")):
        client.set(first, poison)
        assert ask(server, "a")[1] == "MISS"
        kept(server, "a")  # it is renewed
    client.delete(first)
    client.lpush(first, "of another type")
    assert ask(server, "a")[1] == "MISS"
    until(lambda: told(server, begun_s))


def test_redis_ends_in_the_middle(serve: Callable[..., Any], redis: Redis) -> None:
    begun_s, server = time.monotonic(), serve("one", "old", response_cache_size=1 << 20)
    first = kept(server, "a")
    redis.process.send_signal(signal.SIGSTOP)  # it takes connections and gives no answer
    assert ask(server, "b")[1] == "MISS" and ask(server, "a") == (first, "HIT"), "memory is asked first"
    redis.end()
    assert [ask(server, text)[1] for text in ("c", "d", "d")] == ["MISS", "MISS", "HIT"]
    until(lambda: told(server, begun_s))


def test_a_server_without_the_package_or_with_a_wrong_url_does_not_start(
    tmp_path: Path, torchserve: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    words = ("--start", "--foreground", "--model-store", str(tmp_path), "--set", "response_cache_redis=nowhere")
    assert "response_cache_redis" in str(torchserve(*words, code=1))
