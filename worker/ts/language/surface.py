"""OpenAI's API in front of a model of the package transformers: completions, chats and tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ts.language.generation import TOP_LOGPROBS_MAX, Generator, Logprobs, Step, Text, sampling_of
from ts.language.handler import CHAT, EVENTS, TEXT, Answer, Head
from ts.protocol import completions
from ts.protocol.completions import DONE, TOKEN_PROMPTS, Asked, BadCompletion, Choice, event

Fields: TypeAlias = "dict[str, Any]"
JSON = "application/json"
#: What completions and chats may ask for, besides one text of the model's own choice.
HONOURS = ("n", "logprobs", "top_logprobs", "logit_bias", "tools", "tool_choice", TOKEN_PROMPTS)
#: The engines that do the rest.
_OTHERS = "the engines llama.cpp and vllm can"
TEXTS_ALONE = "this engine takes texts alone; the engine vllm takes images, with a model that does"
CHOICES_MAX = 128
_TOKENS_OF_A_COMPLETION = 16
#: Tokens before the new ones that are decoded with them, since a token's text depends on its neighbours.
_CONTEXT_TOKENS = 6
_REPLACEMENT = "\ufffd"


class Refusal(Exception):
    """A request that can't be answered, with its status and the member at fault."""

    def __init__(self, message: str, parameter: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.parameter, self.status, self.code = parameter, status, code

    def body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        told = {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}
        return json.dumps({"error": told}).encode()


@dataclass(slots=True)
class Piece:
    """What is new in one choice. `finish_reason`: with its last piece."""

    index: int
    text: str
    tokens: list[tuple[int, Logprobs]] = field(default_factory=list)
    finish_reason: str | None = None


class Usage(NamedTuple):
    taken: int
    given: int

    def fields(self) -> Fields:
        told = {"prompt_tokens": self.taken, "completion_tokens": self.given, "total_tokens": self.taken + self.given}
        return told | {"prompt_tokens_details": {"cached_tokens": 0}}


# --- token numbers to text, as they come, and calls of tools in a text


class TextDecoder:
    """The text of a growing list of tokens. The beginning of a character waits for its end."""

    def __init__(self, tokenizer: Any, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = prompt[-_CONTEXT_TOKENS:]
        self._from, self._shown = 0, len(self._tokens)

    def add(self, token: int) -> str:
        self._tokens.append(token)
        return self._new(last=False)

    def rest(self) -> str:
        return self._new(last=True)

    def _new(self, *, last: bool) -> str:
        before = decoded(self._tokenizer, self._tokens[self._from : self._shown])
        text = decoded(self._tokenizer, self._tokens[self._from :])
        if len(text) <= len(before) or (text.endswith(_REPLACEMENT) and not last):
            return ""
        self._from, self._shown = self._shown, len(self._tokens)
        return text[len(before) :]


def decoded(tokenizer: Any, tokens: list[int], *, special: bool = False) -> str:
    text: str = tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    return text


class ToolFormat:
    """How a family of models writes calls of tools, which its chat template shows: `begin` is before the first."""

    def __init__(self, mark: str, begin: str, each: str) -> None:
        self.mark, self.begin = mark, begin
        self._each = re.compile(each, re.DOTALL)

    def calls(self, text: str) -> list[dict[str, Any]]:
        """OpenAI's objects of the calls in a text, [] if there is none, or one that isn't JSON."""
        found: list[Any] = []
        for match in self._each.finditer(text):
            try:
                value = json.loads(match[1])
            except (ValueError, RecursionError):
                return []
            found += value if isinstance(value, list) else [value]
        if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in found):
            return []
        return [_call(one) for one in found]


#: By the text of the chat template: Hermes, Qwen and SmolLM; Mistral; Llama 3.
_FORMATS = (
    ToolFormat("<tool_call>", "<tool_call>", r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)"),
    ToolFormat("[TOOL_CALLS]", "[TOOL_CALLS]", r"\[TOOL_CALLS\]\s*(\[.*\])"),
    ToolFormat("<|python_tag|>", '{"name"', r"^\s*(?:<\|python_tag\|>)?\s*(\{.*\})\s*$"),
)


def tool_format(template: str) -> ToolFormat | None:
    """The form of tool calls that a chat template teaches; None if it knows no tools."""
    if "tools" not in template:
        return None
    return next((one for one in _FORMATS if one.mark in template), _FORMATS[0])


def _call(value: dict[str, Any]) -> dict[str, Any]:
    given = value.get("arguments", value.get("parameters", {}))
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": value["name"], "arguments": text},
    }


# --- requests in progress


