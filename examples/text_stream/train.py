"""Trains the character model on corpus.txt and writes its weights.

Usage: python examples/text_stream/train.py [--steps 800] [--out examples/text_stream]

Writes `text_stream.pt` and `metrics.json` (the loss on the text, in bits per character). Seed and one thread are
fixed: the same torch on the same kind of machine gives the same weights again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from character_model import CharacterModel, encode  # noqa: E402

SEED = 11
BATCH = 16
LENGTH = 96


def windows(text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces from random places, and the same pieces one character on: both [BATCH, LENGTH]."""
    starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,))
    rows = starts.unsqueeze(1) + torch.arange(LENGTH + 1)
    pieces = text[rows]
    return pieces[:, :-1], pieces[:, 1:]


def loss_of(model: CharacterModel, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats per character."""
    logits, _ = model(inputs)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(text: torch.Tensor, steps: int) -> CharacterModel:
    """AdamW with a cosine schedule and clipped gradients."""
    model = CharacterModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(1, steps + 1):
        loss = loss_of(model, *windows(text))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}/{steps}  loss {loss.item():.3f}", flush=True)
    return model.eval()


def bits_per_character(model: CharacterModel, text: torch.Tensor) -> float:
    """The loss over the whole text, read in one go from its start."""
    with torch.inference_mode():
        return float(loss_of(model, text[:-1].unsqueeze(0), text[1:].unsqueeze(0))) / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the text_stream example.")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    text = torch.tensor(encode((HERE / "corpus.txt").read_text()))
    model = train(text, options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), options.out / "text_stream.pt")
    metrics = {
        "characters": len(text),
        "bits_per_character": round(bits_per_character(model, text), 4),
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": options.steps,
        "seed": SEED,
    }
    (options.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
