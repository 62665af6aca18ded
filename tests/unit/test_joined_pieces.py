"""Pieces of one answer that are ready together go together, and are the same as one by one on every part of the way."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams import Answer, Http1Client
from support import JobOwner, turns
from ts.context import Context
from ts.protocol.decoder import Decoder, decode_bytes
from ts.protocol.frames import (
    CHUNK_COST_BYTES,
    JOINED_BYTES_MAX,
    PIECES_MAX,
    Chunk,
    Credit,
    Failed,
    Input,
    Item,
    Message,
    Pieces,
    Predict,
    chunks_of,
)
from ts.protocol.outbox import GROUP_BYTES_MAX, PIECE_BYTES_MAX, Outbox
from ts.runtime.jobs import Ledger
from ts.runtime.running import Running
from ts.runtime.worker import HELD_PIECES_MAX, Link
from ts_frontend.errors import ClientGone, ServeError
from ts_frontend.grpc import predictions
from ts_frontend.http import app
from ts_frontend.job import Job, JobState
from ts_frontend.job import Ledger as Jobs
from ts_frontend.scheduling.stream import chunks
from ts_frontend.workers.in_flight import ResponseCounter


def written(outbox: Outbox, take: int = 1 << 30) -> bytes:
    """Everything, by writes of at most `take` bytes."""
    out = []
    while outbox:
        data = b"".join(outbox.buffers())[:take]
        outbox.sent(len(data))
        out.append(data)
    return b"".join(out)


def apart(messages: Sequence[Message]) -> list[Any]:
    """The messages with each piece on its own, and views as bytes."""
    singles = chain.from_iterable(chunks_of(one) if isinstance(one, Pieces) else (one,) for one in messages)
    return [
        one._replace(data=bytes(one.data), headers=tuple(one.headers)) if isinstance(one, Chunk) else one
        for one in singles
    ]


def read(data: bytes) -> list[Any]:
    return Decoder(1 << 30).feed(data)


# --- waiting to be written


def test_a_frame_has_so_many_pieces_and_bytes() -> None:
    outbox = Outbox()
    for _ in range(PIECES_MAX + 1):
        outbox.push_piece(1, b"")
    for _ in range(GROUP_BYTES_MAX // PIECE_BYTES_MAX + 1):
        outbox.push_piece(2, bytes(PIECE_BYTES_MAX))
    outbox.push_piece(3, bytes(PIECE_BYTES_MAX + 1))
    sizes = [len(one.data) for one in read(written(outbox)) if isinstance(one, Pieces)]
    assert sizes == [PIECES_MAX, GROUP_BYTES_MAX // PIECE_BYTES_MAX]
    assert GROUP_BYTES_MAX < JOINED_BYTES_MAX


sizes = st.sampled_from([0, 1, 7, 500, PIECE_BYTES_MAX, PIECE_BYTES_MAX + 1, 17_000, 300_000])
pushes = st.tuples(st.integers(1, 3), st.sampled_from(["piece", "piece", "piece", "chunk", "head"]), sizes)


@settings(max_examples=60, deadline=None)
@given(st.lists(pushes | st.none(), max_size=40), st.lists(st.sampled_from(["last", "chunk", "failed"]), min_size=3))
def test_each_key_gets_what_it_would_get_piece_by_piece(given: list[Any], ends: list[str]) -> None:
    joining, plain = Outbox(), Outbox()
    ways: list[tuple[int, Chunk | Failed, bool]] = []
    data = b""
    for number, push in enumerate([*given, *((key, end, 3) for key, end in zip((1, 2, 3), ends, strict=False))]):
        if push is None:  # the socket takes a part of what waits
            taken = b"".join(joining.buffers())[:10_000]
            joining.sent(len(taken))
            data += taken
            continue
        key, kind, size = push
        value = (b"%d " % number).ljust(size, b".")[:size]
        if kind == "piece":
            joining.push_piece(key, value)
        elif kind == "last":
            joining.push_last(key, value)
        message: Chunk | Failed = Chunk(key, value, kind == "last", 201 if kind == "head" else 200)
        if kind == "failed":
            message = Failed(key, 500, "no")
        if kind not in ("piece", "last"):
            joining.push(message)
        plain.push(message)
        ways.append((key, message, True))
    found, wanted = apart(read(data + written(joining))), apart(read(written(plain)))
    for key in (1, 2, 3):
        assert [one for one in found if one.job_id == key] == [one for one in wanted if one.job_id == key]


# --- from a worker


def link_of(ledger: Ledger) -> tuple[Link, socket.socket]:
    """A link without waiters, and the other end of its socket, which receives the flushed bytes."""
    ours, its = socket.socketpair()
    ours.setblocking(False)
    link = Link(its.detach())
    link.ledger = ledger
    return link, ours


def arrived(sock: socket.socket) -> bytes:
    """The bytes that were flushed since the last call."""
    try:
        return sock.recv(1 << 20)
    except BlockingIOError:
        return b""


def received(sock: socket.socket) -> bytes:
    """Everything up to the other end's close."""
    sock.setblocking(True)
    with sock:
        return b"".join(iter(lambda: sock.recv(1 << 20), b""))


