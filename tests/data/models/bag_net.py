"""The text classifier that TorchServe's example has: a bag of embeddings and a linear layer."""

import torch
from torch import nn


class BagNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(50, 16)
        self.classes = nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.classes(self.embedding(ids, offsets))
