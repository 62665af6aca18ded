"""Trains DigitNet on scikit-learn's digits and writes the files for the archives.

Usage: python examples/digits/train.py [--epochs 60] [--out examples/digits]

Writes `digits.pt` (weights for the eager archive), `digits_scripted.pt` (TorchScript), `metrics.json` (test accuracy)
and `samples/` (one image of each digit, all from the test split). The seed, the split and one thread are fixed: the
same torch on the same kind of machine gives the same weights again.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import warnings
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from digit_net import DigitNet  # noqa: E402

SEED = 20
INK_MAX = 16
SAMPLE_SCALE = 8


class Split(NamedTuple):
    """Images [N, 1, 8, 8] in 0..1 and labels [N]."""

    images: torch.Tensor
    labels: torch.Tensor


def load() -> tuple[Split, Split]:
    """The training and the test split: 1437 and 360 images, each class in its share."""
    digits = load_digits()
    parts = train_test_split(digits.images, digits.target, test_size=360, random_state=SEED, stratify=digits.target)
    images = [torch.tensor(part, dtype=torch.float32).unsqueeze(1) / INK_MAX for part in parts[:2]]
    labels = [torch.tensor(part, dtype=torch.long) for part in parts[2:]]
    return Split(images[0], labels[0]), Split(images[1], labels[1])


def shifted(images: torch.Tensor) -> torch.Tensor:
    """The batch moved by -1, 0 or 1 pixel each way, so that position matters less."""
    down, right = (int(n) for n in torch.randint(-1, 2, (2,)))
    return torch.roll(images, (down, right), dims=(2, 3))


def train(split: Split, epochs: int) -> DigitNet:
    """Adam on cross entropy, batches of 64."""
    model = DigitNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(split.labels)).split(64):
            loss = nn.functional.cross_entropy(model(shifted(split.images[rows])), split.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        schedule.step()
        print(f"\repoch {epoch + 1}/{epochs}  loss {total / len(split.labels):.4f}", end="", flush=True)
    print()
    return model.eval()


def accuracy(model: nn.Module, split: Split) -> float:
    """The share of images whose best class is the right one."""
    with torch.inference_mode():
        return float((model(split.images).argmax(1) == split.labels).float().mean())


def write_samples(model: DigitNet, split: Split, out: Path) -> None:
    """The first image of each digit that the model gets right, eight times its size so that people can see it."""
    out.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        right = model(split.images).argmax(1) == split.labels
    for digit in range(10):
        index = int(((split.labels == digit) & right).nonzero()[0])
        pixels = (split.images[index, 0].numpy() * 255).round().astype(np.uint8)
        image = Image.fromarray(pixels.repeat(SAMPLE_SCALE, 0).repeat(SAMPLE_SCALE, 1))
        image.save(out / f"{digit}.png", optimize=True)


def script(model: DigitNet, path: Path) -> None:
    """The same network as TorchScript; newer torch releases warn that TorchScript is on its way out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.script(model), buffer)
    drop_source_positions(buffer, path)


def drop_source_positions(archive: io.BytesIO, path: Path) -> None:
    """Writes a TorchScript file without its debug records, which hold this machine's paths."""
    with zipfile.ZipFile(archive) as full, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as kept:
        for entry in full.infolist():
            if not entry.filename.endswith(".debug_pkl"):
                kept.writestr(zipfile.ZipInfo(entry.filename), full.read(entry))


def write_metrics(model: DigitNet, training: Split, test: Split, epochs: int, path: Path) -> None:
    metrics = {
        "train_images": len(training.labels),
        "test_images": len(test.labels),
        "train_accuracy": round(accuracy(model, training), 4),
        "test_accuracy": round(accuracy(model, test), 4),
        "parameters": sum(p.numel() for p in model.parameters()),
        "epochs": epochs,
        "seed": SEED,
    }
    path.write_text(json.dumps(metrics, indent=2) + "\n")
    print(json.dumps(metrics))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the digits example.")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    training, test = load()
    model = train(training, options.epochs)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), options.out / "digits.pt")
    script(model, options.out / "digits_scripted.pt")
    write_samples(model, test, options.out / "samples")
    write_metrics(model, training, test, options.epochs, options.out / "metrics.json")


if __name__ == "__main__":
    main()
