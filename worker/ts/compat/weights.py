"""Runs weights that come without an archive (docs/weights.md): TorchScript, torch.export, ONNX, and states whose class
is in a model.py or in the package transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ts.compat.triton_backend import exported, onnx_model
from ts.compat.triton_backend.graphs import TensorGraph, served
from ts.compat.triton_backend.modules import TorchModule
from ts.runtime.handlers import HandlerNotUsable, Loaded, Settings


def load(settings: Settings) -> Loaded:
    """`adapter_settings`: `kind` (one of `_OPENED`), the paths `files`, and for a state `class_file`."""
    adapted = settings["adapter_settings"]
    files = [Path(one) for one in adapted["files"]]
    return served(_OPENED[adapted["kind"]](files, adapted, settings.get("gpu_id")), settings)._replace(completed=None)


def _onnx(files: list[Path], adapted: dict[str, Any], gpu_id: int | None) -> TensorGraph:
    return onnx_model.opened(files[0], {}, gpu_id)


def _exported(files: list[Path], adapted: dict[str, Any], gpu_id: int | None) -> TensorGraph:
    return exported.opened(files[0], {}, gpu_id)


def _torchscript(files: list[Path], adapted: dict[str, Any], gpu_id: int | None) -> TensorGraph:
    from ts.torch_handler.model_files import ModelFileError, load_torchscript

    device = _device(gpu_id)
    try:
        module = load_torchscript(files[0], device)
    except ModelFileError:
        raise HandlerNotUsable(
            f"{files[0].name} is not TorchScript. A state dict needs its class: put a model.py with it next to the file"
        ) from None
    return TorchModule(module, [one.name for one in list(module.forward.schema.arguments)[1:]], device)


def _class(files: list[Path], adapted: dict[str, Any], gpu_id: int | None) -> TensorGraph:
    from ts.torch_handler.model_files import load_eager, model_class

    device, class_file = _device(gpu_id), Path(adapted["class_file"])
    if files[0].suffix != ".safetensors":
        module: Any = load_eager(class_file, files[0], device)
    else:
        module = model_class(class_file)()
        module.load_state_dict(_state(files))
        module = module.to(device).eval()
    return TorchModule.of(module, device)


def _state(files: list[Path]) -> dict[str, Any]:
    """The tensors of all files."""
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise HandlerNotUsable(f"{files[0].name} needs the package safetensors: pip install safetensors") from None
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _transformers(files: list[Path], adapted: dict[str, Any], gpu_id: int | None) -> TensorGraph:
    """The class that config.json names, with the folder's tokenizer for texts where there is one."""
    folder = files[0].parent
    try:
        import transformers  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise HandlerNotUsable(
            "the class of the weights is in config.json, for the package transformers: pip install transformers"
        ) from None
    names = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
    kind = getattr(transformers, names[0], None)
    if kind is None:
        raise HandlerNotUsable(
            f"transformers {transformers.__version__} has no class {names[0]!r}, as config.json says"
        )
    device = _device(gpu_id)
    module = kind.from_pretrained(folder, local_files_only=True).to(device).eval()
    tokenizer = None
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt")):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return TorchModule.of(module, device, tokenizer)


def _device(gpu_id: int | None) -> Any:
    import torch

    return torch.device("cpu" if gpu_id is None else f"cuda:{gpu_id}")


_OPENED = {
    "onnx": _onnx,
    "exported": _exported,
    "torchscript": _torchscript,
    "class": _class,
    "transformers": _transformers,
}