def running(ledger: Ledger, jobs: int, tells: bool = False) -> tuple[Running, socket.socket]:
    """A batch that the handler has begun, and where its answers arrive. `tells`: the handler has looked at its request
    processors."""
    ledger.receive(
        Predict(1, [Item(number, f"r{number}", math.inf, (), [Input("x", "", b"")]) for number in range(jobs)])
    )
    batch = ledger.queue.popleft()
    assert ledger.start(batch)
    link, ours = link_of(ledger)
    one = Running(batch, Context("m", "", None, 1, None), link)
    one.rows(False)
    if tells:
        one.context.set_response_header(0, "name", "value")
    return one, ours


steps = st.one_of(
    st.tuples(st.just("send"), st.sampled_from([b"", b"a", b"long" * 30, "text", bytearray(b"b"), {"a": 1}])),
    st.tuples(st.just("step"), st.sampled_from([b"", b"c", b"too large" * 50, None])),
    st.tuples(st.just("credit"), st.integers(1, 300)),
)


@pytest.mark.pure_form  # it derives from Ledger
@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=20), st.sampled_from([1, 2]), st.booleans(), st.sampled_from([b"", b"end", None]))
def test_the_usual_piece_goes_as_any_piece(given: list[Any], jobs: int, tells: bool, end: bytes | None) -> None:
    class Slow(Ledger):
        """One without the short way for usual pieces."""

        def add_piece(self, job: Any, data: bytes) -> bool:
            return False

    outcomes = []
    for kind in (Ledger, Slow):
        ledger = kind(400, 200)
        one, ours = running(ledger, jobs, tells)
        link: Any = one.link
        link.waits_for_credit, link.holds_back = False, True
        for what, value in given:
            if what == "send":
                if kind is Slow:
                    one._give([(index, one._outcome(index, value, False)) for index in range(jobs)])
                else:
                    one.send([value] * jobs, range(jobs), "", 200)
            elif what == "step":
                one.step([value] * jobs)
            else:
                ledger.receive(Credit(0, value))
            if all(job.over for job in one.jobs):
                break
        one.finish_stream(None if end is None else [end] * jobs)
        for number in range(jobs):
            ledger.receive(Credit(number, 1 << 20))
        link.flush()
        link.close()
        raw = received(ours)
        outcomes.append((apart(decode_bytes(raw)), [job.credit_bytes for job in one.jobs], sorted(ledger.jobs)))
    short, long = outcomes
    assert short[1:] == long[1:]
    for number in range(jobs):
        assert [one for one in short[0] if one.job_id == number] == [one for one in long[0] if one.job_id == number]


def test_the_first_piece_of_an_answer_does_not_wait_and_those_after_it_share_a_write() -> None:
    ledger = Ledger(1 << 20, 1 << 20)
    one, ours = running(ledger, 1)
    link = one.link
    link.holds_back = True
    link._flushed_s = math.inf  # a moment ago, however long this takes
    one.send([b"first"], [0], "", 200)
    assert decode_bytes(arrived(ours)) == [Chunk(0, b"first", False)]
    link._flushed_s = math.inf
    for _ in range(HELD_PIECES_MAX):
        assert not arrived(ours)
        one.send([b"more"], [0], "", 200)
    (together,) = decode_bytes(arrived(ours))
    assert together == Pieces(0, [b"more"] * HELD_PIECES_MAX)
    link.close()
    ours.close()


# --- to a job


