"""Helpers for handlers: label files, class lists, `PredictionException`."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import yaml

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

CLEANUP_REGEX = re.compile("<.*?>")


class PT2Backend(str, Enum):  # noqa: UP042 (as in TorchServe)
    """Backends of torch.compile by their names."""

    EAGER = "eager"
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"
    NVFUSER = "nvfuser"
    AOT_NVFUSER = "aot_nvfuser"
    AOT_CUDAGRAPHS = "aot_cudagraphs"
    OFI = "ofi"
    FX2TRT = "fx2trt"
    ONNXRT = "onnxrt"
    IPEX = "ipex"
    TORCHXLA_TRACE_ONCE = "torchxla_trace_once"
    OPENVINO = "openvino"
    TENSORRT = "tensorrt"
    HPU_BACKEND = "hpu_backend"


PT2_BACKENDS = frozenset(one.value for one in PT2Backend)


class PredictionException(Exception):
    """A prediction that failed, with the status to answer: `raise PredictionException("too long", 413)`."""

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"message : {self.message}, error_code : {self.error_code}"


def deprecated(
    version: str, replacement: str = "", klass: type[Warning] = PendingDeprecationWarning
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function warn, each time it is called, that it goes in `version`. `replacement`: the function to call
    instead; `klass`: the warning's category."""

    def marked(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def warning(*args: P.args, **more: P.kwargs) -> R:
            text = f"{function.__name__} is deprecated in {version} and moved to {replacement}"
            warnings.warn(text, klass, stacklevel=2)
            return function(*args, **more)

        return warning

    return marked


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """The classes that `module` defines (not those it imports), only subclasses of `parent_class` when given."""

    def belongs(member: object) -> bool:
        if not inspect.isclass(member) or member.__module__ != module.__name__:
            return False
        return parent_class is None or issubclass(member, parent_class)

    return [member for _, member in inspect.getmembers(module, belongs)]


def _label(value: object) -> str:
    last = value[-1] if isinstance(value, list) and value else value
    if not isinstance(last, str):
        raise ValueError(f"labels must be a string or a list that ends with one, not {value!r}")
    return last


def load_label_mapping(mapping_file_path: str | Path) -> dict[str, str] | None:
    """Class index to label, from a JSON file; None (and a warning) without one.

    Forms: `{"0": "name"}`, `{"0": ["id", "name"]}`, `{"object_type_names": ["name", …]}`. Raises ValueError for others.
    """
    path = Path(mapping_file_path)
    if not path.is_file():
        logger.warning("%s is missing: predictions are named by class index", path.name)
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f'{path.name} must be an object of "class index": "label", not {type(content).__name__}')
    names = content.get("object_type_names")
    if isinstance(names, list):
        return {str(index): str(name) for index, name in enumerate(names)}
    return {key: _label(value) for key, value in content.items()}


def map_class_to_label(
    probs: Sequence[Sequence[Any]],
    mapping: Mapping[str, str] | None = None,
    lbl_classes: Iterable[Sequence[Any]] | None = None,
) -> list[dict[str, Any]]:
    """Per row of `probs` its values by label.

    `lbl_classes`: per row the class index of each value; None: 0, 1, 2, … . A class without a label is its index.
    """
    if lbl_classes is None:
        lbl_classes = (range(len(row)) for row in probs)
    names = mapping or {}
    return [
        {names.get(str(index), str(index)): value for index, value in zip(classes, row, strict=False)}
        for classes, row in zip(lbl_classes, probs, strict=False)
    ]


def get_yaml_config(yaml_file_path: str | Path) -> dict[str, Any]:
    """A YAML file's mapping; {} for an empty one. Raises ValueError for anything else."""
    content = yaml.safe_load(Path(yaml_file_path).read_text(encoding="utf-8"))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{yaml_file_path} must hold a mapping, not {type(content).__name__}")
    return content


def _torch_backends() -> Iterable[str]:
    import torch

    return torch._dynamo.list_backends(exclude_tags=())  # type: ignore[no-any-return]


def check_valid_pt2_backend(backend: str) -> bool:
    """Whether torch.compile knows `backend`; an unknown one is a warning."""
    if backend in PT2_BACKENDS or backend in _torch_backends():
        return True
    logger.warning("%r isn't a torch.compile backend; known: %s", backend, ", ".join(sorted(PT2_BACKENDS)))
    return False
