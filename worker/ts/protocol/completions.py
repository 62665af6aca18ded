"""OpenAI's completions and chat completions: the fields of a request, and the form of its answer.

The server reads and writes them for handlers that take and give texts; handlers that speak the API themselves
(`openai_api`, docs/openai.md) use the same reading and writing.
"""

from __future__ import annotations

import json
import reprlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Fields: TypeAlias = "dict[str, Any]"

#: The limits of one request. OpenAI's own are 2048 prompts and 4 stop texts.
PROMPTS_MAX, STOPS_MAX, STOP_CHARS_MAX = 128, 16, 256
#: The entry in a handler's `openai_honours` which says that prompts may be lists of token numbers.
TOKEN_PROMPTS = "token_prompts"

#: Members that ask for another answer than one text of the model's own choice, and values that ask for nothing. A
#: request with any other value is refused, unless the handler says that it honours the member.
ASKING: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
}
#: The members that are numbers: whether they are whole, their least and their largest value.
_NUMBERS: Mapping[str, tuple[bool, float, float]] = {
    "max_tokens": (True, 1, 1 << 53),
    "max_completion_tokens": (True, 1, 1 << 53),
    "seed": (True, -(1 << 63), (1 << 64) - 1),
    "temperature": (False, 0, 2),
    "top_p": (False, 0, 1),
    "presence_penalty": (False, -2, 2),
    "frequency_penalty": (False, -2, 2),
}
SAID = ("finish_reason", "prompt_tokens", "completion_tokens")