class Wish(NamedTuple):
    """A request, read. `prompts`: tokens, `number` choices each; `tools`: the form in which the model calls them;
    `adapter`: the key of the one that `model` names, "" for none."""

    body: Fields
    asked: Asked
    prompts: list[list[int]]
    number: int
    chat: bool
    tools: ToolFormat | None
    adapter: str


class Run:
    """The choices of a request in progress."""

    def __init__(self, surface: TextSurface, wish: Wish) -> None:
        loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[list[Step]] = asyncio.Queue()

        def tell(steps: list[Step]) -> None:
            loop.call_soon_threadsafe(self._queue.put_nowait, steps)

        self._generator = surface.generator
        self._texts: list[Text] = []
        for prompt in wish.prompts:
            for at in range(wish.number):
                sampling = surface.sampling(wish, len(prompt))
                if sampling.seed is not None:
                    sampling.seed += at
                self._texts.append(Text(len(self._texts), prompt, sampling, tell, wish.adapter))
        self._decoders = [TextDecoder(surface.tokenizer, text.prompt) for text in self._texts]
        self._choices = [Choice(wish.asked.stops) for _ in self._texts]
        self.taken = sum(map(len, wish.prompts))

    def usage(self) -> Usage:
        return Usage(self.taken, sum(len(text.given) for text in self._texts))

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yields the pieces of all choices as they come. Leaving early ends them in the engine."""
        left = set(range(len(self._texts)))
        self._generator.submit(self._texts)
        try:
            while left:
                for step in await self._queue.get():
                    if step.error is not None:
                        raise Refusal(f"The engine failed: {type(step.error).__name__}: {step.error}", status=500)
                    if step.text.index in left and (piece := self._piece(step)) is not None:
                        if piece.finish_reason:
                            left.discard(piece.index)
                        yield piece
        finally:
            for text in self._texts:
                text.cancelled = True

    def _piece(self, step: Step) -> Piece | None:
        index, choice, decoder = step.text.index, self._choices[step.text.index], self._decoders[step.text.index]
        assert step.token is not None
        ended = step.finish_reason
        is_text = step.token not in step.text.sampling.ends
        text = choice.add(decoder.add(step.token), {}) if is_text else ""
        if ended and not choice.cut:
            text += choice.add(decoder.rest(), {})
            text += "" if choice.cut else choice.rest()
        if choice.cut:
            step.text.cancelled, ended = True, "stop"
        tokens = [(step.token, step.logprobs)] if step.logprobs is not None and is_text else []
        return Piece(index, text, tokens, ended) if text or ended or tokens else None


class TextSurface:
    """The calls of a model that generates text. `usual`: the sampling that its files recommend."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        texts_max: int,
        tokens_max: int | None = None,
        on_waiting: Callable[[int], object] = int,
    ) -> None:
        self.tokenizer = tokenizer
        #: The keys of the adapters in the engine by name; those that were unloaded have None.
        self._adapters: dict[str, str | None] = {}
        self._keys = itertools.count(1)
        self.generator = Generator(model, texts_max, on_waiting)
        config = model.config.get_text_config()
        self.tokens_max = min(
            filter(None, (tokens_max, getattr(config, "max_position_embeddings", None))), default=2048
        )
        self._vocabulary = int(config.vocab_size)
        self._ends, self._usual = _ends(model, tokenizer), _usual(model.generation_config)
        self.tools = tool_format(_template(tokenizer))
        self.calls: dict[str, Callable[[Fields], Awaitable[Answer]]] = {
            CHAT: self._chat,
            TEXT: self._completion,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
        }

    # --- reading

    def read(self, body: Fields, chat: bool) -> Wish:
        """Raises Refusal."""
        asked = _asked(body, chat)
        for name, least, most, whole in _RANGES:
            _check(body, name, least, most, whole)
        count = body.get("n") or 1
        self._check_logprobs(body, chat)
        self._check_bias(body.get("logit_bias"))
        tools = self._tools(body)
        prompts = [self.chat_tokens(body, asked.messages)] if chat else [self._prompt(one) for one in asked.prompts]
        if count * len(prompts) > CHOICES_MAX:
            raise Refusal(f"{count} choices of {len(prompts)} prompts; a request may have {CHOICES_MAX}", "n")
        for prompt in prompts:
            self.check_length(prompt, "messages" if chat else "prompt")
        return Wish(body, asked, prompts, count, chat, tools, self._adapter(body))

    # --- adapters

    async def load_adapter(self, name: str, folder: str) -> None:
        """Raises PredictionException."""
        key = f"adapter{next(self._keys)}"
        try:
            await asyncio.wrap_future(self.generator.load(key, folder))
        except asyncio.CancelledError:
            self.generator.unload(key)
            raise
        self._adapters[name] = key

    def unload_adapter(self, name: str) -> None:
        """Requests that have begun keep the adapter."""
        if key := self._adapters.get(name):
            self._adapters[name] = None
            self.generator.unload(key)

    def _adapter(self, body: Fields) -> str:
        """The key of the adapter that a request names. Raises Refusal for one that was unloaded."""
        name = str(body.get("model")).rpartition(":")[2]
        if (key := self._adapters.get(name, "")) is None:
            raise Refusal(f"the adapter {name} was unloaded", "model", 404, "model_not_found")
        return key

    def check_length(self, prompt: list[int], name: str) -> None:
        if not prompt:
            raise Refusal(f"{name} is empty", name)
        if len(prompt) >= self.tokens_max:
            raise Refusal(
                f"{name} has {len(prompt)} tokens; the model's context has {self.tokens_max}, with the answer",
                *(name, 400, "context_length_exceeded"),
            )

    def _check_logprobs(self, body: Fields, chat: bool) -> None:
        name = "top_logprobs" if chat else "logprobs"
        _check(body, name, 0, TOP_LOGPROBS_MAX, True)
        if chat and body.get("logprobs") not in (None, True, False):
            raise Refusal("logprobs is true or false", "logprobs")
        if chat and body.get("top_logprobs") and not body.get("logprobs"):
            raise Refusal("top_logprobs needs logprobs: true", "top_logprobs")

    def _check_bias(self, bias: Any) -> None:
        if bias is None:
            return
        good = isinstance(bias, dict) and all(
            str(token).isdecimal()
            and int(token) < self._vocabulary
            and type(value) in (int, float)
            and abs(value) <= 100
            for token, value in bias.items()
        )
        if not good:
            raise Refusal(
                f"logit_bias is an object of token numbers below {self._vocabulary}, with numbers from -100 to 100",
                "logit_bias",
            )

    def _tools(self, body: Fields) -> ToolFormat | None:
        tools, choice = body.get("tools"), body.get("tool_choice")
        if choice not in (None, "auto", "none"):
            raise Refusal(f"tool_choice can be auto or none with this engine; {_OTHERS} force a call", "tool_choice")
        if not tools:
            return None
        if not isinstance(tools, list) or not all(_is_tool(one) for one in tools):
            raise Refusal("tools is a list of objects with type: function, and a function with a name", "tools")
        if self.tools is None:
            raise Refusal("the model's chat template has no tools", "tools", code="unsupported_parameter")
        return self.tools if choice != "none" else None

    def _prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        if any(token >= self._vocabulary for token in prompt):
            raise Refusal(f"prompt has a token that isn't below {self._vocabulary}", "prompt")
        return list(prompt)

    def chat_tokens(self, body: Fields, messages: list[Fields]) -> list[int]:
        """The tokens of a conversation by the model's own chat template. Raises Refusal."""
        if not _template(self.tokenizer):
            raise Refusal(
                "the model has no chat template: ask for a completion (/v1/completions), or set chatTemplate",
                "messages",
            )
        try:
            flat = [one | {"content": completions.content(one.get("content"))} for one in messages]
        except BadCompletion as error:
            raise Refusal(f"{error}: {TEXTS_ALONE}", error.parameter) from None
        for one in flat:
            for call in one.get("tool_calls") or ():
                call["function"]["arguments"] = _object(call["function"].get("arguments"))
        options = body.get("chat_template_kwargs") or {}
        if not isinstance(options, dict) or options.keys() & {"conversation", "tokenize", "return_dict"}:
            raise Refusal("chat_template_kwargs is an object of the template's own variables", "chat_template_kwargs")
        tools = body.get("tools") if body.get("tool_choice") != "none" else None
        try:
            text = self.tokenizer.apply_chat_template(
                flat, tools=tools or None, add_generation_prompt=True, tokenize=False, **options
            )
        except Exception as error:  # templates raise what they like
            raise Refusal(f"the model's chat template refuses the messages: {error}"[:400], "messages") from None
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def sampling(self, wish: Wish, length: int) -> Any:
        most = self.tokens_max - length
        if not wish.chat and wish.body.get("max_tokens") is None:
            most = min(most, _TOKENS_OF_A_COMPLETION)
        made = sampling_of(wish.body, self._ends, most, self._usual)
        if wish.body.get("logprobs") not in (None, False):
            made.logprobs = (wish.body.get("top_logprobs") or 0) if wish.chat else int(wish.body["logprobs"])
        return made

    # --- answers

    async def _chat(self, body: Fields) -> Answer:
        return self._answer(self.read(body, True), _Chat(self, body))

    async def _completion(self, body: Fields) -> Answer:
        return self._answer(self.read(body, False), _Completion(self, body))

    def _answer(self, wish: Wish, form: _Completion) -> Answer:
        return self._streamed(wish, form) if wish.asked.stream else self._whole(wish, form)

    async def _whole(self, wish: Wish, form: _Completion) -> Answer:
        run = Run(self, wish)
        found = await gathered(run)
        choices = [form.choice(piece, wish) for piece in found]
        usage = run.usage().fields()
        yield Head(200, JSON)
        yield _json(form.fields | {"object": form.whole, "choices": choices, "usage": usage})

    async def _streamed(self, wish: Wish, form: _Completion) -> Answer:
        run = Run(self, wish)
        yield Head(200, EVENTS, lambda: run.usage().fields())
        more: Fields = {"usage": None} if wish.asked.with_usage else {}
        try:
            async with aclosing(run.pieces()) as pieces:
                async for piece in pieces:
                    deltas = form.deltas(piece, wish)
                    if deltas:
                        yield b"".join(
                            event(form.fields | {"object": form.piece, "choices": [delta]} | more) for delta in deltas
                        )
        except Refusal as error:
            yield b"data: " + error.body() + b"\n\n"
            return
        if wish.asked.with_usage:
            yield event(form.fields | {"object": form.piece, "choices": [], "usage": run.usage().fields()})
        yield DONE

    # --- tokens

    async def _tokenize(self, body: Fields) -> Answer:
        """vLLM's and llama.cpp's forms."""
        if "messages" in body:
            tokens = self.chat_tokens(body, _asked(body, True).messages)
        else:
            text = body.get("prompt", body.get("content"))
            if not isinstance(text, str):
                raise Refusal("prompt is a text", "prompt")
            tokens = list(
                self.tokenizer(text, add_special_tokens=body.get("add_special_tokens") is not False)["input_ids"]
            )
        return whole({"count": len(tokens), "max_model_len": self.tokens_max, "tokens": tokens})

    async def _detokenize(self, body: Fields) -> Answer:
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(type(one) is int and 0 <= one < self._vocabulary for one in tokens):
            raise Refusal(f"tokens is a list of numbers below {self._vocabulary}", "tokens")
        text = decoded(self.tokenizer, tokens)
        return whole({"prompt": text, "content": text})


