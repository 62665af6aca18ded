"""A batch with tensor requests in it: read before the handler is called, written in the form each of them came in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from ts.context import Context
from ts.protocol.frames import Feed, Item
from ts.runtime import replies, requests
from ts.runtime.feeding import Feeding
from ts.runtime.jobs import Batch, Job
from ts.runtime.replies import (
    NOT_A_LIST,
    PREDICTION_FAILED,
    WRONG_LENGTH,
    Failure,
    Outcome,
    failure_of,
    outcome,
    raised,
)
from ts.runtime.running import Ended, Refused, Running
from ts.runtime.worker import Link
from ts.tensors import forms, rows
from ts.tensors.datatypes import BadTensor, NoSuchRegion
from ts.tensors.forms import Form, Model
from ts.tensors.types import InferenceRequest, InferenceResponse
from ts.utils.util import PredictionException

BAD_REQUEST, NOT_FOUND, INTERNAL = 400, 404, 500


class TensorRunning(Running):
    """Requests of TorchServe's own APIs may be among them."""

    __slots__ = ("_forms", "_model", "_takes_rows")

    def __init__(self, batch: Batch, context: Context, link: Link, model: Model, takes_rows: bool) -> None:
        super().__init__(batch, context, link)
        self._model, self._takes_rows = model, takes_rows
        self._forms: list[Form | None] = []

    # --- requests

    def rows(self, decode: bool) -> list[Any]:
        """Rows, or for handlers that take them InferenceRequests. One that can't be read fails alone."""
        jobs: list[Job] = []
        opened: list[Form | None] = []
        rows: list[Any] = []
        headers: list[dict[str, Any]] = []
        for job in self.jobs:
            item, job.item = job.item, None
            assert item is not None
            try:
                form, row, pairs = self._read(item, decode)
                opened.append(form)
                rows.append(row)
                headers.append(pairs)
                jobs.append(job)
            except BadTensor as error:
                self.ledger.give(job, _refused(error), last=True)
            except Exception as error:
                self.ledger.give(job, _internal(error, job), last=True)
        self.jobs = self.batch.jobs = jobs
        self._forms = opened
        self.context.begin(self, self.batch.request_ids(), headers)
        return rows

    def _read(self, item: Item, decode: bool) -> tuple[Form | None, Any, dict[str, Any]]:
        if requests.is_tensor_request(item):
            form = forms.opened(item, self._model)
            if forms.is_followed(item):
                form.request.following = self._following(item)
            return form, self._taken(form.request), requests.headers(item, ())
        fields = requests.fields(item)
        headers = requests.headers(item, fields)
        if self._takes_rows:
            return None, requests.row(fields, decode), headers
        return None, rows.request_of(fields, dict(item.headers), self._model), headers

    def _following(self, item: Item) -> AsyncIterator[InferenceRequest]:
        """The requests after this one. One that can't be read ends the stream, unless the handler deals with it."""

        def read(feed: Feed) -> InferenceRequest:
            try:
                return forms.opened(item._replace(inputs=feed.inputs), self._model).request
            except BadTensor as error:
                raise PredictionException(str(error), BAD_REQUEST) from None

        return Feeding(self.ledger.jobs[item.job_id], self.ledger, self.link.flush, read)

    def _taken(self, request: InferenceRequest) -> Any:
        return rows.row_of(request) if self._takes_rows else request

    # --- answers

    def _outcomes(self, result: Any, last: bool) -> Sequence[Outcome] | Failure:
        if not isinstance(result, list):
            return NOT_A_LIST
        if len(result) != len(self.jobs):
            return WRONG_LENGTH
        return [self._outcome(index, value, last) for index, value in enumerate(result)]

    def _outcome(self, index: int, value: Any, last: bool) -> Outcome:
        if type(value) is Ended:
            value, last = value.value, True
            if value is None:
                return self._end(index)
        if isinstance(value, BaseException):
            return failure_of(value)
        form = self._forms[index]
        if type(value) is Refused:
            failure = failure_of(value.error)
            return (form.failed(failure.message) if form is not None else b"") or failure
        try:
            if form is None:
                return self._plain(value)
            if self.jobs[index].answered and _is_empty(value):
                return form.end() if last else b""
            return form.answer(self._response(value), last)
        except BadTensor as error:
            return _refused(error)
        except Exception as error:
            return _internal(error, self.jobs[index])

    def _response(self, value: Any) -> InferenceResponse:
        """A result that is no tensor is the handler's fault, not the request's."""
        try:
            return rows.response_of(value, self._model)
        except BadTensor as error:
            raise PredictionException(str(error), INTERNAL) from None

    def _end(self, index: int) -> bytes:
        """What a request ends with that has had its answers."""
        form = self._forms[index]
        return b"" if form is None else form.end()

    def _plain(self, value: Any) -> Outcome:
        """The answer over TorchServe's own APIs: a single text or bytes as it is, anything else as JSON."""
        if not isinstance(value, InferenceResponse):
            return outcome(value)
        outputs = value.outputs
        if len(outputs) == 1 and outputs[0].datatype == "BYTES" and outputs[0].array.size == 1:
            return outcome(outputs[0].array.ravel()[0])
        return outcome({tensor.name: rows.plain_value(tensor) for tensor in outputs})

    def fail(self, failure: Failure) -> None:
        """A handler that raised is TorchServe's 503; to clients of tensor protocols, which ask again after an
        UNAVAILABLE, it is what it is: an internal error."""
        if failure is PREDICTION_FAILED:
            for job, form in zip(self.jobs, self._forms, strict=False):
                if form is not None:
                    self.ledger.give(job, Failure(500, failure.message), last=True)
        super().fail(failure)

    def _head(self, index: int) -> replies.Head:
        head, form = super()._head(index), self._forms[index]
        if form is None or not form.headers:
            return head
        return head._replace(headers=(*form.headers, *head.headers))


def _refused(error: BadTensor) -> Failure:
    return Failure(NOT_FOUND if isinstance(error, NoSuchRegion) else BAD_REQUEST, str(error))


def _internal(error: Exception, job: Job) -> Failure:
    """What can't be read or sent for another reason than the client's: it fails alone, and the log says why."""
    failure = raised(error, [job.request_id])
    return Failure(500, f"{type(error).__name__}: {error}") if failure is PREDICTION_FAILED else failure


def _is_empty(value: Any) -> bool:
    """The nothing that a handler returns once it has sent all it had to say."""
    return value is None or (isinstance(value, (str, bytes, bytearray)) and not value)
