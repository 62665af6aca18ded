"""A model from each kind of file that an archive may hold."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import pickle
import sys
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ts.protocol.datatypes import OF_ONNX_TYPE
from ts.utils.util import list_classes_from_module

logger = logging.getLogger(__name__)

#: The beginning of the text file that Git LFS leaves in place of a large one.
_LFS_POINTER = b"version https://git-lfs"
#: torch's messages about a truncated file.
_DAMAGES = ("failed finding central directory", "not a ZIP archive", "unexpected EOF", "file in archive is not in a")
#: The names of a model's state in a checkpoint, and the prefix of its keys when the model was wrapped.
_CHECKPOINT = ("model_state_dict", "state_dict", "model_state", "model")
_WRAPPED = "module."
_KEYS_SHOWN_MAX, _KEYS_CHARS_MAX = 8, 300
TRUST = "If you trust this archive, set `handler: {weights_only: false}` in its model-config.yaml"


class ModelFileError(RuntimeError):
    """An archive's model can't be loaded from its files. The message names the file and the remedy."""


def _existing(path: str | Path, what: str) -> Path:
    path = Path(path)
    if not path.is_file():
        raise ModelFileError(f"{what} {path.name} isn't in the archive's directory {path.parent}")
    return path


def _module(path: Path) -> ModuleType:
    """The module of `path`: the one that a handler's own `import` gives, unless another module has its name."""
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() == path.resolve():
        return known
    if known is not None:
        name = f"_ts_model_file_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelFileError(f"model file {path.name} is no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def model_class(path: Path) -> type:
    """The class that a model file defines; among several, the only torch.nn.Module. Raises ModelFileError."""
    classes = list_classes_from_module(_module(path))
    if len(classes) > 1:
        classes = [found for found in classes if issubclass(found, torch.nn.Module)]
    if len(classes) != 1:
        names = ", ".join(found.__name__ for found in classes) or "none"
        raise ModelFileError(f"model file {path.name} must define one torch.nn.Module class, it has: {names}")
    return classes[0]


