"""A real worker process: its handling of requests, results, errors, streams, cancels and its own end."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import threading
import time
from pathlib import Path

import pytest

from support import GUARD_S, until
from ts.protocol.frames import Cancel, Credit, Failed, Input, LoadFailed, Predict, Stop, encode_bytes

PIECE_COST = 64


def failed(answer):
    assert isinstance(answer, Failed), answer
    told = answer.message.removesuffix(f" (request ID id-{answer.job_id}: the model's log says why)")
    assert answer.by_handler or told == answer.message
    return answer.code, told


# --- inputs


def test_context_describes_model_and_worker(start_worker, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "probe.py").write_bytes((Path(__file__).parent.parent / "handlers" / "probe.py").read_bytes())
    (folder / "model-config.yaml").write_text("handler: {depth: 3}\nbatchSize: 2\n")
    worker = start_worker(
        model_dir=str(folder),
        config_file="model-config.yaml",
        manifest={"model": {"modelName": "m"}},
        python_path=["/nowhere/extra"],
        batch_size=2,
        executed=True,
    )
    found = worker.json({"op": "properties"})
    assert found["model_yaml_config"] == {"handler": {"depth": 3}, "batchSize": 2}
    assert found["manifest"] == {"model": {"modelName": "m"}}
    assert found["cwd"] == str(folder)
    assert found["path"][:2] == [str(folder), "/nowhere/extra"]
    properties = found["system_properties"]
    assert properties["model_dir"] == str(folder)
    assert (properties["gpu_id"], properties["batch_size"], properties["server_name"]) == (None, 2, "MMS")
    assert found["seen"]["loads"] == 1


def test_describe_has_no_input(start_worker):
    worker = start_worker()
    predict = worker.batch([], headers=[("describe", "True")])
    worker.send(predict)
    assert json.loads(worker.answer(predict.items[0].job_id)) == {"describe": "True"}


# --- results


@pytest.mark.parametrize("op", ["bad_status", "huge_phrase", "many_headers"])
def test_an_answer_that_cannot_be_sent_fails_alone_of_its_batch(start_worker, op):
    worker = start_worker(batch_size=3)
    fine, bad, also = worker.ask({"op": "value", "value": "1"}, {"op": op}, {"op": "value", "value": "3"})
    assert (fine, also) == (b"1", b"3")
    assert failed(bad) == (503, "Prediction failed")
    assert "id-2" in worker.out_file.read_text()


def test_a_generator_that_a_plain_handler_returns_has_the_worker_for_itself(start_worker):
    worker = start_worker()
    first = worker.predict({"op": "generate", "count": 300, "returns": True})[0]
    second = worker.predict({"op": "status", "code": 418, "phrase": ""})[0]
    assert worker.answer(first).endswith(b"299 end")
    worker.answer(second)
    assert worker.order == [first, second]
    assert (worker.first[first].status, worker.first[second].status) == (200, 418)


def test_what_is_logged_is_printed_in_order_from_info_up(start_worker):
    worker = start_worker()
    worker.ask({"op": "log"})
    worker.stop()
    assert worker.out_file.read_text() == "first\nsaid\nlast\n"
    assert worker.err_file.read_text() == ""


def test_printed_lines_come_at_once(start_worker):
    worker = start_worker()
    worker.ask({"op": "print"})
    assert worker.out_file.read_text() == "printed line\n"


def test_many_requests_in_flight_keep_their_order(start_worker):
    worker = start_worker()
    jobs = [worker.predict({"op": "value", "value": str(number)})[0] for number in range(500)]
    assert [worker.answer(job) for job in jobs] == [str(number).encode() for number in range(500)]
    assert worker.order == jobs


# --- loading


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("import no_such_library\n", ["ModuleNotFoundError", "no_such_library"]),
        ("def broken(:\n", ["SyntaxError"]),
        ("x = 1\n", ["no function handle", "no class with a method handle"]),
        ("class A: pass\nclass B: pass\n", ["A, B"]),
        ("class A: pass\n", ["class A", "no method handle"]),
        ("def handle(data, context): raise RuntimeError('bad weights')\n", ["RuntimeError: bad weights"]),
        ("import sys\nsys.exit(3)\n", ["sys.exit(3)"]),
    ],
)
def test_what_is_wrong_with_a_handler_is_said(start_worker, tmp_path, source, parts):
    (tmp_path / "mine.py").write_text(source)
    worker = start_worker(load=False)
    answer = worker.load("mine.py", model_dir=str(tmp_path))
    assert isinstance(answer, LoadFailed)
    assert answer.info["code"] == 500
    for part in parts:
        assert part in answer.info["message"]
    assert answer.info["traceback"]
    assert worker.process.wait(60) == 1


def test_a_missing_handler_is_named(start_worker):
    answer = start_worker(load=False).load("absent.py")
    assert isinstance(answer, LoadFailed)
    assert "absent.py" in answer.info["message"]


def test_memory_errors_while_loading_have_their_code(start_worker, tmp_path):
    (tmp_path / "mine.py").write_text("def handle(data, context): raise MemoryError('weights')\n")
    answer = start_worker(load=False).load("mine.py", model_dir=str(tmp_path))
    assert answer.info["code"] == 507


@pytest.mark.parametrize(
    ("handler", "source"),
    [
        ("mine.py", "class H:\n  def initialize(self, c): self.c = c\n  def handle(self, d, c): return ['ok']\n"),
        ("mine:entry", "def entry(d, c): return ['ok']\ndef handle(d, c): 1 / 0\n"),
        ("folder/mine.py:entry", "def entry(d, c): return ['ok']\n"),
        ("mine.py:Chosen", "class Chosen:\n  def handle(self, d, c): return ['ok']\nclass Other: pass\n"),
        ("yaml.py", "def handle(d, c): return ['ok']\n"),
        ("mine.py", "async def handle(d, c): return ['ok']\n"),
        ("mine.py", "import asyncio\nclass H:\n  async def initialize(self, c): self.x = await asyncio.sleep(0, 'ok')\n"
         "  async def handle(self, d, c): return [self.x]\n"),
        ("mine.py", "def handle(d, c):\n  yield 'o'\n  return 'k'\n"),
    ],
)  # fmt: skip
def test_entry_points(start_worker, tmp_path, handler, source):
    (tmp_path / (handler.partition(":")[0].removeprefix("folder/").removesuffix(".py") + ".py")).write_text(source)
    (tmp_path / "model-config.yaml").write_text("{}")
    worker = start_worker(handler, model_dir=str(tmp_path), config_file="model-config.yaml")
    assert worker.ask({"op": "any"}) == b"ok"


# --- streams


def test_the_old_place_of_the_streaming_call(start_worker):
    assert start_worker().ask({"op": "socket"}) == b"rawend"


def test_an_error_after_a_piece_ends_the_stream(start_worker):
    worker = start_worker()
    job = worker.predict({"op": "stream_then_fail"})[0]
    assert failed(worker.answer(job)) == (503, "Prediction failed")
    assert worker.pieces(job, 1) == [b"first"]


def test_generators_run_beside_each_other(start_worker):
    worker = start_worker("counting.py")
    slow, quick = worker.predict(b"3000")[0], worker.predict(b"2")[0]
    assert worker.answer(quick) == b"0 1 counted to 2"
    assert worker.answer(slow).endswith(b"2999 counted to 3000")
    assert worker.order == [quick, slow]


def test_a_batch_in_a_generator(start_worker):
    assert start_worker("counting.py", batch_size=2).ask(b"1", b"3") == [b"0 counted to 1", b"0 1 2 counted to 3"]


def test_async_requests_wait_beside_each_other(start_worker):
    worker = start_worker("waiting.py")
    waiting = worker.predict(b"wait door")[0]
    assert worker.ask(b"open door") == b"opened"
    assert worker.answer(waiting) == b"through"
    assert failed(worker.ask(b"fail")) == (503, "Prediction failed")


@pytest.mark.parametrize(("handler", "body"), [
    ("probe.py", {"op": "stream", "count": 40, "size": 1000}),
    ("probe.py", {"op": "stream_from_thread", "count": 40, "size": 1000}),
    ("probe.py", {"op": "generate", "count": 40, "size": 1000}),
    ("dots.py", b"1000x40"),
    ("ticking.py", b"1000x40"),
])  # fmt: skip
def test_a_reader_without_credit_stalls_its_producer(start_worker, handler, body):
    worker = start_worker(handler, credit_bytes=3000)
    job = worker.predict(body)[0]
    assert len(worker.pieces(job, 3)) == 3  # 3 * (1000 + 64) bytes use the credit up
    for number in range(4, 41):
        worker.send(Credit(job, 1000 + PIECE_COST))
        assert len(worker.pieces(job, number)) == number
    worker.send(Credit(job, 1000 + PIECE_COST))
    assert isinstance(worker.answer(job), bytes)


@pytest.mark.parametrize(("handler", "stalled", "other", "expected"), [
    ("dots.py", b"1000x40", b"1x3", b"..."),
    ("ticking.py", b"1000x40", b"1x3", b"..."),
])  # fmt: skip
def test_a_stalled_stream_stops_nobody_else(start_worker, handler, stalled, other, expected):
    worker = start_worker(handler, credit_bytes=2000)
    job = worker.predict(stalled)[0]
    worker.pieces(job, 2)
    for _ in range(3):
        assert worker.ask(other) == expected
    assert len(worker.pending[job]) == 2
    worker.send(Cancel(job))
    assert failed(worker.answer(job)) == (499, "Request cancelled")


# --- cancels and deadlines


def test_a_running_handler_sees_that_it_is_cancelled(start_worker):
    worker = start_worker()
    job = worker.predict({"op": "until_cancelled"})[0]
    worker.send(Cancel(job))
    assert failed(worker.answer(job)) == (499, "Request cancelled")
    assert worker.ask({"op": "value", "value": "alive"}) == b"alive"


def test_in_a_batch_only_the_cancelled_request_is_told(start_worker):
    worker = start_worker(batch_size=2)
    gone, stays = worker.predict({"op": "until_cancelled"}, {"op": "value", "value": "fine"})
    worker.send(Cancel(gone))
    assert failed(worker.answer(gone))[0] == 499
    assert worker.answer(stays) == b"fine"


@pytest.mark.parametrize(
    ("ask", "seen"),
    [({"op": "stream_forever"}, "cancelled"), ({"op": "generate", "count": 1 << 40}, "generator_closed")],
)
def test_a_handler_that_streams_is_unwound(start_worker, ask, seen):
    worker = start_worker()
    job = worker.predict(ask)[0]
    worker.pieces(job, 2)
    worker.send(Credit(job, 1 << 40), Cancel(job))
    assert failed(worker.answer(job)) == (499, "Request cancelled")
    assert worker.json({"op": "properties"})["seen"][seen] == 1


def test_a_streaming_handler_that_waits_for_credit_is_unwound(start_worker):
    worker = start_worker(credit_bytes=100)
    job = worker.predict({"op": "stream_forever"})[0]
    worker.pieces(job, 2)
    worker.send(Cancel(job))
    assert failed(worker.answer(job)) == (499, "Request cancelled")


def test_a_cancelled_async_handler_gets_cancelled_error(start_worker):
    worker = start_worker("waiting.py")
    job = worker.predict(b"wait door")[0]
    assert worker.ask(b"seen?") == b"nothing was cancelled"
    worker.send(Cancel(job))
    assert failed(worker.answer(job)) == (499, "Request cancelled")
    assert worker.ask(b"seen?") == b"cancelled was seen"


def test_a_cancelled_async_generator_is_closed(start_worker):
    worker = start_worker("ticking.py")
    job = worker.predict(b"1000x100000")[0]
    worker.pieces(job, 1)
    worker.send(Cancel(job))
    assert failed(worker.answer(job)) == (499, "Request cancelled")
    assert worker.ask(b"closed?") == b"1000x100000"


def test_a_cancel_overtakes_a_large_request(start_worker):
    """Frames of a request that isn't complete yet don't hold up a control frame between them."""
    worker = start_worker()
    running = worker.predict({"op": "until_cancelled"})[0]
    large = worker.batch([Input("body", "application/json", b'{"op": "echo"}'), Input("payload", "", bytes(100 << 20))])
    data = encode_bytes(Predict(large.batch_id, large.items))
    head_bytes = 40 * (256 * 1024 + 16)
    worker.sock.sendall(data[:head_bytes])
    worker.send(Cancel(running))
    assert failed(worker.answer(running)) == (499, "Request cancelled")
    worker.sock.sendall(data[head_bytes:])
    assert failed(worker.answer(large.items[0].job_id))[0] == 500  # over max_response_size: it was run


def test_handlers_see_their_deadline(start_worker):
    worker = start_worker()
    found = json.loads(worker.ask({"op": "time_left"}, deadline_s=time.monotonic() + 1000))
    assert 900 < found["remaining_s"] <= 1000


# --- the end


def test_progress_names_the_batches_that_the_handler_was_called_for(start_worker, tmp_path):
    worker = start_worker()
    assert worker.begun(77, 78) == []
    job = worker.predict({"op": "until_cancelled"}, batch_id=77)[0]
    worker.predict({"op": "value", "value": 1}, batch_id=78)
    until(lambda: worker.begun(77))
    assert worker.begun(77, 78) == [77]
    worker.send(Cancel(job))
    worker.answer(job)


def test_stop_finishes_what_was_sent(start_worker):
    worker = start_worker()
    jobs = [worker.predict({"op": "value", "value": number})[0] for number in range(50)]
    large = worker.predict({"op": "size", "size": 5_000_000})[0]
    assert worker.stop() == 0
    assert [worker.answers[job] for job in jobs] == [str(number).encode() for number in range(50)]
    assert len(worker.answers[large]) == 5_000_000


@pytest.mark.parametrize(
    ("handler", "body"), [("counting.py", b"500"), ("ticking.py", b"3x500"), ("waiting.py", b"open")]
)
def test_stop_lets_streams_end(start_worker, handler, body):
    worker = start_worker(handler)
    job = worker.predict(body)[0]
    assert worker.stop() == 0
    assert isinstance(worker.answers[job], bytes)


@pytest.mark.parametrize("body", [None, {"op": "until_cancelled"}, {"op": "stream_forever"}])
def test_the_end_of_the_socket_ends_the_process(start_worker, body):
    worker = start_worker()
    if body is not None:
        worker.predict(body, batch_id=1)
        until(lambda: worker.begun(1))
    worker.sock.close()
    assert worker.process.wait(60) == 0


def test_the_end_of_the_socket_ends_a_process_that_loads(start_worker, tmp_path):
    (tmp_path / "mine.py").write_text("import time\nopen('loading', 'w')\nwhile True: time.sleep(0.01)\n")
    worker = start_worker(load=False)
    worker.begin_load("mine.py", model_dir=str(tmp_path))
    until((tmp_path / "loading").exists)
    worker.sock.close()
    assert worker.process.wait(60) == 0


@pytest.mark.parametrize(
    ("handler", "body"), [("probe.py", {"op": "raise", "kind": "exit"}), ("waiting.py", b"exit 7")]
)
def test_a_handler_that_exits_ends_the_worker_after_earlier_answers(start_worker, handler, body):
    worker = start_worker(handler)
    first = worker.predict({"op": "value", "value": "first"} if handler == "probe.py" else b"open x")[0]
    worker.predict(body)
    worker.to_end()
    assert worker.process.wait(60) == 7
    assert first in worker.answers


FORKING = """
import os
class Handler:
    def initialize(self, context):
        self.loads = os.fork()
    def handle(self, data, context):
        return ["child" if os.fork() == 0 else "parent"] * len(data)
