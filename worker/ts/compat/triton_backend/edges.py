"""The tensors of config.pbtxt, applied to requests and answers: shapes, sequences' control inputs, output names."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ts.compat.triton_backend.messages import TritonModelException, of_config
from ts.protocol.datatypes import DATATYPES
from ts.tensors.forms import fits
from ts.tensors.types import Array, BadTensor, InferenceRequest, InferenceResponse, Tensor

Fields = dict[str, Any]
#: The fields of a control input's two values, and their datatype.
_VALUES = {f"{name.lower()}_false_true": DATATYPES[name] for name in ("INT32", "FP32", "BOOL")}
#: The most different objections to a model's answers that are logged.
OBJECTIONS_MAX = 100
#: The most shapes of outputs that are remembered as compared with their declarations.
FITTING_MAX = 256


class Edges:
    """The tensors of a model's configuration (JSON). `strict`: an answer that doesn't fit its declaration is an
    error; otherwise, as with Triton's Python models, the deviation is logged, and undeclared outputs are left out."""

    def __init__(self, config: Fields, *, strict: bool = True) -> None:
        self._strict = strict
        self._said: set[str] = set()
        #: The outputs that agree with their declarations: name, datatype and shape.
        self._fitting: set[tuple[str, str, tuple[int, ...]]] = set()
        self.batched = int(config.get("max_batch_size") or 0) > 0
        self._inner = {one["name"]: shape for one in config.get("input") or () if (shape := _reshaped(one)) is not None}
        self._outputs = {one["name"]: _Output.of(one, self.batched) for one in config.get("output") or ()}
        self._controls = [
            (one["name"], control)
            for one in (config.get("sequence_batching") or {}).get("control_input") or ()
            for control in one.get("control") or ()
        ]

    # --- into the model

    def taken(self, request: InferenceRequest) -> list[Tensor]:
        """The inputs for the model. Raises BadTensor for an unusable sequence id."""
        if not (self._inner or self._controls):
            return request.inputs
        inputs = [self._reshaped(tensor) for tensor in request.inputs] if self._inner else list(request.inputs)
        return inputs + [self._control(name, control, request.parameters) for name, control in self._controls]

    def _reshaped(self, tensor: Tensor) -> Tensor:
        shape = self._inner.get(tensor.name)
        if shape is None:
            return tensor
        array = tensor.array.reshape((*self._batch(tensor.array), *shape))
        return Tensor(tensor.name, tensor.datatype, array, tensor.parameters)

    def _batch(self, array: Array) -> tuple[int, ...]:
        return (array.shape[0],) if self.batched else ()

    def _control(self, name: str, control: Fields, parameters: Mapping[str, Any]) -> Tensor:
        shape = [1, 1] if self.batched else [1]
        kind = control["kind"]
        if kind == "CONTROL_SEQUENCE_CORRID":
            return _correlation(name, of_config(control["data_type"]), parameters.get("sequence_id") or 0, shape)
        on = {
            "CONTROL_SEQUENCE_START": bool(parameters.get("sequence_start")),
            "CONTROL_SEQUENCE_END": bool(parameters.get("sequence_end")),
            "CONTROL_SEQUENCE_READY": True,
        }[kind]
        for key, row in _VALUES.items():
            if control.get(key):
                return Tensor(name, row.name, np.full(shape, control[key][int(on)], row.dtype))
        raise TritonModelException(f"control input {name!r} has no values for false and true")

    # --- out of it

    def given(self, response: InferenceResponse) -> InferenceResponse:
        """The answer for clients, with the configured outputs. Deviations from the configuration are each logged
        once, or raise TritonModelException if `strict`."""
        if self._outputs:
            for tensor in response.outputs:
                if (tensor.name, tensor.datatype, tensor.array.shape) not in self._fitting:
                    break
            else:
                return response
            response.outputs = [self._checked(tensor) for tensor in response.outputs if self._is_declared(tensor)]
        return response

    def _object(self, text: str) -> None:
        """Raises TritonModelException if `strict`, otherwise logs the text once."""
        if self._strict:
            raise TritonModelException(text)
        if text not in self._said and len(self._said) < OBJECTIONS_MAX:
            self._said.add(text)
            print(text, file=sys.stderr, flush=True)

    def _is_declared(self, tensor: Tensor) -> bool:
        if tensor.name in self._outputs:
            return True
        self._object(f"the model gave an output {tensor.name!r}; its configuration has: {', '.join(self._outputs)}")
        return False

    def _checked(self, tensor: Tensor) -> Tensor:
        declared = self._outputs[tensor.name]
        if tensor.datatype != declared.datatype:
            self._object(f"output {tensor.name!r} is of {tensor.datatype}, not {declared.datatype}")
        if not fits(tensor.array.shape, declared.inner):
            self._object(f"output {tensor.name!r} has shape {list(tensor.shape)}, not {declared.inner}")
            return tensor
        if declared.outer is None:
            if tensor.datatype == declared.datatype and len(self._fitting) < FITTING_MAX:
                self._fitting.add((tensor.name, tensor.datatype, tensor.array.shape))
            return tensor
        array = tensor.array.reshape((*self._batch(tensor.array), *declared.outer))
        return Tensor(tensor.name, tensor.datatype, array, tensor.parameters)


class _Output(NamedTuple):
    """A configured output. `inner`: its shape in the model, -1 for any size; `outer`: for clients, if it differs."""

    datatype: str
    inner: list[int]
    outer: list[int] | None

    @classmethod
    def of(cls, declared: Fields, batched: bool) -> _Output:
        dims, reshaped = [int(size) for size in declared["dims"]], _reshaped(declared)
        inner = ([-1] if batched else []) + (dims if reshaped is None else reshaped)
        return cls(of_config(declared["data_type"]), inner, None if reshaped is None else dims)


def _reshaped(tensor: Fields) -> list[int] | None:
    """The shape inside the model, if it differs."""
    reshape = tensor.get("reshape")
    return None if reshape is None else [int(size) for size in reshape.get("shape") or ()]


def _correlation(name: str, datatype: str, sequence_id: Any, shape: list[int]) -> Tensor:
    if datatype == "BYTES":
        array = np.empty(shape, dtype=object)
        array.fill(str(sequence_id).encode())
        return Tensor(name, datatype, array)
    if isinstance(sequence_id, str):
        raise BadTensor(f"the sequence is named by a text, {sequence_id!r}; the model takes a number")
    try:
        return Tensor(name, datatype, np.full(shape, sequence_id, DATATYPES[datatype].dtype))
    except OverflowError:
        raise BadTensor(f"sequence_id {sequence_id} is no {datatype}, which the model takes") from None


def tensors_of(config: Fields, signature: Fields, labels: Mapping[str, Sequence[str]]) -> Fields:
    """The declarations for checking requests and building answers, by name."""
    most = int(config.get("max_batch_size") or 0)
    inputs = {one["name"]: {**one, "batch_max": most} if most else one for one in signature["inputs"]}
    outputs = {
        one["name"]: {**one, "batched": most > 0, "labels": list(labels.get(one["name"], ()))}
        for one in signature["outputs"]
    }
    return {"inputs": inputs, "outputs": outputs}
