"""`shareWeights: true`: the model is loaded once, and its workers are forked from the process that has it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support import alive, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shareWeights needs Linux")

SIZE_BYTES = 200_000_000
HANDLER = """
import json, os, threading

class Model:
    def initialize(self, context):
        with open({trace!r}, "a") as trace:
            trace.write(f"{{os.getpid()}}\\n")
        if {fails}:
            raise ValueError("no such weights")
        if {threaded}:
            threading.Thread(target=threading.Event().wait, name="poller", daemon=True).start()
        self.weights = b"w" * {size}

    def handle(self, data, context):
        return [json.dumps([os.getpid(), os.getppid()])] * len(data)
"""


class Traced:
    """A server with models that note which processes have loaded them."""

    def __init__(self, server: Any, folder: Path) -> None:
        self.server, self.folder = server, folder

    def loads(self, name: str) -> list[int]:
        return [int(line) for line in (self.folder / name).read_text().split()]

    def holder(self, name: str) -> int:
        found = self.server.describe(name)["shareWeights"]
        assert found["shared"], found
        return int(found["pid"])


def handler(folder: Path, name: str, *, threaded: bool = False, fails: str = "False", size: int = 1000) -> str:
    return HANDLER.format(trace=str(folder / name), threaded=threaded, fails=fails, size=size)


@pytest.fixture(scope="module")
def traced(server_of: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traces")
    models = {
        "held": (handler(folder, "held"), "shareWeights: true\n"),
        "large": (handler(folder, "large", size=SIZE_BYTES), "shareWeights: true\n"),
        "alone": (handler(folder, "alone", size=SIZE_BYTES), ""),
        "threaded": (handler(folder, "threaded", threaded=True), "shareWeights: true\nminWorkers: 2\n"),
    }
    with server_of(models) as server:
        yield Traced(server, folder)


def pids(traced: Traced, name: str) -> list[int]:
    return sorted(traced.server.worker_pids(name))


def test_scaling_loads_nothing(traced: Traced) -> None:
    server = traced.server
    server.scale("held", 4)
    assert len(pids(traced, "held")) == 4
    holder = traced.holder("held")
    assert json.loads(server.predict("held", {}))[1] == holder
    assert traced.loads("held") == [holder]
    server.scale("held", 1)
    assert traced.loads("held") == [holder]


def proportional_bytes(pids: Iterable[int]) -> int:
    """The memory of these processes, each page divided among those that have it."""
    return sum(int(psutil.Process(pid).memory_full_info().pss) for pid in pids)


def test_four_workers_take_little_more_memory_than_one(traced: Traced) -> None:
    server = traced.server
    server.scale("large", 4)
    server.scale("alone", 1)
    assert traced.loads("large") == [traced.holder("large")]
    alone = proportional_bytes(server.worker_pids("alone"))
    assert alone > SIZE_BYTES
    assert proportional_bytes([traced.holder("large"), *server.worker_pids("large")]) < 1.3 * alone
    for name in ("large", "alone"):
        server.scale(name, 0)


def test_zero_workers_give_the_memory_back(traced: Traced) -> None:
    server = traced.server
    server.scale("held", 1)
    holder, loads = traced.holder("held"), len(traced.loads("held"))
    server.scale("held", 0)
    until(lambda: not alive(holder))
    assert server.describe("held")["shareWeights"]["pid"] == 0
    server.scale("held", 2)
    assert len(traced.loads("held")) == loads + 1


def test_a_holder_that_dies_is_replaced(traced: Traced) -> None:
    server = traced.server
    server.scale("held", 2)
    holder, before, loads = traced.holder("held"), pids(traced, "held"), len(traced.loads("held"))
    os.kill(holder, signal.SIGKILL)
    until(lambda: len(set(pids(traced, "held")) - set(before)) == 2)
    assert traced.holder("held") != holder
    assert len(traced.loads("held")) == loads + 1
    assert json.loads(server.predict("held", {}))[1] == traced.holder("held")


def test_a_handler_with_threads_is_loaded_in_each_worker_and_describe_says_why(traced: Traced) -> None:
    found = traced.server.describe("threaded")["shareWeights"]
    assert found["shared"] is False and "1 thread (poller)" in found["reason"]
    assert set(traced.loads("threaded")) >= set(pids(traced, "threaded"))
    assert "threaded_1.0: shareWeights has no effect" in traced.server.log


def test_what_a_failed_load_is_and_that_it_is_tried_again(start: Any, write: Any, tmp_path: Path) -> None:
    mark = tmp_path / "there"
    write("held", handler(tmp_path, "trace", fails=f"not os.path.exists({str(mark)!r})"), config="shareWeights: true")
    server = start()
    with pytest.raises(Exception, match="no such weights"):
        server.register("held")
    mark.touch()
    server.register("held")
    found = server.describe("held")["shareWeights"]
    assert found["shared"]
    server.unregister("held")
    until(lambda: not alive(found["pid"]))


def test_nothing_is_left_of_a_server_that_is_killed(start: Any, write: Any, tmp_path: Path) -> None:
    write("held", handler(tmp_path, "trace"), config="shareWeights: true\nminWorkers: 2\n")
    server = start()
    server.register("held")
    everyone = [server.describe("held")["shareWeights"]["pid"], *server.worker_pids("held")]
    assert len(everyone) == 3 and all(map(alive, everyone))
    server.process.kill()
    server.wait()
    until(lambda: not any(map(alive, everyone)))
