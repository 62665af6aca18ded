"""From a Pillow image to the tensor a vision model was trained on; results equal torchvision's pixel for pixel.

Heights come before widths, tensors are [channels, height, width]. Steps of torchvision can stand among these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from PIL import Image

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_WIDE_MODES: Mapping[str, torch.dtype] = MappingProxyType({"I": torch.int32, "I;16": torch.int16, "F": torch.float32})


class Compose:
    """Steps one after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = list(transforms)

    def __call__(self, image: Any) -> Any:
        for step in self.transforms:
            image = step(image)
        return image


class ToRGB:
    """Converts to three channels, from any mode: grey, palette, transparency."""

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.convert("RGB")


class Resize:
    """`size`: the length of the shorter side, the other in proportion (rounded down); or (height, width).

    Bilinear over as many pixels as fall together, so that shrinking doesn't skip any.
    """

    def __init__(self, size: int | Sequence[int]) -> None:
        self.size = size

    def __call__(self, image: Image.Image) -> Image.Image:
        width, height = self._target(*image.size)
        return image if (width, height) == image.size else image.resize((width, height), Image.Resampling.BILINEAR)

    def _target(self, width: int, height: int) -> tuple[int, int]:
        if not isinstance(self.size, int):
            return self.size[1], self.size[0]
        if width <= height:
            return self.size, int(self.size * height / width)
        return int(self.size * width / height), self.size


class CenterCrop:
    """The middle `size` (a square's side, or (height, width)); a smaller image gets a black border."""

    def __init__(self, size: int | Sequence[int]) -> None:
        self.height, self.width = (size, size) if isinstance(size, int) else size

    def __call__(self, image: Image.Image) -> Image.Image:
        left, top = _start(image.width, self.width), _start(image.height, self.height)
        return image.crop((left, top, left + self.width, top + self.height))


def _start(length: int, wanted: int) -> int:
    return round((length - wanted) / 2) if length >= wanted else -((wanted - length) // 2)


class ToTensor:
    """Float [channels, height, width]: 8-bit values become 0 … 1, those of wider images stay as they are."""

    def __call__(self, image: Image.Image) -> torch.Tensor:
        if image.mode == "1":
            image = image.convert("L")
        dtype = _WIDE_MODES.get(image.mode, torch.uint8)
        flat = torch.frombuffer(bytearray(image.tobytes()), dtype=dtype)
        tensor = flat.view(image.height, image.width, -1).permute(2, 0, 1).contiguous()
        return tensor.float().div(255) if dtype is torch.uint8 else tensor


class Normalize:
    """(value - mean) / std, per channel, or with one mean for all. Raises ValueError for another number of them."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1)
        self.std = torch.tensor(std, dtype=torch.float32).view(-1, 1, 1)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if len(self.mean) not in (1, tensor.shape[-3]):
            raise ValueError(f"an image of {tensor.shape[-3]} channels, where {len(self.mean)} are expected")
        return (tensor - self.mean) / self.std


def imagenet() -> Compose:
    """The transforms for models trained on ImageNet: 224 x 224 from the middle of the image, normalised."""
    return Compose((ToRGB(), Resize(256), CenterCrop(224), ToTensor(), Normalize(IMAGENET_MEAN, IMAGENET_STD)))
