"""A character-level language model: one recurrent layer that reads bytes and foretells the next one."""

from __future__ import annotations

import torch
from torch import nn

#: Line break and the printable ASCII characters; anything else is read as a blank.
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))


class CharacterModel(nn.Module):
    """Embedding, GRU, linear. 96 characters in, 96 logits out, 121 000 parameters.

    `forward(tokens [N, T] int64, state [1, N, 160] or None)` gives logits [N, T, 96] and the state after the last one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), 48)
        self.recur = nn.GRU(48, 160, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(160, len(ALPHABET))

    def forward(self, tokens: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, state = self.recur(self.embed(tokens), state)
        return self.out(self.drop(hidden)), state


def encode(text: str) -> list[int]:
    """Characters to token numbers."""
    return [ALPHABET.find(character) if character in ALPHABET else ALPHABET.index(" ") for character in text]


def decode(token: int) -> str:
    return ALPHABET[token]
