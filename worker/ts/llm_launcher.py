"""Serves one language model: `python -m ts.llm_launcher --model_id NAME` until Ctrl-C.

`--model_id` is a `.gguf` file, a folder of Hugging Face, or a name on its hub. A model of vLLM is a directory in the
model store, which is deleted at the end; other engines serve the files where they lie.
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

#: The packages of the engines.
PACKAGES = {"vllm": "vllm", "transformers": "transformers", "llama.cpp": "xllamacpp"}
#: Options that only vLLM has, by their names in vLLM, and options of all engines by their names in `language_models`.
OF_VLLM = (
    *("max_num_seqs", "download_dir", "tensor_parallel_size", "gpu_memory_utilization", "quantization", "enable_lora"),
    "enforce_eager",
)
OF_ALL = {"dtype": "dtype", "max_model_len": "maxModelLength", "trust_remote_code": "trustRemoteCode"}
_SEQUENCES = 256


def parser() -> argparse.ArgumentParser:
    """TorchServe's options, under TorchServe's names and those of MAX, Dynamo and `vllm serve`."""
    made = argparse.ArgumentParser(
        prog="python -m ts.llm_launcher", description="Serve a language model.", allow_abbrev=False
    )
    add = made.add_argument
    add("--model_name", "--model-name", "--served-model-name", default="model", help="what it is called in URLs")
    add("--model_store", "--model-store", default="model_store", help="directory that it is served from")
    add(
        *("--model_id", "--model-id", "--model", "--model-path", "--model_path"),
        default="meta-llama/Meta-Llama-3.1-8B-Instruct",
        help="a .gguf file, a folder, or a name on the Hugging Face hub",
    )
    add("--disable_token_auth", action="store_true", help="ask no tokens")
    add("--vllm_engine.max_num_seqs", "--max-num-seqs", type=int, help=f"requests at a time ({_SEQUENCES})")
    add("--vllm_engine.max_model_len", "--max-model-len", type=int, help="tokens of a prompt and its answer")
    add("--vllm_engine.download_dir", "--download-dir", help="where vLLM keeps weights")
    add("--startup_timeout", type=int, default=1200, help="seconds that loading may take")
    add("--engine", choices=[*PACKAGES, "trt_llm"], help="default: the best installed one for the model")
    add("--dtype", help="type of the weights, as bfloat16")
    add("--trt_llm_engine.max_batch_size", type=int, help="TensorRT-LLM isn't part of this server")
    add("--trt_llm_engine.kv_cache_free_gpu_memory_fraction", type=float, help="the same")
    add(
        "--trust-remote-code", "--trust_remote_code", action="store_true", default=None, help="run the model's own code"
    )
    add("--tensor-parallel-size", type=int, help="GPUs that vLLM spreads the model over (all)")
    add("--gpu-memory-utilization", type=float, help="part of the GPU's memory for vLLM")
    add("--quantization", help="vLLM's form of quantized weights")
    add("--enable-lora", action="store_true", default=None, help="vLLM takes adapters")
    add("--enforce-eager", action="store_true", default=None, help="vLLM makes no CUDA graphs")
    return made


def _given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The options of these names that have a value; TorchServe's have a prefix."""
    values = vars(options)
    found = {name: values.get(f"vllm_engine.{name}", values.get(name)) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def model_config(given: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """The model-config.yaml of a model of vLLM. `gpus`: the number of GPUs for the model, 0 for the CPU."""
    engine = {"max_num_seqs": _SEQUENCES, **_given(given, (*OF_VLLM, *OF_ALL))}
    parallel = engine.get("tensor_parallel_size") or gpus
    if parallel > 1:
        engine["tensor_parallel_size"] = parallel
    many = {"parallelType": "custom", "parallelLevel": parallel} if parallel > 1 and gpus else {}
    place = Path(given.model_id)
    return {
        "minWorkers": 1,
        "maxWorkers": 1,
        "responseTimeout": given.startup_timeout,
        "startupTimeout": given.startup_timeout,
        "deviceType": "gpu" if gpus else "cpu",
        **many,
        "handler": {
            "model_path": str(place.absolute()) if place.exists() else given.model_id,
            "vllm_engine_config": engine,
        },
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


def engine_of(given: argparse.Namespace) -> str:
    """The engine for a model: the named one; "" leaves the choice to the server. Exits if none is installed."""
    if given.engine == "trt_llm":
        sys.exit(f"TensorRT-LLM isn't part of this server. There are the engines {', '.join(PACKAGES)}")
    place = Path(given.model_id)
    gguf = place.suffix == ".gguf" or (place.is_dir() and any(place.glob("*.gguf")))
    able = ["llama.cpp"] if gguf else ["vllm", "transformers"] if place.is_dir() else [*PACKAGES]
    possible = [given.engine] if given.engine else able
    there = [one for one in possible if importlib.util.find_spec(PACKAGES[one]) is not None]
    if not there:
        install = f"{shlex.quote(sys.executable)} -m pip install"
        how = ", or ".join(f"{install} {PACKAGES[one]}" for one in possible)
        sys.exit(f"The engine {' or '.join(possible)} is not installed. Install it: {how}")
    return str(given.engine or ("vllm" if there[0] == "vllm" and not place.is_dir() else ""))


@contextlib.contextmanager
def _model(given: argparse.Namespace, engine: str) -> Iterator[tuple[str, list[str]]]:
    """What the server is to load, and its further words. Exits for options that the engine doesn't have."""
    if engine == "vllm":
        with model_directory(given, _gpus()):
            yield given.model_name, []
        return
    if lacking := _given(given, OF_VLLM):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in lacking)
        sys.exit(f"{flags}: only for the engine vllm (--engine vllm); {engine or 'this model'} doesn't have it")
    Path(given.model_store).mkdir(parents=True, exist_ok=True)
    settings = {OF_ALL[name]: value for name, value in _given(given, tuple(OF_ALL)).items()}
    settings |= {"engine": engine} if engine else {}
    place = Path(given.model_id)
    timeout = str(given.startup_timeout)
    more = {"default_startup_timeout": timeout, "default_response_timeout": timeout}
    if settings:
        more["language_models"] = json.dumps(settings)
    words = [word for key, value in more.items() for word in ("--set", f"{key}={value}")]
    yield f"{given.model_name}={place.absolute() if place.exists() else given.model_id}", words


def main(words: Sequence[str] | None = None) -> None:
    """Serves until Ctrl-C or SIGTERM. Exits with 1 without an engine, without the model, or if the server ends."""
    given = parser().parse_args(words)
    engine = engine_of(given)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _model(given, engine) as (named, more), contextlib.suppress(KeyboardInterrupt):
        try:
            lines: Queue[str | None] = launcher.start(
                model_store=given.model_store,
                no_config_snapshots=True,
                models=named,
                disable_token=given.disable_token_auth,
                exit_on_error=True,
                options=more,
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
