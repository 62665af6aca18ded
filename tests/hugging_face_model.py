"""Makes a folder of Hugging Face of a language model in a GGUF file: `python tests/hugging_face_model.py FILE FOLDER`.

It needs transformers, torch, gguf and accelerate. The folder appears when it is complete; one that is there stays.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any


def main(file: Path, folder: Path) -> None:
    if folder.is_dir():
        return
    import torch

    transformers: Any = importlib.import_module("transformers")
    made = folder.with_name(f"{folder.name}.{os.getpid()}")
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(made)
    read = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # a model that has it can't be saved
    plain = type(read)(config)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(made)
    made.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
