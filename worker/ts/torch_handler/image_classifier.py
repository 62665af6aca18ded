"""Image in, the most probable classes out."""

from __future__ import annotations

from typing import Any

import torch

from ts.handler_utils.timer import timed
from ts.torch_handler.image_transforms import imagenet
from ts.torch_handler.vision_handler import VisionHandler
from ts.utils.util import map_class_to_label


class ImageClassifier(VisionHandler):
    """For models that give [batch, classes]; `topk` classes are answered."""

    topk = 5
    image_processing = imagenet()

    def set_max_result_classes(self, topk: int) -> None:
        self.topk = topk

    def get_max_result_classes(self) -> int:
        return self.topk

    @timed
    def postprocess(self, data: Any) -> Any:
        """Per image {label: probability}, the most probable first."""
        shares = torch.softmax(data, dim=1)
        probs, classes = torch.topk(shares, min(self.topk, shares.shape[1]), dim=1)
        return map_class_to_label(probs.tolist(), self.mapping, classes.tolist())
