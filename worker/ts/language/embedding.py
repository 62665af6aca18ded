"""Vectors of texts, as sentence-transformers computes them, and scores of pairs of texts."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch

from ts.language.handler import Answer
from ts.language.surface import Fields, Refusal, whole

INPUTS_MAX = 2048
#: One computation has so many tokens with padding at most, or one text.
BATCH_TOKENS = 16_384
AGAIN_PART = 0.1
#: The ways of sentence-transformers to make a vector of a text of its tokens' vectors, by their keys.
_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt",
    "pooling_mode_lasttoken": "last",
}


@dataclass(slots=True)
class Encoded:
    """A text, or a pair of them, as tokens. `types`: of a pair, which text each token is of, for models that ask."""

    ids: list[int]
    types: list[int] = field(default_factory=list)


class Batches:
    """Computes the texts of all waiting requests together, those of similar lengths side by side: `tokens_max` tokens
    with padding, or one text. `compute` runs in a thread and gives a result for each.

    Callers that have got their results often come again at once. The first of them waits for as many others, up to
    AGAIN_PART of the time that the last computation took: alone it would cost several times as much.
    """

    def __init__(self, compute: Callable[[list[Any]], Sequence[Any]], tokens_max: int = BATCH_TOKENS) -> None:
        self._compute, self._tokens_max = compute, tokens_max
        self._waiting: list[tuple[Encoded, asyncio.Future[Any]]] = []
        self._task: asyncio.Task[None] | None = None
        self._last_count, self._last_s, self._ended_s = 0, 0.0, 0.0
        self._again = asyncio.Event()

    async def results(self, texts: Sequence[Encoded]) -> list[Any]:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in texts]
        self._waiting.extend(zip(texts, futures, strict=True))
        if len(self._waiting) >= self._last_count:
            self._again.set()
        if self._task is None:
            self._task = loop.create_task(self._run())
        return list(await asyncio.gather(*futures))

    async def _run(self) -> None:
        await asyncio.sleep(0)  # those that came with this one join it
        try:
            while self._waiting:
                await self._others()
                begun_s, self._last_count = monotonic(), len(self._waiting)
                taken, self._waiting = sorted(self._waiting, key=lambda one: len(one[0].ids)), []
                while taken:
                    batch = [taken.pop()]
                    longest = max(len(batch[0][0].ids), 1)
                    while taken and longest * (len(batch) + 1) <= self._tokens_max:
                        batch.append(taken.pop())
                    wanted = [one for one in batch if not one[1].cancelled()]
                    if wanted:
                        await self._give(wanted)
                self._ended_s = monotonic()
                self._last_s = self._ended_s - begun_s
        finally:
            self._task = None

    async def _others(self) -> None:
        left_s = self._ended_s + AGAIN_PART * self._last_s - monotonic()
        if left_s > 0 and len(self._waiting) < self._last_count:
            self._again.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._again.wait(), left_s)

    async def _give(self, batch: list[tuple[Encoded, asyncio.Future[Any]]]) -> None:
        try:
            found = await asyncio.to_thread(self._compute, [text for text, _ in batch])
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(Refusal(f"The engine failed: {type(error).__name__}: {error}", status=500))
            return
        for (_, future), value in zip(batch, found, strict=True):
            if not future.done():
                future.set_result(value)


def padded(model: Any, tokenizer: Any, texts: Sequence[Encoded]) -> dict[str, torch.Tensor]:
    """The arguments of a model for texts side by side, each [texts, tokens of the longest]."""
    longest = max(1, *(len(one.ids) for one in texts))

    def rows(values: Callable[[Encoded], list[int]], fill: int) -> torch.Tensor:
        filled = [(found := values(one)) + [fill] * (longest - len(found)) for one in texts]
        return torch.tensor(filled, device=model.device)

    given = {
        "input_ids": rows(lambda one: one.ids, tokenizer.pad_token_id or 0),
        "attention_mask": rows(lambda one: [1] * len(one.ids), 0),
    }
    if any(one.types for one in texts) and "token_type_ids" in inspect.signature(model.forward).parameters:
        given["token_type_ids"] = rows(lambda one: one.types, 0)
    return given


class EncoderSurface:
    """The calls of a model that embeds texts (`folder` has sentence-transformers' files, or the mean is taken), or that
    scores pairs of them (a class for sequences with one label)."""

    def __init__(self, model: Any, tokenizer: Any, folder: Path, scores: bool) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._pooling, self._normalised, self._tokens_max = _modules(folder, model, tokenizer)
        self._batches = Batches(self._scores if scores else self._vectors)
        self.calls: dict[str, Callable[[Fields], Awaitable[Answer]]] = (
            {"v1/rerank": self._rerank, "rerank": self._rerank, "v1/score": self._score, "score": self._score}
            if scores
            else {"v1/embeddings": self._embeddings, "v1/score": self._score, "score": self._score}
        )
        self._is_scorer = scores

    # --- computing

    def _vectors(self, texts: list[Encoded]) -> Sequence[Any]:
        """A vector [size] for each text, float32."""
        given = padded(self._model, self._tokenizer, texts)
        with torch.inference_mode():
            states = self._model(**given).last_hidden_state.float()
            mask = given["attention_mask"].unsqueeze(-1).float()
            if self._pooling == "cls":
                found = states[:, 0]
            elif self._pooling == "max":
                found = states.masked_fill(mask == 0, -1e9).max(1).values
            elif self._pooling == "last":
                last = given["attention_mask"].sum(1) - 1
                found = states[torch.arange(len(texts)), last]
            else:
                counts = mask.sum(1).clamp(min=1e-9)
                found = (states * mask).sum(1) / (counts.sqrt() if self._pooling == "mean_sqrt" else counts)
            if self._normalised:
                found = torch.nn.functional.normalize(found, dim=-1)
            return list(found.cpu().numpy())

    def _scores(self, pairs: list[Encoded]) -> Sequence[Any]:
        """A number from 0 to 1 for each pair."""
        with torch.inference_mode():
            found = self._model(**padded(self._model, self._tokenizer, pairs)).logits.float()[:, 0]
            return [float(one) for one in torch.sigmoid(found)]

    def _tokens(self, text: Any, name: str, other: str | None = None) -> Encoded:
        if isinstance(text, list) and text and all(type(one) is int for one in text):
            return Encoded(text[: self._tokens_max])
        if not isinstance(text, str):
            raise Refusal(f"{name} is a text or a list of texts, or of tokens", name)
        given = self._tokenizer(text, other, truncation=True, max_length=self._tokens_max)
        return Encoded(list(given["input_ids"]), list(given.get("token_type_ids") or ()))

    # --- calls

    async def _embeddings(self, body: Fields) -> Answer:
        value: Any = body.get("input")
        many = isinstance(value, list) and not (value and type(value[0]) is int)
        inputs = list(value) if many else [value]
        if not 0 < len(inputs) <= INPUTS_MAX:
            raise Refusal(f"input is a text, or a list of 1 to {INPUTS_MAX} of them", "input")
        form = body.get("encoding_format") or "float"
        if form not in ("float", "base64"):
            raise Refusal(f"encoding_format is float or base64, not {str(form)[:40]}", "encoding_format")
        size = body.get("dimensions")
        if size is not None and (type(size) is not int or not 0 < size <= self._model.config.hidden_size):
            raise Refusal(f"dimensions is a number from 1 to {self._model.config.hidden_size}", "dimensions")
        tokens = [self._tokens(one, "input") for one in inputs]
        vectors = [_cut(one, size) for one in await self._batches.results(tokens)]
        data = [
            {"object": "embedding", "index": at, "embedding": _encoded(vector) if form == "base64" else vector.tolist()}
            for at, vector in enumerate(vectors)
        ]
        return whole({"object": "list", "data": data, "model": body.get("model"), "usage": usage(tokens)})

    async def _pairs(self, pairs: list[tuple[str, str]]) -> tuple[list[float], list[Encoded]]:
        """The score of each pair, and the tokens."""
        if not 0 < len(pairs) <= INPUTS_MAX:
            raise Refusal(f"a request has 1 to {INPUTS_MAX} documents", "documents")
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise Refusal("queries and documents are texts", "documents")
        if self._is_scorer:
            tokens = [self._tokens(first, "query", second) for first, second in pairs]
            return await self._batches.results(tokens), tokens
        tokens = [self._tokens(text, "text_1") for pair in pairs for text in pair]
        vectors = await self._batches.results(tokens)
        scores = [float(_cut(a, None) @ _cut(b, None)) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        return scores, tokens

    async def _rerank(self, body: Fields) -> Answer:
        """Jina's and Cohere's form."""
        query, given = body.get("query"), body.get("documents")
        documents = (
            [one.get("text") if isinstance(one, dict) else one for one in given] if isinstance(given, list) else []
        )
        scores, tokens = await self._pairs([(query, one) for one in documents])  # type: ignore[misc]  # checked there
        order = sorted(range(len(scores)), key=lambda at: -scores[at])
        top = body.get("top_n")
        if top is not None and (type(top) is not int or top < 1):
            raise Refusal("top_n is a whole number of at least 1", "top_n")
        shown = body.get("return_documents") is not False
        results = [
            {"index": at, "relevance_score": scores[at], **({"document": {"text": documents[at]}} if shown else {})}
            for at in order[:top]
        ]
        return whole({"model": body.get("model"), "results": results, "usage": usage(tokens)})

    async def _score(self, body: Fields) -> Answer:
        """vLLM's form: one text with each of several, or two lists of the same length."""
        first, second = body.get("text_1"), body.get("text_2")
        left: list[Any] = first if isinstance(first, list) else [first]
        right: list[Any] = second if isinstance(second, list) else [second]
        if len(left) == 1:
            left = left * len(right)
        if len(left) != len(right):
            raise Refusal(f"text_1 has {len(left)} texts and text_2 {len(right)}", "text_2")
        scores, tokens = await self._pairs(list(zip(left, right, strict=True)))
        data = [{"object": "score", "index": at, "score": score} for at, score in enumerate(scores)]
        return whole({"object": "list", "data": data, "model": body.get("model"), "usage": usage(tokens)})


def usage(texts: Sequence[Encoded]) -> Fields:
    count = sum(len(one.ids) for one in texts)
    return {"prompt_tokens": count, "total_tokens": count}


def _cut(vector: Any, size: int | None) -> Any:
    """The first `size` numbers at the length 1, as Matryoshka models are used; all of them unchanged without it."""
    if size is None:
        return vector
    cut = vector[:size]
    return cut / max(float(np.linalg.norm(cut)), 1e-12)


def _encoded(vector: Any) -> str:
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()


def limits(model: Any, tokenizer: Any) -> list[Any]:
    """The most tokens of a text by the model, and by its tokenizer; None for no limit."""
    return [getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length]


def _modules(folder: Path, model: Any, tokenizer: Any) -> tuple[str, bool, int]:
    """The pooling, whether vectors get the length 1, and the most tokens of a text, by sentence-transformers' files.
    Raises ValueError for modules that aren't known."""
    most = limits(model, tokenizer)
    file = folder / "modules.json"
    if not file.is_file():
        return "mean", False, int(min(filter(None, most)))
    pooling, normalised = "mean", False
    for module in json.loads(file.read_text()):
        kind, place = str(module.get("type")).rpartition(".")[2], folder / str(module.get("path") or "")
        if kind == "Transformer":
            settings = place / "sentence_bert_config.json"
            most.append(_json_of(settings).get("max_seq_length"))
        elif kind == "Pooling":
            pooling = _pooling(_json_of(place / "config.json"))
        elif kind == "Normalize":
            normalised = True
        else:
            raise ValueError(f"modules.json names {kind}, which is not supported: serve it with a handler")
    return pooling, normalised, int(min(filter(None, most)))


def _json_of(file: Path) -> Fields:
    found = json.loads(file.read_text()) if file.is_file() else {}
    return found if isinstance(found, dict) else {}


def _pooling(settings: Fields) -> str:
    named = settings.get("pooling_mode")
    chosen = [named] if named else [mode for name, mode in _POOLINGS.items() if settings.get(name)]
    if len(chosen) != 1 or chosen[0] not in _POOLINGS.values():
        raise ValueError(f"the pooling {' and '.join(map(str, chosen)) or 'none'} is not supported")
    return str(chosen[0])
