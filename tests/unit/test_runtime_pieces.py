"""The parts of the worker's runtime that do no I/O: requests to data, results to answers, the ledger, kinds."""

from __future__ import annotations

import builtins
import contextlib
import math
import os
import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts.context import Context
from ts.protocol.frames import Cancel, Chunk, Credit, Failed, Input, Item, Predict
from ts.protocol.otf_message_handler import create_predict_response
from ts.protocol.otf_message_handler import send_intermediate_predict_response as old_send
from ts.runtime import handlers, running
from ts.runtime.jobs import CANCELLED, EARLY_CANCELS_MAX, Failure, Ledger
from ts.runtime.worker import Link
from ts.service import PredictionException


def pushed(ledger):
    """The content of the outbox, decoded."""
    from ts.protocol.decoder import decode_bytes

    data = b""
    while ledger.outbox:
        piece = b"".join(ledger.outbox.buffers())
        ledger.outbox.sent(len(piece))
        data += piece
    found = decode_bytes(data) if data else []
    return [one._replace(data=bytes(one.data)) if isinstance(one, Chunk) else one for one in found]


def item(job_id, deadline_s=math.inf):
    return Item(job_id, f"id-{job_id}", deadline_s, (), [Input("data", "", b"x")])


def ledger_with(*batches, credit=1000, limit=1 << 20):
    ledger = Ledger(credit, limit)
    for batch_id, batch in enumerate(batches):
        ledger.receive(Predict(batch_id, [item(job_id) for job_id in batch]))
    return ledger


@contextlib.contextmanager
def link_without_frontend():
    """A link whose other end nobody reads."""
    ours, theirs = socket.socketpair()
    with ours:
        link = Link(theirs.detach())
        link.ledger = ledger_with()
        yield link
        link.close()


# --- the ledger


def test_pieces_are_held_without_credit_and_the_end_waits_behind_them():
    ledger = ledger_with([1], credit=10)
    batch = ledger.queue.popleft()
    ledger.start(batch)
    (job,) = batch.jobs
    for piece in (b"1", b"2", b"3"):
        ledger.give(job, piece, last=False)
    ledger.give(job, Failure(503, "no"), last=True)
    assert pushed(ledger) == [Chunk(1, b"1", False)]
    assert ledger.held_bytes(job) == 2
    ledger.receive(Credit(1, 100))
    assert pushed(ledger) == [Chunk(1, b"2", False)]
    ledger.receive(Credit(1, 1000))
    assert pushed(ledger) == [Chunk(1, b"3", False), Failed(1, 503, "no")]
    assert not ledger.jobs


def test_a_cancel_while_the_end_is_held_drops_what_is_held():
    ledger = ledger_with([1], credit=1)
    batch = ledger.queue.popleft()
    ledger.start(batch)
    ledger.give(batch.jobs[0], b"sent", last=False)
    ledger.give(batch.jobs[0], b"held", last=True)
    ledger.receive(Cancel(1))
    assert pushed(ledger) == [Chunk(1, b"sent", False), Failed(1, 499, "Request cancelled")]


def test_early_cancels_are_remembered_up_to_a_limit():
    ledger = Ledger(1000, 1000)
    for job_id in range(EARLY_CANCELS_MAX + 1):
        ledger.receive(Cancel(job_id))
    ledger.receive(Predict(1, [item(0), item(EARLY_CANCELS_MAX)]))
    batch = ledger.queue.popleft()
    assert ledger.start(batch)
    assert [job.job_id for job in batch.jobs] == [0]


# --- results


def test_views_of_other_shapes_are_flattened():
    array = pytest.importorskip("numpy").arange(6, dtype="uint16").reshape(2, 3)
    sent: Any = running.outcome(memoryview(array))
    assert bytes(sent) == array.tobytes()


def raising(error):
    try:
        raise error
    except type(error) as caught:
        return caught


class Ends(Exception):
    def __str__(self):
        raise SystemExit(3)


class Lies(Exception):
    """Its parts are its own code."""

    __class__ = property(lambda self: sys.exit(4))
    __traceback__ = __cause__ = __context__ = __notes__ = property(lambda self: 1 / 0)


def caused(depth):
    error = ValueError("first")
    for _ in range(depth):
        outer = ValueError("outer")
        outer.__cause__ = error
        error = outer
    return error


