"""Modules of torch without declared tensors: requests determine the datatypes and shapes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ts.compat.triton_backend.edges import Fields
from ts.compat.triton_backend.messages import TritonModelException, texts
from ts.compat.triton_backend.torchscript import positions
from ts.tensors.types import BadTensor, Tensor
from ts.tensors.v1_form import GUESSED
from ts.utils.util import PredictionException

#: Names of outputs that the module doesn't name, as in Triton's repositories.
OUTPUT = "output__{}"
NUMBERS = "send numbers as JSON, such as [[1, 2]], as CSV, .npy, or as a tensor"


class TorchModule:
    """Inputs go to arguments of their names, `NAME__INDEX` to that argument, others in their order. Numbers without
    a datatype get that of the module's weights; integers stay integers if it has an embedding. `tokenizer`: makes
    the arguments from an input of texts."""

    def __init__(self, module: Any, arguments: Sequence[str], device: Any, tokenizer: Any = None) -> None:
        self.config: Fields = {"platform": "pytorch_libtorch"}
        self._module, self._arguments, self._device = module, list(arguments), device
        self._tokenizer = tokenizer
        weights = next((one for one in module.parameters() if one.is_floating_point()), None)
        self._dtype = None if weights is None else weights.dtype
        kinds = {str(getattr(one, "original_name", type(one).__name__)) for one in module.modules()}
        self._takes_whole = any("Embedding" in kind for kind in kinds)

    @classmethod
    def of(cls, module: Any, device: Any, tokenizer: Any = None) -> TorchModule:
        """The adapter of a Python module, whose `forward` names the arguments."""
        return cls(module, list(inspect.signature(module.forward).parameters), device, tokenizer)

    def run(self, inputs: Sequence[Tensor], wanted: Sequence[str]) -> list[Tensor]:
        import torch

        found = self._given(inputs)
        with torch.inference_mode():
            if isinstance(found, dict):
                return list(_outputs(self._module(**found)))
            return list(_outputs(self._module(*found)))

    def _given(self, inputs: Sequence[Tensor]) -> dict[str, Any] | list[Any]:
        """The arguments, by name if the inputs have arguments' names."""
        if len(inputs) == 1 and inputs[0].datatype == "BYTES":
            return self._tokens(inputs[0])
        names = [one.name for one in inputs]
        values = {one.name: self._in(one) for one in inputs}
        if all(name in self._arguments for name in names):
            return values
        if len(values) > len(self._arguments):
            takes = ", ".join(self._arguments)
            raise _refused(f"the request has {len(values)} inputs, {', '.join(names)}; forward takes: {takes}")
        order = positions(names, self._arguments)
        return [values[name] for name in sorted(values, key=order.__getitem__)]

    def _tokens(self, tensor: Tensor) -> dict[str, Any]:
        if self._tokenizer is None:
            raise _refused(f"input {tensor.name!r} is texts, and there is no tokenizer for them: {NUMBERS}")
        made = self._tokenizer(texts(tensor).ravel().tolist(), return_tensors="pt", padding=True, truncation=True)
        return {name: value.to(self._device) for name, value in made.items() if name in self._arguments}

    def _in(self, tensor: Tensor) -> Any:
        if tensor.datatype == "BYTES":
            raise _refused(f"input {tensor.name!r} is of BYTES, which isn't numbers")
        found = tensor.as_torch()
        if tensor.parameters.get(GUESSED) and self._dtype is not None and found.dtype != self._dtype:
            whole = not found.is_floating_point()
            found = found if whole and (self._takes_whole or tensor.datatype == "BOOL") else found.to(self._dtype)
        return found.to(self._device)


def _refused(text: str) -> PredictionException:
    return PredictionException(text, 400)


def _outputs(found: Any) -> Iterator[Tensor]:
    """The tensors of a result by name: a mapping's keys, a named tuple's fields."""
    if hasattr(found, "detach"):
        yield _tensor(OUTPUT.format(0), found)
        return
    if isinstance(found, Mapping) or hasattr(found, "_asdict"):
        named = dict(found if isinstance(found, Mapping) else found._asdict())
        yield from (_tensor(name, value) for name, value in named.items() if hasattr(value, "detach"))
        return
    values = found if isinstance(found, (tuple, list)) else [found]
    yield from (_tensor(OUTPUT.format(index), value) for index, value in enumerate(values))


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return Tensor.of(name, value)
    except BadTensor as error:
        raise TritonModelException(f"the model's output {name!r} can't be sent: {error}") from None
