"""Image in, a class for each pixel out."""

from __future__ import annotations

from typing import Any

import torch

from ts.handler_utils.timer import timed
from ts.torch_handler.image_transforms import imagenet
from ts.torch_handler.vision_handler import VisionHandler


class ImageSegmenter(VisionHandler):
    """For models that give {"out": [batch, classes, height, width]}, as torchvision's do."""

    image_processing = imagenet()

    @timed
    def postprocess(self, data: Any) -> Any:
        """Per image, row and pixel [class, probability]."""
        probs, classes = torch.softmax(data["out"], dim=1).max(dim=1)
        return torch.stack([classes.to(probs.dtype), probs], dim=3).tolist()
