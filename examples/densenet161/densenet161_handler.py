"""Names what is in a photo: encoded image in, the five likeliest classes and their probabilities out.

It prepares images as the network was trained: shorter side to 256, the middle 224 x 224, ImageNet's mean and
deviation. Pillow and torch do that; torchvision isn't needed.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from PIL import Image

from ts.torch_handler.base_handler import BaseHandler
from ts.utils.util import PredictionException

SHORTER_SIDE = 256
SIDE = 224
MEAN = torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1)


def image_to_tensor(encoded: bytes) -> torch.Tensor:
    """An encoded image as normalised float tensor [3, 224, 224]; `PredictionException` 400 when it is none."""
    try:
        image = Image.open(io.BytesIO(encoded)).convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise PredictionException(f"The input is not an image: {error}", 400) from error
    scale = SHORTER_SIDE / min(image.size)
    image = image.resize((max(SIDE, round(image.width * scale)), max(SIDE, round(image.height * scale))))
    left, top = (image.width - SIDE) // 2, (image.height - SIDE) // 2
    image = image.crop((left, top, left + SIDE, top + SIDE))
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(SIDE, SIDE, 3)
    return (pixels.permute(2, 0, 1) / 255 - MEAN) / DEVIATION


class DenseNetHandler(BaseHandler):
    """One row, one image: under the key `data` or `body`."""

    def preprocess(self, data: list[dict[str, Any]]) -> torch.Tensor:
        rows = [row.get("data") or row.get("body") or b"" for row in data]
        return torch.stack([image_to_tensor(bytes(row)) for row in rows]).to(self.device)

    def postprocess(self, data: torch.Tensor) -> list[dict[str, float]]:
        """Logits [N, classes] to {name: probability}, likeliest first."""
        best, indices = torch.softmax(data, dim=1).topk(5)
        return [
            {self.label(index): probability for index, probability in zip(row, values, strict=True)}
            for row, values in zip(indices.tolist(), best.tolist(), strict=True)
        ]

    def label(self, index: int) -> str:
        return (self.mapping or {}).get(str(index), str(index))
