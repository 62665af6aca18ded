"""The bodies of OpenAI's completions and chat completions: a text for the model, and texts back.

Answers are small JSON objects (`text`, and the model's metadata for it: `finish_reason`, `prompt_tokens`,
`completion_tokens`), which the frontend puts into OpenAI's form.
"""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from ts.protocol import completions
from ts.protocol.completions import SAID, BadCompletion
from ts.protocol.frames import Buffer
from ts.tensors.forms import Form, ModelSpec, completed, payload
from ts.tensors.generate_form import TEXT_INPUT
from ts.tensors.json_form import dumped, json_object, text_bytes
from ts.tensors.types import BadTensor, Headers, InferenceRequest, InferenceResponse, Tensor, as_bytes, bytes_array

#: The option for a body with `messages` instead of a `prompt`.
CHAT = "chat"
_NOT_PARAMETERS = frozenset(
    {"model", "prompt", "messages", "stream", "stream_options", "n", "user", "max_completion_tokens"}
)


class OpenAIForm(Form):
    """The model's one text input (`text_input` without a declaration) is the prompt, or the conversation: a line for
    each message, `role: content`, and `assistant:`. A handler with a template of its own finds the messages, as JSON,
    in the parameter `messages`. The body's other keys (`max_tokens`, `temperature`, `stop`, …) are parameters; a chat's
    `max_completion_tokens` is `max_tokens`."""

    def __init__(self, data: Buffer, pairs: Headers, options: frozenset[str], model: ModelSpec) -> None:
        self._model, message, chat = model, json_object(payload(data)), CHAT in options
        self._decoder = getincrementaldecoder("utf-8")("replace")
        parameters = {
            name: value for name, value in message.items() if name not in _NOT_PARAMETERS and value is not None
        }
        try:
            asked = completions.read(message, chat, completions.ASKING)
            text = _conversation(asked.messages) if chat else _only(asked.prompts)
        except BadCompletion as error:
            raise BadTensor(str(error)) from None
        if chat:
            parameters["messages"] = json.dumps(asked.messages, ensure_ascii=False)
        if asked.max_tokens is not None:
            parameters["max_tokens"] = asked.max_tokens
        self.request = InferenceRequest([self._input(text)], "", model.name, model.version, parameters, pairs=pairs)

    def _input(self, text: str) -> Tensor:
        texts = [name for name, one in self._model.inputs.items() if one.get("datatype") == "BYTES"]
        if self._model.inputs and len(texts) != 1:
            raise BadTensor(f"model {self._model.name!r} has {len(texts)} text inputs; a completion needs one")
        name = texts[0] if texts else TEXT_INPUT
        rank = len(self._model.inputs.get(name, {}).get("shape") or [1])
        return Tensor(name, "BYTES", bytes_array([text_bytes(text, f"input {name!r}")], [1] * rank))

    def answer(self, response: InferenceResponse, last: bool) -> bytes:
        response = completed(response, self.request, self._model)
        texts = [tensor for tensor in response.outputs if tensor.datatype == "BYTES"]
        if not texts:
            raise BadTensor(f"model {self._model.name!r} answered without a text")
        text = self._decoder.decode(b"".join(as_bytes(value) for value in texts[0].array.ravel()), last)
        said = {name: response.parameters[name] for name in SAID if name in response.parameters}
        for tensor in response.outputs:
            if tensor.name in SAID and tensor.array.size == 1:
                value = tensor.array.ravel()[0]
                said[tensor.name] = as_bytes(value).decode() if tensor.datatype == "BYTES" else int(value)
        return dumped({"text": text} | said)

    def end(self) -> bytes:
        """The rest of a text that ended in the middle of a character."""
        rest = self._decoder.decode(b"", True)
        return dumped({"text": rest}) if rest else b""


opened = OpenAIForm


def _only(prompts: Sequence[str]) -> str:
    """The only prompt; the frontend makes a request of each, except in a large body. Raises BadTensor for several."""
    if len(prompts) > 1:
        raise BadTensor(f"prompt is a list of {len(prompts)} texts; a body of this size may have one")
    return prompts[0]


def _conversation(messages: Sequence[dict[str, Any]]) -> str:
    lines = [f"{one['role']}: {completions.content(one.get('content'))}" for one in messages]
    return "\n".join([*lines, "assistant:"])
