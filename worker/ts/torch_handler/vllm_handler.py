"""Language models in vLLM's engine, behind OpenAI's completions and chat completions. Needs `vllm`.

The server gives OpenAI's requests to this handler as they come (`openai_api`). A request's `url_path` says which it is:
`v1/completions`, `v1/chat/completions`, `v1/models`; without one (gRPC) it is a chat when the body has `messages`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from ts.context import Context
from ts.handler_utils.utils import needed, row_value, send_intermediate_predict_response
from ts.protocol import completions
from ts.protocol.completions import Asked, BadCompletion, Choice, Completion
from ts.torch_handler.base_handler import BaseHandler
from ts.utils.util import PredictionException

_WHAT = "vllm_handler"
#: The members of a request that are vLLM's sampling parameters of the same name.
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "stop", "seed", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
)
CHAT, TEXT = "v1/chat/completions", "v1/completions"


class _Wish(NamedTuple):
    """One request, read. `prompts`: as vLLM takes them, an answer each."""

    ident: str
    model: str
    chat: bool
    asked: Asked
    prompts: Sequence[Mapping[str, Any]]
    sampling: dict[str, Any]

    def answer(self) -> Completion:
        return completions.form_of(self.chat)(self.ident, self.model, self.asked.with_usage)


class VLLMHandler(BaseHandler):
    """model-config.yaml: `handler: {model_path: DIR or hub name, vllm_engine_config: {…}, adapters: {NAME: DIR},
    chat_template: TEXT}`. Requests run concurrently in the engine, up to the model's `maxConcurrency`."""

    openai_api = True
    openai_honours = ("logit_bias", completions.TOKEN_PROMPTS)

    def __init__(self) -> None:
        super().__init__()
        self.vllm_engine: Any = None
        self.adapters: dict[str, str] = {}
        self.served: list[str] = []
        self.chat_template: str | None = None

    @property
    def openai_models(self) -> list[str]:
        """Further names that requests may give as their model."""
        return [*self.served, *self.adapters]

    def initialize(self, context: Context) -> None:
        """Raises PackageMissing, ValueError for missing or unknown entries of model-config.yaml, and vLLM's errors."""
        self.context = context
        section = context.model_yaml_config.get("handler")
        section = section if isinstance(section, dict) else {}
        vllm = needed("vllm", "vllm", _WHAT)
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        options = _engine_options(section, str(context.system_properties["model_dir"]))
        known = inspect.signature(vllm.AsyncEngineArgs).parameters
        if unknown := ", ".join(name for name in options if name not in known):
            raise ValueError(f"vllm_engine_config has {unknown}, which vLLM {vllm.__version__} does not take")
        self.vllm_engine = vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(**options))
        named = options.get("served_model_name") or options["model"]
        self.served = [named] if isinstance(named, str) else list(named)
        self.adapters = dict(section.get("adapters") or {})
        self.chat_template = section.get("chat_template")
        self.initialized = True

    async def handle(self, data: Any, context: Context) -> list[Any]:
        """Each request's answer, or its exception."""
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
            return {"object": "list", "data": [{"id": name, "object": "model"} for name in self.openai_models]}
        wish = await self._read(row, path, str(context.get_request_id(idx)))
        if not wish.asked.stream:
            return await self._whole(wish)
        context.set_response_content_type(idx, "text/event-stream")
        async for event in self._events(wish):
            pieces = [completions.event(event) if at == idx else None for at in range(count)]
            send_intermediate_predict_response(pieces, {idx: wish.ident}, "ok", 200, context)
            if isinstance(context, Context):  # a test's own context waits for nobody
                await context.drain()
        return completions.DONE

    # --- reading

    async def _read(self, row: Any, path: str, ident: str) -> _Wish:
        body = _body(row_value(row))
        chat = path == CHAT or (not path and "messages" in body)
        if path not in ("", TEXT, CHAT):
            raise PredictionException(f"Unknown API endpoint: {path}", 404)
        model = body.get("model") or self.served[0]
        if model == getattr(self.context, "model_name", None) and model not in self.openai_models:
            model = self.served[0]
        if model not in self.openai_models:
            raise PredictionException(f"there is no model {model!r}, only {', '.join(self.openai_models)}", 404)
        try:
            asked = completions.read(body, chat, self.openai_honours)
            prompts = [await self._chat_prompt(asked)] if chat else [_prompt(one) for one in asked.prompts]
        except BadCompletion as error:
            raise PredictionException(str(error), 400) from None
        sampling = {name: body[name] for name in SAMPLING if body.get(name) is not None}
        if chat or asked.max_tokens is not None:
            sampling["max_tokens"] = asked.max_tokens  # None: as many as the model has room for
        return _Wish(ident, model, chat, asked, prompts, sampling)

    async def _chat_prompt(self, asked: Asked) -> Mapping[str, Any]:
        """The token numbers of a chat: a template already writes the initial tokens, which the engine would add
        again to a text."""
        found = self.vllm_engine.get_tokenizer()
        tokenizer = await found if inspect.isawaitable(found) else found  # a coroutine in releases up to 0.11
        more = {"chat_template": self.chat_template} if self.chat_template else {}
        messages = [one | {"content": completions.content(one.get("content"))} for one in asked.messages]
        try:
            prompt = tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=False, **more
            )
        except Exception as error:  # templates raise any exception: roles that don't alternate, no template at all
            raise PredictionException(f"the chat's template: {type(error).__name__}: {error}", 400) from error
        if isinstance(prompt, str):  # of a tokenizer of the model's own
            prompt = tokenizer.encode(prompt, add_special_tokens=False)
        return _prompt(list(prompt))

    # --- generating

    async def _generate(self, wish: _Wish, index: int) -> AsyncGenerator[Any, None]:
        """vLLM's outputs for one of the prompts, each with the text so far. Raises PredictionException for requests
        that vLLM refuses, and when it fails."""
        vllm = needed("vllm", "vllm", _WHAT)
        more = {"lora_request": self._adapter(wish.model)} if wish.model in self.adapters else {}
        ident = f"{wish.ident}-{index}"
        try:
            parameters = vllm.SamplingParams.from_optional(**wish.sampling)
            outputs = self.vllm_engine.generate(wish.prompts[index], parameters, ident, **more)
        except Exception as error:
            raise _refused(error, "sampling parameters: ") from error
        async with aclosing(outputs):
            try:
                async for output in outputs:
                    if output.outputs[0].finish_reason == "error":
                        raise PredictionException("vLLM's engine failed to answer", 500)
                    yield output
            except Exception as error:
                raise _refused(error) from error

    def _adapter(self, name: str) -> Any:
        lora = needed("vllm.lora.request", "vllm", _WHAT)
        return lora.LoRARequest(name, list(self.adapters).index(name) + 1, self.adapters[name])

    async def _whole(self, wish: _Wish) -> dict[str, Any]:
        choices = [Choice() for _ in wish.prompts]
        texts = await asyncio.gather(*(self._text(wish, index, one) for index, one in enumerate(choices)))
        return wish.answer().whole(texts, choices)

    async def _text(self, wish: _Wish, index: int, choice: Choice) -> str:
        text = ""
        async with aclosing(self._generate(wish, index)) as outputs:
            async for output in outputs:
                text = output.outputs[0].text
                choice.add("", _said(output))
        return text

    async def _events(self, wish: _Wish) -> AsyncIterator[dict[str, Any]]:
        answer, choices = wish.answer(), [Choice() for _ in wish.prompts]
        sent = [0] * len(choices)
        async for index, output in _side_by_side([self._generate(wish, index) for index in range(len(choices))]):
            last, choice = output.outputs[0], choices[index]
            new, sent[index] = last.text[sent[index] :], len(last.text)
            choice.add(new, _said(output))
            if new or not choice.begun:
                yield answer.piece(index, choice, new)
            if last.finish_reason:
                yield answer.end(index, choice)
        if wish.asked.with_usage:
            yield answer.of_usage(choices)


