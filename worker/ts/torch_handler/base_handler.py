"""BaseHandler: loads an archive's model and answers requests in three steps that subclasses replace."""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ts.context import Context
from ts.handler_utils.timer import timed
from ts.handler_utils.utils import is_asked, row_value
from ts.torch_handler import model_files
from ts.utils.util import PredictionException, check_valid_pt2_backend, load_label_mapping

logger = logging.getLogger(__name__)

PROFILE_DIR = "/tmp/pytorch_profiler"
#: What handlers of TorchServe ask before they use it: all of it is in torch, or in packages of its own.
PROFILER_AVAILABLE = PT2_AVAILABLE = PT230_AVAILABLE = True
XLA_AVAILABLE, IPEX_AVAILABLE, ONNX_AVAILABLE = (
    find_spec(name) is not None for name in ("torch_xla", "intel_extension_for_pytorch", "onnxruntime")
)


def setup_ort_session(model_pt_path: str, map_location: str) -> Any:
    """The ONNX Runtime session of a model's file, on `map_location`: "cpu" or "cuda"."""
    return model_files.load_onnx(model_pt_path, torch.device(map_location)).session


def choose_device(gpu_id: int | str | None) -> torch.device:
    """The device of a worker that was given `gpu_id` (None: no accelerator): CUDA, XPU, MPS, XLA, else the CPU."""
    if gpu_id is not None:
        if torch.cuda.is_available():
            return torch.device(f"cuda:{gpu_id}")
        if os.environ.get("TS_IPEX_GPU_ENABLE", "false").lower() == "true" and torch.xpu.is_available():
            return torch.device(f"xpu:{gpu_id}")
        if torch.backends.mps.is_available():
            return torch.device("mps")
    if find_spec("torch_xla") is not None:
        from torch_xla.core import xla_model  # type: ignore[import-not-found, unused-ignore]

        return xla_model.xla_device()
    return torch.device("cpu")


def attribution(name: str) -> Any:
    """The class `name` of captum.attr. Raises PredictionException 501 without that package."""
    try:
        module = importlib.import_module("captum.attr")
    except ImportError as error:
        message = "explanations need the package captum: add it to the archive's requirements or pip install it"
        raise PredictionException(message, 501) from error
    return getattr(module, name)


