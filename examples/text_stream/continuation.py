"""A request of the text_stream example, and the text that answers it."""

from __future__ import annotations

import json
from typing import Any

import torch
from character_model import decode, encode

from ts.utils.util import PredictionException

MAX_TOKENS = 2000
DEFAULTS = {"prompt": "", "max_tokens": 120, "temperature": 0.0, "seed": None}


def parse(row: dict[str, Any]) -> dict[str, Any]:
    """The request of one row with its defaults; `PredictionException` with status 400 when it makes no sense. In the
    Open Inference Protocol and OpenAI's API it has a prompt, and the rest as parameters."""
    body = row.get("data") or row.get("body") or b""
    if isinstance(body, (bytes, bytearray)):
        body = body.decode("utf-8", "replace")
    tensors = getattr(row, "request", None)
    if tensors is not None:
        known = set(DEFAULTS) - {"prompt"}
        body = {"prompt": body} | {name: value for name, value in tensors.parameters.items() if name in known}
    elif isinstance(body, str) and body.lstrip().startswith("{"):
        try:
            body = json.loads(body)
        except ValueError as error:
            raise PredictionException(f"The input looks like JSON and isn't: {error}", 400) from error
    request = {**DEFAULTS, **(body if isinstance(body, dict) else {"prompt": str(body)})}
    check(request)
    return request


def check(request: dict[str, Any]) -> None:
    unknown = sorted(set(request) - set(DEFAULTS))
    if unknown:
        raise PredictionException(f"Unknown keys: {', '.join(unknown)}. Known: {', '.join(DEFAULTS)}", 400)
    if not isinstance(request["prompt"], str):
        raise PredictionException("prompt is a text", 400)
    if not isinstance(request["max_tokens"], int) or not 1 <= request["max_tokens"] <= MAX_TOKENS:
        raise PredictionException(f"max_tokens is a whole number from 1 to {MAX_TOKENS}", 400)
    if not isinstance(request["temperature"], (int, float)) or not 0 <= request["temperature"] <= 10:
        raise PredictionException("temperature is a number from 0 to 10", 400)
    if not isinstance(request["seed"], (int, type(None))):
        raise PredictionException("seed is a whole number", 400)


class Continuation:
    """One text on its way: `next()` gives the next character, "" when there are enough."""

    def __init__(self, model: torch.nn.Module, device: torch.device, request: dict[str, Any]) -> None:
        self.model = model
        self.device = device
        self.temperature = float(request["temperature"])
        self.max_tokens = self.left = request["max_tokens"]
        self.prompt_tokens = len(request["prompt"])
        self.random = torch.Generator()
        if request["seed"] is None:
            self.random.seed()
        else:
            self.random.manual_seed(request["seed"])
        self.logits, self.state = self.read(encode(request["prompt"]) or encode("\n"), None)

    def read(self, tokens: list[int], state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [96] after the last of the tokens, and the model's state there."""
        with torch.inference_mode():
            logits, state = self.model(torch.tensor([tokens], device=self.device), state)
        return logits[0, -1].cpu(), state

    def pick(self) -> int:
        if self.temperature == 0:
            return int(self.logits.argmax())
        weights = torch.softmax(self.logits / self.temperature, dim=0)
        return int(torch.multinomial(weights, 1, generator=self.random))

    def next(self) -> str:
        if self.left == 0:
            return ""
        token = self.pick()
        self.left -= 1
        if self.left:
            self.logits, self.state = self.read([token], self.state)
        return decode(token)

    def last(self, row: dict[str, Any], piece: str) -> Any:
        """The last piece for a row. In protocols that tell it, it says how many tokens (here: characters) there were,
        and that the text ended for its length: this model never ends one by itself."""
        if not hasattr(row, "request"):
            return piece
        from ts.tensors.types import InferenceResponse, Tensor

        given = self.max_tokens - self.left
        said = {"finish_reason": "length", "prompt_tokens": self.prompt_tokens, "completion_tokens": given}
        return InferenceResponse([Tensor.of("output", piece)], parameters=said)
