"""A small detector with torchvision's interface: images to a list of {"boxes", "labels", "scores"}."""

import torch
from torch import nn

SIDE = 64


class BoxesNet(nn.Module):
    """Every cell of SIDE pixels has a label and a score; its box is the cell."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Conv2d(3, 4, SIDE, stride=SIDE)

    def forward(self, images: "torch.Tensor | list[torch.Tensor]") -> list[dict[str, torch.Tensor]]:
        return [self.found(image) for image in images]

    def found(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        scores, labels = torch.sigmoid(self.cells(image.unsqueeze(0))[0]).max(dim=0)
        rows, columns = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
        corners = torch.stack([columns, rows, columns + 1, rows + 1], dim=-1) * float(SIDE)
        return {"boxes": corners.flatten(0, 1), "labels": labels.flatten(), "scores": scores.flatten()}