def grouped(depth):
    group: Any = getattr(builtins, "ExceptionGroup", lambda text, members: members[0])
    error = ValueError("first")
    for _ in range(depth):
        error = group("group", [error])
    return error


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ValueError("unknown label \ud800"), "ValueError: unknown label \\ud800"),
        (lambda: ValueError("\n" * 3_000_000), "ValueError"),
        (lambda: PredictionException("\ud800" * 3_000_000, 404), "\\ud800\\ud800"),
        (lambda: ValueError({"a": "x" * 3_000_000}), "ValueError: {'a': 'xxx"),
        (lambda: Ends(), "Ends: <exception str() failed>"),
        (lambda: Lies("text"), "Lies: text"),
        (lambda: caused(5000), "ValueError: outer"),
        (lambda: grouped(5000), "group"),
    ],
)
def test_a_failure_is_told_whatever_it_is_made_of(make, told, capsys):
    error = make()
    failure = running.raised(raising(error), ["id"])
    assert told in failure.message + failure.cause
    printed = capsys.readouterr().out  # encoded as a worker's is
    assert told in printed and 0 < len(printed) < 100_000
    assert len(failure.message) + len(failure.cause) < 70_000
    described = handlers.describe_failure(error)
    assert 0 < len(described["message"]) < 10_000 and len(described["traceback"]) < 70_000
    (described["message"] + described["traceback"]).encode()


