"""What a worker tells of its progress decides what runs again when it dies."""

from __future__ import annotations


def test_a_batch_that_overtook_another_on_the_socket_stays_counted_as_started(start_worker):
    worker = start_worker()
    worker.ask({"op": "print"}, batch_id=6)
    worker.ask({"op": "print"}, batch_id=5)
    assert worker.started() == 6
