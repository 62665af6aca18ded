"""Language models in vLLM's engine, behind OpenAI's completions and chat completions. Needs `vllm`.

A request's `url_path` says which: `v1/completions`, `v1/chat/completions`, `v1/models`; without one (gRPC) it is a chat
when the body has `messages`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ts.handler_utils.missing import needed
from ts.handler_utils.utils import send_intermediate_predict_response
from ts.torch_handler.base_handler import BaseHandler
from ts.torch_handler.rows import row_value
from ts.utils.util import PredictionException

if TYPE_CHECKING:
    from ts.context import Context

_WHAT = "vllm_handler"
#: Members of a request that are vLLM's sampling parameters by the same name.
SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
)
_PREFIXES: Mapping[bool, str] = MappingProxyType({True: "chatcmpl", False: "cmpl"})


class _Wish(NamedTuple):
    """One request, read. `prompt` is a text or token ids."""

    ident: str
    model: str
    chat: bool
    stream: bool
    prompt: Any
    sampling: dict[str, Any]


class VLLMHandler(BaseHandler):
    """model-config.yaml: `handler: {model_path: DIR or hub name, vllm_engine_config: {…}, adapters: {NAME: DIR},
    chat_template: TEXT}`. Requests run beside each other in the engine, up to the model's `maxConcurrency`."""

    def __init__(self) -> None:
        super().__init__()
        self.vllm_engine: Any = None
        self.adapters: dict[str, str] = {}
        self.served: list[str] = []
        self.chat_template: str | None = None

    def initialize(self, context: Context) -> None:
        """Raises PackageMissing, ValueError for what model-config.yaml lacks, and what vLLM raises."""
        self.context = context
        section = context.model_yaml_config.get("handler")
        section = section if isinstance(section, dict) else {}
        vllm = needed("vllm", "vllm", _WHAT)
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        options = _engine_options(section, str(context.system_properties["model_dir"]))
        self.vllm_engine = vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(**options))
        named = options.get("served_model_name") or options["model"]
        self.served = [named] if isinstance(named, str) else list(named)
        self.adapters = dict(section.get("adapters") or {})
        self.chat_template = section.get("chat_template")
        self.initialized = True

    async def handle(self, data: Any, context: Context) -> list[Any]:
        """Each request's answer, or what went wrong with it."""
        began_s = time.perf_counter()
        answers = await asyncio.gather(
            *(self._serve(row, context, idx, len(data)) for idx, row in enumerate(data)), return_exceptions=True
        )
        if context.metrics is not None:
            context.metrics.add_time("HandlerTime", round((time.perf_counter() - began_s) * 1000, 2), None, "ms")
        return answers

    async def _serve(self, row: Any, context: Context, idx: int, count: int) -> Any:
        path = str(context.get_request_header(idx, "url_path") or "").strip("/")
        if path == "v1/models":
            return {"object": "list", "data": [{"id": name, "object": "model"} for name in self._names()]}
        wish = await self._read(row, path, str(context.get_request_id(idx)))
        if not wish.stream:
            return await self._whole(wish)
        context.set_response_content_type(idx, "text/event-stream")
        async for piece in self._events(wish):
            pieces = [piece if at == idx else None for at in range(count)]
            request_ids = {idx: wish.ident}
            send_intermediate_predict_response(pieces, request_ids, "ok", 200, context)
            await context.drain()
        return "data: [DONE]\n\n"

    def _names(self) -> list[str]:
        return [*self.served, *self.adapters]

    # --- reading

    async def _read(self, row: Any, path: str, ident: str) -> _Wish:
        body = _body(row_value(row))
        chat = path == "v1/chat/completions" or (not path and "messages" in body)
        if path not in ("", "v1/completions", "v1/chat/completions"):
            raise PredictionException(f"Unknown API endpoint: {path}", 404)
        model = body.get("model") or self.served[0]
        if model not in self._names():
            raise PredictionException(f"there is no model {model!r}, only {', '.join(self._names())}", 404)
        if body.get("n", 1) != 1:
            raise PredictionException(f"n must be 1, not {body['n']!r}", 400)
        sampling = {name: body[name] for name in SAMPLING if body.get(name) is not None}
        if chat:
            sampling.setdefault("max_tokens", body.get("max_completion_tokens"))
        prompt = await self._chat_prompt(body) if chat else _needed(body, "prompt", str, list)
        return _Wish(f"{_PREFIXES[chat]}-{ident}", model, chat, bool(body.get("stream")), prompt, sampling)

    async def _chat_prompt(self, body: dict[str, Any]) -> str:
        tokenizer = await self.vllm_engine.get_tokenizer()
        more = {"chat_template": self.chat_template} if self.chat_template else {}
        prompt: str = tokenizer.apply_chat_template(
            _needed(body, "messages", list), tokenize=False, add_generation_prompt=True, **more
        )
        return prompt

    # --- generating

    async def _generate(self, wish: _Wish) -> AsyncIterator[Any]:
        """vLLM's outputs, each with the text so far. Raises PredictionException for parameters it refuses."""
        vllm = needed("vllm", "vllm", _WHAT)
        try:
            parameters = vllm.SamplingParams(**wish.sampling)
        except (TypeError, ValueError) as error:
            raise PredictionException(f"sampling parameters: {error}", 400) from error
        prompt = {"prompt_token_ids": wish.prompt} if isinstance(wish.prompt, list) else wish.prompt
        more = {"lora_request": self._adapter(wish.model)} if wish.model in self.adapters else {}
        async with aclosing(self.vllm_engine.generate(prompt, parameters, wish.ident, **more)) as outputs:
            async for output in outputs:
                yield output

    def _adapter(self, name: str) -> Any:
        lora = needed("vllm.lora.request", "vllm", _WHAT)
        return lora.LoRARequest(name, list(self.adapters).index(name) + 1, self.adapters[name])

    async def _whole(self, wish: _Wish) -> dict[str, Any]:
        outputs = [output async for output in self._generate(wish)]
        if not outputs:
            raise PredictionException("the engine gave no output", 500)
        output = outputs[-1]
        last = output.outputs[0]
        text = {"message": {"role": "assistant", "content": last.text}} if wish.chat else {"text": last.text}
        taken, given = len(output.prompt_token_ids or ()), len(last.token_ids)
        usage = {"prompt_tokens": taken, "completion_tokens": given, "total_tokens": taken + given}
        return {**_answer(wish, text, last.finish_reason, ""), "usage": usage}

    async def _events(self, wish: _Wish) -> AsyncIterator[str]:
        sent = 0
        async for output in self._generate(wish):
            last = output.outputs[0]
            new, sent = last.text[sent:], len(last.text)
            if new or last.finish_reason:
                text = {"delta": {"role": "assistant", "content": new}} if wish.chat else {"text": new}
                yield f"data: {json.dumps(_answer(wish, text, last.finish_reason, '.chunk'))}\n\n"


