"""What agents call, in front of chats: OpenAI's responses, without state, and Anthropic's messages."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from ts.language.handler import EVENTS, Answer, Head
from ts.language.surface import TEXTS_ALONE, Fields, Refusal, Run, TextSurface, Wish, gathered, split_calls, whole

_COUNT = "v1/messages/count_tokens"
#: Parameters with the same name and meaning in all three.
_SAME = ("model", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs", "seed")


def with_agents(surface: TextSurface) -> dict[str, Callable[[Fields], Awaitable[Answer]]]:
    """The calls of a surface, with these."""

    async def respond(body: Fields) -> Answer:
        if body.get("previous_response_id") or body.get("conversation"):
            raise Refusal("nothing is stored: send the whole conversation as input", "previous_response_id")
        wish = surface.read(_of_responses(body), True)
        return _streamed_response(surface, wish) if wish.asked.stream else await _response(surface, wish)

    async def message(body: Fields) -> Answer:
        if type(body.get("max_tokens")) is not int:
            raise Refusal("max_tokens is a whole number", "max_tokens")
        wish = surface.read(_of_messages(body), True)
        return _streamed_message(surface, wish) if wish.asked.stream else await _message(surface, wish)

    async def count(body: Fields) -> Answer:
        chat = _of_messages(body)
        return whole({"input_tokens": len(surface.chat_tokens(chat, chat["messages"]))})

    return surface.calls | {"v1/responses": respond, "v1/messages": message, _COUNT: count}


# --- requests as chats


def _given(body: Fields) -> Fields:
    return {name: body[name] for name in _SAME if body.get(name) is not None}


def _of_responses(body: Fields) -> Fields:
    """Raises Refusal."""
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items or not all(isinstance(one, dict) for one in items):
        raise Refusal("input is a text, or a list of items", "input")
    messages: list[Fields] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    for item in items:
        kind = item.get("type") or "message"
        if kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            messages.append({"role": role, "content": _texts(item.get("content"), "input")})
        elif kind == "function_call":
            call = {"name": item.get("name"), "arguments": item.get("arguments")}
            messages.append(_called(str(item.get("call_id")), call))
        elif kind == "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else json.dumps(output)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        elif kind != "reasoning":
            raise Refusal(f"input has an item of type {str(kind)[:40]}, which this engine doesn't take", "input")
    form = ((body.get("text") or {}).get("format") or {}) if isinstance(body.get("text"), dict) else {}
    more: Fields = {"response_format": form} if form.get("type") not in (None, "text") else {}
    tools = body.get("tools")
    if isinstance(tools, list):
        more["tools"] = [_tool_of_responses(one) for one in tools]
        more["tool_choice"] = body.get("tool_choice")
    return _given(body) | {"messages": messages, "max_tokens": body.get("max_output_tokens"), **more}


def _tool_of_responses(tool: Any) -> Fields:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise Refusal("tools can be of type function with this engine", "tools")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _of_messages(body: Fields) -> Fields:
    """Raises Refusal."""
    given = body.get("messages")
    if not isinstance(given, list) or not given or not all(isinstance(one, dict) for one in given):
        raise Refusal("messages is a list of objects with role and content", "messages")
    messages: list[Fields] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _texts(body["system"], "system")})
    for one in given:
        messages += _messages_of(one)
    more: Fields = {}
    if isinstance(body.get("tools"), list):
        more["tools"] = [_tool_of_messages(one) for one in body["tools"]]
        choice = (body.get("tool_choice") or {}).get("type", "auto")
        more["tool_choice"] = choice if choice in ("auto", "none") else "required"
    return _given(body) | {
        "messages": messages,
        "max_tokens": body.get("max_tokens"),
        "stop": body.get("stop_sequences"),
        **more,
    }


def _messages_of(one: Fields) -> list[Fields]:
    """OpenAI's messages for one of Anthropic's, whose content may have results and calls of tools."""
    content = one.get("content")
    blocks = content if isinstance(content, list) else []
    results = [block for block in blocks if isinstance(block, dict) and block.get("type") == "tool_result"]
    calls = [block for block in blocks if isinstance(block, dict) and block.get("type") == "tool_use"]
    rest = [block for block in blocks if block not in results and block not in calls]
    found = [
        {"role": "tool", "tool_call_id": one.get("tool_use_id"), "content": _texts(one.get("content"), "messages")}
        for one in results
    ]
    text = _texts(rest if isinstance(content, list) else content, "messages")
    for call in calls:
        found.append(
            _called(str(call.get("id")), {"name": call.get("name"), "arguments": json.dumps(call.get("input"))})
        )
    return [*found, {"role": one.get("role"), "content": text}] if text or not found else found


def _called(ident: str, function: Fields) -> Fields:
    return {"role": "assistant", "content": "", "tool_calls": [{"id": ident, "type": "function", "function": function}]}


def _tool_of_messages(tool: Any) -> Fields:
    if not isinstance(tool, dict) or "input_schema" not in tool:
        raise Refusal("tools have a name and an input_schema", "tools")
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _texts(content: Any, name: str) -> str:
    """The text of a content, or of its blocks. Raises Refusal for others."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in content):
        return "".join(one["text"] for one in content)
    raise Refusal(f"{name}: {TEXTS_ALONE}", name)


