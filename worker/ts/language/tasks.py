"""Tasks of transformers' pipelines: classes of texts and of tokens, words for masks, answers to questions.

The texts of all waiting requests are computed together. Results are those of the pipelines, but KServe's V1 gets what
KServe's huggingfaceserver answers. Requests with numbers in place of texts get the outputs of `forward`
(docs/language-models.md).
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ts.compat.triton_backend.graphs import GraphAdapter
from ts.compat.triton_backend.torch_graphs import TorchModule
from ts.context import Context
from ts.handler_utils.utils import as_sent, row_value
from ts.language.embedding import BATCH_TOKENS, INPUTS_MAX, Batches, Encoded, padded, usage
from ts.language.handler import Answer, json_bytes, parameters, results, strings
from ts.language.surface import Fields, Refusal, whole
from ts.protocol.frames import Input
from ts.protocol.tasks import ANSWER, ARGUMENT, CLASSIFY, FILL, TAG
from ts.tensors import v1_form
from ts.tensors.forms import ModelSpec, plain_value
from ts.tensors.types import BadTensor, InferenceRequest, InferenceResponse, Tensor
from ts.tensors.v1_form import INSTANCES, V1Request, V1Response
from ts.utils.util import PredictionException

#: What `predictions` adds to V1's answers.
PREDICTIONS = ("", "probabilities", "raw_logits")
#: For masks, each token has a number for each word of the vocabulary: so many are computed at once, of all tokens.
_MASK_NUMBERS = 1 << 26
#: A request for masks has an answer with so many words at most, and so many numbers with all of the vocabulary.
_WORDS_MAX, _NUMBERS_MAX = 20_000, 1 << 21
#: The members of a text that has two parts; all but a pair's second are needed.
_PARTS = {CLASSIFY: ("text", "text_pair"), ANSWER: ("question", "context")}
#: A question with a part of its context has so many tokens, and two parts so many in common, as in pipelines.
_QUESTION_TOKENS, _COMMON_TOKENS = 384, 128


def _whole(most: int) -> tuple[Callable[[Any], bool], str]:
    return lambda value: type(value) is int and 1 <= value <= most, f"a whole number from 1 to {most}"


def _one_of(*words: str) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value in words, f"one of {', '.join(words)}"


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= INPUTS_MAX and all(isinstance(one, str) for one in value)


_COUNT, _TEXTS = _whole(1000), (_is_texts, f"a list of 1 to {INPUTS_MAX} texts")
#: The parameters of pipelines that requests may give, by task: what is allowed, in a function and in words.
_PARAMETERS: Mapping[str, Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    CLASSIFY: {
        "top_k": (lambda value: value is None or _COUNT[0](value), f"null, or {_COUNT[1]}"),
        "function_to_apply": _one_of("sigmoid", "softmax", "none"),
    },
    TAG: {
        "aggregation_strategy": _one_of("none", "simple", "first", "average", "max"),
        "ignore_labels": (lambda value: value == [] or _is_texts(value), _TEXTS[1]),
    },
    FILL: {"top_k": _COUNT, "targets": _TEXTS},
    ANSWER: {
        "top_k": _COUNT,
        "max_answer_len": _whole(_QUESTION_TOKENS),
        "handle_impossible_answer": (lambda value: type(value) is bool, "true or false"),
    },
}


@dataclass(slots=True)
class Text(Encoded):
    """`result` makes the result of the model's numbers: [labels], or a row for each token."""

    result: Callable[[torch.Tensor], Any] = torch.Tensor.tolist


