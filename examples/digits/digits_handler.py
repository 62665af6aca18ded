"""Classifies images of handwritten digits: image bytes in, `{"class", "probability", "probabilities"}` out.

It serves the eager archive (digit_net.py and weights) and the TorchScript one: `BaseHandler.initialize` loads both.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from PIL import Image

from ts.torch_handler.base_handler import BaseHandler
from ts.utils.util import PredictionException

SIDE = 8


def image_to_tensor(encoded: bytes) -> torch.Tensor:
    """An encoded image (PNG, JPEG, ...) of any size as float tensor [1, 8, 8], ink 1.0 on ground 0.0.

    Raises `PredictionException` with status 400 when the bytes are no image.
    """
    try:
        image = Image.open(io.BytesIO(encoded)).convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise PredictionException(f"The input is not an image: {error}", 400) from error
    return torch.tensor(list(image.tobytes()), dtype=torch.float32).reshape(1, SIDE, SIDE) / 255


class DigitClassifier(BaseHandler):
    """One row, one image: under the key `data` or `body`, as PNG or another format that Pillow reads."""

    def preprocess(self, data: list[dict[str, Any]]) -> torch.Tensor:
        rows = [row.get("data") or row.get("body") or b"" for row in data]
        return torch.stack([image_to_tensor(bytes(row)) for row in rows]).to(self.device)

    def postprocess(self, data: torch.Tensor) -> list[dict[str, Any]]:
        """Logits [N, 10] to one answer per row."""
        return [self.answer(row) for row in torch.softmax(data, dim=1).tolist()]

    def answer(self, probabilities: list[float]) -> dict[str, Any]:
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        return {
            "class": self.label(best),
            "probability": round(probabilities[best], 6),
            "probabilities": {self.label(index): round(p, 6) for index, p in enumerate(probabilities)},
        }

    def label(self, index: int) -> str:
        """The name of a class, from index_to_name.json when the archive has one."""
        return (self.mapping or {}).get(str(index), str(index))
