"""Models from the Hugging Face hub. Needs `huggingface_hub` when it is called."""

from __future__ import annotations

import importlib

PATTERNS = ("*.json", "*.pt", "*.bin", "*.txt", "*.model", "*.pth", "*.safetensors", "original/*")


def download_model(
    model_id: str, revision: str = "main", model_path: str = ".cache", use_auth_token: bool | str = True
) -> str:
    """Downloads a model's weights, configuration and tokenizer to the cache folder `model_path`; returns their folder.

    `use_auth_token`: a token, True for the one that is stored on this machine.
    """
    hub = importlib.import_module("huggingface_hub")
    patterns = list(PATTERNS)
    folder: str = hub.snapshot_download(
        repo_id=model_id, revision=revision, allow_patterns=patterns, cache_dir=model_path, token=use_auth_token
    )
    return folder
