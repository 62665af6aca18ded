"""The base of envelopes: opens requests, hands their inputs to the handler as one list, closes the answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from ts.handler_utils.utils import is_asked, row_value
from ts.utils.util import PredictionException

if TYPE_CHECKING:  # it needs numpy, which not every handler has loaded
    from ts.tensors.types import InferenceRequest

logger = logging.getLogger(__name__)

Handle = Callable[[Any, Any], Any]


def tensors_of(row: Any) -> InferenceRequest | None:
    """The request of a row that came as tensors: over gRPC, or over HTTP with binary data."""
    found: InferenceRequest | None = getattr(row, "request", None)
    return found


def json_object(value: Any) -> dict[str, Any]:
    """A request's JSON object, also from bytes or text. Raises PredictionException 400."""
    try:
        parsed = json.loads(value) if isinstance(value, str | bytes | bytearray) else value
    except ValueError as error:
        raise PredictionException(f"the body isn't JSON: {error}", 400) from error
    if not isinstance(parsed, dict):
        raise PredictionException(f"the body must be a JSON object, not {type(parsed).__name__}", 400)
    return parsed


def list_in(body: dict[str, Any], key: str) -> list[Any]:
    """The list that `body` has under `key`. Raises PredictionException 400."""
    if not isinstance(body.get(key), list):
        raise PredictionException(f'the body needs a list under "{key}", it has: {", ".join(body) or "nothing"}', 400)
    return list(body[key])


def shares(results: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    """`results` cut in pieces of `counts`; a lone request gets all, however many. Raises ValueError."""
    if len(counts) == 1:
        return [results]
    if len(results) != sum(counts):
        raise ValueError(f"the handler returned {len(results)} results for {sum(counts)} inputs")
    ends = [sum(counts[: at + 1]) for at in range(len(counts))]
    return [results[end - count : end] for end, count in zip(ends, counts, strict=True)]


class BaseEnvelope:
    """Around a handler's `handle`: `open` takes a request apart, `close` makes its answer.

    Requests of a batch are opened each on its own; one that can't be opened gets status 400 and leaves the others be.
    An envelope written for TorchServe has `parse_input` and `format_output` instead, for the whole batch.
    """

    def __init__(self, handle_fn: Handle) -> None:
        self._handle_fn = handle_fn
        self._parsed: list[tuple[int, Any]] = []

    def parse_input(self, data: Any) -> list[Any]:
        """The inputs of a batch for the handler. Raises PredictionException for the first that can't be opened."""
        opened = [self.opened(row) for row in data]
        self._parsed = [(len(inputs), note) for inputs, note in opened]
        return [value for inputs, _ in opened for value in inputs]

    def format_output(self, results: Any) -> list[Any]:
        """The answers to the batch that `parse_input` has taken apart."""
        pieces = shares(results, [count for count, _ in self._parsed])
        return [self.close(piece, self._parsed[idx][1], None, idx) for idx, piece in enumerate(pieces)]

    def open(self, value: Any) -> tuple[list[Any], Any]:
        """A request's inputs for the handler, and a note for `close`. Raises PredictionException."""
        raise NotImplementedError(f"{type(self).__name__} has neither open and close nor parse_input and format_output")

    def close(self, results: Sequence[Any], note: Any, context: Any, idx: int) -> Any:
        """The answer to request `idx` from the results for its inputs; no context outside of a server."""
        raise NotImplementedError(f"{type(self).__name__} has no close")

    def handle(self, data: Any, context: Any) -> Any:
        """One answer per request of the batch. Raises PredictionException when none could be opened."""
        if not data or is_asked(context, "describe"):
            return self._handle_fn(data, context)
        if type(self).parse_input is not BaseEnvelope.parse_input:
            return self.format_output(self._handle_fn(self.parse_input(data), context))
        answers: list[Any] = [None] * len(data)
        opened = {idx: found for idx, row in enumerate(data) if (found := self._try(row, idx, answers, context))}
        inputs = list(chain.from_iterable(found for found, _ in opened.values()))
        results = self._handle_fn(inputs, context) if opened else []
        pieces = shares(results, [len(found) for found, _ in opened.values()]) if opened else []
        for (idx, (_, note)), piece in zip(opened.items(), pieces, strict=True):
            answers[idx] = self.close(piece, note, context, idx)
        return answers

    def opened(self, row: Any) -> tuple[list[Any], Any]:
        value = row_value(row)
        return self.open(row if value is None else value)

    def _try(self, row: Any, idx: int, answers: list[Any], context: Any) -> tuple[list[Any], Any] | None:
        try:
            return self.opened(row)
        except PredictionException as error:
            if len(answers) == 1:
                raise
            logger.warning("Request %s: %s", context.get_request_id(idx), error.message)
            if tensors_of(row) is not None:
                answers[idx] = error
                return None
            context.set_response_status(error.error_code, "", idx)
            answers[idx] = {"code": error.error_code, "type": "BadRequestException", "message": error.message}
            return None
