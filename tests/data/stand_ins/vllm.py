"""A stand-in for the package vllm: an engine that returns the prompt, word by word.

Its functions have the parameters of a release's functions, and are coroutines if those are: the record next to this
file is read from the wheels (ts_scripts/record_signatures.py). The release is the newest, or the one that VLLM_RELEASE
names; the tokenizer is declared as VLLM_TOKENIZER (a name in the record) is, by default as the release's own.
"""

import functools
import inspect
import json
import os
import sys
import types
from pathlib import Path

RECORD = json.loads(Path(__file__).with_name("vllm_signatures.json").read_text())
RELEASES = [name for name in RECORD if name.startswith("vllm ")]
RELEASE = os.environ.get("VLLM_RELEASE") or RELEASES[-1]
__version__ = RELEASE.split()[1]
DECLARED = RECORD["transformers 4.57.6"] | RECORD[RELEASE]
DECLARED |= RECORD.get(os.environ.get("VLLM_TOKENIZER", ""), {})
#: What the vocabulary begins with: a token that the tokenizer puts before a text, not before a chat.
BEGIN, WORDS_FROM = 1, 1000


def signature(name):
    return inspect.signature(eval(f"lambda {DECLARED[name]['parameters']}: None"))  # noqa: S307 - of the record


def as_released(name):
    """Arguments are those of the release, whatever the function below is called with: it gets them by name."""

    def decorate(function):
        declared, kind = signature(name), DECLARED[name]["kind"]

        @functools.wraps(function)
        def called(self, *args, **kwargs):
            given = declared.bind(*args, **kwargs).arguments
            more = given.pop("kwargs", {})
            found = function(self, **given, **more)
            assert inspect.isasyncgen(found) == (kind == "async generator"), name
            return _awaited(found) if kind == "coroutine" else found

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        called.__signature__ = declared.replace(parameters=[own, *declared.parameters.values()])
        return called

    return decorate


async def _awaited(value):
    return value


class VLLMClientError(Exception):
    """The error of later releases for a request that they refuse; it is no ValueError."""


Refusal = {"ValueError": ValueError, "VLLMClientError": VLLMClientError}[DECLARED["VLLMValidationError"]["parameters"]]


class SamplingParams:
    def __init__(self, given):
        self.temperature = 1.0 if given.get("temperature") is None else given["temperature"]
        if self.temperature < 0:
            raise Refusal(f"temperature must be non-negative, got {self.temperature}.")
        if given.get("min_tokens", 0) < 0:
            raise Refusal("min_tokens must be greater than or equal to 0")
        self.max_tokens, stop = given.get("max_tokens", 16), given.get("stop") or []
        self.stop = [stop] if isinstance(stop, str) else stop

    @staticmethod
    def from_optional(*args, **kwargs):
        return SamplingParams(signature("SamplingParams.from_optional").bind(*args, **kwargs).arguments)


class AsyncEngineArgs:
    @as_released("AsyncEngineArgs")
    def __init__(self, model, max_model_len=None, **more):
        self.model, self.max_model_len = model, max_model_len


class LoRARequest:
    @as_released("LoRARequest")
    def __init__(self, lora_name, lora_int_id, lora_path):
        assert lora_int_id > 0 and lora_path
        self.lora_name = lora_name


class CompletionOutput:
    @as_released("CompletionOutput")
    def __init__(self, **given):
        vars(self).update(given)


class RequestOutput:
    @as_released("RequestOutput.__init__")
    def __init__(self, **given):
        vars(self).update(given)


class Tokenizer:
    """A word is a token; words get their numbers when they are first seen."""

    def __init__(self):
        self.words = []

    @as_released("Tokenizer.apply_chat_template")
    def apply_chat_template(self, tokenize=True, return_dict=False, chat_template=None, **given):
        messages = given.pop("messages", None) or given.pop("conversation")
        assert given == {"add_generation_prompt": True}, given
        text = " ".join(f"{one['role']}: {one['content']}" for one in messages)
        text = (chat_template or "{}").format(text)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @as_released("Tokenizer.encode")
    def encode(self, text, add_special_tokens=True):
        words = text.split()
        self.words += [word for word in dict.fromkeys(words) if word not in self.words]
        return [BEGIN] * add_special_tokens + [WORDS_FROM + self.words.index(word) for word in words]

    def decode(self, ids):
        return [self.words[one - WORDS_FROM] if one >= WORDS_FROM else str(one) for one in ids]


class AsyncLLMEngine:
    def __init__(self, arguments):
        self.arguments, self.tokenizer = arguments, Tokenizer()

    @classmethod
    @as_released("AsyncLLMEngine.from_engine_args")
    def from_engine_args(cls, engine_args):
        return cls(engine_args)

    @as_released("AsyncLLMEngine.get_tokenizer")
    def get_tokenizer(self):
        return self.tokenizer

    @as_released("AsyncLLMEngine.generate")
    async def generate(self, sampling_params, request_id, prompt=None, inputs=None, lora_request=None):
        prompt = prompt or inputs
        ids = prompt.get("prompt_token_ids") or self.tokenizer.encode(prompt["prompt"])
        limit = self.arguments.max_model_len
        if limit is not None and len(ids) > limit:
            raise Refusal(f"The prompt has {len(ids)} tokens, the maximum model length is {limit}")
        words = self.tokenizer.decode(ids[ids[:1] == [BEGIN] :])
        words = [*([f"<{lora_request.lora_name}>"] if lora_request else []), *words]
        given, ended = words[: sampling_params.max_tokens], "stop"
        stops = [given.index(stop) for stop in sampling_params.stop if stop in given]
        if stops:
            given = given[: min(stops)]
        elif len(given) < len(words):
            ended = "length"
        for count in range(1, len(given) + 1):
            await _awaited(None)
            finished = count == len(given)
            more = {"cumulative_logprob": None, "logprobs": None, "finish_reason": ended if finished else None}
            text = " ".join(given[:count])
            output = CompletionOutput(index=0, text=text, token_ids=list(range(count)), **more)
            yield RequestOutput(
                request_id=request_id,
                prompt=None,
                prompt_token_ids=ids,
                prompt_logprobs=None,
                outputs=[output],
                finished=finished,
            )


for _name in ("vllm.lora", "vllm.lora.request"):
    sys.modules[_name] = types.ModuleType(_name)
sys.modules["vllm.lora.request"].LoRARequest = LoRARequest