groups = st.lists(
    st.tuples(st.lists(st.sampled_from([b"", b"a", b"bb", bytes(60)]), min_size=1, max_size=4), st.booleans()),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(groups, st.booleans(), st.sampled_from([50, 150, 1 << 20]), st.booleans(), st.booleans())
def test_a_job_takes_pieces_together_as_one_by_one(
    given: list[tuple[list[bytes], bool]], stream: bool, limit: int, ends: bool, reads: bool
) -> None:
    """`given`: pieces, and whether they come after one with a status of its own."""

    async def outcome(together: bool) -> Any:
        owner = JobOwner()
        job = Job(Jobs(), [], request_id="r", stream=stream, response_bytes_max=limit)
        job.enqueue(owner)
        job.send(owner, 1.0)
        got: list[bytes] = []

        async def take() -> None:
            async for ready in chunks(job):
                got.extend(bytes(one) for one in ready)

        reader = asyncio.ensure_future(take()) if stream and reads else None
        for number, (data, headed) in enumerate(given):
            last = ends and number == len(given) - 1
            if headed:
                job.deliver(Chunk(job.id, b"h", False, 201, "Made", [("k", "v")]), 2.0)
            if together:
                job.deliver_pieces(Pieces(job.id, data, last), 2.0)
            else:
                for chunk in chunks_of(Pieces(job.id, data, last)):
                    job.deliver(chunk, 2.0)
            if reader is not None:
                await turns()
        granted = 0 if job.done else owner.granted_bytes  # one that has ended needs none
        state = job.state, job.status, job.phrase, list(job.headers), job.received_bytes, granted, len(owner.released)
        unread = [bytes(one) for one in job._chunks] if reader is None else []
        if job.state is JobState.SENT:
            job.cancel()
        if reader is not None:
            await asyncio.wait({reader})
            unread = [*got, str(reader.exception()).encode()]
        return state if job.state is not JobState.FAILED else state[0], unread

    assert asyncio.run(outcome(True)) == asyncio.run(outcome(False))


def test_responses_are_counted_one_by_one() -> None:
    def counted(messages: Sequence[Message]) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        counter = ResponseCounter(lambda index, kind, _: found.append((index, kind)))
        job = Job(Jobs(), [], request_id="r")
        for message in messages:
            counter.note([message], {5: (job, None)})
        assert not counter._open
        return found

    together = Pieces(5, [b"a", b"", b"c"], True)
    one_by_one = [Chunk(5, b"before", False), *chunks_of(together)]
    assert counted([Chunk(5, b"before", False), together, Pieces(6, [b"x"])]) == counted(one_by_one)
    assert counted(one_by_one) == [(0, "success"), (1, "success"), (2, "empty"), (3, "success")]


# --- to clients


@given(st.lists(st.integers(0, 5000).map(bytes), max_size=5))
def test_answers_of_several_pieces_are_those_of_each(pieces: list[bytes]) -> None:
    assert predictions.responses(pieces) == [predictions.response(piece) for piece in pieces]
    views = [memoryview(piece) for piece in pieces]
    assert predictions.responses(views) == predictions.responses(pieces)


@given(st.lists(st.sampled_from([b"", b"a", bytes(3000), bytes(40_000), bytes(70_000)]), min_size=1, max_size=8))
def test_what_is_sent_together_over_http_is_the_pieces_in_bounds(pieces: list[bytes]) -> None:
    parts = list(app.joined(pieces))
    assert b"".join(parts) == b"".join(pieces)
    assert all(len(part) <= app.JOINED_BYTES_MAX or part in pieces for part in parts)
    assert all(len(one) + len(two) > app.JOINED_BYTES_MAX for one, two in zip(parts, parts[1:], strict=False))


def sent_over_http(lists: Sequence[Sequence[bytes]], apart: bool, fails: ServeError | None = None) -> Answer:
    """The answer with these pieces, to a client that sees the chunks."""

    async def pieces() -> Any:
        for ready in lists:
            yield ready
        if fails is not None:
            raise fails

    async def answered() -> Answer:
        client = Http1Client()
        stream = client.request()
        stream.begin(200, ())
        with pytest.raises(ClientGone) if fails is not None else nullcontext():
            await app._send_pieces(pieces(), stream, apart=apart)
        return client.answer()

    return asyncio.run(answered())


def test_pieces_are_chunks_of_their_own_where_clients_can_tell_them_apart() -> None:
    lists = [[b"a"], [b"b", b"", b"c"], [b""], [b"d", bytes(70_000), b"e"]]
    assert sent_over_http(lists, True).pieces == [b"a", b"b", b"c", b"d", bytes(70_000), b"e"]
    assert sent_over_http(lists, False).pieces == [b"a", b"bc", b"d", bytes(70_000), b"e"]
    failed = sent_over_http([[b"a", b"b"]], False, ServeError("no"))
    assert failed.pieces == [b"ab"] and not failed.ended


def test_events_may_be_joined() -> None:
    assert app._has_events([(b"a", b"b"), (b"content-type", b"text/event-stream; charset=utf-8")])
    assert not app._has_events([(b"content-type", b"text/plain")])


def test_the_cost_of_pieces_is_that_of_each() -> None:
    owner = JobOwner()
    job = Job(Jobs(), [], request_id="r")
    job.enqueue(owner)
    job.send(owner, 1.0)
    job.deliver_pieces(Pieces(job.id, [b"a", b"bc"]), 2.0)
    assert owner.granted_bytes == 3 + 2 * CHUNK_COST_BYTES