"""
FORKING_LATER = """
import os
async def handle(data, context):
    if data is None:
        return None
    return ["child" if os.fork() == 0 else "parent"] * len(data)
"""


@pytest.mark.parametrize("source", [FORKING, FORKING_LATER], ids=["class", "async"])
def test_a_process_that_the_handler_forks_answers_nothing(start_worker, tmp_path, source):
    """It returns from the handler into the runtime, where it would go on as a second worker on the same socket."""
    (tmp_path / "forking.py").write_text(source)
    worker = start_worker("forking.py", model_dir=str(tmp_path))
    assert [worker.ask({}) for _ in range(8)] == [b"parent"] * 8
    said = "which the handler has forked, returned from the handler and was ended"
    until(lambda: worker.err_file.read_text().count(said) >= 8)


def test_a_process_that_a_handler_leaves_does_not_hold_its_socket(start_worker, tmp_path):
    (tmp_path / "leaving.py").write_text(
        "import os, time\ndef handle(data, context):\n    if data is None: return\n"
        "    pid = os.fork()\n    if not pid:\n        os.close(1); os.close(2); time.sleep(600); os._exit(0)\n"
        "    return [str(pid)]\n"
    )
    worker = start_worker("leaving.py", model_dir=str(tmp_path))
    child = int(worker.ask({}))
    try:
        worker.process.kill()
        worker.to_end()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_killed_worker_has_sent_earlier_answers(start_worker):
    worker = start_worker()
    assert worker.ask({"op": "value", "value": 1}) == b"1"
    worker.predict({"op": "die"}, batch_id=5)
    worker.to_end()
    assert worker.process.wait(60) == -9
    assert worker.begun(*range(1, 6)) == [1, 5]


def test_bytes_that_are_no_frame_end_the_worker(start_worker):
    worker = start_worker()
    worker.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    worker.to_end()
    assert worker.process.wait(60) == 70
    assert "no valid frame" in worker.err_file.read_text()


def test_replies_wait_for_a_slow_frontend(start_worker):
    """The socket is full: the worker neither drops nor blocks for ever, and stops after everything is out."""
    worker = start_worker(response_bytes_max=1 << 30)
    jobs = [worker.predict({"op": "size", "size": 3_000_000})[0] for _ in range(5)]
    worker.send(Stop())
    until(lambda: worker.begun(jobs[-1]))
    worker.to_end()
    assert [len(worker.answers[job]) for job in jobs] == [3_000_000] * 5
    assert worker.process.wait(60) == 0


def test_a_request_over_the_message_limit_ends_the_worker(start_worker):
    """The frontend refuses larger requests itself: a frame that says so comes from something broken."""
    worker = start_worker(message_bytes_max=1_000_000)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the length alone ends it
        worker.sock.sendall(encode_bytes(worker.batch([Input("body", "", bytes(1_100_000))]))[: 256 * 1024 + 16])
    worker.to_end()
    assert worker.process.wait(60) == 70
    assert "over the limit of 1000000" in worker.err_file.read_text()


# --- large bodies


HOARDER = """
import os

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

