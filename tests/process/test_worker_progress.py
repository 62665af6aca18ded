"""What a worker notes of its progress decides what runs again when it dies."""

from __future__ import annotations

import pytest

from ts.protocol.frames import Failed, encode_bytes
from ts.protocol.progress import PLACES, PROGRESS_BYTES, SIZES_MAX, Progress, has_begun, spent


def test_a_batch_that_was_overtaken_on_the_socket_is_noted_when_its_own_turn_comes(start_worker):
    worker = start_worker()
    worker.ask({"op": "print"}, batch_id=6)
    assert worker.begun(5, 6) == [6]
    worker.ask({"op": "print"}, batch_id=5)
    assert worker.begun(5, 6) == [5, 6]


def test_a_request_that_waits_for_its_first_step_is_not_begun(start_worker, tmp_path):
    """Both requests come at once; the second one has a call of its own, which is made first, and kills the worker."""
    (tmp_path / "mine.py").write_text(
        "import os, signal\n"
        "def handle(data, context):\n"
        "    if data is not None and context.get_request_header(0, 'describe'):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return [b'x'] * len(data or ())\n"
    )
    worker = start_worker("mine.py", model_dir=str(tmp_path), continuous=True, batch_size=4)
    batches = [worker.batch(b"1", batch_id=1), worker.batch(b"2", batch_id=2, headers=[("describe", "True")])]
    worker.sock.sendall(b"".join(map(encode_bytes, batches)))
    worker.to_end()
    assert worker.begun(1, 2) == [2]


def test_the_table_of_ids() -> None:
    memory = bytearray(PROGRESS_BYTES)
    progress = Progress(memory)
    assert not any(has_begun(bytes(memory), number) for number in range(1, 2 * PLACES))
    progress.begin(3)
    progress.begin(PLACES + 4)
    table = bytes(memory)
    begun = [number for number in range(1, 3 * PLACES) if has_begun(table, number)]
    assert begun == [3, 4, PLACES + 4], "the newer one of a place covers the older one, and no newer one"
    progress.begin(4)
    assert bytes(memory) == table
    assert has_begun(table[:16], 3), "a table that can't be read says yes"


def test_the_sums_of_times() -> None:
    memory = bytearray(PROGRESS_BYTES)
    progress = Progress(memory)
    assert spent(bytes(memory)) == {}
    for size in (1, 2, SIZES_MAX):
        progress.spend(size, 0.5, 0.0)
        progress.spend(size, 0.25, 2.0)
    progress.spend(SIZES_MAX + 1, 1.0, 1.0)
    progress.begin(PLACES)
    assert spent(bytes(memory)) == dict.fromkeys((1, 2, SIZES_MAX), (0.75, 2.0))
    assert has_begun(bytes(memory), PLACES) and not has_begun(bytes(memory), 1)
    assert spent(bytes(memory)[: PLACES * 8]) == {}


@pytest.mark.parametrize(
    ("bodies", "whole"),
    [
        ([{"op": "raise", "kind": "value"}], [False]),
        ([{"op": "value", "value": 1}, {"op": "raise", "kind": "value"}], [True, True]),
        ([{"op": "value", "value": 1}, {"op": "raise", "kind": "prediction"}], [True, True]),
    ],
)
def test_failures_say_whether_the_whole_batch_failed(start_worker, bodies, whole):
    worker = start_worker()
    answers = worker.ask(*bodies)
    answers = answers if isinstance(answers, list) else [answers]
    assert [isinstance(answer, Failed) and answer.whole for answer in answers] == whole
