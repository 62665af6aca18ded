"""Makes densenet161.mar.

Usage: python examples/densenet161/build.py --export-path DIR [--weights FILE --index-to-name FILE | --stand-in]

Without options it takes the weights and the class names from torchvision, which downloads 110 MB once. `--weights`
takes a file that is already there. `--stand-in` makes an archive of a narrow network with random weights and ten
classes, for trying the commands without a download.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from model_archiver import ModelArchiver, ModelArchiverConfig

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from densenet161_stand_in import DenseNet161StandIn  # noqa: E402


class Parts(NamedTuple):
    """The differences between the real archive and the stand-in."""

    model_file: Path
    serialized_file: Path
    index_to_name: Path
    more_files: tuple[Path, ...] = ()


def stand_in(work: Path) -> Parts:
    """Random weights from a fixed seed."""
    torch.manual_seed(0)
    torch.save(DenseNet161StandIn().state_dict(), work / "densenet161_stand_in.pt")
    (work / "index_to_name.json").write_text(json.dumps({str(index): f"class {index}" for index in range(10)}))
    return Parts(
        HERE / "densenet161_stand_in.py",
        work / "densenet161_stand_in.pt",
        work / "index_to_name.json",
        (HERE / "densenet161.py",),
    )


def from_torchvision(work: Path) -> Parts:
    """The published ImageNet weights and their 1000 class names."""
    try:
        from torchvision.models import DenseNet161_Weights
    except ImportError:
        sys.exit(
            "torchvision is not installed. Install it, or give --weights FILE --index-to-name FILE, or --stand-in."
        )
    weights = DenseNet161_Weights.IMAGENET1K_V1
    torch.save(weights.get_state_dict(progress=True), work / "densenet161.pt")
    names = {str(index): name for index, name in enumerate(weights.meta["categories"])}
    (work / "index_to_name.json").write_text(json.dumps(names))
    return Parts(HERE / "densenet161.py", work / "densenet161.pt", work / "index_to_name.json")


def archive(parts: Parts, export_path: Path) -> None:
    """Packs the archive as `torch-model-archiver --model-name densenet161 ...` does; README.md has the command."""
    ModelArchiver.generate_model_archive(
        ModelArchiverConfig(
            model_name="densenet161",
            version="1.0",
            handler="image_classifier",
            model_file=str(parts.model_file),
            serialized_file=str(parts.serialized_file),
            extra_files=",".join(str(file) for file in (parts.index_to_name, *parts.more_files)),
            export_path=str(export_path),
            force=True,
        )
    )
    print(export_path / "densenet161.mar")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make densenet161.mar.")
    parser.add_argument("--export-path", type=Path, required=True)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--index-to-name", type=Path)
    parser.add_argument("--stand-in", action="store_true")
    options = parser.parse_args()
    if (options.weights is None) != (options.index_to_name is None):
        parser.error("--weights and --index-to-name go together")
    with tempfile.TemporaryDirectory() as work:
        if options.weights:
            parts = Parts(HERE / "densenet161.py", options.weights, options.index_to_name)
        else:
            parts = stand_in(Path(work)) if options.stand_in else from_torchvision(Path(work))
        archive(parts, options.export_path)


if __name__ == "__main__":
    main()