def _asked(body: Fields, chat: bool) -> Asked:
    """Raises Refusal."""
    try:
        return completions.read(body, chat, HONOURS)
    except BadCompletion as error:
        others = f"; {_OTHERS}" if error.reason == "unsupported_parameter" else ""
        raise Refusal(f"{error}{others}", error.parameter, code=error.reason) from None


async def gathered(run: Run) -> list[Piece]:
    """Each choice as one piece."""
    found: dict[int, Piece] = {}
    async with aclosing(run.pieces()) as pieces:
        async for piece in pieces:
            known = found.setdefault(piece.index, Piece(piece.index, ""))
            known.text += piece.text
            known.tokens += piece.tokens
            known.finish_reason = piece.finish_reason
    return [found[index] for index in sorted(found)]


class _Completion:
    """The objects of a completion's answer."""

    prefix, whole, piece = "cmpl", "text_completion", "text_completion"

    def __init__(self, surface: TextSurface, body: Fields) -> None:
        self._tokenizer = surface.tokenizer
        ident = f"{self.prefix}-{uuid.uuid4().hex}"
        self.fields: Fields = {"id": ident, "created": int(time.time()), "model": body.get("model")}
        self._begun: set[int] = set()
        self._held: dict[int, str] = {}

    def choice(self, piece: Piece, wish: Wish) -> Fields:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._logprobs(piece, wish),
            "finish_reason": piece.finish_reason,
        }

    def deltas(self, piece: Piece, wish: Wish) -> list[Fields]:
        return [self.choice(piece, wish)]

    def _logprobs(self, piece: Piece, wish: Wish) -> Fields | None:
        if not piece.tokens and wish.body.get("logprobs") is None:
            return None
        return {
            "tokens": [self._text(token) for token, _ in piece.tokens],
            "token_logprobs": [one.chosen for _, one in piece.tokens],
            "top_logprobs": [{self._text(token): value for token, value in one.top} for _, one in piece.tokens],
            "text_offset": [],
        }

    def _text(self, token: int) -> str:
        return decoded(self._tokenizer, [token], special=True)