def _engine_options(section: Mapping[str, Any], model_dir: str) -> dict[str, Any]:
    """vLLM's AsyncEngineArgs: what vllm_engine_config says; the model from there, else model_path, in the archive when
    it is there. Raises ValueError when neither names one."""
    options = dict(section.get("vllm_engine_config") or {})
    if not options.get("model"):
        path = section.get("model_path")
        if not path:
            raise ValueError("model-config.yaml must have handler: {model_path: …} or vllm_engine_config: {model: …}")
        own = os.path.join(model_dir, path)
        options["model"] = own if os.path.exists(own) else path
    return options


def _body(value: Any) -> dict[str, Any]:
    try:
        parsed = json.loads(value) if isinstance(value, str | bytes | bytearray) else value
    except ValueError as error:
        raise PredictionException(f"the body isn't JSON: {error}", 400) from error
    if not isinstance(parsed, dict):
        raise PredictionException(f"the body must be a JSON object, not {type(parsed).__name__}", 400)
    return parsed


def _needed(body: dict[str, Any], name: str, *types: type) -> Any:
    if not isinstance(body.get(name), types) or not body[name]:
        raise PredictionException(f"the body needs {name} ({' or '.join(one.__name__ for one in types)})", 400)
    return body[name]


def _answer(wish: _Wish, text: dict[str, Any], finish_reason: str | None, suffix: str) -> dict[str, Any]:
    kind = f"chat.completion{suffix}" if wish.chat else "text_completion"
    choice = {"index": 0, **text, "finish_reason": finish_reason}
    return {"id": wish.ident, "object": kind, "created": int(time.time()), "model": wish.model, "choices": [choice]}
