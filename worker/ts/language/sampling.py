"""The choice of the next token: OpenAI's parameters, and those that vLLM adds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

#: The most alternatives of a token that a request may ask for, as in OpenAI's API.
TOP_LOGPROBS_MAX = 20
SEED_LIMIT = 1 << 63


@dataclass(slots=True)
class Sampling:
    """How one text is chosen. `temperature` 0: always the likeliest token; `logprobs`: None, or the number of
    alternatives that are told with each token; `ends`: tokens that end the text."""

    max_tokens: int
    ends: frozenset[int]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether it is the likeliest token of the model's own scores."""
        changed = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1 or self.logit_bias
        return self.temperature == 0 and not changed and not self.min_tokens and self.logprobs is None

    def generator(self) -> torch.Generator:
        """The random numbers of one text, the same ones for the same seed."""
        made = torch.Generator()
        made.manual_seed((random.getrandbits(63) if self.seed is None else self.seed) % SEED_LIMIT)
        return made


@dataclass(slots=True)
class Logprobs:
    """The logarithm of a token's probability, and those of the likeliest tokens, by number."""

    chosen: float
    top: list[tuple[int, float]]


def choose(
    scores: torch.Tensor, sampling: Sampling, prompt: list[int], given: list[int], generator: torch.Generator
) -> tuple[int, Logprobs | None]:
    """The next token. `scores` [vocabulary]: the model's, of any precision; `given`: the tokens of the text so far.
    Logprobs are of the model's own scores."""
    scores = scores.float().cpu()
    own = torch.log_softmax(scores, dim=-1) if sampling.logprobs is not None else None
    scores = _changed(scores, sampling, prompt, given)
    token = int(scores.argmax()) if sampling.temperature == 0 else _drawn(scores, sampling, generator)
    if own is None:
        return token, None
    top = torch.topk(own, sampling.logprobs) if sampling.logprobs else None
    likeliest: list[tuple[int, float]] = []
    if top is not None:
        likeliest = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return token, Logprobs(float(own[token]), likeliest)


def _changed(scores: torch.Tensor, sampling: Sampling, prompt: list[int], given: list[int]) -> torch.Tensor:
    scores = scores.clone()
    if sampling.repetition_penalty != 1 and (prompt or given):
        seen = torch.tensor(sorted({*prompt, *given}))
        found = scores[seen]
        penalty = sampling.repetition_penalty
        scores[seen] = torch.where(found > 0, found / penalty, found * penalty)
    if given and (sampling.presence_penalty or sampling.frequency_penalty):
        seen, counts = torch.unique(torch.tensor(given), return_counts=True)
        scores[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    if len(given) < sampling.min_tokens:
        scores[list(sampling.ends)] = -torch.inf
    return scores


def _drawn(scores: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    values, tokens = torch.sort(scores / sampling.temperature, descending=True)
    if 0 < sampling.top_k < len(values):
        values, tokens = values[: sampling.top_k], tokens[: sampling.top_k]
    shares = torch.softmax(values, dim=-1)
    if sampling.top_p < 1:
        kept = int((shares.cumsum(-1) - shares < sampling.top_p).sum())
        shares = shares[: max(kept, 1)]
    if sampling.min_p > 0:
        shares = shares[: max(int((shares >= sampling.min_p * shares[0]).sum()), 1)]
    return int(tokens[int(torch.multinomial(shares, 1, generator=generator))])


def sampling_of(body: dict[str, Any], ends: frozenset[int], most: int, usual: dict[str, Any]) -> Sampling:
    """The parameters of a request, whose types and ranges were checked. `most`: tokens at most; `usual`: the model's
    own values of the parameters that it doesn't name."""

    def value(name: str, other: Any) -> Any:
        found = body.get(name)
        return usual.get(name, other) if found is None else found

    wanted = body.get("max_completion_tokens") or body.get("max_tokens")
    return Sampling(
        max_tokens=min(most, wanted) if wanted else most,
        ends=frozenset() if body.get("ignore_eos") else ends,
        temperature=float(value("temperature", 1.0)),
        top_p=float(value("top_p", 1.0)),
        top_k=int(value("top_k", 0)),
        min_p=float(value("min_p", 0.0)),
        presence_penalty=float(value("presence_penalty", 0.0)),
        frequency_penalty=float(value("frequency_penalty", 0.0)),
        repetition_penalty=float(value("repetition_penalty", 1.0)),
        min_tokens=int(value("min_tokens", 0)),
        logit_bias={int(token): float(bias) for token, bias in (body.get("logit_bias") or {}).items()},
        seed=body.get("seed"),
    )
