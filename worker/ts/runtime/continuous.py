"""Runs handlers of continuous batches: `handle` is called for every step with the requests that are in progress.

The first step of a request has its inputs, later steps have only its headers; a handler keeps the request's state under
its id. A request leaves the batch when its answer ends it (`_Step.goes_on`), when it fails, or when its caller has
given up.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

from ts.context import Context, RequestCancelled
from ts.protocol.frames import Input
from ts.protocol.shared import Progress
from ts.runtime.handlers import Loaded
from ts.runtime.jobs import CANCELLED, Batch, Failure, Job, Outcome
from ts.runtime.running import (
    HELD_BYTES_MAX,
    PREDICTION_FAILED,
    Headers,
    Opened,
    Running,
    fields_of,
    frozen,
    headers_of,
    is_tensor_request,
    raised,
)
from ts.runtime.worker import Link

STREAM_NEXT: Final = "ts_stream_next"


class _Active:
    """A request in progress. `id`: its name for the handler, unique among those in progress."""

    __slots__ = ("headers", "id", "inputs", "job")

    def __init__(self, job: Job, request_id: str) -> None:
        assert job.item is not None
        self.job, self.id = job, request_id
        self.inputs = fields_of(job.item)
        self.headers = headers_of(job.item.headers, [part[:2] for part in self.inputs])
        job.item = None

    def asked(self) -> tuple[Sequence[Input], Headers]:
        """The inputs and headers for this step. The first step gets the inputs, later ones the headers alone."""
        inputs, headers = self.inputs, self.headers
        if inputs:
            self.inputs = ()
            self.headers = Headers(headers)
            for part in inputs:
                self.headers.pop(part.name, None)
        return inputs, headers


class _Jobs(Batch):
    """The requests of one step. A slow reader doesn't delay others: its pieces are kept, up to a limit."""

    __slots__ = ()

    @property
    def stalled(self) -> bool:
        return False


class _Step(Running):
    """One call of the handler, and the division of its result into last and other pieces."""

    __slots__ = ("_end_key", "_headers", "_ids")

    def __init__(self, active: Sequence[_Active], context: Context, link: Link) -> None:
        batch = _Jobs(0)
        batch.jobs = [one.job for one in active]
        super().__init__(batch, context, link)
        self._ids = {index: one.id for index, one in enumerate(active)}
        self._end_key = context.header_key_sequence_end.lower()
        self._headers: list[Headers] = []

    def begin(self, active: Sequence[_Active], decode: bool) -> list[Any]:
        asked = [one.asked() for one in active]
        self._headers = [headers for _, headers in asked]
        self.context.begin(self, self._ids)
        return [self.row(index, inputs, decode) for index, (inputs, _) in enumerate(asked)]

    def headers(self) -> list[Headers]:
        return self._headers

    def _give(self, pieces: Sequence[tuple[int, Outcome]]) -> None:
        if self.batch.cancelled:
            raise RequestCancelled
        sent = [self._piece(index, frozen(value), last=False) for index, value in pieces]
        self.link.flush()
        if not all(sent) and all(job.over for job in self.jobs):
            raise ValueError("no request of the step is left: what was to be sent can't be, the log says why")

    def finish(self, result: Any) -> None:
        pieces = self._outcomes(result, True)
        if isinstance(pieces, Failure):
            self.fail(pieces)
            return
        for index, piece in enumerate(pieces):
            last = True
            if not isinstance(piece, Failure):
                try:
                    last = not self.goes_on(index, result[index])
                except SystemExit:
                    raise
                except BaseException as error:  # of the criterion or the value
                    piece = raised(error, [self._ids[index]])
            self._piece(index, frozen(piece), last)

    def goes_on(self, index: int, value: Any) -> bool:
        """Whether the request is in the next step too: its stopping criterion returns False, or, without criteria, its
        answer has the header `ts_stream_next` with `true`."""
        criteria = self.context.stopping_criteria
        if criteria:
            stop = criteria[index](value)
            return stop is not None and not stop
        processor: Any = self.context.request_processor[index]  # whose values may be of any type
        headers = processor.get_response_headers()
        return str(headers.get(STREAM_NEXT, "")).lower() == "true"

    def _put(self, index: int, value: Outcome, last: bool) -> None:
        job = self.jobs[index]
        if not last and job.held and self.ledger.held_bytes(job) > HELD_BYTES_MAX:
            value = Failure(503, f"Over {HELD_BYTES_MAX} bytes of this stream wait for its reader")
        head = self._head(index)
        headers = tuple(pair for pair in head.headers if pair[0] != STREAM_NEXT)
        end = tuple(pair for pair in headers if pair[0].lower() == self._end_key)
        self.ledger.give(job, value, last, head.status, head.phrase, headers, end)