class BaseHandler:
    """`initialize` once, then `handle` per batch: preprocess, inference, postprocess.

    `model` is the loaded model, on `device`; `mapping` the labels of index_to_name.json or None.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None
        self.device: Any = None
        self.initialized = False
        self.context: Any = None
        self.model_pt_path: str | None = None
        self.manifest: Any = None
        self.map_location: str | None = None
        self.explain = False
        self.target = 0
        self.profiler_args: dict[str, Any] = {}
        self.model_yaml_config: dict[str, Any] = {}

    def initialize(self, context: Context) -> None:
        """Load the model that the archive's manifest names.

        Raises ts.torch_handler.model_files.ModelFileError (a RuntimeError) if it is missing or unreadable.
        """
        self.context = context
        self.manifest = context.manifest or {}
        self.model_yaml_config = getattr(context, "model_yaml_config", None) or {}
        self.device = choose_device(context.system_properties.get("gpu_id"))
        self.map_location = self.device.type
        model_dir = str(context.system_properties["model_dir"])
        self.model = self._load(model_dir)
        self._compile()
        self.mapping = self._load_mapping(model_dir)
        self.initialized = True

    def _load(self, model_dir: str) -> Any:
        names = self.manifest.get("model", {})
        model_file, serialized_file = names.get("modelFile"), names.get("serializedFile")
        self.model_pt_path = os.path.join(model_dir, serialized_file) if serialized_file else None
        if model_file:
            return self._load_pickled_model(model_dir, model_file, self.model_pt_path)
        if self.model_pt_path is None:
            raise model_files.ModelFileError(
                "No model weights could be loaded: the manifest names neither a model file nor a serialized file. "
                "Archive the model with --model-file or --serialized-file, or write `initialize` in the handler."
            )
        return self._load_serialized(self.model_pt_path)

    def _load_serialized(self, path: str) -> Any:
        ending = Path(path).suffix
        if ending == ".pt":
            return self._load_torchscript_model(path)
        if ending == ".pt2":
            return model_files.load_exported(path, self.device)
        if ending == ".onnx":
            return model_files.load_onnx(path, self.device)
        if ending == ".so" and wants_ahead_of_time(self.model_yaml_config):
            return model_files.load_shared_library(path, self.device)
        hint = " without `pt2: {export: {aot_compile: true}}` in model-config.yaml" if ending == ".so" else ""
        raise model_files.ModelFileError(
            f"No model weights could be loaded: {Path(path).name}{hint} isn't .pt, .pt2, .onnx or a model file's state"
        )

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        return model_files.load_torchscript(model_pt_path, self.device)

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
        return model_files.load_eager(
            os.path.join(model_dir, model_file), model_pt_path, self.device, self._setting("weights_only", True)
        )

    def _compile(self) -> None:
        options = compile_options(self.model_yaml_config)
        if options is None and self.device.type == "xla":
            options = {"backend": "torchxla_trace_once"}
        if options is not None:
            self.model = compiled(self.model, options)

    def _load_mapping(self, model_dir: str) -> dict[str, str] | None:
        return load_label_mapping(os.path.join(model_dir, "index_to_name.json"))

    def _setting(self, key: str, default: Any) -> Any:
        section = self.model_yaml_config.get("handler")
        return section.get(key, default) if isinstance(section, dict) else default

    @timed
    def preprocess(self, data: Any) -> Any:
        """Rows of numbers to one tensor on `device`. Raises TypeError for anything else."""
        values = [row_value(row) for row in data] if isinstance(data, list) else data
        try:
            return torch.as_tensor(values, device=self.device)
        except (RuntimeError, TypeError, ValueError) as error:
            kinds = ", ".join(sorted({type(value).__name__ for value in values}))
            message = f"rows of {kinds} make no tensor: {error}. Give {type(self).__name__} a `preprocess` of its own"
            raise TypeError(message) from error

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's output for the result of `preprocess`; no gradients."""
        with torch.inference_mode():
            return self.model(data.to(self.device) if hasattr(data, "to") else data, *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> Any:
        """The model's output as a list with one element per request."""
        return data.tolist()

    def handle(self, data: Any, context: Context) -> Any:
        """One answer per request of the batch. Records HandlerTime."""
        started_s = time.perf_counter()
        self.context = context
        output = self._answer(data)
        elapsed_ms = (time.perf_counter() - started_s) * 1000
        if context.metrics is not None:
            context.metrics.add_time("HandlerTime", round(elapsed_ms, 2), None, "ms")
        return output

    def _answer(self, data: Any) -> Any:
        if self._is_describe():
            return [self.describe_handle()]
        if os.environ.get("ENABLE_TORCH_PROFILER"):
            return self._infer_with_profiler(data)[0]
        return self._infer(data)

    def _infer(self, data: Any) -> Any:
        ready = self.preprocess(data)
        if self._is_explain():
            return self.explain_handle(ready, data)
        return self.postprocess(self.inference(ready))

    # Handlers with a `handle` of their own call these two.
    def _is_describe(self) -> bool:
        return is_asked(self.context, "describe")

    def _is_explain(self) -> bool:
        self.explain = is_asked(self.context, "explain")
        return self.explain

    def _infer_with_profiler(self, data: Any) -> tuple[Any, Any]:
        """The answer and its torch profile, whose trace is written under PROFILE_DIR/<model name>."""
        name = (self.manifest or {}).get("model", {}).get("modelName", "model")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        trace = torch.profiler.tensorboard_trace_handler(os.path.join(PROFILE_DIR, name))
        arguments = {"activities": activities, "record_shapes": True, "on_trace_ready": trace, **self.profiler_args}
        with torch.profiler.profile(**arguments) as profile:
            output = self._infer(data)
        logger.info("%s", profile.key_averages().table(sort_by="cpu_time_total", row_limit=10))
        return output, profile

    def explain_handle(self, data_preprocess: Any, raw_data: Any) -> Any:
        """The explanation of an answer: `get_insights(preprocessed, input, target)` of a subclass."""
        row = raw_data[0]
        self.target = _target(row.get("target") if isinstance(row, dict) else None)
        return self.get_insights(data_preprocess, row_value(row), self.target)

    def get_insights(self, data_preprocess: Any, inputs: Any, target: Any) -> Any:
        """One explanation per request, by a subclass. Raises NotImplementedError here."""
        raise NotImplementedError(f"{type(self).__name__} has no get_insights: it can't explain its predictions")

    def describe_handle(self) -> Any:
        """The description of this model for DescribeModel with `customized`."""
        return None

    def get_device(self) -> Any:
        return self.device


def _target(value: Any) -> Any:
    """The class that an explanation is for: the request's value (digits as a number), 0 without."""
    if isinstance(value, bytes | bytearray):
        value = value.decode("utf-8", "replace")
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value or 0


# --- `pt2` of model-config.yaml: the compilation of a model


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name)
    return dict(value) if isinstance(value, Mapping) else {}


def compile_options(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments for torch.compile from a model-config.yaml; None: don't compile.

    `pt2: {compile: {enable: true, backend: B, …}}`, or the older `pt2: B` and `pt2: {backend: B, …}`.
    """
    pt2 = config.get("pt2")
    if isinstance(pt2, str):
        return {"backend": pt2}
    if not isinstance(pt2, Mapping):
        return None
    if "compile" not in pt2:
        return {key: value for key, value in pt2.items() if key != "export"} or None
    options = _section(pt2, "compile")
    return options if options.pop("enable", True) and pt2["compile"] is not False else None


def wants_ahead_of_time(config: Mapping[str, Any]) -> bool:
    """`pt2: {export: {aot_compile: true}}`: the serialized file is a library of machine code."""
    return bool(_section(_section(config, "pt2"), "export").get("aot_compile", False))


def compiled(model: Any, options: dict[str, Any]) -> Any:
    """`model` through torch.compile, or unchanged (and a warning) when that can't be done."""
    if not check_valid_pt2_backend(options.get("backend", "inductor")):
        logger.warning("The model runs uncompiled")
        return model
    if isinstance(model, torch.jit.ScriptModule) or not isinstance(model, torch.nn.Module):
        logger.warning("A %s can't be compiled: the model runs as it is", type(model).__name__)
        return model
    try:
        return torch.compile(model, **options)
    except Exception as error:
        logger.warning("torch.compile(%s) failed, the model runs uncompiled: %s", options, error)
        return model
