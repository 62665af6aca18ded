"""The base of image models' handlers: requests to a batch of images."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from PIL import Image

from ts.context import Context
from ts.handler_utils.timer import timed
from ts.handler_utils.utils import row_value
from ts.torch_handler.base_handler import BaseHandler, attribution
from ts.torch_handler.image_transforms import Compose, ToTensor
from ts.utils.util import PredictionException


class VisionHandler(BaseHandler):
    """`image_processing` makes a tensor of a Pillow image; subclasses replace it (torchvision's steps fit)."""

    image_processing: Callable[[Any], Any] = Compose([ToTensor()])

    def initialize(self, context: Context) -> None:
        """As BaseHandler; `limit_max_image_pixels=false` lifts Pillow's guard against huge images."""
        super().initialize(context)
        if not context.system_properties.get("limit_max_image_pixels", True):
            Image.MAX_IMAGE_PIXELS = None

    @timed
    def preprocess(self, data: Any) -> Any:
        """One tensor [batch, …] on `device` from rows with an image file, the same in base64, or nested lists.

        Raises PredictionException 400 for any other value.
        """
        images = [self._image(row_value(row)) for row in data]
        return torch.stack(images).to(self.device)

    def _image(self, value: Any) -> Any:
        try:
            if isinstance(value, str):
                value = base64.b64decode(value)
            if not isinstance(value, bytes | bytearray | memoryview):
                return torch.tensor(value, dtype=torch.float32)
            image = Image.open(io.BytesIO(value))
            image.load()
        except (OSError, Image.DecompressionBombError, TypeError, ValueError, RuntimeError) as error:
            raise PredictionException(f"the input is not an image: {error}", 400) from error
        return self.image_processing(image)

    @cached_property
    def ig(self) -> Any:
        """Captum's integrated gradients of the model."""
        return attribution("IntegratedGradients")(self.model)

    def get_insights(self, data_preprocess: Any, inputs: Any, target: Any = 0) -> Any:
        """Per image how much each pixel speaks for class `target`, in the image's shape."""
        return self.ig.attribute(data_preprocess, target=target, n_steps=15).tolist()
