"""A worker's notes of its progress decide which requests run again when it dies."""

from __future__ import annotations

import json

import pytest

from ts.protocol.frames import Failed, encode_bytes
from ts.protocol.shared import PLACES, PROGRESS_BYTES, SIZES_MAX, Progress, has_begun, spent


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


#: Tells which of our functions were called between the note of a batch and the handler's own first line.
CALLS = """
import json, sys

def profile(frame, event, argument):
    code = frame.f_code
    if event == "call" and ("/ts/" in code.co_filename or code.co_filename == __file__):
        names.append(code.co_name)

names = []
sys.setprofile(profile)

def seen():
    last = len(names) - names[::-1].index("begin")
    return json.dumps(names[last:])
"""
KINDS = {
    "blocking": "def handle(data, context):\n    return None if data is None else [seen()]\n",
    "generator": "def handle(data, context):\n    yield [seen()]\n",
    "async": "async def handle(data, context):\n    return [seen()]\n",
    "async generator": "async def handle(data, context):\n    yield [seen()]\n",
    "object": "class Model:\n    def handle(self, data, context):\n        return [seen()]\n",
    "continuous": "def handle(data, context):\n    return None if data is None else [seen()]\n",
}


#: The profile of compiled code has one more call of the function that takes an async generator's steps.
KINDS_HERE = [pytest.param(kind, marks=pytest.mark.pure_form if kind == "async generator" else ()) for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS_HERE)
def test_nothing_but_the_handlers_call_follows_the_note(start_worker, tmp_path, kind):
    """Whatever ran in between would be time in which a killed worker's requests fail, although none has begun."""
    (tmp_path / "mine.py").write_text(CALLS + KINDS[kind])
    worker = start_worker("mine.py", model_dir=str(tmp_path), continuous=kind == "continuous")
    on_the_way = ["__call__"] if kind == "object" else []
    assert worker.json(b"x") == [*on_the_way, "handle", "seen"]


TWO_STREAMS = """
import functools, os, signal

def handle(data, context):
    for row in data:
        if bytes(row.get("data") or row.get("body")) == b"kill":
            os.kill(os.getpid(), signal.SIGKILL)
    yield [b"x"] * len(data)

def wrapped(function):
    @functools.wraps(function)
    def call(data, context):
        return function(data, context)
    return call
"""


@pytest.mark.parametrize(("last", "begun"), [("", [1]), ("handle = wrapped(handle)\n", [1, 2])])
def test_a_stream_that_waits_for_its_first_step_is_not_begun(start_worker, tmp_path, last, begun):
    """No code of a generator function runs before; code of its wrapper may."""
    (tmp_path / "mine.py").write_text(TWO_STREAMS + last)
    worker = start_worker("mine.py", model_dir=str(tmp_path))
    batches = [worker.batch(b"kill", batch_id=1), worker.batch(b"x", batch_id=2)]
    worker.sock.sendall(b"".join(map(encode_bytes, batches)))
    worker.to_end()
    assert worker.begun(1, 2) == begun


#: From the note to the handler's first instruction. The loop takes note of a new async generator.
INSTRUCTIONS_MAX = {"async generator": 60}
INSTRUCTIONS_MAX_USUAL = 20
#: Looks at each instruction of the main thread whether the second batch is noted: all that a kill there would leave.
INSTRUCTIONS = """
import json, os, sys

states, called = None, False

def trace(frame, event, argument):
    global called
    frame.f_trace_opcodes = True
    if event == "call" and frame.f_code.co_filename == __file__ and frame.f_code.co_name == "handle":
        called = called or frame is not earlier
    if event == "opcode":
        states.append((called, any(os.pread(table, 8, 2 * 8))))
    return trace

def seen(row):
    global states, table, earlier
    if states is None:  # the first request names the table
        table, states = os.open(bytes(row["data"]), os.O_RDONLY), []
        earlier = frame = sys._getframe(1)
        while frame is not None:
            frame.f_trace, frame.f_trace_opcodes, frame = trace, True, frame.f_back
        sys.settrace(trace)
        return b"watched from now on"
    sys.settrace(None)
    return json.dumps(states)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_any_instruction_finds_the_note_before_the_handlers_first_one(start_worker, tmp_path, kind):
    """And not long before: a kill in between fails requests that the handler has seen nothing of."""
    (tmp_path / "mine.py").write_text(INSTRUCTIONS + KINDS[kind].replace("seen()", "seen(data[0])"))
    worker = start_worker("mine.py", model_dir=str(tmp_path), continuous=kind == "continuous")
    worker.ask(worker.progress.name.encode(), batch_id=1)
    states = json.loads(worker.ask(b"x", batch_id=2))
    first = next(index for index, (handles, _) in enumerate(states) if handles)
    noted = next(index for index, (_, is_noted) in enumerate(states) if is_noted)
    assert noted <= first <= noted + INSTRUCTIONS_MAX.get(kind, INSTRUCTIONS_MAX_USUAL)


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
