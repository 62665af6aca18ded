"""DenseNet-161 (Huang et al., arxiv.org/abs/1608.06993) in plain torch.

Parameters have the names that torchvision gives them, so its published weights load, also the first ones, which
were saved with a dot more in some names (`norm.1`).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

BLOCKS = (6, 12, 36, 24)
BOTTLENECK = 4

_OLD_NAME = re.compile(r"(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\..*)")


class DenseNet161(nn.Module):
    """Images [N, 3, H, W], ImageNet-normalised, H and W of 32 or more, to logits [N, classes].

    `growth` channels come from each of the 78 dense layers; `first` from the stem.
    """

    def __init__(self, growth: int = 48, first: int = 96, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.ModuleDict(self.stem(first))
        channels = first
        for number, layers in enumerate(BLOCKS, start=1):
            self.features[f"denseblock{number}"] = self.block(channels, growth, layers)
            channels += layers * growth
            if number < len(BLOCKS):
                self.features[f"transition{number}"] = self.transition(channels)
                channels //= 2
        self.features["norm5"] = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, classes)

    @staticmethod
    def stem(first: int) -> dict[str, nn.Module]:
        return {
            "conv0": nn.Conv2d(3, first, 7, stride=2, padding=3, bias=False),
            "norm0": nn.BatchNorm2d(first),
            "relu0": nn.ReLU(),
            "pool0": nn.MaxPool2d(3, stride=2, padding=1),
        }

    @staticmethod
    def block(channels: int, growth: int, layers: int) -> nn.ModuleDict:
        """Layer k reads all earlier channels, `channels + (k - 1) * growth`, and adds `growth` channels."""
        wide = BOTTLENECK * growth
        return nn.ModuleDict(
            {
                f"denselayer{index + 1}": nn.Sequential(
                    OrderedDict(
                        norm1=nn.BatchNorm2d(channels + index * growth),
                        relu1=nn.ReLU(),
                        conv1=nn.Conv2d(channels + index * growth, wide, 1, bias=False),
                        norm2=nn.BatchNorm2d(wide),
                        relu2=nn.ReLU(),
                        conv2=nn.Conv2d(wide, growth, 3, padding=1, bias=False),
                    )
                )
                for index in range(layers)
            }
        )

    @staticmethod
    def transition(channels: int) -> nn.Sequential:
        return nn.Sequential(
            OrderedDict(
                norm=nn.BatchNorm2d(channels),
                relu=nn.ReLU(),
                conv=nn.Conv2d(channels, channels // 2, 1, bias=False),
                pool=nn.AvgPool2d(2),
            )
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = images
        for part in self.features.values():
            found = self.dense(part, found) if isinstance(part, nn.ModuleDict) else part(found)
        pooled = functional.adaptive_avg_pool2d(functional.relu(found), 1)
        return self.classifier(pooled.flatten(1))

    @staticmethod
    def dense(block: nn.ModuleDict, found: torch.Tensor) -> torch.Tensor:
        for layer in block.values():
            found = torch.cat((found, layer(found)), dim=1)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        renamed = {_OLD_NAME.sub(r"\1\2", name): value for name, value in state_dict.items()}
        return super().load_state_dict(renamed, *args, **kwargs)
