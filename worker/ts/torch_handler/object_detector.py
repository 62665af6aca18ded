"""Image in, boxes around known objects out."""

from __future__ import annotations

from typing import Any

import torch

from ts.handler_utils.timer import timed
from ts.handler_utils.utils import row_value
from ts.torch_handler.image_transforms import Compose, ToRGB, ToTensor
from ts.torch_handler.vision_handler import VisionHandler


class ObjectDetector(VisionHandler):
    """For models that give per image {"boxes", "labels", "scores"}, as torchvision's do."""

    threshold = 0.5
    image_processing = Compose([ToRGB(), ToTensor()])

    @timed
    def preprocess(self, data: Any) -> Any:
        """One tensor, or a list of them when the images differ in size: torchvision's detectors take both."""
        images = [self._image(row_value(row)).to(self.device) for row in data]
        same = all(image.shape == images[0].shape for image in images)
        return torch.stack(images) if same else images

    @timed
    def postprocess(self, data: Any) -> Any:
        """Per image a list of {label: [x1, y1, x2, y2], "score": score}, scores from `threshold` on."""
        return [self._boxes(found) for found in data]

    def _boxes(self, found: Any) -> list[dict[str, Any]]:
        names = self.mapping or {}
        rows = zip(found["labels"].tolist(), found["boxes"].tolist(), found["scores"].tolist(), strict=True)
        return [
            {names.get(str(label), str(label)): box, "score": score}
            for label, box, score in rows
            if score >= self.threshold
        ]
