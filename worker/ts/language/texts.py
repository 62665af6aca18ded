"""Token numbers to text, as they come, and calls of tools in a text."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

#: Tokens before the new ones that are decoded with them, since a token's text depends on its neighbours.
_CONTEXT_TOKENS = 6
_REPLACEMENT = "\ufffd"


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