def _refuse_pointer(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ModelFileError(
                f"{path.name} is a pointer of Git LFS instead of the weights: run `git lfs pull` and pack it again"
            )


def _is_damage(error: Exception) -> bool:
    return isinstance(error, EOFError) or any(part in str(error) for part in _DAMAGES)


def _damaged(path: Path, error: Exception) -> str:
    size = path.stat().st_size
    return f"{path.name} ({size} bytes) isn't a whole file of weights: copy or save it again, and pack it. ({error})"


def load_weights(path: str | Path, device: torch.device, weights_only: bool = True) -> Any:
    """Loads the object saved in `path`. Raises ModelFileError when it holds more than tensors and plain values."""
    path = _existing(path, "serialized file")
    _refuse_pointer(path)
    try:
        return torch.load(path, map_location=device, weights_only=weights_only)
    except (EOFError, RuntimeError) as error:
        if not _is_damage(error):
            raise
        raise ModelFileError(_damaged(path, error)) from error
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise
        raise ModelFileError(
            f"{path.name} holds Python objects, whose loading can run any code. Save `model.state_dict()` instead. "
            f"{TRUST}. ({str(error).splitlines()[-1]})"
        ) from error


def load_eager(
    model_file: str | Path, weights: str | Path | None, device: torch.device, weights_only: bool = True
) -> torch.nn.Module:
    """The model file's class, made without arguments, with the weights file's state; in evaluation mode."""
    model = model_class(_existing(model_file, "model file"))()
    if weights is not None:
        fit(model, load_weights(weights, device, weights_only), Path(weights), Path(model_file))
    return model.to(device).eval()


def fit(model: torch.nn.Module, saved: Any, weights: Path, model_file: Path) -> None:
    """Gives `model`, of the class in `model_file`, the state in `saved`, read from `weights`. Raises ModelFileError."""
    state = state_of(saved, model, weights.name)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        files = f"{weights.name} doesn't fit {type(model).__name__} of {model_file.name}"
        raise ModelFileError(f"{files}. Pack the model file that the weights were saved with. {error}") from None


def state_of(saved: Any, model: torch.nn.Module, file: str) -> Any:
    """The state for `model` in what a file has: a state, a module, or a checkpoint with one under a usual name; without
    the prefix of DataParallel and DistributedDataParallel. Raises ModelFileError."""
    if isinstance(saved, torch.nn.Module):
        return saved.state_dict()
    if not isinstance(saved, Mapping):
        raise ModelFileError(f"{file} holds a {type(saved).__name__}, no state of a model. Save `model.state_dict()`")
    own = model.state_dict().keys()
    if own and not own & saved.keys():
        named = [key for key in _CHECKPOINT if isinstance(saved.get(key), Mapping)]
        saved = saved[named[0]] if named else saved
    if saved and all(isinstance(key, str) and key.startswith(_WRAPPED) for key in saved) and not own & saved.keys():
        saved = {key.removeprefix(_WRAPPED): value for key, value in saved.items()}
    if own and not any(isinstance(value, torch.Tensor) for value in saved.values()):
        keys = ", ".join(sorted(map(str, saved))[:_KEYS_SHOWN_MAX])[:_KEYS_CHARS_MAX]
        raise ModelFileError(
            f"{file} is no state of {type(model).__name__}: its keys are {keys!a}. Save `model.state_dict()`, alone or "
            f"in a dict under one of {', '.join(_CHECKPOINT)}"
        )
    return saved


def load_torchscript(path: str | Path, device: torch.device) -> torch.jit.ScriptModule:
    """A TorchScript archive, in evaluation mode. Raises ModelFileError for eager weights."""
    path = _existing(path, "serialized file")
    _refuse_pointer(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.load(str(path), map_location=device).eval()
    except RuntimeError as error:
        if _is_damage(error):
            raise ModelFileError(_damaged(path, error)) from error
        if "constants.pkl" not in str(error):
            raise
        raise ModelFileError(
            f"{path.name} is no TorchScript archive. Eager weights need the model's class: "
            "give the archive a --model-file."
        ) from error


def is_compiled_package(path: Path) -> bool:
    """Whether a .pt2 holds machine code (AOTInductor) instead of an exported program."""
    with zipfile.ZipFile(path) as archive:
        return any("/aotinductor/" in name for name in archive.namelist())


def load_exported(path: str | Path, device: torch.device) -> Any:
    """A .pt2 file's callable: a compiled package as it is, an exported program moved to `device`."""
    path = _existing(path, "serialized file")
    if is_compiled_package(path):
        return torch._inductor.aoti_load_package(str(path))
    program = torch.export.load(str(path))
    if device.type != "cpu":
        program = torch.export.passes.move_to_device_pass(program, device)
    return program.module()


def load_shared_library(path: str | Path, device: torch.device) -> Any:
    """The callable of a .so made by `torch._export.aot_compile`."""
    return torch._export.aot_load(str(_existing(path, "serialized file")), device.type)


_ONNX_TYPES = {name: getattr(torch, row.array_type) for name, row in OF_ONNX_TYPE.items() if row.element is not bytes}


class OnnxModel:
    """An ONNX Runtime session that is called like a model: tensors in, a tensor (or a list of them) out.

    Inputs are given in the types that the model declares. Everything else is the session's (`run`, `get_inputs`, …).
    """

    def __init__(self, session: Any) -> None:
        self.session = session
        self._inputs = {one.name: _ONNX_TYPES.get(one.type) for one in session.get_inputs()}

    def __call__(self, *tensors: torch.Tensor) -> Any:
        feeds = {
            name: tensor.detach().to("cpu", dtype).numpy()
            for (name, dtype), tensor in zip(self._inputs.items(), tensors, strict=True)
        }
        outputs = [torch.as_tensor(output) for output in self.session.run(None, feeds)]
        return outputs[0] if len(outputs) == 1 else outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)


def load_onnx(path: str | Path, device: torch.device) -> OnnxModel:
    """An ONNX model in ONNX Runtime, on CUDA when `device` is. Raises ModelFileError without that package."""
    path = _existing(path, "serialized file")
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError as error:
        message = f"{path.name} needs ONNX Runtime: add `onnxruntime` to the archive's requirements or pip install it"
        raise ModelFileError(message) from error
    return OnnxModel(runtime.InferenceSession(str(path), providers=_providers(runtime, device)))


def _providers(runtime: Any, device: torch.device) -> list[Any]:
    """The execution providers for an ONNX model, best first: the worker's GPU where this ONNX Runtime supports it."""
    if device.type != "cuda":
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in runtime.get_available_providers():
        logger.warning("this ONNX Runtime has no CUDA: the model runs on the CPU. Install onnxruntime-gpu instead")
        return ["CPUExecutionProvider"]
    return [("CUDAExecutionProvider", {"device_id": device.index or 0}), "CPUExecutionProvider"]