class BadCompletion(ValueError):
    """An invalid request. `parameter`: the member at fault; `reason`: OpenAI's error code."""

    def __init__(self, message: str, parameter: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.parameter, self.reason = parameter, reason


class Asked(NamedTuple):
    """A parsed request. `prompts`: texts, or lists of token numbers, with an answer each; a chat has `messages`
    instead and one answer. `max_tokens`: the limit for each answer."""

    prompts: tuple[Any, ...]
    messages: list[Fields]
    stream: bool
    with_usage: bool
    stops: tuple[str, ...]
    max_tokens: int | None


def read(body: Fields, chat: bool, honours: Collection[str] = (), whole: bool = True) -> Asked:
    """Parses a request. Raises BadCompletion. `honours`: the members of ASKING that the model honours, and
    TOKEN_PROMPTS. Unless `whole`, prompts and messages are left out."""
    _check_asking(body, honours)
    for name, limits in _NUMBERS.items():
        _check_number(name, body.get(name), *limits)
    stream = _flag(body, "stream")
    most = body.get("max_completion_tokens")
    return Asked(
        () if chat or not whole else _prompts(body.get("prompt"), TOKEN_PROMPTS in honours),
        _messages(body.get("messages")) if chat and whole else [],
        stream,
        _with_usage(body.get("stream_options"), stream),
        _stops(body.get("stop")),
        body.get("max_tokens") if most is None else most,
    )


def _check_asking(body: Fields, honours: Collection[str]) -> None:
    for name, nothing in ASKING.items():
        value = body.get(name)
        if value is None or name in honours or any(type(value) is type(one) and value == one for one in nothing):
            continue
        raise BadCompletion(
            f"{name} is {_shown(value)}: the model does not support this parameter", name, "unsupported_parameter"
        )


def _check_number(name: str, value: Any, whole: bool, least: float, most: float) -> None:
    if value is None:
        return
    good = type(value) is int or (type(value) is float and not whole)
    if not good or not least <= value <= most:
        kind = "a whole number" if whole else "a number"
        limits = f"at least {least:g}" if most >= 1 << 53 else f"from {least:g} to {most:g}"
        raise BadCompletion(f"{name} is {kind}, {limits}, not {_shown(value)}", name)


def _flag(body: Fields, name: str) -> bool:
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise BadCompletion(f"{name} is true or false, not {_shown(value)}", name)
    return bool(value)


def _with_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise BadCompletion(f"stream_options is an object, not {_shown(options)}", "stream_options")
    if not stream:
        raise BadCompletion("stream_options is only for a request with stream: true", "stream_options")
    return _flag(options, "include_usage")


def _stops(value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise BadCompletion(f"stop is a text, or a list of texts that are not empty, not {_shown(value)}", "stop")
    if len(found) > STOPS_MAX or any(len(one) > STOP_CHARS_MAX for one in found):
        raise BadCompletion(f"stop may be {STOPS_MAX} texts of {STOP_CHARS_MAX} characters at most", "stop")
    return tuple(found)


def _prompts(value: Any, token_prompts: bool) -> tuple[Any, ...]:
    many = isinstance(value, list) and not (value and _is_token(value[0]))
    found = tuple(value) if many else (value,)
    if len(found) > PROMPTS_MAX:
        raise BadCompletion(f"prompt is a list of {len(found)}; a request may have {PROMPTS_MAX}", "prompt")
    if not found:
        raise BadCompletion("prompt is an empty list; a request has at least one", "prompt")
    for one in found:
        if isinstance(one, str):
            continue
        if not (isinstance(one, list) and one and all(map(_is_token, one))):
            raise BadCompletion(f"prompt is a text or a list of texts, not {_shown(value)}", "prompt")
        if not token_prompts:
            raise BadCompletion("prompt is a list of token numbers; the model takes texts", "prompt")
    return found


def _is_token(value: Any) -> bool:
    return type(value) is int and value >= 0


def _messages(value: Any) -> list[Fields]:
    if not isinstance(value, list) or not value:
        raise BadCompletion("messages is a list of objects with role and content, with at least one", "messages")
    for one in value:
        if not isinstance(one, dict) or not isinstance(one.get("role"), str):
            raise BadCompletion(
                f"each of the messages is an object with role and content, not {_shown(one)}", "messages"
            )
    return value


def content(value: Any) -> str:
    """A message's text, or the texts of its parts. Raises BadCompletion for other parts."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        parts = [one.get("text") if isinstance(one, dict) and one.get("type") == "text" else None for one in value]
        if all(isinstance(part, str) for part in parts):
            return "".join(map(str, parts))
    raise BadCompletion(f"content is a text, or a list of parts of type text, not {_shown(value)}", "messages")


def _shown(value: Any) -> str:
    """The beginning of a value, which may be large and deep."""
    return (reprlib.repr(value) if isinstance(value, (list, dict)) else json.dumps(value))[:80]


# --- answers


class Choice:
    """One answer in progress: the text that may be sent, up to the first of `stops`, and its metadata."""

    def __init__(self, stops: Sequence[str] = (), max_tokens: int | None = None) -> None:
        self._stops, self._max_tokens = stops, max_tokens
        self._held = ""
        self._said: Fields = {}
        #: Whether a stop text came, after which the rest isn't wanted.
        self.cut = False
        self.begun = False

    def add(self, text: str, said: Mapping[str, Any]) -> str:
        """Takes a piece and its metadata (SAID); returns the text to send, without a stop's possible beginning."""
        if self.cut:
            return ""
        self._said |= {name: said[name] for name in SAID if said.get(name) is not None}
        if not self._stops:
            return text
        text = self._held + text
        at = min((at for at in (text.find(stop) for stop in self._stops) if at >= 0), default=-1)
        self.cut = at >= 0
        shown = at if self.cut else min(_begun(text, stop) for stop in self._stops)
        self._held = "" if self.cut else text[shown:]
        return text[:shown]

    def rest(self) -> str:
        """The text that was held back, at the end of the answer."""
        rest, self._held = self._held, ""
        return rest

    @property
    def finish_reason(self) -> str:
        """`stop` after one of the stops; else the model's own reason; else `length` at the limit of tokens."""
        if self.cut:
            return "stop"
        if self._said.get("finish_reason"):
            return str(self._said["finish_reason"])
        given = self._said.get("completion_tokens")
        return "length" if given is not None and self._max_tokens is not None and given >= self._max_tokens else "stop"

    @property
    def tokens(self) -> tuple[int, int] | None:
        """The numbers of prompt and answer tokens; None unless the model reported both."""
        taken, given = self._said.get("prompt_tokens"), self._said.get("completion_tokens")
        return None if taken is None or given is None else (taken, given)


def _begun(text: str, stop: str) -> int:
    """The position at which `stop` may have begun at the end of a text; the text's length if nowhere."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) if at < 0 else at


class Completion:
    """The response objects of one request. `with_usage`: the last one of a stream has the numbers of tokens."""

    prefix, whole_object, piece_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, request_id: str, model: str, with_usage: bool = False) -> None:
        self._fields = {"id": f"{self.prefix}-{request_id}", "created": int(time.time()), "model": model}
        self._more: Fields = {"usage": None} if with_usage else {}

    def whole(self, texts: Sequence[str], choices: Sequence[Choice]) -> Fields:
        found = [
            {"index": index, **self._text(text), "logprobs": None, "finish_reason": choice.finish_reason}
            for index, (text, choice) in enumerate(zip(texts, choices, strict=True))
        ]
        tokens = usage(choices)
        return {
            **self._fields,
            "object": self.whole_object,
            "choices": found,
            **({} if tokens is None else {"usage": tokens}),
        }

    def piece(self, index: int, choice: Choice, text: str) -> Fields:
        """A piece of a stream; the first of its choice may be empty."""
        first, choice.begun = not choice.begun, True
        return self._event({"index": index, **self._delta(text, first), "logprobs": None, "finish_reason": None})

    def end(self, index: int, choice: Choice) -> Fields:
        more = {"logprobs": None, "finish_reason": choice.finish_reason}
        return self._event({"index": index, **self._end_delta(), **more})

    def of_usage(self, choices: Sequence[Choice]) -> Fields:
        """The last object of a stream, for a client that requested usage."""
        return {**self._fields, "object": self.piece_object, "choices": [], "usage": usage(choices)}

    def _event(self, choice: Fields) -> Fields:
        return {**self._fields, "object": self.piece_object, "choices": [choice], **self._more}

    def _text(self, text: str) -> Fields:
        return {"text": text}

    def _delta(self, text: str, first: bool) -> Fields:
        return {"text": text}

    def _end_delta(self) -> Fields:
        return {"text": ""}


class ChatCompletion(Completion):
    """The response objects of a chat."""

    prefix, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _text(self, text: str) -> Fields:
        return {"message": {"role": "assistant", "content": text}}

    def _delta(self, text: str, first: bool) -> Fields:
        return {"delta": {"role": "assistant", "content": text} if first else {"content": text}}

    def _end_delta(self) -> Fields:
        return {"delta": {}}


def form_of(chat: bool) -> Callable[..., Completion]:
    return ChatCompletion if chat else Completion


def usage(choices: Sequence[Choice]) -> Fields | None:
    """The numbers of tokens of all choices together, None unless each has them."""
    found = [choice.tokens for choice in choices if choice.tokens is not None]
    if len(found) < len(choices):
        return None
    taken, given = (sum(one) for one in zip(*found, strict=True))
    return {"prompt_tokens": taken, "completion_tokens": given, "total_tokens": taken + given}


DONE = b"data: [DONE]\n\n"


def event(value: Fields) -> bytes:
    """An object of a stream, as a server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"
