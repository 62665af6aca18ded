"""An engine without a free place: it stays ready, what waits for it is bounded, and it brings another worker."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from smollm2 import MODEL
from support import GUARD_S, ran, until, with_packages

PROGRAM = Path(__file__).parent.parent / "data" / "programs" / "small_models.py"
pytestmark = pytest.mark.external
#: The places of each engine, and the requests that may wait for one.
PLACES, QUEUE = 2, 3
SETTINGS: dict[str, Any] = {
    "minWorkers": 1,
    "jobQueueSize": QUEUE,
    "responseTimeout": GUARD_S,
    "handler": {"parallel": PLACES},
}
BOUNDED = {**SETTINGS, "cpuThreads": 3}
GROWS = {**SETTINGS, "maxWorkers": 2, "autoscale": {"targetQueue": 0, "upAfter": 0.2, "downAfter": 1}}


@pytest.fixture(scope="module", params=["llama.cpp", pytest.param("transformers", marks=pytest.mark.slow)])
def server(
    request: Any, client_python: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, serving: Any
) -> Iterator[Any]:
    """Two models: `bounded` has one worker, `grows` up to two."""
    place = tmp_path_factory.mktemp("full")
    if request.param == "llama.cpp":
        env, files = with_packages(client_python("gguf")), [MODEL]
    else:
        env = with_packages(client_python("transformers"), client_python("sentences"))
        ran(PROGRAM, env, str(place / "models"), "a", "1")
        config = place / "models" / "llama" / "config.json"  # a text may go on for as long as a test needs
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 1_000_000}))
        files = list(config.parent.iterdir())
    for name, settings in (("bounded", BOUNDED), ("grows", GROWS)):
        folder = place / "store" / name
        folder.mkdir(parents=True)
        for file in files:
            (folder / file.name).symlink_to(file)
        more = {"verbosity": 3} if request.param == "llama.cpp" else {}
        (folder / "model-config.yaml").write_text(json.dumps(settings | {"handler": settings["handler"] | more}))
    asked = {"env": env, "load_models": "bounded,grows", "metrics_mode": "prometheus"}
    with serving(place, place / "store", asked, []) as server:
        for name in ("bounded", "grows"):
            server.wait_for_log(f"of {name}_1.0 is ready")
        if request.param == "llama.cpp":
            server.wait_for_log("n_threads = 3")  # which the engine says at its third verbosity
        yield server


class Streams:
    """Texts that don't end by themselves."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self._kept, self._pool = ExitStack(), ThreadPoolExecutor(16)
        self._lines: list[Iterator[str]] = []  # one that is dropped ends its stream

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *args: object) -> None:
        self.leave()
        self._pool.shutdown()

    def begin(self, **more: Any) -> Future[int]:
        """Asks for one; the future has the status once its first token is there."""
        return self._pool.submit(self._begin, more)

    def _begin(self, more: dict[str, Any]) -> int:
        body = {
            "model": self._model,
            "prompt": "The sky",
            "stream": True,
            "max_tokens": 4000,
            "ignore_eos": True,
            **more,
        }
        asked = httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=GUARD_S)
        answer = self._kept.enter_context(asked)
        if answer.status_code == 200:
            self._lines.append(answer.iter_lines())
            next(self._lines[-1])
        return answer.status_code

    def leave(self) -> None:
        self._kept.close()


def metrics(server: Any, model: str) -> dict[str, float]:
    """By name, summed up over all other labels."""
    text = httpx.get(f"http://127.0.0.1:{server.port('http_metrics')}/metrics", timeout=GUARD_S).text
    lines = [line for line in text.splitlines() if f'model_name="{model}"' in line and "le=" not in line]
    found: dict[str, float] = defaultdict(float)
    for line in lines:
        found[line.partition("{")[0]] += float(line.rpartition(" ")[2])
    return found


def test_a_full_engine_is_ready_and_what_waits_for_it_is_bounded(server: Any) -> None:
    with Streams(server.http, "bounded") as streams:
        assert [streams.begin().result(GUARD_S) for _ in range(PLACES)] == [200] * PLACES
        waiting = [streams.begin() for _ in range(QUEUE)]
        until(lambda: metrics(server, "bounded")["ts_queued_requests"] == QUEUE, lambda: metrics(server, "bounded"))
        assert not any(one.done() for one in waiting)
        body = {"model": "bounded", "prompt": "a"}
        refused = httpx.post(f"{server.http}/v1/completions", json=body, timeout=GUARD_S)
        assert refused.status_code == 503 and "job_queue_size" in refused.json()["error"]["message"], refused.text
        for path in ("v1/models/bounded", "v2/models/bounded/ready", "v2/health/ready", "ping"):
            assert httpx.get(f"{server.http}/{path}", timeout=GUARD_S).status_code == 200, path
        found = metrics(server, "bounded")
        assert (found["ts_running_requests"], found["ts_concurrency"]) == (PLACES, PLACES)
        assert found["ts_refused_requests_total"] == 1
        until(lambda: metrics(server, "bounded")["vllm:num_requests_running"] == PLACES, "they are told soon")
        said = server.describe("bounded")
        assert said["jobQueueStatus"] == {"remainingCapacity": 0, "pendingRequests": QUEUE}
        assert [one["status"] for one in said["workers"]] == ["READY"]
        streams.leave()
        for one in as_completed(waiting, GUARD_S):
            assert one.result() == 200
            streams.leave()


def test_more_streams_than_places_bring_a_worker_and_fewer_end_it(server: Any) -> None:
    with Streams(server.http, "grows") as streams:
        assert [streams.begin().result(GUARD_S) for _ in range(PLACES)] == [200] * PLACES
        assert len(server.worker_pids("grows")) == 1, "a full engine alone is no reason"
        more = [streams.begin() for _ in range(PLACES)]
        assert [one.result(GUARD_S) for one in more] == [200] * PLACES, "on the new worker"
        assert len(server.worker_pids("grows")) == 2
        assert metrics(server, "grows")["ts_concurrency"] == 2 * PLACES
        assert "requests wait" in server.describe("grows")["autoscale"]["lastDecision"]["reason"]
    until(lambda: len(server.worker_pids("grows")) == 1, "the least", timeout_s=GUARD_S)
    assert Streams(server.http, "grows").begin(stream=False, max_tokens=1).result(GUARD_S) == 200


def test_texts_that_wait_in_the_engine_count(server: Any) -> None:
    """Of one request, more than there are places. Only the engine transformers tells."""
    if server.directory.joinpath("models").exists():
        with Streams(server.http, "grows") as streams:
            assert streams.begin(n=2 * PLACES, temperature=1).result(GUARD_S) == 200
            until(lambda: len(server.worker_pids("grows")) == 2, lambda: server.describe("grows"))
            until(lambda: metrics(server, "grows")["vllm:num_requests_waiting"] == PLACES, "they are told soon")
        until(lambda: len(server.worker_pids("grows")) == 1, "the least", timeout_s=GUARD_S)
        until(lambda: metrics(server, "grows")["vllm:num_requests_waiting"] == 0, "none is left")