class TaskModel:
    """A model with one of these tasks. `calls`: those of vLLM's API."""

    def __init__(self, task: str, model: Any, tokenizer: Any, tokens_max: int, predictions: str) -> None:
        tokenizer.model_max_length = tokens_max
        self._task, self._model, self._tokenizer = task, model, tokenizer
        self._predictions = predictions
        self._questions = _Questions(tokenizer) if task == ANSWER else None
        self._pipeline: Any = None
        self._refusals: tuple[type[Exception], ...] = ()
        if task != ANSWER:
            self._pipeline, self._refusals = _pipeline(task, model, tokenizer)
        most = _MASK_NUMBERS // model.config.vocab_size if task == FILL else BATCH_TOKENS
        self._batches = Batches(self._computed, most)
        self._forward = GraphAdapter(TorchModule.of(model, model.device))
        self.calls = {"classify": self._classify, "v1/classify": self._classify} if task == CLASSIFY else {}

    # --- requests

    async def answer(self, row: Any, context: Context) -> Any:
        """The answer to a request of any API, JSON for TorchServe's. Raises PredictionException."""
        request = getattr(row, "request", None)
        try:
            if isinstance(request, V1Request):
                return await self._of_v1(request)
            if isinstance(request, InferenceRequest):
                return await self._of_tensors(request, parameters(request))
            return await self._of_body(row, context.model_name)
        except Refusal as error:
            raise PredictionException(str(error), error.status) from None
        except BadTensor as error:
            raise PredictionException(str(error), 400) from None

    async def _of_v1(self, request: V1Request) -> InferenceResponse:
        texts = self._texts(next(one for name in INSTANCES if isinstance(one := request.payload.get(name), list)))
        if texts is None and not _are_texts(request.inputs):
            return await self._numbers(request)
        texts = self._joined(request.inputs) if texts is None else texts
        given = parameters(request)
        if given and self._task != ANSWER:
            raise Refusal(f"predictions of V1 have no parameters for {self._task}; {', '.join(given)} are for others")
        return V1Response([], payload={"predictions": await self._results(texts, given, v1=True)})

    async def _of_tensors(self, request: InferenceRequest, given: Fields) -> InferenceResponse:
        """MLServer's form for texts: JSON of the result for each. Of one `args`, and of one text with masks, a list is
        its elements."""
        if not _are_texts(request.inputs):
            return await self._numbers(request)
        found = await self._results(self._joined(request.inputs), given)
        opened = request.inputs[0].name == ARGUMENT or self._task == FILL
        if opened and len(found) == 1 and isinstance(found[0], list):
            found = found[0]
        return InferenceResponse([results(found)])

    async def _of_body(self, row: Any, name: str) -> bytes:
        """What a pipeline gives for the `inputs` of a JSON object with `parameters`, for other JSON, or for a text."""
        value = row_value(row)
        parts = row if value is None and isinstance(row, dict) else {"body": value}
        if value is not None:
            read = _read(value)
            named = next((key for key in INSTANCES if isinstance(read, dict) and key in read), "")
            given = (read.get("parameters") or {}) if named else {}
            inputs = read[named] if named else read
            texts = self._texts(inputs if isinstance(inputs, list) else [inputs])
            if texts is not None:
                if not isinstance(given, dict):
                    raise Refusal("parameters is a JSON object", "parameters")
                found = await self._results(texts, given)
                alone = isinstance(inputs, str) and self._task == CLASSIFY and "top_k" not in given
                return json_bytes(found if isinstance(inputs, list) or alone else found[0])
        sent = [Input(key, "", _bytes(part)) for key, part in parts.items()]
        request = v1_form.request_of(sent, (), ModelSpec(name, "", {}, {}))
        if _are_texts(request.inputs):
            found = await self._results(self._joined(request.inputs), {})
            return json_bytes(found if self._task == CLASSIFY or len(found) > 1 else found[0])
        answered = {one.name: plain_value(one) for one in (await self._numbers(request)).outputs}
        return json_bytes(next(iter(answered.values())) if len(answered) == 1 else answered)

    async def _numbers(self, request: InferenceRequest) -> InferenceResponse:
        """The outputs of `forward` for tensors. Raises PredictionException."""
        (found,) = await asyncio.to_thread(self._forward.answers, [request], None)
        if isinstance(found, Exception):
            raise found
        if not isinstance(found, InferenceResponse):
            raise PredictionException(str(found), 500)
        return found

    def _texts(self, inputs: Any) -> list[Any] | None:
        """The texts of a request, each with its parts as an object if it has two; None for numbers. Raises Refusal."""
        parts = _PARTS.get(self._task, ())

        def is_text(value: Any) -> bool:
            if isinstance(value, dict):
                fits = set(value) <= set(parts) and (set(value) == set(parts) or "text" in value)
                return fits and all(isinstance(one, str) for one in value.values())
            return isinstance(value, str)

        if not isinstance(inputs, list) or not all(is_text(one) for one in inputs):
            return None
        if self._task == ANSWER and any(isinstance(one, str) for one in inputs):
            raise Refusal("a question is an object with question and context, which are texts", "inputs")
        return inputs

    def _joined(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The texts of tensors: one of them, or one for each part. Raises Refusal."""
        columns = {one.name: strings(one) for one in tensors}
        parts = _PARTS.get(self._task, ())
        if set(columns) == set(parts):
            if len({len(column) for column in columns.values()}) != 1:
                raise Refusal(f"{' and '.join(columns)} have different numbers of texts")
            return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        if self._task == ANSWER or len(columns) != 1:
            pairs = f"two, {' and '.join(parts)}" if parts else ""
            wanted = " or ".join(filter(None, ["" if self._task == ANSWER else "one input", pairs]))
            raise Refusal(f"the texts are {wanted}, of BYTES; the request has {', '.join(columns)}")
        return next(iter(columns.values()))

    # --- computing

    async def _results(self, inputs: list[Any], given: Fields, *, v1: bool = False) -> list[Any]:
        """The result of each text. Raises Refusal."""
        if not 0 < len(inputs) <= INPUTS_MAX:
            raise Refusal(f"a request has 1 to {INPUTS_MAX} texts")
        self._check(given)
        if self._questions is not None:
            return await self._answered(self._questions, inputs, given)
        texts = [self._encoded(one, given, v1) for one in inputs]
        if self._task == FILL:
            masks = sum(one.ids.count(self._tokenizer.mask_token_id) for one in texts)
            whole_vocabulary = bool(v1 and self._predictions)
            count = masks * (self._model.config.vocab_size if whole_vocabulary else given.get("top_k", 5))
            most = _NUMBERS_MAX if whole_vocabulary else _WORDS_MAX
            if count > most:
                raise Refusal(f"the answer has {count} words for {masks} masks, at most {most}: send fewer at once")
        return await self._batches.results(texts)

    async def _answered(self, questions: _Questions, inputs: list[Any], given: Fields) -> list[Any]:
        parts = [questions.parts(one["question"], one["context"], given) for one in inputs]
        found = iter(await self._batches.results([part for several in parts for part in several]))
        return [questions.best([next(found) for _ in several], given) for several in parts]

    def _check(self, given: Fields) -> None:
        known = _PARAMETERS[self._task]
        for name, value in given.items():
            if name not in known:
                raise Refusal(f"{name} is no parameter of {self._task}; there are {', '.join(known)}", name)
            allowed, words = known[name]
            if not allowed(value):
                raise Refusal(f"{name} is {words}, not {str(value)[:40]}", name)
        if self._task == FILL and given.get("top_k", 1) > self._model.config.vocab_size:
            raise Refusal(f"top_k is at most {self._model.config.vocab_size}, the words that there are", "top_k")

    def _encoded(self, text: Any, given: Fields, v1: bool) -> Text:
        made = self._pipeline
        try:
            before, _, after = made._sanitize_parameters(**given)
            if self._task == CLASSIFY:
                before["truncation"] = True
            elif self._task == FILL:
                before["tokenizer_kwargs"] = {"truncation": True}
            found: Any = made.preprocess(text, **before)
            one = next(found) if self._task == TAG else found
        except self._refusals as error:
            raise Refusal(str(error)) from None
        ids = one["input_ids"][0].tolist()
        if not ids:
            raise Refusal("a text has no tokens")

        def result(numbers: torch.Tensor) -> Any:
            if v1:
                return self._of_kserve(numbers, ids)
            outputs = {**one, "logits": numbers[None]}
            return made.postprocess([outputs] if self._task == TAG else outputs, **after)

        return Text(ids, one["token_type_ids"][0].tolist() if "token_type_ids" in one else [], result)

    def _of_kserve(self, numbers: torch.Tensor, ids: list[int]) -> Any:
        """What KServe's huggingfaceserver makes of the logits."""
        if self._task == FILL:
            numbers = numbers[[at for at, token in enumerate(ids) if token == self._tokenizer.mask_token_id]]
        if not self._predictions:
            best = numbers.argmax(-1)
            if self._task == FILL:
                return self._tokenizer.decode(best)
            return [best.tolist()] if self._task == TAG else int(best)
        rounded = self._predictions == "probabilities"
        rows = (numbers.softmax(-1) if rounded else numbers).tolist()

        def shown(value: float) -> Any:
            text = f"{value:.4f}"
            return value if not rounded else text if self._task == FILL else float(text)

        if self._task == CLASSIFY:
            return {str(at): shown(value) for at, value in enumerate(rows)}
        if self._task == TAG:
            return [{str(at): shown(value) for at, value in enumerate(row)} for row in rows]
        return [[{str(at): shown(value)} for at, value in enumerate(row)] for row in rows]

    def _computed(self, texts: list[Text]) -> Sequence[Any]:
        """The results of texts that are computed side by side."""
        if self._task == CLASSIFY and len(texts) > 1 and getattr(self._model.config, "pad_token_id", None) is None:
            return [self._computed([one])[0] for one in texts]  # such a class may find its last token only alone
        with torch.inference_mode():
            found = self._model(**padded(self._model, self._tokenizer, texts))
            numbers = found.logits if "logits" in found else torch.stack((found.start_logits, found.end_logits), -1)
            rows = (
                numbers
                if self._task == CLASSIFY
                else [row[: len(one.ids)] for one, row in zip(texts, numbers, strict=True)]
            )
            return [one.result(row.float().cpu()) for row, one in zip(rows, texts, strict=True)]

    # --- vLLM's call

    async def _classify(self, body: Fields) -> Answer:
        inputs = body.get("input")
        texts = self._texts(inputs if isinstance(inputs, list) else [inputs])
        if texts is None or not 0 < len(texts) <= INPUTS_MAX:
            raise Refusal(f"input is a text, or a list of 1 to {INPUTS_MAX} of them", "input")
        labels = self._model.config.id2label
        sigmoid = self._model.config.problem_type == "multi_label_classification" or len(labels) == 1
        encoded = [self._encoded(one, {}, v1=False) for one in texts]
        for one in encoded:
            one.result = torch.sigmoid if sigmoid else lambda numbers: numbers.softmax(-1)
        data = [
            {"index": at, "label": labels[int(row.argmax())], "probs": row.tolist(), "num_classes": len(row)}
            for at, row in enumerate(await self._batches.results(encoded))
        ]
        told = {"id": f"classify-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        return whole({**told, "model": body.get("model"), "data": data, "usage": usage(encoded)})


class _Questions:
    """Questions about a context, of which a long one is read in parts, as the pipelines of transformers 4 did; later
    ones have none for it."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                "question-answering needs a tokenizer that tells the places of its tokens (tokenizer.json)"
            )
        self._tokenizer = tokenizer
        self._tokens_max = min(tokenizer.model_max_length, _QUESTION_TOKENS)
        self._common = min(self._tokens_max // 2, _COMMON_TOKENS)

    def parts(self, question: str, context: str, given: Fields) -> list[Text]:
        """Raises Refusal."""
        length = len(self._tokenizer(question, "")["input_ids"])
        if length + self._common >= self._tokens_max:
            most = self._tokens_max - self._common - 1
            raise Refusal(f"question has {length} tokens; it may have {most}", "question")
        if not context.strip() or not question.strip():
            raise Refusal("question and context are texts that aren't empty", "inputs")
        found = self._tokenizer(
            question,
            context,
            truncation="only_second",
            max_length=self._tokens_max,
            stride=self._common,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        types = found.get("token_type_ids") or [[] for _ in found["input_ids"]]
        return [
            Text(ids, types[at], partial(self._spans, found, at, context, given))
            for at, ids in enumerate(found["input_ids"])
        ]

    def _spans(self, found: Any, at: int, context: str, given: Fields, numbers: torch.Tensor) -> list[Fields]:
        """The likeliest answers in a part, each with its place in the context."""
        of_context = np.array([one == 1 for one in found.sequence_ids(at)])
        counts = of_context.copy()
        counts[[token == self._tokenizer.cls_token_id for token in found["input_ids"][at]]] = True
        chances = torch.where(torch.tensor(counts)[:, None], numbers, -1e4).softmax(0).numpy()
        allowed = np.tril(np.triu(np.outer(of_context, of_context)), given.get("max_answer_len", 15) - 1)
        pairs = np.where(allowed, np.outer(*chances.T), -1)
        spans = []
        for index in np.argsort(-pairs, axis=None, kind="stable")[: min(given.get("top_k", 1), allowed.sum())]:
            first, last = divmod(int(index), len(pairs))
            begin, end = self._place(found, at, first)[0], self._place(found, at, last)[1]
            score = float(pairs[first, last])
            spans.append({"score": score, "start": begin, "end": end, "answer": context[begin:end]})
        if given.get("handle_impossible_answer"):
            spans.append({"score": float(chances[0].prod()), "start": 0, "end": 0, "answer": ""})
        return spans

    def _place(self, found: Any, at: int, token: int) -> tuple[int, int]:
        """The begin and end of a token's word."""
        word = found.token_to_word(at, token)
        begin, end = found["offset_mapping"][at][token] if word is None else found.word_to_chars(at, word, 1)
        return int(begin), int(end)

    def best(self, spans: list[list[Fields]], given: Fields) -> Any:
        """Of the answers in all parts the likeliest, or a list of the `top_k`."""
        nothing = [one for part in spans for one in part if not one["answer"]]
        found = [one for part in spans for one in part if one["answer"]]
        if nothing:
            found.append(min(nothing, key=lambda one: float(one["score"])))
        found.sort(key=lambda one: -one["score"])
        count = given.get("top_k", 1)
        return found[:count] if count > 1 else found[0]


def _pipeline(task: str, model: Any, tokenizer: Any) -> tuple[Any, tuple[type[Exception], ...]]:
    """The pipeline, and what it raises for inputs that it can't read."""
    from transformers import pipelines  # type: ignore[import-not-found,unused-ignore]

    made = pipelines.pipeline(task, model=model, tokenizer=tokenizer, device=model.device)
    return made, (ValueError, pipelines.base.PipelineException)


def _are_texts(tensors: Sequence[Tensor]) -> bool:
    return bool(tensors) and all(one.datatype == "BYTES" for one in tensors)


def _read(value: Any) -> Any:
    """The JSON value of a body, or its text; None for bytes that are neither."""
    if not isinstance(value, (bytes, bytearray, str)):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, (dict, list, str)) else None


def _bytes(value: Any) -> bytes:
    sent = as_sent(value)
    return sent if isinstance(sent, bytes) else sent.encode()
