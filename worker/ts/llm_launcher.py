"""Serves one language model with `vllm_handler`: `python -m ts.llm_launcher --model_id NAME` until Ctrl-C.

The model is a directory in the model store, which is deleted at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import yaml

from ts import launcher


def parser() -> argparse.ArgumentParser:
    """TorchServe's options."""
    made = argparse.ArgumentParser(prog="python -m ts.llm_launcher", description="Serve a language model with vLLM.")
    made.add_argument("--model_name", default="model", help="what it is called in URLs")
    made.add_argument("--model_store", default="model_store", help="directory that it is served from")
    made.add_argument("--model_id", required=True, help="name on the Hugging Face hub, or a directory")
    made.add_argument("--disable_token_auth", action="store_true", help="ask no tokens")
    made.add_argument("--vllm_engine.max_num_seqs", type=int, default=256, help="requests at a time")
    made.add_argument("--vllm_engine.max_model_len", type=int, help="tokens of a prompt and its answer")
    made.add_argument("--vllm_engine.download_dir", help="where weights are kept")
    made.add_argument("--startup_timeout", type=int, default=1200, help="seconds that loading may take")
    made.add_argument("--engine", default="vllm", choices=["vllm"], help="TensorRT-LLM isn't part of this server")
    return made


def model_config(given: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """The model-config.yaml. `gpus`: the number of GPUs for the model, 0 for the CPU."""
    options = vars(given)
    names = ("max_num_seqs", "max_model_len", "download_dir")
    engine = {name: options[f"vllm_engine.{name}"] for name in names if options[f"vllm_engine.{name}"] is not None}
    if gpus > 1:
        engine["tensor_parallel_size"] = gpus
    many = {"parallelType": "custom", "parallelLevel": gpus} if gpus > 1 else {}
    return {
        "minWorkers": 1,
        "maxWorkers": 1,
        "responseTimeout": given.startup_timeout,
        "startupTimeout": given.startup_timeout,
        "maxConcurrency": engine["max_num_seqs"],
        "deviceType": "gpu" if gpus else "cpu",
        **many,
        "handler": {"model_path": given.model_id, "vllm_engine_config": engine},
    }


@contextlib.contextmanager
def model_directory(given: argparse.Namespace, gpus: int) -> Iterator[Path]:
    """The model in the store, for the time of the block. Raises SystemExit if the name is taken."""
    folder = Path(given.model_store, given.model_name)
    try:
        (folder / "MAR-INF").mkdir(parents=True)
    except FileExistsError:
        sys.exit(f"{folder} is there already. Delete it, or give another --model_name or --model_store")
    try:
        model = {"modelName": given.model_name, "handler": "vllm_handler", "configFile": "model-config.yaml"}
        (folder / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"runtime": "python", "model": model}))
        (folder / "model-config.yaml").write_text(yaml.safe_dump(model_config(given, gpus)))
        yield folder
    finally:
        shutil.rmtree(folder)


def get_model_config(args: argparse.Namespace, model_snapshot_path: str | None = None) -> dict[str, Any]:
    """TorchServe's name of `model_config`, with this machine's GPUs. `model_snapshot_path`: the downloaded weights."""
    config = model_config(args, _gpus())
    if model_snapshot_path is not None:
        config["handler"]["model_path"] = str(model_snapshot_path)
    return config


@contextlib.contextmanager
def create_mar_file(args: argparse.Namespace, model_snapshot_path: str | None = None) -> Iterator[str]:
    """TorchServe's name of `model_directory`: the path of the model in the store, which goes after the block."""
    with model_directory(args, _gpus()) as folder:
        (folder / "model-config.yaml").write_text(yaml.safe_dump(get_model_config(args, model_snapshot_path)))
        yield folder.as_posix()


def main(words: Sequence[str] | None = None) -> None:
    """Serves until Ctrl-C or SIGTERM. Exits with 1 without vLLM, without the model, or if the server ends."""
    given = parser().parse_args(words)
    if importlib.util.find_spec(given.engine) is None:
        install = f"{shlex.quote(sys.executable)} -m pip install {given.engine}"
        sys.exit(f"The package {given.engine}, the engine of vllm_handler, is not installed. Install it: {install}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with model_directory(given, _gpus()), contextlib.suppress(KeyboardInterrupt):
        try:
            lines: Queue[str | None] = launcher.start(
                model_store=given.model_store,
                no_config_snapshots=True,
                models=given.model_name,
                disable_token=given.disable_token_auth,
                exit_on_error=True,
            )
            if lines.get() is None:  # a started server prints further lines
                sys.exit("The server did not start")
            while lines.get() is not None:
                pass
            sys.exit("The server has ended")
        finally:
            launcher.stop(wait=False)


def _gpus() -> int:
    import torch

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


if __name__ == "__main__":
    main()