class _Chat(_Completion):
    """The objects of a chat's answer. A stream's text from the first call of a tool on is held until it is whole."""

    prefix, whole, piece = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, piece: Piece, wish: Wish) -> Fields:
        text, calls = split_calls(piece.text, wish.tools)
        message: Fields = {"role": "assistant", "content": text if text or not calls else None}
        if calls:
            message["tool_calls"] = calls
        reason = "tool_calls" if calls and piece.finish_reason == "stop" else piece.finish_reason
        return {
            "index": piece.index,
            "message": message,
            "logprobs": self._logprobs(piece, wish),
            "finish_reason": reason,
        }

    def deltas(self, piece: Piece, wish: Wish) -> list[Fields]:
        text = piece.text
        calls: list[Fields] = []
        if wish.tools is not None:
            held = self._held.get(piece.index, "") + text
            at = 0 if held.startswith(wish.tools.begin) else _begin_of(held, wish.tools.begin)
            text, self._held[piece.index] = held[:at], held[at:]
            if piece.finish_reason:
                rest, calls = split_calls(self._held.pop(piece.index), wish.tools)
                text += rest
        deltas = []
        if text or piece.tokens or piece.index not in self._begun:
            first: Fields = {} if piece.index in self._begun else {"role": "assistant"}
            deltas.append(self._delta(piece, first | {"content": text}, None, self._logprobs(piece, wish)))
        self._begun.add(piece.index)
        if calls:
            numbered = [{"index": at, **call} for at, call in enumerate(calls)]
            deltas.append(self._delta(piece, {"tool_calls": numbered}, None))
        if piece.finish_reason:
            reason = "tool_calls" if calls and piece.finish_reason == "stop" else piece.finish_reason
            deltas.append(self._delta(piece, {}, reason))
        return deltas

    def _delta(self, piece: Piece, delta: Fields, reason: str | None, logprobs: Fields | None = None) -> Fields:
        return {"index": piece.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, piece: Piece, wish: Wish) -> Fields | None:
        if not piece.tokens:
            return None
        return {
            "content": [
                self._token(token, one.chosen) | {"top_logprobs": [self._token(*other) for other in one.top]}
                for token, one in piece.tokens
            ]
        }

    def _token(self, token: int, logprob: float) -> Fields:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def split_calls(text: str, tools: ToolFormat | None) -> tuple[str, list[Fields]]:
    """The text before calls of tools, and the calls; all of the text if it has none."""
    if tools is None or tools.begin not in text:
        return text, []
    at = text.index(tools.begin)
    calls = tools.calls(text[at:])
    return (text[:at].rstrip(), calls) if calls else (text, [])


