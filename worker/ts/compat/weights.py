"""Runs weights without an archive (docs/weights.md): TorchScript, torch.export, ONNX, and states with a class in a
model.py or in the package transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ts.compat.triton_backend import onnx_model
from ts.compat.triton_backend.graphs import TensorGraph, served
from ts.compat.triton_backend.torch_graphs import TorchModule, device_of, exported
from ts.runtime.handlers import HandlerNotUsable, Loaded, Settings


def load(settings: Settings) -> Loaded:
    """`adapter_settings`: `kind` (one of `_OPENED`), the paths `files`, and `class_file` for a state."""
    adapted = settings["adapter_settings"]
    files = [Path(one) for one in adapted["files"]]
    return served(_OPENED[adapted["kind"]](files, adapted, settings.get("gpu_id")), settings)._replace(completed=None)


def _torchscript(files: list[Path], adapted: dict[str, Any], gpu_id: int | None) -> TensorGraph:
    from ts.torch_handler.model_files import ModelFileError, load_torchscript

    device = device_of(gpu_id)
    try:
        module = load_torchscript(files[0], device)
    except ModelFileError:
        raise HandlerNotUsable(
            f"{files[0].name} is not TorchScript. A state dict needs its class: put a model.py with it next to the file"
        ) from None
    return TorchModule(module, [one.name for one in list(module.forward.schema.arguments)[1:]], device)


def _class(files: list[Path], adapted: dict[str, Any], gpu_id: int | None) -> TensorGraph:
    from ts.torch_handler.model_files import fit, load_eager, model_class

    device, class_file = device_of(gpu_id), Path(adapted["class_file"])
    if files[0].suffix != ".safetensors":
        module: Any = load_eager(class_file, files[0], device)
    else:
        module = model_class(class_file)()
        fit(module, _state(files), files[0], class_file)
        module = module.to(device).eval()
    return TorchModule.of(module, device)


def _state(files: list[Path]) -> dict[str, Any]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise HandlerNotUsable(f"{files[0].name} needs the package safetensors: pip install safetensors") from None
    found: dict[str, Any] = {}
    for file in files:
        try:
            found |= load_file(file)
        except SafetensorError as error:
            raise HandlerNotUsable(f"{file.name} can't be read: {error}") from error
    return found


def _transformers(files: list[Path], adapted: dict[str, Any], gpu_id: int | None) -> TensorGraph:
    """The class that config.json names, with the folder's tokenizer for texts, if there is one."""
    folder = files[0].parent
    try:
        import transformers  # type: ignore[import-not-found,unused-ignore]
        from safetensors import SafetensorError
    except ImportError:
        raise HandlerNotUsable(
            "the class of the weights is in config.json, for the package transformers: pip install transformers"
        ) from None
    config = json.loads((folder / "config.json").read_text())
    name = (config.get("architectures") or [""])[0]
    kind = getattr(transformers, name, None)
    if kind is None:
        own = ": its code is the model's own (auto_map), so that it needs a handler" if config.get("auto_map") else ""
        raise HandlerNotUsable(
            f"transformers {transformers.__version__} has no class {name!r}, which config.json names{own}"
        )
    transformers.utils.logging.disable_progress_bar()
    device = device_of(gpu_id)
    try:
        module, loading = kind.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        text = f"{type(error).__name__}: {error}"
        raise HandlerNotUsable(f"transformers can't load {name} from {files[0].name}: {text}") from error
    # Models for embeddings are often saved without their pooler, whose output nobody takes.
    if absent := sorted(one for one in loading["missing_keys"] if "pooler." not in one):
        raise HandlerNotUsable(
            f"config.json doesn't fit {files[0].name}: {len(absent)} weights of {name} aren't in it and would be "
            f"random, the first is {absent[0]}"
        )
    module = module.to(device).eval()
    tokenizer = None
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt")):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return TorchModule.of(module, device, tokenizer)


_OPENED: Mapping[str, Callable[[list[Path], dict[str, Any], int | None], TensorGraph]] = {
    "onnx": lambda files, adapted, gpu_id: onnx_model.opened(files[0], {}, gpu_id),
    "exported": lambda files, adapted, gpu_id: exported(files[0], {}, gpu_id),
    "torchscript": _torchscript,
    "class": _class,
    "transformers": _transformers,
}
