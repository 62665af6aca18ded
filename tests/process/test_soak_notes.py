"""The soak's look at a worker before it is killed: whether its handler knows of all that the server's note says."""

from __future__ import annotations

import signal
import subprocess
import sys
from datetime import datetime

import pytest

from soak import notes
from ts.protocol.progress import PLACES

#: Stops the worker before the first statement of the soak's handler, in the midst of its note, or after it.
STOPS = """
import signal
inner_handle, inner_note = handle, note

def stop_at(data, place):
    if data and bytes(data[0].get("data") or data[0].get("body")).split()[1] == place:
        os.kill(os.getpid(), signal.SIGSTOP)

def note(data):
    stop_at(data, b"noting")
    inner_note(data)
    stop_at(data, b"noted")

def handle(data, context):
    stop_at(data, b"before")
    return inner_handle(data, context)
"""


@pytest.fixture
def soaked(start_worker, tmp_path):
    """A worker with the soak's handler, and the folder of its notes."""
    folder = tmp_path / "notes"
    folder.mkdir()
    (tmp_path / "mine.py").write_text(notes.handler_of(folder) + STOPS)
    return start_worker("mine.py", model_dir=str(tmp_path), batch_size=4), folder


def ask(worker, *places, batch_id):
    """Sends a batch whose requests have these asks."""
    return worker.predict(
        *(f"{batch_id:014}-{index} {ask} x".encode() for index, ask in enumerate(places)), batch_id=batch_id
    )


@pytest.mark.parametrize(
    ("place", "where"), [("before", notes.BETWEEN), ("noting", notes.NOTING), ("noted", notes.ELSEWHERE)]
)
@pytest.mark.parametrize("earlier", [[], [1, PLACES + 1, 2 * PLACES + 1]], ids=["none", "one place"])
def test_where_a_worker_stands(soaked, place, where, earlier):
    """Also after batches that shared a place of the server's note, as those of a worker that lives long do."""
    worker, folder = soaked
    for batch_id in earlier:
        for job_id in ask(worker, "echo", batch_id=batch_id):
            worker.answer(job_id)
    jobs = ask(worker, place, "echo", batch_id=4 * PLACES)
    notes.wait_still(worker.process.pid)
    assert notes.where_stands(worker.process.pid, folder) == where
    worker.process.send_signal(signal.SIGCONT)
    for job_id in jobs:
        worker.answer(job_id)
    worker.process.send_signal(signal.SIGSTOP)
    notes.wait_still(worker.process.pid)
    assert notes.where_stands(worker.process.pid, folder) == notes.ELSEWHERE
    assert {f"{4 * PLACES:014}-{index}" for index in range(2)} <= notes.named(folder)


def test_a_process_that_is_no_worker_is_not_killed(tmp_path):
    """A worker's number may belong to another process by the time that it is to be killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        with pytest.raises(ProcessLookupError):
            notes.kill(other.pid, tmp_path)
        assert other.poll() is None
        other.communicate(b"\n")
    assert other.returncode == 0
    with pytest.raises(ProcessLookupError):
        notes.kill(other.pid, tmp_path)


LOG = """\
2026-01-02T03:04:05,000 [INFO ] main ts_frontend.workers.pool - Worker 9001 of echo_1.0 is ready (pid 50).
2026-01-02T03:04:06,000 [WARN ] main ts_frontend.workers.worker - Worker 9001 of echo_1.0 died: Killed; request ids: a b
2026-01-02T03:04:07,000 [INFO ] main ts_frontend.workers.pool - Worker 9001 of echo_1.0 is ready (pid 51, 1 thread).
2026-01-02T03:04:08,000 [WARN ] main ts_frontend.workers.worker - Worker 9001 of echo_1.0 died: Killed; request ids: c
2026-01-02T03:04:09,000 [INFO ] main ts_frontend.workers.pool - Worker 9002 of echo_1.0 is ready (pid 52).
2026-01-02T03:04:10,000 [WARN ] main ts_frontend.workers.worker - Worker 9002 of echo_1.0 died: Itself; request ids: d
"""


def killed(pid, where, clock):
    at_s = datetime.strptime(f"2026-01-02T03:04:{clock}", "%Y-%m-%dT%H:%M:%S.%f").timestamp()
    return notes.Kill(pid, where, 2, 1, at_s - 0.1, at_s - 0.02, at_s - 0.01, at_s)


@pytest.mark.parametrize(
    ("name", "explained", "text"),
    [
        (
            "a",
            True,
            f"pid 50 killed 2026-01-02T03:04:05.990 {notes.BETWEEN} (server's batch 2, handler's 1; noted -100 ms",
        ),
        ("b", True, "; 10 ms later: 2026-01-02T03:04:06,000 [WARN ] main"),
        ("c", False, f"pid 51 killed 2026-01-02T03:04:07.995 {notes.ELSEWHERE}"),
        ("d", False, "pid 52, wasn't killed by the soak: 2026-01-02T03:04:10,000"),
        ("e", False, "no dead worker"),
    ],
)
def test_each_failed_request_is_told_with_the_end_of_its_worker(name, explained, text):
    kills = [
        killed(50, notes.BETWEEN, "05.99"),
        killed(51, notes.ELSEWHERE, "07.995"),
        killed(50, notes.ELSEWHERE, "20.0"),  # the number was used again
    ]
    found = notes.verdict(name, notes.deaths_in(LOG.splitlines()), kills)
    assert found.explained == explained and text in found.text
