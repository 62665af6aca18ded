"""Runs SageMaker's `inference.py`: model_fn, and input_fn, predict_fn and output_fn or transform_fn.

The contract is that of AWS's toolkit (docs/platforms.md). Every function may take one more argument, the context. Each
request of a batch is answered by itself. A generator from output_fn or transform_fn streams its pieces. Torch is
imported when a default needs it: scripts of other frameworks do without.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ts.context import Context
from ts.handler_utils.utils import as_sent, needed, streamed
from ts.protocol.text import said
from ts.utils.util import PredictionException

if TYPE_CHECKING:
    import torch

SCRIPT, CODE = "inference.py", "code"
JSON, CSV, NPY, NPZ, ANY = "application/json", "text/csv", "application/x-npy", "application/x-npz", "*/*"
_TEXTS = (JSON, CSV)
#: The functions of a script, with the number of arguments that each gets besides the context.
_FUNCTIONS = {
    "pre_model_fn": 1,
    "model_fn": 1,
    "model_warmup_fn": 2,
    "input_fn": 2,
    "predict_fn": 2,
    "output_fn": 2,
    "transform_fn": 4,
}


class InferenceScript:
    """The handler. Its functions are those of the script, and the toolkit's own for those that it hasn't."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self._gpu_id: int | None = None
        self._model: Any = None
        self._accept = os.environ.get("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT") or JSON

    def initialize(self, context: Context) -> None:
        """Imports the script and loads its model. Raises ValueError for unfit functions; its own exceptions pass."""
        properties = context.system_properties
        model_dir = properties["model_dir"]
        self._gpu_id = properties.get("gpu_id")
        self._functions = self._of_script(_script(Path(model_dir)))
        self._call("pre_model_fn", context, model_dir)
        self._model = self._call("model_fn", context, model_dir)
        self._call("model_warmup_fn", context, model_dir, self._model)

    def handle(self, data: Sequence[Any], context: Context) -> list[Any]:
        """The answers of a batch; one that failed has its status and the exception, whose traceback is in the log."""
        return [self._answer(idx, row, context) for idx, row in enumerate(data)]

    def _answer(self, idx: int, row: Mapping[str, Any], context: Context) -> Any:
        try:
            answer, content_type = self._transformed(idx, row.get("body", row.get("data")), context)
            context.set_response_content_type(idx, content_type)
            return streamed(idx, answer, context) if isinstance(answer, Iterator) else answer
        except Exception as error:
            traceback.print_exc()
            status = getattr(error, "status", getattr(error, "status_code", 500))
            told = said(error)
            if isinstance(error, PredictionException):
                status, told = error.error_code, error.message
            context.set_response_content_type(idx, "text/plain; charset=utf-8")
            context.set_response_status(status if isinstance(status, int) else 500, idx=idx)
            return f"{told}\n"

    def _transformed(self, idx: int, body: Any, context: Context) -> tuple[Any, str]:
        content_type = str(context.get_request_header(idx, "content-type") or "").partition(";")[0].strip().lower()
        accept = str(context.get_request_header(idx, "accept") or "").replace(" ", "")
        accept = self._accept if accept in ("", ANY) else accept
        given = as_sent(body)
        if content_type in _TEXTS and isinstance(given, bytes):
            given = given.decode("utf-8")
        if "transform_fn" in self._functions:
            result = self._call("transform_fn", context, self._model, given, content_type, accept)
        else:
            read = self._call("input_fn", context, given, content_type)
            prediction = self._call("predict_fn", context, read, self._model)
            result = self._call("output_fn", context, prediction, accept)
        if isinstance(result, tuple) and len(result) == 2:
            return result
        return result, accept.partition(",")[0]

    # --- the functions

    @cached_property
    def _device(self) -> torch.device:
        from ts.torch_handler.base_handler import choose_device

        return choose_device(self._gpu_id)

    def _of_script(self, script: Path | None) -> dict[str, Callable[..., Any]]:
        own: dict[str, Callable[..., Any]] = {
            "model_fn": lambda model_dir, context: self._load(model_dir),
            "input_fn": lambda data, content_type, context: self._read(data, content_type),
            "predict_fn": lambda data, model, context: self._predict(data, model),
            "output_fn": lambda prediction, accept, context: _written(prediction, accept),
        }
        if script is None:
            return own
        sys.path.insert(0, str(script.parent))
        importlib.invalidate_caches()
        module = importlib.import_module(script.stem)
        found: dict[str, Callable[..., Any]] = {
            name: vars(module)[name] for name in _FUNCTIONS if callable(vars(module).get(name))
        }
        parts = [name for name in ("input_fn", "predict_fn", "output_fn") if name in found]
        if "transform_fn" in found and parts:
            raise ValueError(
                f"{script.name} has transform_fn and {', '.join(parts)}: transform_fn does their work, too"
            )
        return own | {name: _called(script.name, name, function) for name, function in found.items()}

    def _call(self, name: str, context: Context, *arguments: Any) -> Any:
        """Calls a function of the script, which may take the context; None if there is none."""
        function = self._functions.get(name)
        return None if function is None else function(*arguments, context)

    def _load(self, model_dir: str) -> Any:
        """The only TorchScript file of the folder, model.pt before others."""
        files = sorted(one for one in Path(model_dir).iterdir() if one.suffix in (".pt", ".pth"))
        preferred = [one for one in files if one.name == "model.pt"] or files
        if len(preferred) != 1:
            names = ", ".join(one.name for one in files) or "none"
            raise ValueError(f"a model without model_fn is one .pt or .pth file of TorchScript; there are: {names}")
        from ts.torch_handler.model_files import load_torchscript

        return load_torchscript(preferred[0], self._device)

    def _read(self, data: Any, content_type: str) -> torch.Tensor:
        import torch

        if content_type in _TEXTS:
            return torch.as_tensor(_read_text(data, content_type), dtype=torch.float32, device=self._device)
        return torch.from_numpy(_read_array(data, content_type)).to(self._device)

    def _predict(self, data: Any, model: Any) -> Any:
        import torch

        with torch.inference_mode():
            return model.to(self._device).eval()(data)


