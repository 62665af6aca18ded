"""A batch with tensor requests: decoded before the handler is called, and answered in each request's form."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Final, TypeAlias

from ts.context import Context
from ts.protocol.frames import FEED_BYTES, FEED_COST_BYTES, Feed, Item, size_of
from ts.protocol.shared import Progress
from ts.protocol.text import said, text_of
from ts.runtime.jobs import Batch, Failure, Job, Ledger, Outcome
from ts.runtime.running import (
    PLAIN_HEAD,
    PREDICTION_FAILED,
    Comparing,
    Ended,
    Head,
    Opened,
    Refused,
    Running,
    failure_of,
    fields_of,
    is_comparison,
    is_tensor_request,
    outcome,
    raised,
    wrong_shape,
)
from ts.runtime.worker import Link
from ts.tensors import forms, v1_form
from ts.tensors.forms import Form, ModelSpec
from ts.tensors.types import BadTensor, InferenceRequest, InferenceResponse, NoSuchRegion
from ts.utils.util import PredictionException

#: The size of the steps in which taken bytes are reported to the frontend, while more are waiting.
GRANT_BYTES: Final = FEED_BYTES // 4


class Feeding:
    """An async iterator over the further inputs of a request: `read(feed)` for each Feed, until the last. The
    frontend is told how much was read, and at once when the handler waits for more, so that it can distinguish
    computing from waiting for the client."""

    def __init__(self, job: Job, ledger: Ledger, flush: Callable[[], object], read: Callable[[Feed], Any]) -> None:
        self._job, self._ledger, self._flush, self._read = job, ledger, flush, read
        self._waiting: deque[Feed] = deque()
        self._changed = asyncio.Event()
        self._over = False
        self._taken_bytes = FEED_COST_BYTES  # the request itself
        job.on_feed = self._put
        self._ask(FEED_BYTES - FEED_COST_BYTES)

    def _put(self, feed: Feed) -> None:
        self._waiting.append(feed)
        self._over |= feed.last
        self._changed.set()

    def _ask(self, size_bytes: int) -> None:
        self._ledger.ask_for(self._job, size_bytes)
        self._flush()

    def __aiter__(self) -> Feeding:
        return self

    async def __anext__(self) -> Any:
        while True:
            feed = await self._next()
            if feed is None:
                raise StopAsyncIteration
            if feed.inputs:
                return self._read(feed)

    async def _next(self) -> Feed | None:
        while not self._waiting:
            if self._over:
                return None
            self._grant()
            self._changed.clear()
            await self._changed.wait()
        feed = self._waiting.popleft()
        if self._taken_bytes >= GRANT_BYTES:
            self._grant()
        self._taken_bytes += FEED_COST_BYTES + size_of(feed.inputs)
        return feed

    def _grant(self) -> None:
        if self._taken_bytes:
            size_bytes, self._taken_bytes = self._taken_bytes, 0
            self._ask(size_bytes)


BAD_REQUEST: Final = 400
NOT_FOUND: Final = 404
INTERNAL: Final = 500

#: The method `spend` of `ts.protocol.shared.Progress`.
Spend: TypeAlias = "Callable[[int, float, float], object]"


class TensorRunning(Running):
    """Requests of TorchServe's own APIs may be among them. `spend` gets the size of the batch, and the seconds of
    reading and of writing."""

    __slots__ = ("_forms", "_model", "_read_s", "_spend", "_takes_rows")

    verbatim = False

    def __init__(
        self, batch: Batch, context: Context, link: Link, model: ModelSpec, takes_rows: bool, spend: Spend
    ) -> None:
        super().__init__(batch, context, link)
        self._model, self._takes_rows, self._spend = model, takes_rows, spend
        self._forms: list[Form | None] = []
        self._read_s = 0.0  # told with the first answer

    # --- requests

    def rows(self, decode: bool) -> list[Any]:
        """Rows, or InferenceRequests for handlers that take them. An invalid request fails alone."""
        begun_s = perf_counter()
        jobs: list[Job] = []
        opened: list[Form | None] = []
        rows: list[Any] = []
        asked = self._asked
        for job in self.jobs:
            item, job.item = job.item, None
            assert item is not None
            try:
                form, row, inputs = self._read(item, decode)
                opened.append(form)
                rows.append(row)
                jobs.append(job)
                asked.append((item.headers, inputs))
            except BadTensor as error:
                self.ledger.refuse(job, _refused(error))
            except Exception as error:
                self.ledger.refuse(job, _internal(error, job))
        self.jobs = self.batch.jobs = jobs
        self._forms = opened
        self._read_s = perf_counter() - begun_s
        self.context.begin(self, self.batch.request_ids())
        return rows

    def _read(self, item: Item, decode: bool) -> tuple[Form | None, Any, Sequence[tuple[str, ...]]]:
        """The form, the row, and the inputs for the headers."""
        if is_tensor_request(item):
            form = forms.opened(item, self._model)
            request = form.request
            if request.stream and forms.is_followed(item):
                request.following = self._following(item)
            return form, forms.row_of(request) if self._takes_rows else request, ()
        fields = fields_of(item)
        inputs = [part[:2] for part in fields]
        if self._takes_rows:
            return None, self.row(len(self._asked), fields, decode), inputs
        made = v1_form.request_of if self._model.values else forms.request_of
        return None, made(fields, item.headers, self._model), inputs

    def _following(self, item: Item) -> AsyncIterator[InferenceRequest]:
        """The requests after this one. An invalid one ends the stream, unless the handler catches its exception."""

        def read(feed: Feed) -> InferenceRequest:
            try:
                return forms.opened(item._replace(inputs=feed.inputs), self._model).request
            except BadTensor as error:
                raise PredictionException(str(error), BAD_REQUEST) from None

        return Feeding(self.ledger.jobs[item.job_id], self.ledger, self.link.flush, read)

    # --- answers

    def _outcomes(self, result: Any, last: bool) -> Sequence[Outcome] | Failure:
        if type(result) is not list or len(result) != len(self.jobs):
            failure = wrong_shape(result, len(self.jobs))
            if failure is not None:
                return failure
        begun_s = perf_counter()
        found = [self._written(index, value, last) for index, value in enumerate(result)]
        self._tell_spent(perf_counter() - begun_s)
        return found

    def _outcome(self, index: int, value: Any, last: bool) -> Outcome:
        begun_s = perf_counter()
        found = self._written(index, value, last)
        self._tell_spent(perf_counter() - begun_s)
        return found

    def _tell_spent(self, written_s: float) -> None:
        self._spend(len(self.jobs), self._read_s, written_s)
        self._read_s = 0.0

    def _written(self, index: int, value: Any, last: bool) -> Outcome:
        form = self._forms[index]
        try:
            if type(value) is InferenceResponse and form is not None:
                return form.answer(value, last)
            return self._unusual(index, form, value, last)
        except BadTensor as error:
            return _refused(error)
        except Exception as error:
            return _internal(error, self.jobs[index])

    def _unusual(self, index: int, form: Form | None, value: Any, last: bool) -> Outcome:
        """The outcome for a value that isn't just a response. Raises BadTensor."""
        if type(value) is Ended:
            value, last = value.value, True
            if value is None:
                return self._end(index)
        if isinstance(value, BaseException):
            return failure_of(value)
        if type(value) is Refused:
            failure = failure_of(value.error)
            return (form.failed(failure.message) if form is not None else b"") or failure
        if form is None:
            return self._plain(value)
        # The empty result of a handler that has sent all its pieces before.
        if self.jobs[index].answered and (value is None or isinstance(value, (str, bytes, bytearray)) and not value):
            return form.end() if last else b""
        return form.answer(self._response(value), last)

    def _response(self, value: Any) -> InferenceResponse:
        """The response of a result; a result that isn't a tensor is the handler's fault."""
        try:
            return forms.response_of(value, self._model)
        except BadTensor as error:
            raise PredictionException(str(error), INTERNAL) from None

    def _end(self, index: int) -> bytes:
        """The end of an answer whose messages have all been sent."""
        form = self._forms[index]
        return b"" if form is None else form.end()

    def _plain(self, value: Any) -> Outcome:
        """The answer over TorchServe's own APIs: a single text or bytes unchanged, anything else as JSON. The only
        output of a model that takes values is its value."""
        if not isinstance(value, InferenceResponse):
            return outcome(value)
        outputs = value.outputs
        if len(outputs) == 1 and outputs[0].datatype == "BYTES" and outputs[0].array.size == 1:
            return outcome(outputs[0].array.ravel()[0])
        plain = {tensor.name: forms.plain_value(tensor) for tensor in outputs}
        return outcome(plain[outputs[0].name] if self._model.values and len(outputs) == 1 else plain)

    def fail(self, failure: Failure) -> None:
        """A handler's exception is TorchServe's 503; clients of tensor protocols, which retry after an UNAVAILABLE, get
        an internal error instead."""
        self.batch.failed = len(self.jobs) > 1
        if failure.by_handler and failure.message == PREDICTION_FAILED.message:
            for job, form in zip(self.jobs, self._forms, strict=False):
                if form is not None:
                    self.ledger.give(job, failure._replace(code=INTERNAL), last=True)
        super().fail(failure)

    def _is_plain(self) -> bool:
        if not self.context.is_plain:
            return False
        for form in self._forms:  # noqa: SIM110  # a generator costs more than this loop
            if form is not None and form.headers:
                return False
        return True

    def _head(self, index: int) -> Head:
        form = self._forms[index]
        head = PLAIN_HEAD if self.context.is_plain else super()._head(index)
        if form is None or not form.headers:
            return head
        return head._replace(headers=(*form.headers, *head.headers))


def _refused(error: BadTensor) -> Failure:
    return Failure(NOT_FOUND if isinstance(error, NoSuchRegion) else BAD_REQUEST, text_of(error))


def _internal(error: Exception, job: Job) -> Failure:
    """The failure of a request by the server's fault. Its traceback is logged."""
    failure = raised(error, [job.request_id])
    if not failure.by_handler:
        return failure
    return failure._replace(code=INTERNAL, message=said(error), cause="")


def with_tensors(link: Link, tensors: Mapping[str, Any], takes_rows: bool, progress: Progress) -> Opened:
    """The function that opens batches with requests of a tensor protocol among them. `tensors`: what the model
    declares of its own."""
    model = ModelSpec(**{"name": "", "version": "", "inputs": {}, "outputs": {}, **tensors})

    def opened(batch: Batch, context: Context) -> Running:
        if is_comparison(batch):
            return Comparing(batch, context, link)
        return TensorRunning(batch, context, link, model, takes_rows, progress.spend)

    return opened
