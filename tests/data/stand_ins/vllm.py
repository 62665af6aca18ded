"""A stand-in for the package vllm: an engine that gives the prompt back, word by word, with the same interface."""

import asyncio
import sys
import types
from dataclasses import dataclass, field


class SamplingParams:
    def __init__(self, max_tokens=16, temperature=1.0, stop=None):
        if temperature < 0:
            raise ValueError(f"temperature must be non-negative, got {temperature}.")
        self.max_tokens, self.stop = max_tokens, stop


class AsyncEngineArgs:
    def __init__(self, model, served_model_name=None, max_num_seqs=256):
        self.model, self.served_model_name = model, served_model_name


@dataclass
class Completion:
    text: str
    token_ids: list
    finish_reason: "str | None"


@dataclass
class RequestOutput:
    prompt_token_ids: list
    outputs: list = field(default_factory=list)


class Tokenizer:
    def apply_chat_template(self, messages, tokenize, add_generation_prompt, chat_template="{}"):
        assert not tokenize and add_generation_prompt
        return chat_template.format(" ".join(f"{one['role']}: {one['content']}" for one in messages))


class AsyncLLMEngine:
    @classmethod
    def from_engine_args(cls, arguments):
        return cls()

    async def get_tokenizer(self):
        return Tokenizer()

    async def generate(self, prompt, sampling_params, request_id, lora_request=None):
        words = prompt.split() if isinstance(prompt, str) else [str(one) for one in prompt["prompt_token_ids"]]
        given = [*([f"<{lora_request.name}>"] if lora_request else []), *words][: sampling_params.max_tokens]
        for count in range(1, len(given) + 1):
            await asyncio.sleep(0)
            finished = None if count < len(given) else "length" if len(given) < len(words) else "stop"
            yield RequestOutput(words, [Completion(" ".join(given[:count]), given[:count], finished)])


class LoRARequest:
    def __init__(self, name, number, path):
        assert number > 0 and path
        self.name = name


for _name in ("vllm.lora", "vllm.lora.request"):
    sys.modules[_name] = types.ModuleType(_name)
sys.modules["vllm.lora.request"].LoRARequest = LoRARequest