def _script(model_dir: Path) -> Path | None:
    """The script that SAGEMAKER_PROGRAM names, inference.py by default, in the model's code, in the folder that
    SAGEMAKER_SUBMIT_DIRECTORY names, or beside the model; None if there is none."""
    program = os.environ.get("SAGEMAKER_PROGRAM") or SCRIPT
    name = program if program.endswith(".py") else f"{program}.py"
    submitted = os.environ.get("SAGEMAKER_SUBMIT_DIRECTORY", "")
    folders = [model_dir / CODE, *([Path(submitted)] if submitted.startswith("/") else []), model_dir]
    return next((one / name for one in folders if (one / name).is_file()), None)


def _called(file: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one that takes the context. Raises ValueError for a wrong number of arguments."""
    least, there = _FUNCTIONS[name], len(inspect.signature(function).parameters)
    if there == least:
        return lambda *arguments: function(*arguments[:-1])
    if there != least + 1:
        raise ValueError(
            f"{name} of {file} takes {there} arguments; it is called with {least}, or with the context, too"
        )
    return function


# --- the toolkit's content types


def _read_text(text: str, content_type: str) -> Any:
    try:
        if content_type == JSON:
            return np.array(json.loads(text), dtype=np.float32)
        return np.genfromtxt(io.StringIO(text), delimiter=",", dtype=np.float32)
    except (ValueError, RecursionError) as error:
        raise PredictionException(f"The body is no array of numbers in {content_type}: {error}", 400) from None


def _read_array(data: bytes, content_type: str) -> Any:
    try:
        if content_type == NPY:
            return np.load(io.BytesIO(data), allow_pickle=False)
        if content_type == NPZ:
            sparse = needed("scipy.sparse", "scipy", f"A body of {NPZ}")
            return sparse.load_npz(io.BytesIO(data)).toarray()
    except (ValueError, KeyError, EOFError, OSError) as error:
        raise PredictionException(f"The body is not {content_type}: {error}", 400) from None
    raise PredictionException(
        f"Content type {content_type!r} is not read without an input_fn: {JSON}, {CSV}, {NPY}, {NPZ} are", 415
    )


def _written(prediction: Any, accept: str) -> tuple[Any, str]:
    """The prediction in the first of the accepted content types that is known."""
    value = prediction.detach().cpu().numpy() if hasattr(prediction, "detach") else prediction
    for content_type in (one.partition(";")[0] for one in accept.split(",")):
        if content_type in (JSON, ANY):
            return json.dumps(value, default=_plain), JSON
        if content_type == CSV:
            text = io.StringIO()
            np.savetxt(text, np.atleast_1d(value), delimiter=",", fmt="%s")
            return text.getvalue(), CSV
        if content_type == NPY:
            array = io.BytesIO()
            np.save(array, value, allow_pickle=False)
            return array.getvalue(), NPY
    raise PredictionException(
        f"Content type {accept!r} is not written without an output_fn: {JSON}, {CSV} and {NPY} are", 406
    )


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no JSON: write it in output_fn")
