"""Two of torchtext's functions, for handlers that relied on them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_APART = re.compile(r"'|[.,()!?]")
_BLANK = re.compile(r"<br />|[;:]|\s+")


def ngrams_iterator(token_list: Sequence[str], ngrams: int) -> Iterator[str]:
    """The tokens, then all pairs of neighbours joined by a blank, and so on up to `ngrams` of them."""
    for size in range(1, ngrams + 1):
        for start in range(len(token_list) - size + 1):
            yield " ".join(token_list[start : start + size])


def basic_english(line: str) -> list[str]:
    """Lower-case words; punctuation marks are words of their own, but quotation marks, colons and semicolons go."""
    text = _BLANK.sub(" ", line.lower().replace('"', ""))
    return _APART.sub(lambda mark: f" {mark[0]} ", text).split()


def get_tokenizer(tokenizer: str | Callable[[str], Any] | None, language: str = "en") -> Callable[[str], Any]:
    """None: split at blanks; "basic_english"; or a function, which is returned. Raises ValueError for others."""
    if tokenizer is None:
        return str.split
    if tokenizer == "basic_english":
        if language != "en":
            raise ValueError(f"basic_english is for English (en), not {language}")
        return basic_english
    if callable(tokenizer):
        return tokenizer
    raise ValueError(f"there is no tokenizer {tokenizer!r}: give None, 'basic_english' or a function")
