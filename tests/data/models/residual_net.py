"""A small residual network for images, as published ones are built."""

import torch
from torch import nn

CLASSES = 20


def path(given: int, channels: int) -> nn.Sequential:
    """Two convolutions, which halve height and width."""
    return nn.Sequential(
        nn.Conv2d(given, channels, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
    )


class ResidualNet(nn.Module):
    """Images [N, 3, H, W] to logits [N, CLASSES]; beside each path of convolutions is a short cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 7, stride=4, padding=3)
        self.first, self.first_cut = path(12, 16), nn.Conv2d(12, 16, 1, stride=2, bias=False)
        self.second, self.second_cut = path(16, 24), nn.Conv2d(16, 24, 1, stride=2, bias=False)
        self.classes = nn.Linear(24, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = torch.relu(self.stem(images))
        found = torch.relu(self.first(found) + self.first_cut(found))
        found = torch.relu(self.second(found) + self.second_cut(found))
        return self.classes(found.mean((2, 3)))
