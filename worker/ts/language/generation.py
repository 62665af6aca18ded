"""Texts of a causal model of the package transformers, many at a time.

All running texts are one padded batch. Each step computes a token of each; a text that has ended leaves the batch, and
waiting ones join it. A cache that can't be joined (sliding windows, recurrent states) makes batches that end together.
Each text of a batch may have another adapter (LoRA), which needs peft.
"""

from __future__ import annotations

import inspect
import json
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ts.protocol.tasks import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ts.utils.util import PredictionException

#: The name that peft has for the model without an adapter.
BASE = "__base__"
#: The settings of an adapter that change its own weights alone. Others also change the model's, for every text.
_OWN = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out"),
        *("inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha"),
        *("lora_dropout", "peft_version", "r", "rank_pattern", "revision", "target_modules", "task_type"),
        "use_rslora",
    }
)
#: Beginnings of an adapter's training that leave the model's own weights as they are.
_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")


class Adapters:
    """The adapters of a model, each by a key of its own. All methods belong to the thread that computes."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._peft: Any = None
        self._layers: list[Any] = []
        self._hooks: list[Any] = []
        #: The adapter of each row of the next computation: a key, or BASE.
        self.rows: Sequence[str] = ()

    def load(self, key: str, folder: str) -> None:
        """Raises PredictionException (400) for an adapter that isn't for this model, or can't be beside others."""
        import peft  # type: ignore[import-not-found,unused-ignore]

        config = _config(peft, Path(folder))
        try:
            self._inject(peft, key, config)
            found = self._peft.load_adapter(folder, key, torch_device=str(self._model.device))
            if keys := [*found.unexpected_keys, *(one for one in found.missing_keys if f".{key}." in one)]:
                raise ValueError(f"the weights of {keys[0]} are not those of the model or of {ADAPTER_CONFIG}")
            self._try(key)
        except (ValueError, TypeError, RuntimeError, KeyError, IndexError) as error:
            self.remove(key)
            text = " ".join(str(error).split())[:400]
            raise PredictionException(f"The adapter in {folder} does not fit the model: {text}", 400) from error

    def remove(self, key: str) -> None:
        if self._peft is not None and key in self._peft.peft_config:
            self._peft.delete_adapter(key)
        for layer in self._layers:  # those of an adapter whose injection failed half-way
            layer.delete_adapter(key)

    def _inject(self, peft: Any, key: str, config: Any) -> None:
        """Puts the adapter's layers into the model; their weights are 0 so far."""
        try:
            if self._peft is None:
                self._peft = peft.PeftModel(self._model, config, adapter_name=key)
            else:
                self._peft.add_adapter(key, config)
        finally:
            from peft.tuners.lora import LoraLayer  # type: ignore[import-not-found,unused-ignore]

            for hook in self._hooks:
                hook.remove()
            self._layers = [one for one in self._model.modules() if isinstance(one, LoraLayer)]
            self._hooks = [one.register_forward_pre_hook(self._named, with_kwargs=True) for one in self._layers]
        self._model.eval()

    def _named(self, module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Tells a layer the adapter of each row. peft's own way to do so costs a hook for each layer in each step."""
        return given, named | {"adapter_names": list(self.rows)}

    def _try(self, key: str) -> None:
        """Computes a row with the adapter beside one without it: some layers can't do that."""
        self.rows = (key, BASE)
        with torch.inference_mode():
            self._model(input_ids=torch.zeros((2, 2), dtype=torch.long, device=self._model.device))


def _config(peft: Any, folder: Path) -> Any:
    """An adapter's settings. Raises PredictionException (400)."""
    import safetensors  # type: ignore[import-not-found,unused-ignore]

    try:
        given = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        kind = given["peft_type"]
        config = peft.PeftConfig.from_pretrained(str(folder))
        with safetensors.safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
            others = [key for key in file.keys() if "lora_" not in key]  # noqa: SIM118  # it is no mapping
    except (OSError, ValueError, TypeError, LookupError, safetensors.SafetensorError) as error:
        raise PredictionException(f"{folder} is not the folder of an adapter of peft: {error}", 400) from error
    usual = peft.LoraConfig().to_dict()
    changed = [] if kind != "LORA" else [name for name, value in config.to_dict().items() if value != usual.get(name)]
    wrong = {"peft_type": kind} if kind != "LORA" else {name: given.get(name) for name in set(changed) - _OWN}
    if config.peft_type == "LORA" and config.init_lora_weights not in _BEGINNINGS:
        wrong["init_lora_weights"] = config.init_lora_weights
    if others and not wrong:
        wrong = {ADAPTER_WEIGHTS: others[0]}
    if wrong:
        name = min(wrong)
        raise PredictionException(
            f"The adapter in {folder} has {name}: {json.dumps(wrong[name])[:80]}. This engine computes plain LoRA, "
            "which leaves the model's own weights as they are; the engine vllm may take others",
            400,
        )
    config.init_lora_weights = True
    return config


#: The tokens, with padding, that one step computes of new prompts. A longer prompt is computed alone.
PREFILL_TOKENS = 4096
#: The most alternatives of a token that a request may ask for, as in OpenAI's API.
TOP_LOGPROBS_MAX = 20
SEED_LIMIT = 1 << 63


# --- the choice of the next token: OpenAI's parameters, and those that vLLM adds


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


# --- the engine


class Step(NamedTuple):
    """What one step gave a text: a token (None with an error), or the end of it."""

    text: Text
    token: int | None
    logprobs: Logprobs | None
    finish_reason: str | None
    error: BaseException | None = None


class Text:
    """One text in progress. `index`: its place in its request; `tell` is called in the engine's thread; `adapter`: the
    key of its adapter, "" for the model alone."""

    def __init__(
        self, index: int, prompt: list[int], sampling: Sampling, tell: Callable[[list[Step]], object], adapter: str = ""
    ) -> None:
        self.index, self.prompt, self.sampling, self.tell, self.adapter = index, prompt, sampling, tell, adapter
        self.given: list[int] = []
        self.generator = sampling.generator()
        self.cancelled = False


class _Source(NamedTuple):
    """What the encoder made of the prompts [texts, length, size], and the columns that aren't padding."""

    states: torch.Tensor
    mask: torch.Tensor


class _Batch(NamedTuple):
    """The running texts: their cache, the columns that aren't padding [texts, length], the next input [texts], and the
    source of a model with an encoder."""

    texts: list[Text]
    cache: Any
    mask: torch.Tensor
    latest: torch.Tensor
    source: _Source | None = None


class Generator:
    """The engine. `texts_max`: texts that are computed side by side. `on_waiting` gets the number of those that wait,
    when it changes, in any thread."""

    def __init__(self, model: Any, texts_max: int, on_waiting: Callable[[int], object] = int) -> None:
        self._model, self._texts_max, self._on_waiting = model, texts_max, on_waiting
        self._device = model.device
        self._encodes = bool(model.config.is_encoder_decoder)
        takes = inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._has_positions = "position_ids" in takes
        self._cache_name = "past_key_values" if "past_key_values" in takes else "cache"
        self._changed = threading.Condition()
        self._waiting: deque[Text] = deque()
        self._told_waiting = 0
        self._batch: _Batch | None = None
        self._joins = True
        self._adapters: Adapters | None = None
        self._loads: deque[tuple[str, str, Future[None]]] = deque()
        self._leaving: set[str] = set()
        threading.Thread(target=self._run, name="generation", daemon=True).start()

    @property
    def counts(self) -> tuple[int, int]:
        return len(self._batch.texts) if self._batch else 0, len(self._waiting)

    def submit(self, texts: Sequence[Text]) -> None:
        with self._changed:
            self._waiting.extend(texts)
            self._tell_waiting()
            self._changed.notify()

    def load(self, key: str, folder: str) -> Future[None]:
        """Loads an adapter between two steps. The future has the exception of `Adapters.load`."""
        loaded: Future[None] = Future()
        with self._changed:
            self._loads.append((key, folder, loaded))
            self._changed.notify()
        return loaded

    def unload(self, key: str) -> None:
        """Removes an adapter once the texts that have it have ended."""
        with self._changed:
            self._leaving.add(key)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._batch or self._loads or self._leaving):
                    self._changed.wait()
            self._load_adapters()
            with self._changed:
                self._remove_adapters()
                new = self._admitted()
                self._tell_waiting()
            if not new and self._batch is None:
                continue
            concerned = [*new, *(self._batch.texts if self._batch else ())]
            try:
                with torch.inference_mode():
                    steps = self._step(new)
            except BaseException as error:  # each request tells it; the next ones may be smaller
                self._batch = None
                steps = [Step(text, None, None, None, error) for text in concerned]
            _tell(steps)

    def _tell_waiting(self) -> None:
        waiting = sum(not text.cancelled for text in self._waiting)
        if waiting != self._told_waiting:
            self._told_waiting = waiting
            self._on_waiting(waiting)

    def _load_adapters(self) -> None:
        while self._loads:
            key, folder, loaded = self._loads.popleft()
            if not loaded.set_running_or_notify_cancel():
                continue
            self._adapters = self._adapters or Adapters(self._model)
            try:
                self._adapters.load(key, folder)
            except BaseException as error:  # its caller tells it
                loaded.set_exception(error)
            else:
                loaded.set_result(None)

    def _remove_adapters(self) -> None:
        if self._leaving:
            used = {text.adapter for text in (*self._waiting, *(self._batch.texts if self._batch else ()))}
            for key in self._leaving - used:
                if self._adapters is not None:
                    self._adapters.remove(key)
            self._leaving &= used

    def _admitted(self) -> list[Text]:
        """The waiting texts that the next step begins with."""
        running = len(self._batch.texts) if self._batch else 0
        if running and not self._joins:
            return []
        new: list[Text] = []
        longest = 0
        while self._waiting and running + len(new) < self._texts_max:
            text = self._waiting[0]
            longest = max(longest, len(text.prompt))
            if new and longest * (len(new) + 1) > PREFILL_TOKENS:
                break
            self._waiting.popleft()
            if not text.cancelled:
                new.append(text)
        return new

    def _step(self, new: list[Text]) -> list[Step]:
        """One token of each text, and the first one of the new texts."""
        batch = _without(self._batch, lambda text: text.cancelled) if self._batch else None
        steps: list[Step] = []
        if batch is not None:
            mask = torch.cat([batch.mask, batch.mask.new_ones(len(batch.texts), 1)], dim=1)
            self._tell_adapters(batch.texts)
            scores = self._scores(batch.latest[:, None], mask, batch.cache, batch.source)
            chosen = _chosen(scores, batch.texts)
            steps += chosen
            batch = batch._replace(mask=mask, latest=self._inputs(chosen))
        self._batch = batch
        if new:
            ids, mask = self._padded([text.prompt for text in new])
            cache, source = self._cache(), None
            self._tell_adapters(new)
            if self._encodes:
                source = _Source(self._model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state, mask)
                ids, mask = torch.full_like(ids[:, :1], self._start), torch.ones_like(mask[:, :1])
            scores = self._scores(ids, mask, cache, source)
            self._joins = source is None and _is_joinable(cache)
            chosen = _chosen(scores, new)
            steps += chosen
            begun = _Batch(new, cache, mask, self._inputs(chosen), source)
            batch = begun if batch is None else _joined(batch, begun)
        ended = {step.text for step in steps if step.finish_reason}
        self._batch = _without(batch, ended.__contains__) if batch is not None and ended else batch
        return steps

    def _tell_adapters(self, texts: list[Text]) -> None:
        if self._adapters is not None:
            self._adapters.rows = [text.adapter or BASE for text in texts]

    @property
    def _start(self) -> int:
        """The token that a decoder begins with."""
        config = self._model.generation_config
        return int(config.decoder_start_token_id if config.decoder_start_token_id is not None else config.bos_token_id)

    def _cache(self) -> Any:
        from transformers import DynamicCache, EncoderDecoderCache  # type: ignore[import-not-found,unused-ignore]

        if self._encodes:
            return EncoderDecoderCache(DynamicCache(), DynamicCache())
        return DynamicCache(config=self._model.config)

    def _scores(self, ids: torch.Tensor, mask: torch.Tensor, cache: Any, source: _Source | None) -> torch.Tensor:
        """The scores of each text's next token [texts, vocabulary]."""
        if source is not None:
            found = self._model(
                decoder_input_ids=ids,
                encoder_outputs=(source.states,),
                attention_mask=source.mask,
                use_cache=True,
                **{self._cache_name: cache},
            )
            scored: torch.Tensor = found.logits[:, -1]
            return scored
        options: dict[str, Any] = {**self._options, self._cache_name: cache}
        if self._has_positions:
            options["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        found = self._model(input_ids=ids, attention_mask=mask, use_cache=True, **options)
        scores: torch.Tensor = found.logits[:, -1]
        return scores

    def _padded(self, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The prompts side by side, with padding before the shorter ones, and the mask of it."""
        longest = max(map(len, prompts))
        ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return torch.tensor(ids, device=self._device), torch.tensor(mask, device=self._device)

    def _inputs(self, steps: list[Step]) -> torch.Tensor:
        return torch.tensor([step.token for step in steps], device=self._device)


def _tell(steps: list[Step]) -> None:
    """Gives each request its steps, all at once."""
    told: dict[Callable[[list[Step]], object], list[Step]] = {}
    for step in steps:
        if not step.text.cancelled:
            told.setdefault(step.text.tell, []).append(step)
    for tell, found in told.items():
        tell(found)


def _chosen(scores: torch.Tensor, texts: list[Text]) -> list[Step]:
    likeliest = scores.argmax(-1).tolist() if any(text.sampling.greedy for text in texts) else []
    steps = []
    for at, text in enumerate(texts):
        sampling, logprobs = text.sampling, None
        if sampling.greedy:
            token = likeliest[at]
        else:
            token, logprobs = choose(scores[at], sampling, text.prompt, text.given, text.generator)
        text.given.append(token)
        ended = "stop" if token in sampling.ends else "length" if len(text.given) >= sampling.max_tokens else None
        steps.append(Step(text, token, logprobs, ended))
    return steps


def _is_joinable(cache: Any) -> bool:
    """Whether it is only keys and values of all tokens, so that others can be put beside them."""
    from transformers.cache_utils import DynamicLayer  # type: ignore[import-not-found,unused-ignore]

    return all(type(layer) is DynamicLayer for layer in getattr(cache, "layers", [None]))


def _joined(left: _Batch, right: _Batch) -> _Batch:
    length = max(left.mask.shape[1], right.mask.shape[1])
    for ours, theirs in zip(left.cache.layers, right.cache.layers, strict=True):
        ours.keys = torch.cat([_lengthened(ours.keys, length), _lengthened(theirs.keys, length)])
        ours.values = torch.cat([_lengthened(ours.values, length), _lengthened(theirs.values, length)])
    masks = [torch.nn.functional.pad(one.mask, (length - one.mask.shape[1], 0)) for one in (left, right)]
    latest = torch.cat([left.latest, right.latest])
    return _Batch([*left.texts, *right.texts], left.cache, torch.cat(masks), latest)


def _lengthened(values: torch.Tensor, length: int) -> torch.Tensor:
    """Keys or values [texts, heads, length, size] with zeros before them."""
    return torch.nn.functional.pad(values, (0, 0, length - values.shape[2], 0))


def _without(batch: _Batch | None, gone: Callable[[Text], bool]) -> _Batch | None:
    """The batch without some of its texts, and without the columns that were theirs alone."""
    if batch is None:
        return None
    kept = [at for at, text in enumerate(batch.texts) if not gone(text)]
    if len(kept) == len(batch.texts):
        return batch
    if not kept:
        return None
    chosen = torch.tensor(kept, device=batch.mask.device)
    batch.cache.batch_select_indices(chosen)
    mask = batch.mask[chosen]
    source = batch.source and _Source(batch.source.states[chosen], batch.source.mask[chosen])
    if source is None and _is_joinable(batch.cache):
        first = int(mask.any(0).int().argmax())
        mask = mask[:, first:]
        for layer in batch.cache.layers:
            layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]
    return _Batch([batch.texts[at] for at in kept], batch.cache, mask, batch.latest[chosen], source)
