"""The base of text models' handlers: a vocabulary, and text made plain."""

from __future__ import annotations

import os
import re
import string
import unicodedata
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ts.context import Context
from ts.handler_utils.text_utils import get_tokenizer
from ts.torch_handler.base_handler import BaseHandler, attribution
from ts.torch_handler.contractions import CONTRACTION_MAP
from ts.torch_handler.model_files import load_weights
from ts.utils.util import CLEANUP_REGEX

VOCABULARY_FILE = "source_vocab.pt"
_SHORT_FORMS = "|".join(sorted(map(re.escape, CONTRACTION_MAP), key=len, reverse=True))
_CONTRACTIONS = re.compile(rf"(?<!\w)(?:{_SHORT_FORMS})(?!\w)", re.IGNORECASE)
_NO_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))
_PUNCTUATION_DELETED = str.maketrans("", "", string.punctuation)


class TextHandler(BaseHandler):
    """`source_vocab`: the contents of `source_vocab.pt` among the archive's extra files, a dict of token to index."""

    def __init__(self) -> None:
        super().__init__()
        self.source_vocab: Any = None
        self.input_text: str | None = None

    def initialize(self, context: Context) -> None:
        """As BaseHandler, and the vocabulary. Raises ModelFileError when it is missing or a pickled object."""
        super().initialize(context)
        path = self.get_source_vocab_path(context)
        self.source_vocab = load_weights(path, self.device, self._setting("weights_only", True))

    def get_source_vocab_path(self, context: Context) -> str:
        """The vocabulary's file: a subclass may have another one."""
        return os.path.join(context.system_properties["model_dir"], VOCABULARY_FILE)

    @cached_property
    def lig(self) -> Any:
        """Captum's integrated gradients of the model's layer `embedding`."""
        return attribution("LayerIntegratedGradients")(self.model, self.model.embedding)

    def get_word_token(self, input_tokens: Sequence[str]) -> list[str]:
        """Tokens without the character by which byte-pair encodings mark the begin of a word."""
        return [token.replace("\u0120", "") for token in input_tokens]

    def summarize_attributions(self, attributions: Any) -> Any:
        """One number per token from [1, tokens, embedding] or [tokens, embedding], of length 1 together."""
        sums = attributions.sum(dim=-1).squeeze(0)
        return sums / sums.norm()

    # Handlers with a `preprocess` of their own call the steps below.
    @cached_property
    def tokenizer(self) -> Any:
        return get_tokenizer("basic_english")

    def _remove_html_tags(self, text: str) -> str:
        return CLEANUP_REGEX.sub("", text)

    def _expand_contractions(self, text: str) -> str:
        return expand_contractions(text).replace("'", "")

    def _remove_accented_characters(self, text: str) -> str:
        return without_accents(text)

    def _remove_punctuation(self, text: str) -> str:
        return text.translate(_PUNCTUATION_DELETED)

    _remove_puncutation = _remove_punctuation  # TorchServe has both spellings

    def _tokenize(self, text: str) -> list[str]:
        return list(self.tokenizer(text))


def plain(text: str) -> str:
    """Lower case without tags, contractions, accents and punctuation."""
    text = expand_contractions(CLEANUP_REGEX.sub("", text).lower())
    return " ".join(without_accents(text).translate(_NO_PUNCTUATION).split())


def without_accents(text: str) -> str:
    """ASCII alone: letters without their accents; other characters are left out."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode("ascii")


def expand_contractions(text: str) -> str:
    """ "don't" as "do not"; the first letter stays as it is."""
    straight = text.replace("\u2019", "'")
    return _CONTRACTIONS.sub(lambda found: found[0][0] + CONTRACTION_MAP[found[0].lower()][1:], straight)


def ngrams(tokens: list[str], size_max: int) -> list[str]:
    """The tokens, then each two neighbours as "a b", and so on up to `size_max`."""
    runs = (zip(*(tokens[at:] for at in range(size)), strict=False) for size in range(1, size_max + 1))
    return [" ".join(run) for group in runs for run in group]
