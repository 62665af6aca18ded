"""Text in, the probability of each class out."""

from __future__ import annotations

from typing import Any

import torch

from ts.handler_utils.timer import timed
from ts.handler_utils.utils import row_value
from ts.torch_handler.text_handler import TextHandler, ngrams, plain
from ts.utils.util import PredictionException, map_class_to_label


def _text(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return str(value, "utf-8")
        except UnicodeDecodeError as error:
            raise PredictionException(f"the input is no UTF-8 text: {error}", 400) from error
    if not isinstance(value, str):
        raise PredictionException(f"the input must be text, not {type(value).__name__}", 400)
    return value


class TextClassifier(TextHandler):
    """For models that are called with (token ids of all texts, where each text starts), as torch.nn.EmbeddingBag is."""

    ngrams = 2

    @timed
    def preprocess(self, data: Any) -> Any:
        """Token ids [tokens] and offsets [batch] on `device`. Raises PredictionException 400 for rows without text."""
        texts = [_text(row_value(row)) for row in data]
        self.input_text = texts[0]
        ids = [self._ids(text) for text in texts]
        starts = [sum(map(len, ids[:at])) for at in range(len(ids))]
        flat = [index for one in ids for index in one]
        where = {"dtype": torch.int64, "device": self.device}
        return torch.tensor(flat, **where), torch.tensor(starts, **where)

    def _ids(self, text: str) -> list[int]:
        tokens = ngrams(plain(text).split(), self.ngrams)
        if not isinstance(self.source_vocab, dict):
            return [self.source_vocab[token] for token in tokens]
        known: dict[str, int] = self.source_vocab
        unknown = known.get("<unk>", 0)
        return [known.get(token, unknown) for token in tokens]

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's output [batch, classes]."""
        with torch.inference_mode():
            return self.model(*data, *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> Any:
        """Per text {label: probability}."""
        return map_class_to_label(torch.softmax(data, dim=1).tolist(), self.mapping)

    def get_insights(self, data_preprocess: Any, inputs: Any, target: Any = 0) -> Any:
        """For the first text its tokens, and how much each speaks for class `target`: one number for all when the layer
        is an EmbeddingBag, which mixes them."""
        ids, offsets = data_preprocess
        attributions = self.lig.attribute(ids, additional_forward_args=(offsets,), target=target)
        words = ngrams(plain(self.input_text or "").split(), self.ngrams)
        return [{"importances": self.summarize_attributions(attributions).tolist(), "words": words}]