# --- answers


def _ident(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class _Texts:
    """The text of a chat in progress, without calls of tools, and its calls at the end."""

    def __init__(self, wish: Wish) -> None:
        self._mark = wish.tools.begin if wish.tools else None
        self._wish, self._sent = wish, 0
        self.text, self.finish_reason = "", "stop"
        self.calls: list[Fields] = []

    def add(self, text: str) -> str:
        """What may be sent now."""
        self.text += text
        shown = len(self.text)
        if self._mark is not None:
            at = self.text.find(self._mark)
            shown = at if at >= 0 else max(self._sent, len(self.text) - len(self._mark))
        new, self._sent = self.text[self._sent : shown], max(shown, self._sent)
        return new

    def end(self) -> str:
        """What is still to be sent."""
        shown, self.calls = split_calls(self.text, self._wish.tools)
        self.text = shown
        return shown[self._sent :]


async def _said(run: Run, texts: _Texts) -> AsyncGenerator[str, None]:
    async with aclosing(run.pieces()) as pieces:
        async for piece in pieces:
            if text := texts.add(piece.text):
                yield text
            texts.finish_reason = piece.finish_reason or texts.finish_reason
    if text := texts.end():
        yield text


async def _finished(surface: TextSurface, wish: Wish) -> tuple[Run, _Texts]:
    run, texts = Run(surface, wish), _Texts(wish)
    (piece,) = await gathered(run)
    texts.add(piece.text)
    texts.end()
    texts.finish_reason = piece.finish_reason or "stop"
    return run, texts


def _response_object(ident: str, wish: Wish, texts: _Texts | None, output: list[Fields], run: Run) -> Fields:
    status = "in_progress" if texts is None else "incomplete" if texts.finish_reason == "length" else "completed"
    usage = run.usage()
    told = {
        "input_tokens": usage.taken,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage.given,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.taken + usage.given,
    }
    return {
        "id": ident,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "model": wish.body.get("model"),
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": wish.body.get("tool_choice") or "auto",
        "tools": [{"type": "function", **one["function"]} for one in wish.body.get("tools") or ()],
        "usage": None if texts is None else told,
    }


def _output(ident: str, texts: _Texts) -> list[Fields]:
    """The items of a response."""
    part = {"type": "output_text", "text": texts.text, "annotations": []}
    message = {"id": ident, "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    calls = [
        {"id": _ident("fc"), "type": "function_call", "status": "completed", "call_id": one["id"], **one["function"]}
        for one in texts.calls
    ]
    return [*([message] if texts.text or not calls else []), *calls]


async def _response(surface: TextSurface, wish: Wish) -> Answer:
    run, texts = await _finished(surface, wish)
    return whole(_response_object(_ident("resp"), wish, texts, _output(_ident("msg"), texts), run))


async def _streamed_response(surface: TextSurface, wish: Wish) -> Answer:
    yield Head(200, EVENTS)
    number = -1

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return _event(kind, {"type": kind, "sequence_number": number, **fields})

    run, texts = Run(surface, wish), _Texts(wish)
    ident, item_id = _ident("resp"), _ident("msg")
    begun = _response_object(ident, wish, None, [], run)
    item: Fields = {"id": item_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    at = {"item_id": item_id, "output_index": 0, "content_index": 0}
    part = {"type": "output_text", "text": "", "annotations": []}
    yield event("response.created", response=begun) + event("response.in_progress", response=begun)
    yield event("response.output_item.added", output_index=0, item=item) + event(
        "response.content_part.added", **at, part=part
    )
    try:
        async with aclosing(_said(run, texts)) as said:
            async for text in said:
                yield event("response.output_text.delta", **at, delta=text, logprobs=[])
    except Refusal as error:
        yield event("error", **json.loads(error.body())["error"])
        return
    part = part | {"text": texts.text}
    item = item | {"status": "completed", "content": [part]}
    yield event("response.output_text.done", **at, text=texts.text, logprobs=[]) + event(
        "response.content_part.done", **at, part=part
    )
    yield event("response.output_item.done", output_index=0, item=item)
    output = [item, *(one for one in _output(item_id, texts) if one["type"] == "function_call")]
    for index, call in enumerate(output[1:], 1):
        where = {"item_id": call["id"], "output_index": index}
        yield event("response.output_item.added", output_index=index, item=call | {"arguments": ""})
        yield event("response.function_call_arguments.delta", **where, delta=call["arguments"])
        yield event("response.function_call_arguments.done", **where, arguments=call["arguments"])
        yield event("response.output_item.done", output_index=index, item=call)
    whole_response = _response_object(ident, wish, texts, output, run)
    yield event(f"response.{whole_response['status']}", response=whole_response)


_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


def _message_object(wish: Wish, content: list[Fields], reason: str | None, taken: int, given: int) -> Fields:
    return {
        "id": _ident("msg"),
        "type": "message",
        "role": "assistant",
        "model": wish.body.get("model"),
        "content": content,
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": {"input_tokens": taken, "output_tokens": given},
    }


def _reason(texts: _Texts) -> str:
    return "tool_use" if texts.calls else _STOP_REASONS[texts.finish_reason]


def _uses(texts: _Texts) -> list[Fields]:
    """The blocks of calls of tools."""
    return [
        {
            "type": "tool_use",
            "id": one["id"],
            "name": one["function"]["name"],
            "input": json.loads(one["function"]["arguments"]),
        }
        for one in texts.calls
    ]


async def _message(surface: TextSurface, wish: Wish) -> Answer:
    run, texts = await _finished(surface, wish)
    text = [{"type": "text", "text": texts.text}] if texts.text or not texts.calls else []
    return whole(_message_object(wish, [*text, *_uses(texts)], _reason(texts), *run.usage()))


async def _streamed_message(surface: TextSurface, wish: Wish) -> Answer:
    yield Head(200, EVENTS)

    def event(kind: str, **fields: Any) -> bytes:
        return _event(kind, {"type": kind, **fields})

    run, texts = Run(surface, wish), _Texts(wish)
    yield event("message_start", message=_message_object(wish, [], None, run.taken, 0))
    yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    try:
        async with aclosing(_said(run, texts)) as said:
            async for text in said:
                yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
    except Refusal as error:
        yield event("error", error={"type": "api_error", "message": str(error)})
        return
    yield event("content_block_stop", index=0)
    for index, block in enumerate(_uses(texts), 1):
        given = json.dumps(block["input"], ensure_ascii=False)
        yield event("content_block_start", index=index, content_block=block | {"input": {}})
        yield event("content_block_delta", index=index, delta={"type": "input_json_delta", "partial_json": given})
        yield event("content_block_stop", index=index)
    yield event(
        "message_delta",
        delta={"stop_reason": _reason(texts), "stop_sequence": None},
        usage={"output_tokens": run.usage().given},
    )
    yield event("message_stop")


def _event(kind: str, fields: Fields) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(fields, ensure_ascii=False)}\n\n".encode("utf-8", "replace")