async def _side_by_side(sources: Sequence[AsyncGenerator[Any, None]]) -> AsyncIterator[tuple[int, Any]]:
    """Merges the sources: yields their values as they arrive, each with its source's number. The first error ends
    all."""
    waiting = {asyncio.ensure_future(anext(source)): index for index, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                try:
                    found = task.result()
                except StopAsyncIteration:
                    continue
                yield index, found
                waiting[asyncio.ensure_future(anext(sources[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()


def _said(output: Any) -> dict[str, Any]:
    last = output.outputs[0]
    return {
        "prompt_tokens": len(output.prompt_token_ids or ()),
        "completion_tokens": len(last.token_ids),
        "finish_reason": last.finish_reason,
    }


def _refused(error: Exception, what: str = "") -> Exception:
    """The error for the client if it is the client's fault (a ValueError, or in later releases of vLLM a class of
    its own) or vLLM is too busy (`http_status`); otherwise the error itself."""
    if isinstance(error, PredictionException):
        return error
    status = getattr(error, "http_status", None)
    if isinstance(status, int):
        return PredictionException(f"{what}{error}", int(status))
    names = {one.__name__ for one in type(error).__mro__}
    if names & {"ValueError", "VLLMClientError"} or (what and isinstance(error, TypeError)):
        return PredictionException(f"{what}{error}", 400)
    return error


def _engine_options(section: Mapping[str, Any], model_dir: str) -> dict[str, Any]:
    """vLLM's AsyncEngineArgs: those of vllm_engine_config; the model from there, else model_path, in the archive when
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


def _prompt(value: Any) -> Mapping[str, Any]:
    """A text or token numbers, as the engine takes them."""
    return {"prompt": value} if isinstance(value, str) else {"prompt_token_ids": value}