def _begin_of(text: str, mark: str) -> int:
    """The place where `mark` begins in a text, or may begin at its end."""
    if (at := text.find(mark)) >= 0:
        return at
    return next(
        (len(text) - size for size in range(min(len(mark), len(text)), 0, -1) if mark.startswith(text[-size:])),
        len(text),
    )


async def whole(value: Fields) -> Answer:
    yield Head(200, JSON)
    yield _json(value)


def _json(value: Fields) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


#: Parameters that OpenAI hasn't: least and largest value, and whether they are whole.
_RANGES = (
    ("n", 1, CHOICES_MAX, True),
    ("top_k", -1, 1 << 31, True),
    ("min_p", 0, 1, False),
    ("min_tokens", 0, 1 << 31, True),
    ("repetition_penalty", 0.01, 10, False),
)


def _check(body: Fields, name: str, least: float, most: float, whole: bool) -> None:
    value = body.get(name)
    if value is not None and (type(value) not in ((int,) if whole else (int, float)) or not least <= value <= most):
        kind = "a whole number" if whole else "a number"
        raise Refusal(f"{name} is {kind} from {least:g} to {most:g}, not {str(value)[:40]}", name)


def _is_tool(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and value.get("type") == "function"


def _object(value: Any) -> Any:
    """The arguments of a call, which come as JSON, for a template, which writes JSON itself."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _template(tokenizer: Any) -> str:
    found = getattr(tokenizer, "chat_template", None)
    return str(found.get("default") or "") if isinstance(found, dict) else str(found or "")


def _ends(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text."""
    found = getattr(model.generation_config, "eos_token_id", None)
    listed: Sequence[Any] = found if isinstance(found, list) else [found]
    return frozenset(int(one) for one in (*listed, tokenizer.eos_token_id) if one is not None)


def _usual(config: Any) -> Fields:
    """The sampling that generation_config.json recommends, as vLLM takes it."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: value for name in names if (value := getattr(config, name, None)) is not None}