class Handler:
    def initialize(self, context):
        freed = [bytearray(100_000) for _ in range(640)]
        self.kept = bytearray(100_000)  # above them
        self.most = resident()

    def handle(self, data, context):
        return [str(self.most - resident()) for _ in data]
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries give memory back by rules of their own"
)
def test_what_a_load_has_freed_is_given_back(start_worker, tmp_path):
    (tmp_path / "hoarder.py").write_text(HOARDER)
    worker = start_worker("hoarder.py:Handler", model_dir=str(tmp_path))
    assert int(worker.ask(b"")) > 48_000_000


FAULTS = """
import resource

def handle(data, context):
    if data is None:
        return None
    for again in range(4):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for _ in range(4):
            bodies = [bytearray(1 << 20) for _ in range(8)]
            del bodies
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    return [str(faults) for _ in data]
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries keep freed memory by rules of their own"
)
def test_memory_of_large_bodies_is_used_again(start_worker, tmp_path):
    (tmp_path / "faults.py").write_text(FAULTS)
    worker = start_worker("faults.py", model_dir=str(tmp_path))
    assert int(worker.ask(b"")) < 1024  # of the 8192 pages of 4 times 8 bodies


def test_large_bodies_come_back_as_they_went(start_worker, tmp_path):
    """Around the sizes at which messages travel in another way, all on their way at the same time."""
    (tmp_path / "back.py").write_text(
        "def handle(data, context):\n"
        "    for row in data or ():\n"
        "        assert all(type(value) is bytearray for value in row.values())\n"
        "        row['last'] += b'!'\n"
        "    return data and [b''.join(row.values()) for row in data]\n"
    )
    worker = start_worker("back.py", model_dir=str(tmp_path))
    batches = []
    for size in (16_384, 32_768, 65_536, 262_144, 1_048_576):
        for more in (-100, 0, 100):
            last = (bytes(range(256)) * (size // 256 + 2))[: size + more]
            batches += [[[Input("last", "", last)]], [[Input("first", "", last[::-1]), Input("last", "", last)]]]
    batches.append([inputs for (inputs,) in batches[:4]])
    asked = [(worker.batch(*batch, headers=[("x", "y")]), batch) for batch in batches]
    sending = threading.Thread(target=lambda: [worker.send(message) for message, _ in asked])
    sending.start()
    for message, batch in asked:
        for item, inputs in zip(message.items, batch, strict=True):
            assert worker.answer(item.job_id) == b"".join(part.data for part in inputs) + b"!"
    sending.join(GUARD_S)
