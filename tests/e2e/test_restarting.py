"""A server that is replaced in its process: `torchserve --restart`, or SIGUSR2."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from e2e.servers import COMMAND, request_for
from support import GUARD_S, free_port, until
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

TALK = """
def handle(data, context):
    return None if data is None else [bytes(row.get("data") or row.get("body")) for row in data]
"""


def restart(directory: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TMPDIR": str(directory / "tmp")}
    words = [*COMMAND, "--restart"]
    return subprocess.run(words, cwd=directory, env=env, capture_output=True, text=True, timeout=GUARD_S)


def configure(server: Any, **settings: object) -> None:
    with (server.directory / "config.properties").open("a") as file:
        file.writelines(f"{key}={value}\n" for key, value in settings.items())


@contextmanager
def asked(ask: Callable[[], bytes]) -> Iterator[Callable[[], int]]:
    """Asks all the time while the block runs; every answer must be right. Yields the number of answers so far."""
    ended, answers, failures = threading.Event(), [0], list[str]()

    def run() -> None:
        while not ended.is_set():
            try:
                assert ask() == b"said"
                answers[0] += 1
            except Exception as error:
                failures.append(repr(error))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: answers[0]
    finally:
        ended.set()
        thread.join(GUARD_S)
    assert not failures, failures[:3]


@pytest.fixture(scope="module")
def kept(serving: Any, write_to: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One server for tests that restart it, and leave its files as they found them."""
    directory = tmp_path_factory.mktemp("kept")
    (store := directory / "store").mkdir()
    write_to(store, "talk", TALK)
    settings = {"metrics_address": f"unix:{directory}/metrics.sock", "drain_timeout_s": 5}
    with serving(directory, store, settings, ["--ncs", "--models", "talk=talk"], executed=True) as server:
        yield server


@pytest.fixture
def served(kept: Any) -> Iterator[Any]:
    settings = kept.directory / "config.properties"
    before = settings.read_text()
    yield kept
    settings.write_text(before)


@pytest.fixture
def mortal(start: Any, write: Any) -> Any:
    """A server of the test's own."""
    write("talk", TALK)
    return start("--models", "talk=talk", executed=True, drain_timeout_s=5)


def test_no_request_is_lost_and_settings_are_read_anew(served: Any) -> None:
    before = served.process.pid, served.forkservers(), served.worker_pids("talk")

    def over_http() -> bytes:
        return httpx.post(f"{served.http}/predictions/talk", content=b"said", timeout=GUARD_S).content

    with grpc.insecure_channel(served.inference) as channel:
        stub = InferenceAPIsServiceStub(channel)

        def over_grpc() -> bytes:
            return bytes(stub.Predictions(request_for("talk", b"said"), timeout=GUARD_S).prediction)

        with asked(over_http) as http, asked(over_grpc) as calls:

            def both_grew(answers: int, over_grpc: int) -> bool:
                return http() > answers and calls() > over_grpc

            until(lambda: http() and calls())
            for seconds in (77, 78):
                configure(served, default_response_timeout=seconds)
                done = restart(served.directory)
                assert (done.returncode, done.stderr) == (0, ""), done
                assert "TorchServe has restarted." in done.stdout and f":{served.port('http_inference')}" in done.stdout
                assert served.describe("talk")["responseTimeout"] == seconds
                until(partial(both_grew, http(), calls()))
    pid, forkservers, workers = before
    assert served.process.poll() is None and served.process.pid == pid
    assert served.forkservers() == forkservers and served.worker_pids("talk") != workers
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(served.directory / "metrics.sock"))) as client:
        assert client.get("http://server/metrics").status_code == 200
    assert not (served.directory / "tmp" / ".model_server.restart").exists()


def test_settings_that_can_not_be_used_change_nothing(served: Any) -> None:
    workers = until(lambda: served.worker_pids("talk"))
    configure(served, default_response_timeout="soon")
    done = restart(served.directory)
    assert done.returncode == 1 and "default_response_timeout" in done.stderr and "soon" in done.stderr, done
    served.wait_for_log("the server goes on as it is")
    assert served.predict("talk", b"said") == b"said" and set(workers) <= set(served.worker_pids("talk"))


@pytest.mark.long
def test_an_address_that_is_no_longer_served_is_left(mortal: Any) -> None:
    old, new = mortal.http, f"http://127.0.0.1:{free_port()}"
    configure(mortal, inference_address=new)
    assert restart(mortal.directory).returncode == 0
    assert httpx.get(f"{new}/ping").status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{old}/ping")


@pytest.mark.long
def test_a_changed_installation_is_imported_anew(start: Any, write: Any, tmp_path: Path) -> None:
    write("talk", TALK)
    (packages := tmp_path / "packages").mkdir()
    served = start("--models", "talk=talk", executed=True, env={"PYTHONPATH": str(packages)})
    forkservers = served.forkservers()
    (packages / "new.py").touch()
    assert restart(served.directory).returncode == 0
    assert served.forkservers().isdisjoint(forkservers) and served.predict("talk", b"said") == b"said"


@pytest.mark.long
def test_a_forkserver_that_has_died_is_started_anew(served: Any) -> None:
    for pid in served.forkservers():
        os.kill(pid, 9)
    assert restart(served.directory).returncode == 0
    assert served.predict("talk", b"said") == b"said"


def test_who_is_told_to_end_is_not_replaced(mortal: Any) -> None:
    """Also if it is told at once, and by SIGUSR2 several times."""
    for number in (signal.SIGUSR2, signal.SIGUSR2, signal.SIGTERM):
        mortal.process.send_signal(number)
    assert mortal.wait() in (0, -signal.SIGTERM, 128 + signal.SIGTERM), mortal.log


@pytest.mark.long
def test_nothing_is_left_open(served: Any) -> None:
    def descriptors() -> int:
        return len(os.listdir(f"/proc/{served.process.pid}/fd"))

    assert restart(served.directory).returncode == 0
    before = descriptors()
    assert restart(served.directory).returncode == 0
    until(lambda: descriptors() <= before)


@pytest.mark.long
def test_what_another_has_put_in_the_way_is_left_alone(served: Any) -> None:
    """In a temporary directory that users share."""
    (foreign := served.directory / "foreign").write_text("kept")
    place = served.directory / "tmp" / ".model_server.restart"
    os.link(foreign, place)
    workers = until(lambda: served.worker_pids("talk"))
    served.process.send_signal(signal.SIGUSR2)
    until(lambda: served.worker_pids("talk") and not set(workers) & set(served.worker_pids("talk")))
    assert foreign.read_text() == "kept"
    place.unlink()
    (place / "full").mkdir(parents=True)
    done = restart(served.directory)
    assert done.returncode == 1 and "Nothing was restarted" in done.stderr, done
    shutil.rmtree(place)
    assert served.predict("talk", b"said") == b"said"


def test_there_is_no_server_to_restart(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    done = restart(tmp_path)
    assert (done.returncode, done.stdout) == (1, "") and "TorchServe is not currently running." in done.stderr
