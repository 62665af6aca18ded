"""A small convolutional network for 8x8 grey images of handwritten digits."""

from __future__ import annotations

import torch
from torch import nn


class DigitNet(nn.Module):
    """Two convolutions and a linear layer, 9930 parameters.

    Input: float tensor [N, 1, 8, 8], ink 1.0 on ground 0.0. Output: logits [N, 10].
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Sequential(nn.Flatten(), nn.Dropout(0.25), nn.Linear(32 * 4 * 4, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classify(self.features(images))