def test_a_failure_is_told_on_the_descriptor_when_the_handler_has_closed_its_output(capfd, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    running.raised(raising(ValueError("no")), ["id"])
    assert "ValueError: no" in capfd.readouterr().out


def test_code_that_names_a_device_as_its_file_is_told_without_its_lines():
    try:
        exec(compile("raise ValueError('no')", "/dev/zero", "exec"))  # noqa: S102
    except ValueError as error:
        assert 'File "/dev/zero", line 1, in <module>' in running.failure_of(error).traceback


@pytest.mark.parametrize(("text", "sent"), [("a\ud800", b"a\\ud800"), ('{"a": "\udfff"}', b'{"a": "\\udfff"}')])
def test_half_of_a_surrogate_pair_is_escaped_in_an_answer(text, sent):
    class Text(str):
        pass

    assert running.outcome(text) == running.outcome(Text(text)) == sent


def test_one_hostile_element_fails_its_own_request():
    class Hostile(dict[str, int]):
        def items(self):
            sys.exit(5)

    result = running.outcomes(["fine", Hostile(a=1)], 2)
    assert result[0] == b"fine" and result[1][:3] == running.UNSUPPORTED[:3]


REFERENCE = " (request ID id-1: the model's log says why)"


@pytest.mark.parametrize("explains", [True, False])
def test_callers_are_told_the_cause_or_where_it_is(explains):
    ledger = Ledger(1000, 1 << 20, explains)
    ledger.receive(Predict(0, [item(1), item(2)]))
    batch = ledger.queue.popleft()
    ledger.start(batch)
    ledger.give(batch.jobs[0], running.PREDICTION_FAILED._replace(cause="ValueError: x", traceback="lines"), last=True)
    ledger.give(batch.jobs[1], Failure(404, "no such user"), last=True)
    told = f"Prediction failed{': ValueError: x' if explains else REFERENCE}"
    assert pushed(ledger) == [Failed(1, 503, told, True, "lines" if explains else ""), Failed(2, 404, "no such user")]


# --- context


def context():
    return Context("m", "/model", {"model": {}}, 4, None)


class Batch:
    def is_cancelled(self, idx):
        return idx is None

    def headers(self):
        return [{"x": "1", "ts_request_sequence_id": "s"}, {}]

    def deadline_s(self, idx):
        return 100.0


def test_context_before_any_request():
    mine = context()
    assert mine.metrics is None
    assert mine.request_ids is None
    assert mine.cancelled is False
    assert mine.deadline_s == math.inf
    assert mine.model_yaml_config == {}
    with pytest.raises(RuntimeError, match="no request"):
        mine.cl_socket.sendall(b"")


def test_statuses_headers_and_sequences():
    mine = context()
    mine.begin(Batch(), {0: "a", 1: "b"})
    mine.set_all_response_status(500, "all")
    mine.set_response_status(418, "one", 1)
    mine.set_response_content_type(0, "text/plain")
    assert mine.get_response_status(0) == (500, "all")
    assert mine.get_response_status(1) == (418, "one")
    assert mine.get_response_content_type(0) == "text/plain"
    assert mine.get_response_headers(1) == {}
    assert (mine.get_request_id(1), mine.get_request_header(0, "x"), mine.get_sequence_id(0)) == ("b", "1", "s")
    assert mine.get_sequence_id(1) == ""
    assert mine.cancelled
    assert mine.deadline_s == 100.0


def test_metrics_are_made_once_and_turned_to_the_batch():
    class Metrics:
        request_ids = None

    mine = context()
    made: list[Metrics] = []

    def make() -> Any:
        made.append(Metrics())
        return made[-1]

    mine._metrics_source = make
    mine.begin(Batch(), {0: "a"})
    assert mine.metrics is mine.metrics
    assert (len(made), mine.metrics.request_ids) == (1, {0: "a"})


def test_the_old_streaming_call_warns_and_needs_a_context():
    with pytest.warns(PendingDeprecationWarning), pytest.raises(TypeError, match="context"):
        old_send(["x"], {0: "a"}, "ok", 200)


def test_a_tests_own_context_gets_pieces_by_its_socket():
    from ts.handler_utils.utils import send_intermediate_predict_response as send

    sent: list[bytes] = []
    send(["x"], {0: "a"}, "ok", 200, SimpleNamespace(cl_socket=SimpleNamespace(sendall=sent.append)))
    assert sent == [create_predict_response(["x"], {0: "a"}, "ok", 200, None, True)]


def test_frames_of_the_old_wire_call():
    from ts.protocol.decoder import decode_bytes

    (piece,) = decode_bytes(create_predict_response([{"a": 1}], {0: "id"}, "ok", 200, ts_stream_next=True))
    assert isinstance(piece, Chunk)
    assert (piece.job_id, bytes(piece.data), piece.last) == (0, b'{\n  "a": 1\n}', False)
    assert decode_bytes(create_predict_response([None], {0: "id"}, "bad", 503)) == [Failed(0, 503, "bad")]


# --- when a model can't be loaded


def failure_of(tmp_path, text):
    (tmp_path / "broken_handler.py").write_text(text)
    settings = {"model_dir": str(tmp_path), "handler": "broken_handler.py", "model_name": "m"}
    before, path, modules = os.getcwd(), list(sys.path), set(sys.modules)
    try:
        loaded = handlers.load(settings)
        if loaded.loop is not None:
            loaded.loop.close()
    except Exception as error:
        return handlers.describe_failure(error)
    finally:
        os.chdir(before)
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            del sys.modules[name]
    raise AssertionError("it could be loaded")


@pytest.mark.parametrize(
    "text",
    [
        "import nothing_of_this_name\n",
        "def handle(data, context):\n    raise KeyError('weights')\n",
        "try:\n    import nothing_of_this_name\nexcept ImportError as error:\n    raise ValueError('no') from error\n",
    ],
)
def test_a_failed_loads_traceback_begins_at_the_handler(tmp_path, text):
    lines = failure_of(tmp_path, text)["traceback"].splitlines()
    frames = [line for line in lines if line.startswith("  File ") and __file__ not in line]
    assert frames and all("broken_handler.py" in line for line in frames), lines
    assert lines[0] == "Traceback (most recent call last):"


def test_a_handler_that_is_not_there_needs_no_traceback(tmp_path):
    settings = {"model_dir": str(tmp_path), "handler": "nowhere.py", "model_name": "m"}
    with pytest.raises(handlers.HandlerNotUsable) as failure:
        before, path = os.getcwd(), list(sys.path)
        try:
            handlers.load(settings)
        finally:
            os.chdir(before)
            sys.path[:] = path
    lines = handlers.describe_failure(failure.value)["traceback"].splitlines()
    assert not [line for line in lines if line.startswith("  File ") and __file__ not in line]


# --- the short way of a whole answer


heads = st.sampled_from([(201, "", ()), (200, "x", ()), (200, "", (("a", "b"),))])
steps = st.one_of(
    st.tuples(st.just("give"), st.integers(1, 2), st.binary(max_size=30) | st.just(CANCELLED), st.booleans()),
    st.tuples(st.just("give"), st.integers(1, 2), st.sampled_from([b"", bytes(50), bytes(20_000)]), st.booleans()),
    st.tuples(st.just("head"), st.integers(1, 2), heads),
    st.tuples(st.sampled_from(["cancel", "credit"]), st.integers(1, 2)),
    st.tuples(st.just("batch"), *[st.sampled_from([b"", b"a", bytes(50), bytearray(b"b"), CANCELLED])] * 2),
)  # fmt: skip


def by_job(messages):
    """The messages of each job in their order, which is all that is promised of those of several."""
    return sorted(messages, key=lambda message: message.job_id)


@given(st.lists(steps, max_size=8), st.sampled_from([0, 10, 1000]), st.sampled_from([40, 1 << 20]))
def test_a_whole_answer_that_takes_the_short_way_is_the_same(taken, credit, limit):
    def played(ledger):
        ledger.receive(Predict(1, [item(1), item(2)]))
        batch = ledger.queue.popleft()
        ledger.start(batch)
        jobs = dict(enumerate(batch.jobs, 1))
        for what, job_id, *rest in taken:
            if what == "batch":
                values = [job_id, *rest]
                for place in ledger.give_whole(batch.jobs, values):
                    ledger.give(batch.jobs[place], values[place], True)
            elif what == "give":
                ledger.give(jobs[job_id], *rest)
            elif what == "head":
                ledger.give(jobs[job_id], b"x", True, *rest[0])
            else:
                ledger.receive(Cancel(job_id) if what == "cancel" else Credit(job_id, 50))
        states = [(job.answered, job.over, job.done, job.cancelled, job.credit_bytes) for job in jobs.values()]
        return by_job(pushed(ledger)), states, set(ledger.jobs), ledger.unsent

    unhurried = Ledger(credit, limit)
    unhurried._small_bytes_max = -1  # whole answers go in the way of all others
    assert played(Ledger(credit, limit)) == played(unhurried)


# --- the short way of the usual batch


def handled(kind, items, decode, result, looks):
    """The handler's view of a batch, and the messages for this result (None: the rows themselves)."""
    with link_without_frontend() as link:
        mine = context()
        link.ledger.receive(Predict(1, items))
        batch = link.ledger.queue.popleft()
        link.ledger.start(batch)
        run = kind(batch, mine, link)
        rows = run.rows(decode)
        seen = (rows, [[type(value) for value in row.values()] for row in rows], dict(mine.request_ids), run.headers())
        if looks:
            mine.set_response_header(0, "a", "b")
        run.finish(list(rows) if result is None else result)
        return seen, [job.item for job in batch.jobs], by_job(pushed(link.ledger))


content_types = st.sampled_from(
    ["", "application/octet-stream", "text/plain", "application/json", "application/x-www-form-urlencoded"]
)
inputs = st.lists(
    st.builds(Input, st.sampled_from(["data", "body"]), content_types, st.sampled_from([b"", b"a=1", b"[1]", b"\xff"])),
    max_size=2,
)
elements = st.sampled_from(["text", "\udcff", b"bytes", bytearray(b"array"), {"a": 1}, [1], 2.5, None, ValueError("x")])
results = st.none() | st.lists(elements, max_size=3) | st.sampled_from([(b"tuple",), b"bytes", object()])


@pytest.mark.pure_form  # it derives from Running
@given(st.lists(inputs, min_size=1, max_size=2), st.booleans(), results, st.booleans())
def test_a_batch_that_takes_the_short_way_is_handled_as_any_other(given_inputs, decode, result, looks):
    class Longhand(running.Running):
        """Reads and answers every batch in the way of any."""

        __slots__ = ()
        verbatim = False

        def _only_row(self):
            return None

        def _is_plain(self):
            return False

    items = [Item(n, f"id-{n}", math.inf, (), parts) for n, parts in enumerate(given_inputs)]
    short, long = (handled(kind, items, decode, result, looks) for kind in (running.Running, Longhand))
    assert short == long


# --- what a handler doesn't look at


class Place:
    """A place in the batch as numpy and torch give it."""

    def __init__(self, place):
        self.place = place

    def __index__(self):
        return self.place


def test_a_handlers_values_may_be_of_other_types_than_they_should_be():
    """As in Python, also where the runtime is compiled, which looks at the types of arguments."""
    from ts.protocol.decoder import decode_bytes

    ours, theirs = socket.socketpair()
    with ours:
        link, mine = Link(theirs.detach()), context()
        link.ledger = ledger_with()
        link.ledger.receive(Predict(1, [item(0, 1e18), item(1, 2e18)]))
        batch = link.ledger.queue.popleft()
        link.ledger.start(batch)
        run = running.Running(batch, mine, link)
        run.rows(True)
        assert mine.is_cancelled(Place(1)) is False
        assert 0 < mine.remaining_s(Place(0)) < mine.remaining_s(Place(1))
        mine.set_response_header(0, "number", 5)
        mine.set_response_status(201, 7, 0)
        run.send(["a", "b"], [Place(0), Place(1)], None, 200.0)
        run.send(["a", "b"], [Place(1)], KeyError("no"), "odd")
        link.close()
        first, other, failed = decode_bytes(ours.recv(1 << 16))
    assert isinstance(first, Chunk) and isinstance(other, Chunk) and isinstance(failed, Failed)
    assert (first.status, first.phrase, first.headers) == (201, "7", [("number", "5")])
    assert (other.data, failed.code, failed.message) == (b"b", 500, "'no'")