class ContinuousRunner:
    """The main loop of a worker whose model has continuousBatching."""

    def __init__(self, link: Link, loaded: Loaded, opened: Opened, progress: Progress, decode: bool) -> None:
        self._link, self._ledger = link, link.ledger
        self.entry, self._context = loaded.entry, loaded.context
        self._opened = opened
        self._limit = max(1, int(loaded.context.system_properties["batch_size"]))
        self._progress, self._decode = progress, decode
        self._active: list[_Active] = []
        self._unbegun: list[int] = []  # of those, the batches that have had no step yet

    def run(self) -> None:
        """Runs until the frontend sends Stop and everything is answered. SystemExit of a handler passes through."""
        link, ledger = self._link, self._ledger
        while True:
            self._admit()
            if self._active:
                active = self._active
                step = _Step(active, self._context, self._link)
                rows = step.begin(active, self._decode)
                begun, self._unbegun = self._unbegun, []
                self._run(step, rows, begun)
                link.flush()
                link.receive(wait=False)
            elif ledger.stopping and not ledger.jobs:
                return
            else:
                if ledger.outbox:
                    link.flush()
                link.receive(wait=True)

    def _admit(self) -> None:
        """Admits new requests as far as there is room, and drops those whose callers have given up."""
        for one in self._active:
            if one.job.cancelled:
                self._ledger.give(one.job, CANCELLED, last=True)
        self._active = [one for one in self._active if not one.job.over]
        queue = self._ledger.queue
        while queue and len(self._active) < self._limit:
            batch = queue.popleft()
            if not self._ledger.start(batch):
                continue
            if any(_is_single(job) for job in batch.jobs):
                self._call_once(batch)
            else:
                self._active += [_Active(job, self._unused_id(job)) for job in batch.jobs]
                self._unbegun.append(batch.batch_id)

    def _unused_id(self, job: Job) -> str:
        """The request's id with a suffix if it is taken: two clients may choose the same id."""
        used = any(one.id == job.request_id for one in self._active)
        return f"{job.request_id}#{job.job_id}" if used else job.request_id

    def _call_once(self, batch: Batch) -> None:
        """Runs a describe call or a tensor request alone; the result is the whole answer."""
        running = self._opened(batch, self._context)
        rows = running.rows(self._decode)
        if rows:
            self._run(running, rows, [batch.batch_id])

    def _run(self, running: Running, rows: list[Any], begun: Sequence[int]) -> None:
        """Calls the handler; it is the first call for these batches."""
        link = self._link
        link.enter()
        try:
            for batch_id in begun:
                self._progress.begin(batch_id)
            result = self.entry(rows, self._context)
            if inspect.isgenerator(result) or inspect.isawaitable(result) or inspect.isasyncgen(result):
                raise TypeError("with continuousBatching handle returns the answers of one step, it doesn't yield")
            running.finish(result)
        except SystemExit:
            raise
        except BaseException as error:
            running.failed(error)
            running.fail(PREDICTION_FAILED)
        finally:
            link.leave()


def _is_single(job: Job) -> bool:
    item = job.item
    return is_tensor_request(item) or (item is not None and ("describe", "True") in item.headers)
