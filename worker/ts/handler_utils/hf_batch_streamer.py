"""Streams the output of a batch of generations. Needs the package `transformers`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ts.handler_utils.utils import needed


class TextIteratorStreamerBatch:
    """A streamer for `model.generate(…, streamer=…)` of `batch_size` prompts; iterating gives the batch's next pieces.

    Each step is a list with `{"text": piece}` per prompt, until one of them has ended. `timeout`: seconds to wait for a
    piece, None for no limit.
    """

    def __init__(
        self,
        tokenizer: Any,
        batch_size: int,
        skip_prompt: bool = False,
        timeout: float | None = None,
        **decode_kwargs: Any,
    ) -> None:
        streamer = needed("transformers", "transformers", type(self).__name__).TextIteratorStreamer
        self.batch_size = batch_size
        self.streamers = [
            streamer(tokenizer, skip_prompt=skip_prompt, timeout=timeout, **decode_kwargs) for _ in range(batch_size)
        ]
        self._iterators = [iter(one) for one in self.streamers]

    def put(self, value: Any) -> None:
        """New token ids: the prompts [batch, tokens] first, then [batch] at each step. Raises ValueError."""
        if value.shape[0] != self.batch_size:
            raise ValueError(f"{self.batch_size} rows of token ids are expected, the shape is {tuple(value.shape)}")
        for index, streamer in enumerate(self.streamers):
            streamer.put(value[index : index + 1])

    def end(self) -> None:
        for streamer in self.streamers:
            streamer.end()

    def __iter__(self) -> Iterator[list[dict[str, str]]]:
        return self

    def __next__(self) -> list[dict[str, str]]:
        """Waits for a piece of every prompt. Raises StopIteration when one has ended."""
        ended = object()
        pieces = [next(one, ended) for one in self._iterators]
        if ended in pieces:
            raise StopIteration
        return [{"text": str(piece)} for piece in pieces]
