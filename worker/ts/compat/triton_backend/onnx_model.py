"""Backend `onnxruntime`: a graph in model.onnx."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ts.compat.triton_backend.edges import Fields
from ts.compat.triton_backend.messages import TritonModelException, bytes_of, texts
from ts.protocol.datatypes import DATATYPES, OF_ONNX_TYPE
from ts.runtime.handlers import HandlerNotUsable
from ts.tensors.types import Tensor


def opened(file: Path, config: Fields, gpu_id: int | None) -> Onnx:
    """Opens the graph. Raises HandlerNotUsable without onnxruntime, or if the configuration doesn't fit it."""
    try:
        import onnxruntime  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise HandlerNotUsable("backend onnxruntime needs the package onnxruntime: pip install onnxruntime") from None
    providers: list[Any] = ["CPUExecutionProvider"]
    if gpu_id is not None and "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": gpu_id}))
    return Onnx(onnxruntime.InferenceSession(str(file), providers=providers), config)


class Onnx:
    """An ONNX graph. The defaults of the configuration are its own inputs and outputs."""

    def __init__(self, session: Any, config: Fields) -> None:
        self._session = session
        batched = int(config.get("max_batch_size") or 0) > 0
        self.config = {
            **config,
            "input": config.get("input") or [_field(one, batched) for one in session.get_inputs()],
            "output": config.get("output") or [_field(one, batched) for one in session.get_outputs()],
        }
        for kind, known in (("input", session.get_inputs()), ("output", session.get_outputs())):
            names = [one.name for one in known]
            for one in self.config[kind]:
                if one["name"] not in names:
                    raise HandlerNotUsable(f"{kind} {one['name']!r} is not in the graph, which has: {', '.join(names)}")

    def run(self, inputs: Sequence[Tensor], wanted: Sequence[str]) -> list[Tensor]:
        given = {one.name: _in(one) for one in inputs}
        known = [one["name"] for one in self.config["output"]]
        names = [name for name in known if name in wanted] or known
        try:
            found = self._session.run(names, given)
        except Exception as error:  # onnxruntime's errors have no base of their own
            raise TritonModelException(f"the model failed: {type(error).__name__}: {error}") from error
        return [_out(name, value) for name, value in zip(names, found, strict=True)]


def _field(one: Any, batched: bool) -> Fields:
    dims = [size if isinstance(size, int) and size > 0 else -1 for size in one.shape]
    kind = OF_ONNX_TYPE.get(one.type)
    if kind is None:
        raise HandlerNotUsable(f"tensor {one.name!r} of the graph is {one.type}, which has no datatype here")
    return {"name": one.name, "data_type": kind.config_type, "dims": dims[1:] if batched else dims}


def _in(tensor: Tensor) -> Any:
    if DATATYPES[tensor.datatype].as_bits:
        raise TritonModelException(f"input {tensor.name!r}: {tensor.datatype} is not supported by this backend")
    return texts(tensor) if tensor.datatype == "BYTES" else np.ascontiguousarray(tensor.array)


def _out(name: str, value: Any) -> Tensor:
    if value.dtype.kind in "OSU":
        return bytes_of(name, value)
    return Tensor.of(name, value)
